"""Split image and video tensors that are concatenated over a batch's samples (Qwen-VL style)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynagroup.errors import ConfigError

__all__ = ["VISION_KEYS", "VisionTokens", "take_vision"]

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
