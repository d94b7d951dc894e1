"""Packed batches on a transformers model: the collator it needs, and a test that the model keeps the samples apart.

If a model cannot take packed batches, transformers does not say so: samples attend to each other or get wrong
positions, and the loss looks healthy. So the model itself is tested, on two samples of a few tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.varlen import NAME, check_own_attention
from dynagroup.oom.jobs import evaluating
from dynagroup.validation import explained, warn_user

LINEAR = ("flash_attention", "flex_attention", NAME)  # keep samples apart without a mask
Collate: TypeAlias = Callable[[Sequence[Any]], dict[str, Any]]
PROBES = ((7, 5, 6, 9, 8), (6, 8, 5))
SIZES = [len(probe) for probe in PROBES]
WAYS_OUT = (
    "set model.config.use_cache = False (with a cache transformers builds no mask between packed samples), "
    "call dynagroup.integrations.varlen.use_varlen_attention(model), or use the padded layout"
)


def packing_collator(model: Any, **options: Any) -> Collate:
    """``transformers.DataCollatorWithFlattening`` set for this model: its first position, borders for its kernels.

    Args:
        model: a transformers model as it will be trained, with its attention implementation. See :func:`check_packing`.
        options: of the collator, such as ``return_seq_idx=True`` for state-space models.
    """
    # RoBERTa-like models count positions from the one after their padding token's.
    layers = [module for module in model.modules() if type(module).__name__.endswith("Embeddings")]
    padding = [getattr(getattr(layer, "position_embeddings", None), "padding_idx", None) for layer in layers]
    first = next(({"position_ids_start": int(index) + 1} for index in padding if index is not None), {})
    collate = DataCollatorWithFlattening(**{"return_flash_attn_kwargs": _is_linear(model), **first, **options})
    check_packing(model, collate)
    return collate


class NotAskedError(ConfigError):
    """A model or collator cannot be tested, because it needs more than rows of tokens."""


def check_packing(model: Any, collate_fn: Collate) -> None:
    """Run two short samples packed and one by one: the model, which is not changed, must give the same answers. After
    ``use_varlen_attention`` they are also compared with the model's own attention: both runs might be wrong.

    Raises:
        ConfigError: the model cannot be run on them, or answers differ (attention that mixes samples, a cache, other positions).
    """
    name, attention = type(model).__name__, getattr(model.config, "_attn_implementation", None) or "eager"
    if attention == NAME:  # it may have been set by its name
        check_own_attention(model)
    tried = f"{name} could not be run on two packed samples of `input_ids`"
    can = "; decoders and encoders that read one row of tokens can be packed; use the padded layout"
    with explained(tried, ConfigError, way_out=can, kind=NotAskedError):
        together, alone = _answers(model, collate_fn)
    apart = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-12))
    if apart > _rounding(model, alone):
        why = f"its attention {attention!r} does not keep them apart"
        if _is_linear(model):
            why = "its positions or layers that run along the row do not start anew with each sample"
        found = f"{name} answers otherwise on packed samples than on each alone (by {apart:.1%})"
        raise ConfigError(f"{found}: {why}; {WAYS_OUT}")


def check_packed_training(trainer: Any) -> None:
    """:func:`check_packing` of what a Trainer is about to train. Warns if a model or collator cannot be tested."""
    why = "the model is sharded or not on its device yet"
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        try:
            with trainer.accelerator.autocast():
                return check_packing(trainer.model, trainer.data_collator)
        except NotAskedError as error:
            why = str(error)
    way_out = "try dynagroup.integrations.packing.check_packing(model, collate_fn) yourself"
    warn_user(f"whether the model keeps the samples of a packed batch apart could not be checked; {way_out} ({why})")


def _answers(model: Any, collate_fn: Collate) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's answers to two samples packed, and to each alone."""
    batch = collate_fn([{"input_ids": list(ids), "labels": list(ids)} for ids in PROBES])
    shape = tuple(batch["input_ids"].shape)
    if shape != (1, sum(SIZES)):
        raise ConfigError(f"`collate_fn` does not pack: of 8 tokens it made {shape}; use packing_collator(model)")
    together = answer(model, batch)
    parts = batch["input_ids"].split(SIZES, dim=1)  # as they were collated: a collator may have masked some
    alone = torch.cat([answer(model, {"input_ids": part}) for part in parts], dim=1)
    if together.shape != alone.shape:
        raise ConfigError(f"{type(model).__name__} gives no output for each token; use the padded layout")
    return together, alone


def answer(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """A model's logits, or else its first output."""
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items() if k != "labels"}
    with evaluating(model), torch.no_grad():
        output = model(**inputs)
    return output.logits if getattr(output, "logits", None) is not None else output[0]


def _rounding(model: Any, answer: Any) -> float:
    """Largest difference by rounding between two ways to the same answer, relative to the largest number in it."""
    widths = [answer.dtype.itemsize, next(model.parameters()).dtype.itemsize]
    if min(widths) < 4 or torch.is_autocast_enabled(answer.device.type):
        return 5e-2
    short = answer.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return 5e-3 if short else 5e-5


def _is_linear(model: Any) -> bool:
    return any(name in str(getattr(model.config, "_attn_implementation", None)) for name in LINEAR)
