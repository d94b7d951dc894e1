"""The weight of a batch's loss: what the loss is a mean of, and the factor that makes gradients exact."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError

Weigh: TypeAlias = Literal["tokens", "samples"] | Callable[[Any], float]

IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default
MOST = 1e30  # so that sums over ranks and steps stay finite
SHIFTING_LOSSES = ("ForCausalLM", "ForConditionalGeneration")  # of transformers: they leave out the first label


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's part (``local``) of a sum over all ranks and all steps of the update (``total``)."""

    local: float
    total: float


def loss_scale(weight: Share, world_size: int) -> float:
    """Factor for a batch's mean loss. The accumulated gradients, averaged over ranks, then equal those of one process.

    DDP and FSDP divide by ``world_size``. With ``loss_scale = local * world_size / total`` every unit of weight (a token, a
    sample) counts once: the result is the gradient of ``sum(unit losses) / total``.

    >>> loss_scale(Share(local=3, total=4), world_size=2)
    1.5
    """
    return weight.local * world_size / weight.total if weight.total else 0.0


def count_label_tokens(batch: Any, *, shifted: bool = True) -> int:
    """Number of label tokens in a batch that the model predicts.

    Causal models predict ``labels[..., 1:]``; ``shift_labels`` are shifted already. Labels of one dimension are
    classes, one per sample, and all count; so do all elements of labels that are not integers (regression).
    ``shifted=False`` is for models that also predict the first label (encoder-decoders, masked language models).
    ConfigError: a batch has no labels.

    >>> count_label_tokens({"labels": np.array([[-100, 5, 6], [7, 8, -100]])})
    3
    """
    name = _label_name(batch)
    if name is None:
        has = f"weigh='tokens' counts a batch's 'labels', but this {type(batch).__name__} has none"
        raise ConfigError(f"{has}; pass weigh='samples', or a function from a batch to its weight")
    labels = batch[name] if hasattr(batch[name], "ndim") else np.asarray(batch[name])
    if "float" in str(labels.dtype):  # torch's or numpy's
        return math.prod(labels.shape)
    labels = labels[..., 1:] if shifted and name == "labels" and labels.ndim > 1 else labels
    if str(getattr(labels, "device", "cpu")) != "cpu":
        return int((labels != IGNORED).sum())
    return int(np.count_nonzero(np.asarray(labels) != IGNORED))  # five times faster than torch's sum of booleans


def mean_items(batch: Any, *, shifted: bool = True) -> float:
    """The number of items that a usual model's loss is a mean of: predicted labels, or samples if there are none."""
    if _label_name(batch) is not None:
        return float(count_label_tokens(batch, shifted=shifted))
    values = batch.values() if hasattr(batch, "keys") else batch if isinstance(batch, (list, tuple)) else [batch]
    sized = [value for value in values if getattr(value, "ndim", 0) > 0]
    if not sized:
        has = f"cannot see how many samples a batch has: this {type(batch).__name__} holds no tensors"
        raise ConfigError(f"{has}; pass `weigh`, a function from a batch to its weight")
    return float(len(sized[0]))


def _label_name(batch: Any) -> str | None:
    names = ("shift_labels", "labels") if hasattr(batch, "keys") else ()
    return next((name for name in names if name in batch and batch[name] is not None), None)


def predicts_next_token(model: Any, *, unknown: bool = False) -> bool:
    """Whether a model's own loss skips the first label of a row, like transformers' causal losses: by ``loss_type``, or
    if that is None, by its class. Looks through DDP and PEFT. ``unknown``: the answer if there is no ``loss_type``."""
    model = getattr(model, "module", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    named = getattr(model, "loss_type", "")
    if named is not None:
        return unknown if named == "" else named in SHIFTING_LOSSES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    return bool({c.__name__ for c in type(model).__mro__} & set(causal.values()))


def weigher(weigh: Weigh, *, shifted: bool = True) -> Callable[[Any, int], float]:
    """The function (batch, number of samples) -> weight for ``weigh``. ConfigError: it is invalid, or gives no number."""
    if not callable(weigh) and weigh not in ("tokens", "samples"):
        known = "'tokens', 'samples' or a function from a batch to its weight"
        raise ConfigError(f"`weigh` must be {known}, but is {weigh!r}")
    return partial(_weight, weigh, shifted)


def _weight(weigh: Weigh, shifted: bool, batch: Any, num_samples: int) -> float:
    if not callable(weigh):
        return float(count_label_tokens(batch, shifted=shifted) if weigh == "tokens" else num_samples)
    given = weigh(batch)
    try:
        weight = float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, or more than one
        weight = math.nan
    if not 0 <= weight <= MOST:
        raise ConfigError(f"`weigh` must give a weight from 0 to {MOST:g}, but gives {given!r}")
    return weight
