"""Computes the weight of each batch's loss, and the factor that makes accumulated gradients exact."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError

Weigh: TypeAlias = Literal["tokens", "labels", "samples"] | Callable[[Any], float]
IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default
MOST = 1e30  # largest weight, so that sums over ranks and steps are finite
NAMED = ("tokens", "labels", "samples")


@dataclass(frozen=True, slots=True)
class Share:
    """A quantity of one batch (``local``), and its sum over all ranks and steps of the update (``total``)."""

    local: float
    total: float


def loss_scale(weight: Share, world_size: int) -> float:
    """Returns the factor for a batch's mean loss that makes gradients equal those of one process with all samples.

    DDP and FSDP average gradients over ``world_size`` ranks. With the factor ``local * world_size / total`` every unit
    of weight (a token, a sample) counts once: the gradient is that of ``sum(unit losses) / total``.

    >>> loss_scale(Share(local=3, total=4), world_size=2)
    1.5
    """
    return weight.local * world_size / weight.total if weight.total else 0.0


def count_label_tokens(batch: Any, *, shifted: bool = True) -> int:
    """Returns the number of labels in a batch that the model predicts.

    Causal models predict ``labels[..., 1:]``; ``shift_labels`` are shifted already. Labels with one dimension are
    classes, and all count; so do all non-integer labels (regression). Use ``shifted=False`` for models that also
    predict the first label: encoder-decoder and masked language models. ConfigError: a batch without labels.

    >>> count_label_tokens({"labels": np.array([[-100, 5, 6], [7, 8, -100]])})
    3
    """
    name = _label_name(batch)
    if name is None:
        lacking = f"weigh='tokens' or 'labels' needs a field 'labels' in every batch, but this {type(batch).__name__} has none"
        raise ConfigError(f"{lacking}; pass weigh='samples', or a function of a batch")
    labels = batch[name] if hasattr(batch[name], "ndim") else np.asarray(batch[name])
    if "float" in str(labels.dtype):  # torch's or numpy's
        return math.prod(labels.shape)
    if shifted and name == "labels" and labels.ndim > 1:
        labels = labels[..., 1:]
    if str(getattr(labels, "device", "cpu")) != "cpu":
        return int((labels != IGNORED).sum())
    return int(
        np.count_nonzero(np.asarray(labels) != IGNORED)
    )  # five times faster than torch's sum of booleans


def _label_name(batch: Any) -> str | None:
    names = ("shift_labels", "labels") if hasattr(batch, "keys") else ()
    return next((name for name in names if name in batch and batch[name] is not None), None)


def weigher(weigh: Weigh) -> Callable[[Any, int], float]:
    """Returns the function (batch, samples) -> weight."""
    if isinstance(weigh, Mapping):
        raise ConfigError(
            f"`weigh` must be the weight of one loss, but is the dict {weigh!r}; a loop with several "
            "losses passes it to loss_scales(update, weigh), and the Trainer to DynagroupConfig"
        )
    if not callable(weigh) and not (isinstance(weigh, str) and weigh in NAMED):
        raise ConfigError(
            f"`weigh` must be 'tokens', 'labels', 'samples' or a function of a batch, but is {weigh!r}"
        )
    return partial(_weight, weigh)


def _weight(weigh: Weigh, batch: Any, samples: int) -> float:
    if not callable(weigh):
        if weigh == "samples":
            return float(samples)
        return float(count_label_tokens(batch, shifted=weigh == "tokens"))
    given = weigh(batch)
    weight = math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # not a number, or several
        weight = float(given)
    if not 0 <= weight <= MOST:
        raise ConfigError(
            f"`weigh` must return a number from 0 to {MOST:g}, but returned {given!r}"
        )
    return weight
