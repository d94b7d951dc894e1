"""What a batch weighs in the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError

__all__ = ["Weigh", "count_label_tokens", "weigher"]

Weigh: TypeAlias = Literal["tokens", "samples"] | Callable[[Any], float]

IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default


def count_label_tokens(batch: Any, *, shifted: bool = True) -> int:
    """Label tokens of a batch that are predicted.

    Causal models predict ``labels[..., 1:]``: their loss shifts, so the first column is never predicted. A batch with
    ``shift_labels`` was shifted beforehand. Labels of one dimension are classes, one a sample, and are all predicted.

    Args:
        batch: a mapping with ``labels`` (or ``shift_labels``): tensor, array or nested lists; ignored ones are -100.
        shifted: False for models that predict the first label too (encoder-decoders, masked language models).

    Raises:
        ConfigError: the batch has no labels.

    >>> count_label_tokens({"labels": np.array([[-100, 5, 6], [7, 8, -100]])})
    3
    """
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        if "shift_labels" in batch:
            return _count(batch["shift_labels"])
        if "labels" in batch:
            labels = batch["labels"]
            labels = labels if hasattr(labels, "ndim") else np.asarray(labels)
            return _count(labels[..., 1:] if shifted and labels.ndim > 1 else labels)
    raise ConfigError(
        f"weigh='tokens' counts a batch's 'labels', but this {type(batch).__name__} has none; "
        "pass weigh='samples', or a function from a batch to its weight"
    )


def _count(labels: Any) -> int:
    if str(getattr(labels, "device", "cpu")) != "cpu":
        return int((labels != IGNORED).sum())
    return int(np.count_nonzero(np.asarray(labels) != IGNORED))  # five times faster than torch's sum of booleans


def weigher(weigh: Weigh) -> Callable[[Any, int], float]:
    """The function (batch, number of samples) -> weight that ``weigh`` names."""
    if weigh == "tokens":
        return _by_tokens
    if weigh == "samples":
        return _by_samples
    if callable(weigh):
        return _ByFunction(weigh)
    raise ConfigError(f"`weigh` must be 'tokens', 'samples' or a function from a batch to its weight, but is {weigh!r}")


def _by_tokens(batch: Any, num_samples: int) -> float:
    return count_label_tokens(batch)


def _by_samples(batch: Any, num_samples: int) -> float:
    return num_samples


class _ByFunction:
    def __init__(self, function: Callable[[Any], float]) -> None:
        self._function = function

    def __call__(self, batch: Any, num_samples: int) -> float:
        weight = float(self._function(batch))
        if not 0 <= weight < 1 << 30:
            raise ConfigError(f"`weigh` must give a weight from 0 to 2**30, but gives {weight!r}")
        return weight
