"""Outputs of ``generate`` on parts of a batch, put together as the whole batch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["OutputLayout", "merge_outputs"]

OutputPart: TypeAlias = "tuple[int, int, Any]"
"""(first sample, the one behind the last, output of the model)."""


@dataclass(frozen=True, kw_only=True)
class OutputLayout:
    """What the whole batch's output looks like.

    Args:
        prompt: input ids that outputs begin with, padding included (samples, tokens); None: outputs are new tokens only.
        columns: the prompt columns, ``first, last + 1``, that a part was given.
        num_return_sequences: output rows a sample.
        num_beams: rows of scores a sample.
        pad_token_id: fills rows up to the longest.
    """

    prompt: torch.Tensor | None
    columns: Callable[[int, int], tuple[int, int]]
    num_return_sequences: int
    num_beams: int
    pad_token_id: int | None


def merge_outputs(parts: Sequence[OutputPart], layout: OutputLayout) -> Any:
    """Tensors of token ids, or ``ModelOutput`` objects with scores, of consecutive parts (start, stop, output)."""
    first = parts[0][2]
    if hasattr(first, "untyped_storage"):
        return _merge_sequences(parts, layout)
    sequences = _merge_sequences([(a, b, output.sequences) for a, b, output in parts], layout)
    merged: dict[str, Any] = {"sequences": sequences}
    for name, value in first.items():
        if name not in ("sequences", "past_key_values"):
            merged[name] = _merge_field(name, value, [(a, b, output[name]) for a, b, output in parts], layout)
    return type(first)(**merged)


def _merge_field(name: str, value: Any, parts: list[OutputPart], layout: OutputLayout) -> Any:
    import torch

    if name == "sequences_scores":
        return torch.cat([scores for _, _, scores in parts])
    if name == "beam_indices":
        width = max(indices.shape[1] for _, _, indices in parts)
        moved = [
            torch.where(i >= 0, i + start * layout.num_beams, i) for start, _, i in parts
        ]  # rows of the whole batch
        return torch.cat([_widen(indices, width, -1) for indices in moved])
    if isinstance(value, tuple) and all(hasattr(step, "untyped_storage") and step.ndim == 2 for step in value):
        return _merge_steps([steps for _, _, steps in parts], layout)
    raise ConfigError(f"`{name}` of a split batch cannot be put together; call model.generate for it")


def _merge_steps(parts: list[tuple[torch.Tensor, ...]], layout: OutputLayout) -> tuple[torch.Tensor, ...]:
    """(rows, vocabulary) for every step. A part that had ended is certain of the padding token."""
    import torch

    def step(steps: tuple[torch.Tensor, ...], at: int) -> torch.Tensor:
        if at < len(steps):
            return steps[at]
        ended = torch.full_like(steps[0], -math.inf)
        ended[:, _pad(layout)] = 0
        return ended

    return tuple(torch.cat([step(steps, at) for steps in parts]) for at in range(max(map(len, parts))))


def _merge_sequences(parts: Sequence[OutputPart], layout: OutputLayout) -> torch.Tensor:
    import torch

    rows = []
    for start, stop, sequences in parts:
        if layout.prompt is None:
            rows.append(sequences)
            continue
        first, last = layout.columns(start, stop)
        prompt = layout.prompt[start:stop].repeat_interleave(layout.num_return_sequences, dim=0)
        rows.append(torch.cat([prompt.to(sequences.device), sequences[:, last - first :]], dim=1))
    width = max(part.shape[1] for part in rows)
    return torch.cat([part if part.shape[1] == width else _widen(part, width, _pad(layout)) for part in rows])


def _widen(rows: torch.Tensor, width: int, value: int) -> torch.Tensor:
    import torch

    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=value)


def _pad(layout: OutputLayout) -> int:
    if layout.pad_token_id is None:
        raise ConfigError(
            "parts ended after different numbers of tokens, but no padding token is known; give `pad_token_id`"
        )
    return layout.pad_token_id
