"""Computes the weight of each batch's loss, and the factor that makes accumulated gradients exact."""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.validation import explained

Weigh: TypeAlias = Literal["tokens", "labels", "samples"] | Callable[[Any], float]
WeightOf: TypeAlias = Callable[[Any, int], float]  # of a batch, and its number of samples
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
    classes, of which none is shifted away; labels that are no integers (regression) all count.
    Use ``shifted=False`` for models that also predict the first label: encoder-decoder and masked language models.
    ConfigError: a batch without labels.

    >>> count_label_tokens({"labels": np.array([[-100, 5, 6], [7, 8, -100]])})
    3
    """
    name = _label_name(batch)
    if name is None:
        raise ConfigError(
            "weigh='tokens' or 'labels' needs a field 'labels' in every batch, but this "
            f"{type(batch).__name__} has none; pass weigh='samples', or a function of a batch"
        )
    labels = batch[name]
    if not hasattr(labels, "ndim"):
        with explained(
            f"`{name}` of a batch must be a tensor, or lists of equal lengths, but are {labels!r:.80}",
            way_out="; pad them with -100 in `collate_fn`, or pass `weigh`, a function of a batch",
        ):
            labels = np.asarray(labels)
    if "float" in str(labels.dtype):  # torch's or numpy's
        return math.prod(labels.shape)
    if getattr(labels, "is_cpu", True):
        labels = np.asarray(labels)
    is_counted = labels != IGNORED
    if shifted and name == "labels" and labels.ndim > 1:
        is_counted = is_counted[..., 1:]
    if isinstance(is_counted, np.ndarray):  # in a fifth of the time of torch's sum of booleans
        return int(np.count_nonzero(is_counted))
    return int(is_counted.sum())


def _label_name(batch: Any) -> str | None:
    if not hasattr(batch, "keys"):
        return None
    for name in ("shift_labels", "labels"):
        if name in batch and batch[name] is not None:
            return name
    return None


def weigher(weigh: Weigh) -> WeightOf:
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


def _weight(weigh: Weigh, batch: Any, num_samples: int) -> float:
    """Returns the weight of a batch. "tokens" leaves out each sample's first label, which causal models do not predict;
    "labels" counts all."""
    if weigh == "samples":
        return float(num_samples)
    if not callable(weigh):
        return float(count_label_tokens(batch, shifted=weigh == "tokens"))
    answer = weigh(batch)
    weight = math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # not a number, or several
        weight = float(answer)
    if not 0 <= weight <= MOST:
        raise ConfigError(
            f"`weigh` must return a number from 0 to {MOST:g}, but returned {answer!r}"
        )
    return weight
