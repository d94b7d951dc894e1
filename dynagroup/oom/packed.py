"""Split packed batches: samples end to end in one row, told apart by their borders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError

__all__ = ["packed_borders", "take_packed"]

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen")


def packed_borders(batch: Mapping[str, Any]) -> list[int] | None:
    """Where the samples of a packed batch begin, and where the last one ends; None for any other batch.

    Packed is one row of ``input_ids`` with ``cu_seq_lens_q`` (``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``) or
    with ``position_ids`` that start again.

    >>> packed_borders({"input_ids": np.zeros((1, 5)), "position_ids": np.array([[0, 1, 0, 1, 2]])})
    [0, 2, 5]
    """
    row = next((batch[k] for k in ("input_ids", "inputs_embeds") if getattr(batch.get(k), "ndim", 0) >= 2), None)
    if row is None or row.shape[0] != 1:
        return None
    tokens = int(row.shape[1])
    marks = next((batch[key] for key in _BORDERS if batch.get(key) is not None), None)
    if marks is not None:
        return [int(mark) for mark in marks]
    places = batch.get("position_ids")
    if places is None or tuple(places.shape) != (1, tokens) or batch.get("attention_mask") is not None:
        return None
    places = places[0] if isinstance(places, np.ndarray) else places[0].cpu().numpy()
    starts = np.flatnonzero(np.diff(places) != 1) + 1
    return [0, *starts.tolist(), tokens]


def take_packed(batch: Mapping[str, Any], key: str, borders: list[int], start: int, stop: int) -> Any:
    """What samples ``start`` to ``stop - 1`` have of ``batch[key]``.

    Raises:
        ConfigError: it has entries neither for tokens nor for samples.
    """
    value, tokens, num_samples = batch[key], borders[-1], len(borders) - 1
    first, last = borders[start], borders[stop]
    if key in _BORDERS:
        return value[start : stop + 1] - value[start]
    if key in _LONGEST:
        longest = max(borders[i + 1] - borders[i] for i in range(start, stop))
        return longest if isinstance(value, int) else value * 0 + longest
    if value is None or not hasattr(value, "shape") or value.ndim == 0:
        per_sample = isinstance(value, (list, tuple)) and len(value) == num_samples
        return value[start:stop] if per_sample else value  # pyright: ignore[reportOptionalSubscript]
    if value.ndim >= 2 and tuple(value.shape[-2:]) == (tokens, tokens):
        return value[..., first:last, first:last]
    if value.ndim >= 2 and tuple(value.shape[:2]) == (1, tokens):
        part = value[:, first:last]
        return part - part[:, :1] if key == "seq_idx" else part
    if key == "position_ids" and value.shape[-1] == tokens:  # a plane each for time, height, width
        return value[..., first:last]
    if len(value) == num_samples:
        return value[start:stop]
    raise ConfigError(
        f"`{key}` {tuple(value.shape)} has entries neither for the {tokens} tokens nor for the {num_samples} samples of a packed "
        f"batch and cannot be split; give BatchSplitter(rules={{{key!r}: lambda value, batch, start, stop: ...}})"
    )
