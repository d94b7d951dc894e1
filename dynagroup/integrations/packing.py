"""Makes the collator for packed batches of a transformers model, and tests that the model keeps the samples apart.

If a model cannot process packed batches, transformers raises no error: samples attend to each other or get wrong
positions, while the loss looks normal. So the model itself is tested, on two samples."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from dynagroup.errors import ConfigError
from dynagroup.integrations.config import HostTrainer
from dynagroup.integrations.probe import (
    Model,
    answer,
    answers_alone,
    difference_beyond_rounding,
    samples_for,
)
from dynagroup.integrations.varlen import NAME, attention_of, first_position
from dynagroup.jobs.texts import evaluating, without_wrapper
from dynagroup.shapes import IntArray
from dynagroup.text.loader import IGNORED
from dynagroup.validation import explained, warn_user

LINEAR = ("flash_attention", "flex_attention", NAME)
"""Kinds of attention that keep samples apart without a mask."""
Sample: TypeAlias = Mapping[str, Any]
Collate: TypeAlias = Callable[[Sequence[Any]], dict[str, Any]]
PACKABLE = "give every sample one value per token and no padding, or use the padded layout"
WAYS_OUT = (
    "set model.config.use_cache = False (with a cache, transformers makes no mask between packed samples), "
    "call dynagroup.integrations.varlen.use_varlen_attention(model), or use the padded layout"
)


def packing_collator(model: Model, *, return_seq_idx: bool = False) -> Collate:
    """Returns a collate function for packed batches of this model, after a test of them. The batches are those of
    ``transformers.DataCollatorWithFlattening``, made faster, also with other values per token that the model reads
    (``token_type_ids``). The first label of each sample is kept if the model's loss reads it, as that of an encoder does.
    Called with other fields or padding: ConfigError.

    Args:
        model: a transformers model as it will be trained, with its attention implementation. See :func:`check_packing`.
        return_seq_idx: True adds ``seq_idx``, the number of each token's sample, which state-space models read.
    """
    if not hasattr(model, "config") or not isinstance(model, torch.nn.Module):
        raise ConfigError(f"`model` must be a model of transformers, but is {model!r:.80}")
    collate = _Flattening(model, return_seq_idx)
    check_packing(model, collate)
    return collate


def needs_no_mask(model: Model) -> bool:
    """Returns whether a model's attention keeps packed samples apart without a mask over the square of their tokens."""
    attention = attention_of(model)
    return any(kind in attention for kind in LINEAR)


class _Flattening:
    """Lays samples end to end; each has one value per token in all fields that the model reads. transformers' own collator
    makes a Python number for every token, which takes several times as long."""

    def __init__(self, model: Any, return_seq_idx: bool) -> None:
        base = without_wrapper(model) or model
        read = inspect.signature(base.forward).parameters
        self.fields = {*read, "input_ids", "labels"} - {"position_ids"}
        self.skips_first_label = skips_first_label(model)
        self.first_position = first_position(model)
        self.has_borders = needs_no_mask(model)
        self.return_seq_idx = return_seq_idx

    def __call__(self, features: Sequence[Sample]) -> dict[str, Any]:
        sizes = np.array([len(sample["input_ids"]) for sample in features], dtype=np.int64)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        rows = self._rows(features, sizes)
        rows["input_ids"] = rows["input_ids"].astype(np.int64)
        if self.skips_first_label:
            labels = rows.get("labels", rows["input_ids"]).astype(np.int64)
            labels[starts[sizes > 0]] = IGNORED
            rows["labels"] = labels
        first_places = np.repeat(starts - self.first_position, sizes)
        rows["position_ids"] = np.arange(ends[-1]) - first_places
        if self.return_seq_idx:
            rows["seq_idx"] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        batch: dict[str, Any] = {name: torch.from_numpy(row[None]) for name, row in rows.items()}
        if self.has_borders:
            borders = torch.from_numpy(np.append(0, ends).astype(np.int32))
            longest = int(sizes.max())
            batch.update(cu_seq_lens_q=borders, cu_seq_lens_k=borders)
            batch.update(max_length_q=longest, max_length_k=longest)
        return batch

    def _rows(self, features: Sequence[Sample], sizes: IntArray) -> dict[str, np.ndarray]:
        """Returns the values per token of all samples, by field. ConfigError: a field has others, or padding."""
        rows = {}
        for name in sorted(self.fields.intersection(set().union(*features))):
            values = [np.asarray(sample.get(name)) for sample in features]
            rows[name] = _joined(name, values, sizes)
        mask = rows.pop("attention_mask", None)
        if mask is not None and not mask.all():
            raise ConfigError(
                f"cannot pack the padding that the field 'attention_mask' shows; {PACKABLE}"
            )
        return rows


