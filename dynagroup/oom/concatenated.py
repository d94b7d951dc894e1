"""Fields that samples share end to end: packed rows, told apart by their borders, and images, told apart by their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError

__all__ = ["VISION_KEYS", "VisionTokens", "packed_borders", "take_packed", "take_vision"]

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
_IMAGE, _VIDEO = 1, 2
# key -> (grid that describes it, kind in `mm_token_type_ids`, whether it has one row per patch instead of per image)
_RULES: dict[str, tuple[str, int, bool]] = {
    "pixel_values": ("image_grid_thw", _IMAGE, True),
    "image_grid_thw": ("image_grid_thw", _IMAGE, False),
    "pixel_values_videos": ("video_grid_thw", _VIDEO, True),
    "video_grid_thw": ("video_grid_thw", _VIDEO, False),
    "second_per_grid_ts": ("video_grid_thw", _VIDEO, False),
}
VISION_KEYS = frozenset(_RULES)


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


@dataclass(frozen=True, kw_only=True)
class VisionTokens:
    """How images show in ``input_ids``: one placeholder token for every ``merge_size ** 2`` patches.

    >>> VisionTokens(image_token_id=151655).merge_size
    2
    """

    image_token_id: int | None = None
    video_token_id: int | None = None
    merge_size: int = 2

    @classmethod
    def from_config(cls, config: Any) -> VisionTokens | None:
        """From a model's config; None for a model without such tokens."""
        image, video = getattr(config, "image_token_id", None), getattr(config, "video_token_id", None)
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        if merge is None or (image is None and video is None):
            return None
        return cls(image_token_id=image, video_token_id=video, merge_size=merge)


def take_vision(batch: Mapping[str, Any], key: str, start: int, stop: int, tokens: VisionTokens | None) -> Any:
    """The rows of ``batch[key]`` that belong to samples ``start`` to ``stop - 1``; None where they have no images.

    Which images a sample has is counted from its placeholder tokens: the grids alone do not say.
    """
    grid_key, kind, per_patch = _RULES[key]
    if batch[key] is None:
        return None
    grid = batch.get(grid_key)
    if grid is None:
        raise ConfigError(f"`{key}` is concatenated over samples, but `{grid_key}` is not in the batch")
    patches = grid.prod(-1).tolist()
    counts = _placeholders(batch, kind, tokens)
    merge = 2 if tokens is None else tokens.merge_size
    ends = _images_before(counts, [p // merge**2 for p in patches], grid_key)
    first, last = ends[start], ends[stop]
    if first == last:
        return None
    if not per_patch:
        return batch[key][first:last]
    return batch[key][sum(patches[:first]) : sum(patches[:last])]


def _placeholders(batch: Mapping[str, Any], kind: int, tokens: VisionTokens | None) -> list[int]:
    token_id = None if tokens is None else (tokens.image_token_id if kind == _IMAGE else tokens.video_token_id)
    if token_id is not None:
        return (batch["input_ids"] == token_id).sum(-1).tolist()
    if batch.get("mm_token_type_ids") is not None:
        return (batch["mm_token_type_ids"] == kind).sum(-1).tolist()
    raise ConfigError(
        "which images belong to which sample is not known; give "
        "BatchSplitter(vision=VisionTokens.from_config(model.config)), or let the processor return `mm_token_type_ids`"
    )


def _images_before(counts: list[int], tokens_per_image: list[int], grid_key: str) -> list[int]:
    """Images that belong to samples before each sample, and to all of them at the end."""
    ends, image = [0], 0
    for sample, left in enumerate(counts):
        while left > 0 and image < len(tokens_per_image):
            left -= tokens_per_image[image]
            image += 1
        if left != 0:
            raise ConfigError(
                f"sample {sample} has {counts[sample]} image tokens, which `{grid_key}` does not add up to; "
                "check `merge_size` and the token ids given to VisionTokens"
            )
        ends.append(image)
    if image != len(tokens_per_image):
        raise ConfigError(f"`{grid_key}` describes {len(tokens_per_image)} images, but the tokens account for {image}")
    return ends
