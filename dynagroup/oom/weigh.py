"""What a loss is a mean of, so that parts of a batch can be given their exact weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dynagroup.errors import ConfigError
from dynagroup.oom.split import BatchSplitter, describe

if TYPE_CHECKING:
    import torch

__all__ = ["Weigh", "weigher"]

Weigh: TypeAlias = Literal["tokens", "samples", "sum"] | Callable[[Any], float]


def weigher(weigh: Weigh, model: torch.nn.Module) -> Callable[[Any], float] | None:
    """A function from a batch to its weight; None where parts need none (a sum).

    >>> import numpy as np
    >>> weigher("samples", None)(np.zeros((3, 7)))
    3.0
    """
    if weigh == "sum":
        return None
    if weigh == "samples":
        splitter = BatchSplitter()
        return lambda batch: float(splitter.num_samples(batch))
    if weigh == "tokens":
        shifted = _predicts_next_token(model)
        return lambda batch: _count_labels(batch, shifted)
    if not callable(weigh):
        raise ConfigError(f"`weigh` must be 'tokens', 'samples', 'sum' or a function of a batch, but is {weigh!r}")
    return weigh


def _predicts_next_token(model: torch.nn.Module) -> bool:
    """Whether the model's loss leaves out the first label, as transformers' causal losses do."""
    core = getattr(model, "module", model)
    if getattr(getattr(core, "config", None), "is_encoder_decoder", False):
        return False
    return getattr(core, "loss_type", "none") in (None, "ForCausalLM", "ForConditionalGeneration")


def _count_labels(batch: Any, shifted: bool) -> float:
    if not isinstance(batch, Mapping) or ("labels" not in batch and "shift_labels" not in batch):
        raise ConfigError(
            f"weigh='tokens' counts `labels`, which the batch ({describe(batch)}) does not have; say what your loss is a "
            "mean of: weigh='samples', 'sum' or a function of a batch"
        )
    if "shift_labels" in batch:
        labels = batch["shift_labels"]
    else:
        labels = batch["labels"][..., 1:] if shifted else batch["labels"]
    return float((labels != -100).sum())
