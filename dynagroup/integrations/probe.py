"""Compares two samples packed in one row with the same samples alone, on the user's own model and weights."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from transformers import PretrainedConfig

from dynagroup.jobs.texts import evaluating, stated_positions

PROBES = ((7, 5, 6, 9, 8), (6, 8, 5))
LONGEST = 131  # tokens: more than layers that compress blocks have in a block (DeepSeek-V4: 128)
SHORT = 7  # tokens of the second sample: the fewer they are, the more they change if they see the first sample
# The largest difference that rounding causes, relative to all values: in float32, with TF32, and in half precision.
EXACT = 5e-5
TF32 = 1e-2
HALF = 2.5e-2
Batch: TypeAlias = Mapping[str, object]


class Model(Protocol):
    """What is used of a transformers model, also of one with adapters."""

    config: PretrainedConfig

    def __call__(self, **inputs: object) -> Any: ...
    def modules(self) -> Any: ...
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


def samples_for(model: Model) -> list[list[int]]:
    """Returns a long and a short sample of token ids. The model has positions for them, and their border is in no block."""
    positions = stated_positions(model) or LONGEST
    longest = min(LONGEST, positions // 2)
    if longest % 2 == 0:
        longest -= 1
    samples = []
    for words, size in zip(PROBES, (longest, min(SHORT, longest)), strict=True):
        samples.append(list(words * size)[:size])
    return samples


def answer(model: Model, batch: Batch) -> torch.Tensor:
    """Returns a model's logits, or without logits its first output."""
    output = run(model, {name: value for name, value in batch.items() if name != "labels"})
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def run(model: Model, batch: Batch) -> Any:
    """Returns a model's output without dropout and gradients. The batch may be on another device."""
    device = next(model.parameters()).device
    inputs = {}
    for name, value in batch.items():
        inputs[name] = value.to(device) if isinstance(value, torch.Tensor) else value
    with evaluating(model), torch.no_grad():
        return model(**inputs)


def answers_alone(model: Model, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the answers for samples of shape (1, tokens), each run alone. ValueError: they are NaN."""
    answers = [answer(model, {"input_ids": row}) for row in rows]
    if any(bool(one.isnan().any()) for one in answers):
        raise ValueError("its results are not numbers (NaN)")
    return answers


def relative_difference(values: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the norm of the difference, relative to the wanted values'; without words that no token predicts (Chameleon)."""
    varies = (wanted != wanted[..., :1, :]).flatten(0, -2).any(0)
    wanted = wanted[..., varies].float()
    return float((values[..., varies].float() - wanted).norm() / wanted.norm())


def difference_beyond_rounding(
    model: Model, packed: torch.Tensor, alone: Sequence[torch.Tensor]
) -> float:
    """Returns the largest relative difference of a sample's answer; 0 if rounding may have caused it."""
    parts = packed.split([one.shape[1] for one in alone], dim=1)
    largest = 0.0
    for part, wanted in zip(parts, alone, strict=True):
        difference = relative_difference(part, wanted)
        if math.isnan(difference):
            return math.inf
        if difference > rounding_of(model, wanted):
            largest = max(largest, difference)
    return largest


def rounding_of(model: Model, values: torch.Tensor) -> float:
    """Returns the relative difference that rounding may cause in results of a model."""
    device = values.device.type
    parameter = next(model.parameters())
    if min(values.itemsize, parameter.itemsize) < 4 or torch.is_autocast_enabled(device):
        return HALF
    if device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return TF32
    return EXACT
