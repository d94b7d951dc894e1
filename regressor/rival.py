"""dynabatch 0.2.23's shipped regressor, asked about the same batches (from the ``bench`` extra; left out where absent)."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import TOKENS, BatchShape

__all__ = ["available", "relative"]


def available() -> bool:
    return find_spec("dynabatch") is not None


@lru_cache(maxsize=1)
def _booster():
    import xgboost

    spec = find_spec("dynabatch")
    assert spec is not None
    assert spec.origin is not None
    booster = xgboost.Booster()
    booster.load_model(str(Path(spec.origin).parent / "models" / "regressor.ubj"))
    booster.set_param({"nthread": 1})
    return booster


def relative(shape: BatchShape, baseline: BatchShape) -> NDArray[np.float64]:
    """Its prediction. All samples of a batch are as long as the longest here, so words and characters have the tokens' ratios."""
    booster = _booster()
    size = len(shape)
    n, n_b = (np.broadcast_to(b.num_samples, size).astype(float) for b in (shape, baseline))
    length, length_b = (
        np.broadcast_to(b.longest[TOKENS], size).astype(float) for b in (shape, baseline)
    )
    longest, total = length / length_b, n * length / (n_b * length_b)
    values = {"batch_size_x": n_b, "batch_size_y": n, "batch_size_diff": n / n_b}
    for unit in ("token", "word", "char"):
        values |= {
            f"{unit}_max_diff": longest,
            f"{unit}_mean_diff": longest,
            f"{unit}_sum_diff": total,
        }
    assert booster.feature_names is not None
    table = np.stack([values[name] for name in booster.feature_names], axis=1)
    return booster.inplace_predict(table).astype(np.float64)
