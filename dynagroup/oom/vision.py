"""Images of all samples end to end, told apart by the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError

# Concatenated over samples: key -> (kind, whether it has a row a patch instead of one an image).
VISION_KEYS = {
    "pixel_values": ("image", True), "image_grid_thw": ("image", False), "pixel_values_videos": ("video", True),
    "video_grid_thw": ("video", False), "second_per_grid_ts": ("video", False),
}  # fmt: skip
_TYPE_IDS = {"image": 1, "video": 2}  # in `mm_token_type_ids`


@dataclass(frozen=True, kw_only=True)
class VisionTokens:
    """How images show in ``input_ids``: one placeholder token for every ``merge_size ** 2`` patches."""

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


def take_vision(fields: Mapping[Any, Any], key: str, start: int, stop: int, tokens: VisionTokens | None) -> Any:
    """Some samples' rows of images, None for no images: each ends where its placeholder tokens have been seen."""
    kind, per_patch = VISION_KEYS[key]
    grid = fields.get(f"{kind}_grid_thw")
    if fields[key] is None:
        return None
    if grid is None:
        raise ConfigError(f"`{key}` is concatenated over samples, but `{kind}_grid_thw` is not in the batch")
    patches = np.asarray(grid.prod(-1).tolist())
    merge = 2 if tokens is None else tokens.merge_size
    ends, wanted = _sums(patches // merge**2), _sums(_placeholders(fields, kind, tokens))
    images = np.searchsorted(ends, wanted)
    wrong = np.flatnonzero(ends[np.minimum(images, len(patches))] != wanted)
    if len(wrong) or images[-1] != len(patches):
        sample = wrong[0] - 1 if len(wrong) else len(wanted) - 2
        raise ConfigError(
            f"sample {sample} has {wanted[sample + 1] - wanted[sample]} {kind} tokens, which `{kind}_grid_thw` does not add up "
            "to; check `merge_size` and the token ids given to VisionTokens"
        )
    first, last = images[start], images[stop]
    if first == last:
        return None
    rows = _sums(patches) if per_patch else np.arange(len(patches) + 1)
    return fields[key][int(rows[first]) : int(rows[last])]


def _sums(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _placeholders(fields: Mapping[Any, Any], kind: str, tokens: VisionTokens | None) -> list[int]:
    """Placeholder tokens of every sample."""
    token_id = getattr(tokens, f"{kind}_token_id", None)
    if token_id is not None:
        return (fields["input_ids"] == token_id).sum(-1).tolist()
    if fields.get("mm_token_type_ids") is not None:
        return (fields["mm_token_type_ids"] == _TYPE_IDS[kind]).sum(-1).tolist()
    raise ConfigError(
        "which images belong to which sample is not known; give "
        "BatchSplitter(vision=VisionTokens.from_config(model.config)), or let the processor return `mm_token_type_ids`"
    )
