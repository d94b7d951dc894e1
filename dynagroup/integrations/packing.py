"""Makes the collator for packed batches of a transformers model, and tests that the model keeps the samples apart.

If a model cannot process packed batches, transformers raises no error: samples attend to each other or get wrong
positions, while the loss looks normal. So the model itself is tested, on two samples."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.probe import (
    answer,
    answers_alone,
    difference_beyond_rounding,
    samples_for,
)
from dynagroup.integrations.varlen import NAME, first_position
from dynagroup.update.split_test import skips_first_label
from dynagroup.validation import explained, warn_user

LINEAR = (
    "flash_attention",
    "flex_attention",
    NAME,
)  # kinds of attention that keep samples apart without a mask
Collate: TypeAlias = Callable[[Sequence[Any]], dict[str, Any]]
WAYS_OUT = (
    "set model.config.use_cache = False (with a cache, transformers makes no mask between packed samples), "
    "call dynagroup.integrations.varlen.use_varlen_attention(model), or use the padded layout"
)


def packing_collator(model: Any, **options: Any) -> Collate:
    """Returns a ``transformers.DataCollatorWithFlattening`` for this model, after a test that its packed batches work.
    It also packs other values per token that the model reads (``token_type_ids``), and keeps the first label of each
    sample if the model's loss reads it, as that of an encoder does. Called with other fields or padding: ConfigError.

    Args:
        model: a transformers model as it will be trained, with its attention implementation. See :func:`check_packing`.
        options: arguments of the collator, such as ``return_seq_idx=True`` for state-space models.
    """
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise ConfigError(f"`model` must be a model of transformers, but is {model!r:.80}")
    first = first_position(model)
    borders: Any = {"return_flash_attn_kwargs": _is_linear(model)}
    if first:
        borders["position_ids_start"] = first
    collate = _Flattening(model, {**borders, **options})
    check_packing(model, collate)
    return collate


class _Flattening(DataCollatorWithFlattening):
    def __init__(self, model: Any, options: dict[str, Any]) -> None:
        super().__init__(**options)
        own = (
            model.get_base_model() if hasattr(model, "get_base_model") else model
        )  # without adapters
        self.read = {*inspect.signature(own.forward).parameters} - {"input_ids", "position_ids"}
        self.shifts = skips_first_label(model)  # then the loss never reads a first label

    def __call__(
        self, features: Any, return_tensors: Any = None, separator_id: Any = None
    ) -> dict[str, Any]:
        sizes, given = (
            [len(f["input_ids"]) for f in features],
            {name for f in features for name in f},
        )
        rows = {
            name: [np.asarray(sample.get(name)) for sample in features]
            for name in given & self.read
        }
        for name, values in sorted(rows.items()):
            alike = [row.shape for row in values] == [(n,) for n in sizes]
            if not alike or (name == "attention_mask" and not np.hstack(values).all()):
                way_out = (
                    "give every sample one value per token and no padding, or use the padded layout"
                )
                raise ConfigError(
                    f"cannot pack the field {name!r}, which the model reads; {way_out}"
                )
        made: Any = super().__call__(features, return_tensors, separator_id)
        made["labels"] = made["labels"][
            :, [n > 0 for n in sizes for _ in range(max(n, 1))]
        ]  # samples without tokens
        for name in rows.keys() - {"attention_mask", *(["labels"] if self.shifts else [])}:
            packed = np.concatenate(
                [np.zeros(0, np.int64), *(row for row in rows[name] if len(row))]
            )[None]
            made[name] = (
                torch.as_tensor(packed) if isinstance(made["input_ids"], torch.Tensor) else packed
            )
        if not self.shifts and "labels" not in given:
            del made["labels"]  # would be the ids
        return made


class NotAskedError(ConfigError):
    """Raised when a model or collator cannot be tested, because it needs more than rows of tokens."""


def check_packing(model: Any, collate_fn: Collate) -> None:
    """Runs two short samples packed and one by one, and checks that the model gives equal results. The model is not
    changed. Raises ConfigError if the model cannot run these samples, or its attention, its cache, its positions or
    layers along the row mix them."""
    name = type(model).__name__
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    with explained(
        f"{name} cannot run two packed samples of `input_ids`",
        ConfigError,
        way_out="; only models that read one row of tokens can be packed, so use the padded layout",
        kind=NotAskedError,
    ):
        samples = samples_for(model)
        sizes = [len(ids) for ids in samples]
        batch = collate_fn([{"input_ids": list(ids), "labels": list(ids)} for ids in samples])
        shape = (*batch["input_ids"].shape,)
        if shape != (1, sum(sizes)):
            raise ConfigError(
                f"`collate_fn` must pack {sum(sizes)} tokens, but made {shape}; use packing_collator(model)"
            )
        together = answer(model, batch)
        # taken from the packed row, because a collator may mask tokens
        alone = answers_alone(model, batch["input_ids"].split(sizes, dim=1))
        if together.shape[:2] != shape or alone[0].shape[1] != sizes[0]:
            raise ConfigError(
                f"{name} has no output per token and cannot be packed; use padded layout"
            )
        apart = difference_beyond_rounding(model, together, alone)
    if apart:
        why = f"its attention {attention!r} mixes them"
        if _is_linear(model):
            why = "its positions, or layers that run along the row, do not restart at each sample"
        raise ConfigError(
            f"{name} gives other results for packed samples than for each alone (by {apart:.1%}), because "
            f"{why}; {WAYS_OUT}"
        )


def check_packed_training(trainer: Any) -> None:
    """Runs :func:`check_packing` on what a Trainer will train; warns if a model or collator cannot be tested."""
    why = "the model is sharded, or not on its device yet"
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        try:
            with trainer.accelerator.autocast():
                return check_packing(trainer.model, trainer.data_collator)
        except NotAskedError as error:
            why = str(error)
    way_out = "call dynagroup.integrations.packing.check_packing(model, collate_fn) yourself"
    warn_user(f"cannot test whether the model keeps packed samples apart; {way_out} ({why})")


def _is_linear(model: Any) -> bool:
    return any(name in str(getattr(model.config, "_attn_implementation", None)) for name in LINEAR)