def _joined(name: str, values: Sequence[np.ndarray], sizes: IntArray) -> np.ndarray:
    """Returns the values per token of all samples. ConfigError: a sample has not one value per token."""
    if [row.shape for row in values] != [(size,) for size in sizes.tolist()]:
        raise ConfigError(f"cannot pack the field {name!r}, which the model reads; {PACKABLE}")
    # An empty list would make numbers of all others that are not whole.
    return np.concatenate([row for row in values if len(row)] or values)


@dataclass(frozen=True)
class SampleBySample:
    """Packs what a collate function makes of each sample alone, without the padding that its attention mask shows."""

    collate_fn: Collate
    pack: Collate

    def __call__(self, samples: Sequence[object]) -> dict[str, Any]:
        rows = []
        for sample in samples:
            batch = self.collate_fn([sample])
            is_token = batch["attention_mask"][0].bool()
            row = {}
            for name, values in batch.items():
                if name != "attention_mask":
                    row[name] = values[0][is_token].numpy()
            rows.append(row)
        return self.pack(rows)


def skips_first_label(model: Model) -> bool:
    """Returns whether a model's own loss leaves out the first label of a sample, as causal models do."""
    device = next(model.parameters()).device
    ids = torch.tensor([[5, 6, 7]], device=device)
    labels = torch.tensor([[0, -100, -100]], device=device)  # a class that every head has
    with suppress(Exception), torch.no_grad(), evaluating(model):
        loss = float(model(input_ids=ids, labels=labels).loss)
        return math.isnan(loss) or loss == 0.0
    return True


class UntestedError(ConfigError):
    """Raised when nothing is known of a model's packed batches, because it needs more than rows of tokens to run."""


def check_packing(model: Model, collate_fn: Collate) -> None:
    """Runs two short samples packed and one by one, and checks that the model gives equal results. The model is not
    changed. Raises ConfigError if the model cannot run these samples, or its attention, its cache, its positions or
    layers along the row mix them."""
    name = type(model).__name__
    with explained(
        f"{name} cannot run two packed samples of `input_ids`",
        ConfigError,
        way_out="; only models that read one row of tokens can be packed, so use the padded layout",
        kind=UntestedError,
    ):
        samples = samples_for(model)
        sizes = [len(ids) for ids in samples]
        batch = collate_fn([{"input_ids": list(ids), "labels": list(ids)} for ids in samples])
        shape = tuple(batch["input_ids"].shape)
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
        difference = difference_beyond_rounding(model, together, alone)
    if difference:
        reason = f"its attention {attention_of(model)!r} mixes them"
        if needs_no_mask(model):
            reason = (
                "its positions, or layers that run along the row, do not restart at each sample"
            )
        raise ConfigError(
            f"{name} gives other results for packed samples than for each alone (by {difference:.1%}), "
            f"because {reason}; {WAYS_OUT}"
        )


def check_packed_training(trainer: HostTrainer) -> None:
    """Runs :func:`check_packing` on what a Trainer will train; warns if a model or collator cannot be tested."""
    reason = "the model is sharded, or not on its device yet"
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        try:
            with trainer.accelerator.autocast():
                check_packing(trainer.model, trainer.data_collator)
            return
        except UntestedError as error:
            reason = str(error)
    warn_user(
        "cannot test whether the model keeps packed samples apart; call "
        f"dynagroup.integrations.packing.check_packing(model, collate_fn) yourself ({reason})"
    )
