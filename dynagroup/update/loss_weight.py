"""Computes the weight of each batch's loss, and the factor that makes accumulated gradients exact."""

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError

Weigh: TypeAlias = Literal["tokens", "labels", "samples"] | Callable[[Any], float]
IGNORED = -100  # the label that torch.nn.functional.cross_entropy ignores by default
MOST = 1e30  # largest weight, so that sums over ranks and steps are finite
CAUSAL = ("input_ids", "inputs_embeds")  # inputs of causal models, whose labels have the same width
INPUTS = ("decoder_input_ids", *CAUSAL, "input_features", "input_values", "pixel_values")
SHIFTING_LOSSES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "CsmForConditionalGeneration",
)  # skip the first label


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


def mean_items(batch: Any, *, shifted: bool = True) -> float:
    """Returns the number of items whose losses a usual model averages: predicted labels; without labels, samples."""
    if _label_name(batch) is not None:
        return float(count_label_tokens(batch, shifted=shifted))
    values = (
        batch.values()
        if hasattr(batch, "keys")
        else batch
        if isinstance(batch, (list, tuple))
        else [batch]
    )
    sized = [value for value in values if getattr(value, "ndim", 0) > 0]
    if not sized:
        raise ConfigError(
            f"cannot count a batch's samples: this {type(batch).__name__} has no tensors; pass `weigh`"
        )
    return float(len(sized[0]))


def _label_name(batch: Any) -> str | None:
    names = ("shift_labels", "labels") if hasattr(batch, "keys") else ()
    return next((name for name in names if name in batch and batch[name] is not None), None)


def predicts_next_token(model: Any, *, unknown: Any = False) -> Any:
    """Returns whether a model's own loss skips the first label of each sample, judged by its ``loss_type``, or without
    that by its class (inside DDP and PEFT wrappers). ``unknown``: the result for a model without ``loss_type``."""
    model = getattr(model, "module", model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    forward = inspect.unwrap(getattr(type(model), "forward", weigher))
    if (
        str(forward.__module__).startswith("transformers.models.")
        and "CrossEntropyLoss" in forward.__code__.co_names
    ):
        return (
            "shift_logits" in forward.__code__.co_varnames
        )  # False for Bart's decoder, whatever its `loss_type`
    named = getattr(model, "loss_type", "")
    if named is not None:
        return unknown if named == "" else named in SHIFTING_LOSSES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    return bool(
        {c.__name__ for c in type(model).__mro__} & set(causal.values()) - {"XLMWithLMHeadModel"}
    )


def weigher(weigh: Weigh, *, shifted: bool | None = None) -> Callable[[Any, int], float]:
    """Returns the function (batch, samples) -> weight. ``shifted``: first labels do not count; None: checks labels too."""
    if not (
        callable(weigh) or (isinstance(weigh, str) and weigh in ("tokens", "labels", "samples"))
    ):
        raise ConfigError(
            f"`weigh` must be 'tokens', 'labels', 'samples' or a function of a batch, but is {weigh!r}"
        )
    return partial(_weight, weigh, shifted)


def _check_causal(batch: Any) -> None:
    """Raises a ConfigError if labels do not lie beside tokens, or a sample has a first label, and labels unlike its tokens."""
    given: Any = batch["labels"] if _label_name(batch) == "labels" else 0
    labels: Any = given if hasattr(given, "ndim") else np.asarray(given)
    if labels.ndim < 2 or "float" in str(labels.dtype):
        return
    of, ids = next(
        ((k, batch[k]) for k in INPUTS if k in batch and hasattr(batch[k], "shape")),
        ("labels", labels),
    )
    causal = of in ("labels", *CAUSAL) and ids.shape[:2] == labels.shape[:2]
    if causal and ids.shape == labels.shape:
        ids, labels = (
            (ids, labels)
            if type(ids) is type(labels)
            else map(np.array, (ids.tolist(), labels.tolist()))
        )
        causal = not ((labels != ids) & (labels != IGNORED) & (labels[:, :1] != IGNORED)).any()
    mask: Any = batch["attention_mask"] if "attention_mask" in batch else None
    if (
        type(mask) is type(labels)
        and mask.shape == labels.shape
        and ((mask == 0) & (labels != IGNORED))[:, 1:].any()
    ):
        raise ConfigError(
            "labels where attention_mask is 0 must be -100, or the loss counts padding; or pass a `weigh` function"
        )
    if not causal:
        told = f"weigh='tokens' is for causal models, but labels {[*labels.shape]} are not the tokens of {of} {[*ids.shape]}"
        raise ConfigError(
            f"{told}; pass weigh='labels' (encoder-decoders), 'samples' (classes, CTC) or a function"
        )


def _weight(weigh: Weigh, shifted: bool | None, batch: Any, samples: int) -> float:
    if shifted is None and weigh == "tokens":
        _check_causal(batch)
    if not callable(weigh):
        shifted = shifted is not False and weigh == "tokens"
        return float(samples if weigh == "samples" else count_label_tokens(batch, shifted=shifted))
    given, weight = weigh(batch), math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):  # not a number, or several
        weight = float(given)
    if not 0 <= weight <= MOST:
        raise ConfigError(
            f"`weigh` must return a number from 0 to {MOST:g}, but returned {given!r}"
        )
    return weight
