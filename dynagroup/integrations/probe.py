"""Compares two samples packed in one row with the same samples alone, on the user's own model and weights."""

import math
from typing import Any

import torch

from dynagroup.jobs.job import evaluating

PROBES = ((7, 5, 6, 9, 8), (6, 8, 5))
LONGEST = 131  # tokens: more than layers that compress blocks have in a block (DeepSeek-V4: 128)
SHORT = 7  # tokens of the second sample: the fewer they are, the more they change if they see the first sample


def samples_for(model: Any) -> list[list[int]]:
    """Returns a long and a short sample of token ids. The model has positions for them, and their border is in no block."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
    longest = min(LONGEST, positions // 2)
    longest -= (longest + 1) % 2
    sizes = (longest, min(SHORT, longest))
    return [list(probe * size)[:size] for probe, size in zip(PROBES, sizes, strict=True)]


def answer(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Returns a model's logits, or without logits its first output."""
    device = next(model.parameters()).device
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels"
    }
    with evaluating(model), torch.no_grad():
        output = model(**inputs)
    return output.logits if getattr(output, "logits", None) is not None else output[0]


def answers_alone(model: Any, rows: Any) -> list[torch.Tensor]:
    """Returns the answers for samples of shape (1, tokens), each run alone. ValueError: they are NaN."""
    found = [answer(model, {"input_ids": row}) for row in rows]
    if any(bool(one.isnan().any()) for one in found):
        raise ValueError("its results are not numbers (NaN)")
    return found


def differences(found: torch.Tensor, wanted: torch.Tensor) -> tuple[float, float]:
    """Returns the largest difference and that of all values, relative; without words that no token predicts (Chameleon)."""
    told = (wanted != wanted[..., :1, :]).flatten(0, -2).any(0)
    gap, wanted = (found - wanted)[..., told].float(), wanted[..., told].float()
    return float(gap.abs().max() / wanted.abs().max()), float(gap.norm() / wanted.norm())


def difference_beyond_rounding(
    model: Any, packed: torch.Tensor, alone: list[torch.Tensor]
) -> float:
    """Returns the largest relative difference of a sample's answer; 0 if rounding may have caused it."""
    dtype, device = alone[0].dtype, alone[0].device
    limit = 5e-5
    if min(dtype.itemsize, next(model.parameters()).dtype.itemsize) < 4:
        limit = 5e-2
    elif torch.is_autocast_enabled(device.type):
        limit = 5e-2
    elif device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        limit = 5e-3
    found = 0.0
    for mine, wanted in zip(
        packed.split([len(one[0]) for one in alone], dim=1), alone, strict=True
    ):
        largest, in_all = differences(mine, wanted)
        # in half precision, rounding is at most 0.02 in both
        if not (largest <= limit and in_all <= max(limit / 2, 1e-2)):
            found = max(found, math.inf if math.isnan(largest) else largest)
    return found
