"""Two padded streams, measured after processing: batches fit, pad little in both, and are counted in both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import assert_conserves

PAIRS = np.random.default_rng(0).lognormal(3, 0.8, (300, 2)).clip(1, 200).astype(int).tolist()


def length_of(pair: list[int]) -> dict[str, int]:
    return {"source": pair[0], "target": pair[1]}


@pytest.mark.parametrize("mode", [{}, {"shuffle": True, "window": 100}, {"samples_per_update": 60}])
def test_batches_fit_and_are_counted_in_both_streams_in_every_epoch(mode: dict[str, Any]) -> None:
    options: dict[str, Any] = {"collate_fn": list, "length_of": length_of, "weigh": "samples", **mode}
    loader = OnlineDataLoader(PAIRS, TokenBudget(2000), **options)
    for _ in range(2):  # the second epoch is planned from what the first has measured
        before = loader.stats.copy()
        steps = list(loader)
        assert_conserves([list(step.indices) for step in steps], range(300))
        shapes = [(len(step.batch), *np.max(step.batch, axis=0)) for step in steps]
        assert all(count * (source + target) <= 2000 for count, source, target in shapes)
        stats = loader.stats - before
        assert stats.padded_tokens == sum(count * (source + target) for count, source, target in shapes)
        assert stats.real_tokens == np.sum(PAIRS)
        assert stats.padding < 0.45
