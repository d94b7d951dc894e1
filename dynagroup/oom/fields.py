"""The fields of a batch: how containers, caches, packed rows and concatenated images are cut, and what a batch's shape is."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import torch

__all__ = [
    "VISION_KEYS",
    "Fields",
    "VisionTokens",
    "cut",
    "describe",
    "fields_of",
    "first_dim",
    "holds_samples",
    "is_array",
    "is_cache",
    "is_table",
    "longest_of",
    "packed_borders",
    "rebuild",
    "shape_of",
    "take_cache",
    "take_packed",
    "take_vision",
    "to_numpy",
]

Fields: TypeAlias = "dict[Any, Any]"

_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
# Concatenated over samples: key -> (kind, whether it has a row a patch instead of one an image).
VISION_KEYS = {
    "pixel_values": ("image", True), "image_grid_thw": ("image", False), "pixel_values_videos": ("video", True),
    "video_grid_thw": ("video", False), "second_per_grid_ts": ("video", False),
}  # fmt: skip
_TYPE_IDS = {"image": 1, "video": 2}  # in `mm_token_type_ids`
_LAYERS = ("past_key_values", "hidden_states", "attentions")  # sequences of layers, not of samples


def is_array(value: Any) -> TypeGuard[Any]:
    """A tensor or an array (both slice, compare and reduce alike)."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def is_table(value: Any) -> TypeGuard[Any]:
    """An array (samples, tokens)."""
    return is_array(value) and value.ndim == 2


def to_numpy(value: torch.Tensor | np.ndarray) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def fields_of(value: Any) -> Fields | None:
    """What a container holds by key, position or name; None for what is none."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def holds_samples(batch: Any) -> bool:
    """Whether a batch is an array, or a list of samples: not one of tensors of one first dimension."""
    if not isinstance(batch, list):
        return is_array(batch)
    return not batch or not all(is_array(v) and v.ndim for v in batch) or len({len(v) for v in batch}) > 1


def first_dim(value: Any) -> int | None:
    if is_cache(value):
        layers = getattr(getattr(value, "self_attention_cache", value), "layers", [])
        value = next((layer.keys for layer in layers if getattr(layer, "keys", None) is not None), None)
    sized = value.ndim > 0 if is_array(value) else isinstance(value, (list, tuple))
    return len(value) if sized else None


def cut(value: Any, name: str, num_samples: int, start: int, stop: int) -> Any:
    """One field's entries of the samples ``start`` to ``stop - 1``."""
    if value is None or isinstance(value, (str, bytes, int, float, complex, np.generic)):
        return value
    if is_cache(value):
        return take_cache(value, start, stop)
    if is_array(value):
        if not value.ndim:
            return value
        if len(value) == num_samples:
            return value[start:stop]
    elif isinstance(value, (list, tuple)) and len(value) == num_samples and not name.endswith(_LAYERS):
        return _same_kind(value, list(value[start:stop]))
    elif (fields := fields_of(value)) is not None:
        parts = {key: cut(part, f"{name}.{key}", num_samples, start, stop) for key, part in fields.items()}
        return rebuild(value, parts, start, stop)
    raise ConfigError(
        f"`{name}` ({_describe_one(value)}) has no entry per sample in a batch of {num_samples} and cannot be split; "
        f"give BatchSplitter(rules={{{name!r}: lambda value, batch, start, stop: ...}}) or shared_keys={{{name!r}}}"
    )


def rebuild(like: Any, parts: Fields, start: int, stop: int) -> Any:
    """The same kind of container with other contents."""
    if isinstance(like, (tuple, list)):
        return _same_kind(like, list(parts.values()))
    if dataclasses.is_dataclass(like):  # ModelOutput too
        return cast(Any, type(like))(**parts)
    encodings = getattr(like, "encodings", None)
    if encodings is not None:  # BatchEncoding of a fast tokenizer: offsets and words per sample
        return type(like)(parts, encoding=encodings[start:stop], n_sequences=like.n_sequences)
    new = copy.copy(like)
    if not isinstance(new, MutableMapping):
        raise ConfigError(f"a batch of type {type(like).__name__} cannot be rebuilt; give `split` an object that can")
    new.update(parts)
    return new


def _same_kind(like: Sequence[Any], values: list[Any]) -> Any:
    named = isinstance(like, tuple) and hasattr(like, "_fields")
    return type(like)(*values) if named else type(like)(values)  # type: ignore[call-arg]


def is_cache(value: Any) -> bool:
    """Whether this is a ``transformers`` cache. Does not import transformers: without it there is none."""
    module = sys.modules.get("transformers.cache_utils")
    return module is not None and isinstance(value, (module.Cache, module.EncoderDecoderCache))


def take_cache(cache: Any, start: int, stop: int) -> Any:
    """Samples ``start`` to ``stop - 1`` of a cache, as a cache of its own; the given one stays as it is.

    Layers are copied before they are told to select, which makes new tensors only for what is kept.

    Raises:
        ConfigError: a static or otherwise preallocated cache, which is written in place and cannot select.
    """
    import torch
    from transformers.cache_utils import EncoderDecoderCache

    if isinstance(cache, EncoderDecoderCache):
        parts = (take_cache(c, start, stop) for c in (cache.self_attention_cache, cache.cross_attention_cache))
        return type(cache)(*parts)
    part = copy.copy(cache)
    part.layers = [copy.copy(layer) for layer in cache.layers]
    if not all(hasattr(layer, "batch_select_indices") for layer in part.layers):
        raise ConfigError(
            f"a {type(cache).__name__} is written in place and cannot be split; pass a DynamicCache, or none and let "
            "`generate` make its own"
        )
    part.batch_select_indices(torch.arange(start, stop))
    return part


def longest_of(batch: Any) -> int:
    """Width of a padded batch: its token columns, else the second dimension of its first tensor that has one, else 1."""
    fields = {} if is_array(batch) else fields_of(batch) or {}
    named = (fields.get(key) for key in ("input_ids", "inputs_embeds", "attention_mask"))
    wide = (value for value in (*named, batch, *fields.values()) if is_array(value) and value.ndim >= 2)
    return next((int(value.shape[1]) for value in wide), 1)


def shape_of(batch: Any, num_samples: int) -> BatchShape:
    """The shape (K = 1) of a batch as it is run: a packed one by its samples' own lengths."""
    borders = packed_borders(batch) if isinstance(batch, Mapping) else None
    if borders is None:
        return BatchShape.of(num_samples, longest_of(batch))
    return BatchShape.of(num_samples, int(np.diff(borders).max()), borders[-1])


def describe(batch: Any) -> str:
    """The shapes in a batch, short enough for a message.

    >>> describe({"input_ids": np.zeros((2, 7)), "names": ["a", "b"]})
    'input_ids: (2, 7), names: list of 2'
    """
    fields = None if holds_samples(batch) else fields_of(batch)
    if fields is None:
        return _describe_one(batch)
    shown = [f"{name}: {_describe_one(value)}" for name, value in list(fields.items())[:6]]
    return ", ".join(shown) + (", ..." if len(fields) > len(shown) else "")


def _describe_one(value: Any) -> str:
    if is_array(value):
        return str(tuple(value.shape))
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")


def packed_borders(batch: Mapping[Any, Any]) -> list[int] | None:
    """Where the samples of a packed batch begin, and where the last one ends; None for any other batch.

    Packed is one row of ``input_ids`` with ``cu_seq_lens_q`` (``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``) or
    with ``position_ids`` that start again.

    >>> packed_borders({"input_ids": np.zeros((1, 5)), "position_ids": np.array([[0, 1, 0, 1, 2]])})
    [0, 2, 5]
    """
    row = next((batch[k] for k in ("input_ids", "inputs_embeds") if getattr(batch.get(k), "ndim", 0) >= 2), None)
    if row is None or row.shape[0] != 1:
        return None
    marks = next((batch[key] for key in _BORDERS if batch.get(key) is not None), None)
    if marks is not None:
        return [int(mark) for mark in marks]
    places, tokens = batch.get("position_ids"), int(row.shape[1])
    if places is None or tuple(places.shape) != (1, tokens) or batch.get("attention_mask") is not None:
        return None
    starts = np.flatnonzero(np.diff(to_numpy(places[0])) != 1) + 1
    return [0, *starts.tolist(), tokens]


def take_packed(key: str, value: Any, borders: list[int], start: int, stop: int) -> Any:
    """What samples ``start`` to ``stop - 1`` of a packed batch have of one field."""
    tokens, num_samples, first, last = borders[-1], len(borders) - 1, borders[start], borders[stop]
    if key in _BORDERS:
        return value[start : stop + 1] - value[start]
    if key in _LONGEST:
        longest = int(np.diff(borders[start : stop + 1]).max())
        return longest if isinstance(value, int) else value * 0 + longest
    if not is_array(value) or value.ndim == 0:
        return value[start:stop] if isinstance(value, (list, tuple)) and len(value) == num_samples else value
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


@dataclasses.dataclass(frozen=True, kw_only=True)
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


def take_vision(fields: Fields, key: str, start: int, stop: int, tokens: VisionTokens | None) -> Any:
    """The rows of images that belong to samples ``start`` to ``stop - 1``; None where they have no images.

    Grids alone do not say whose an image is: each ends where as many placeholder tokens have been seen as it stands for.
    """
    kind, per_patch = VISION_KEYS[key]
    grid = fields.get(f"{kind}_grid_thw")
    if fields[key] is None:
        return None
    if grid is None:
        raise ConfigError(f"`{key}` is concatenated over samples, but `{kind}_grid_thw` is not in the batch")
    patches = to_numpy(grid.prod(-1))
    merge = 2 if tokens is None else tokens.merge_size
    ends, wanted = _sums(patches // merge**2), _sums(_placeholders(fields, kind, tokens))
    images = np.searchsorted(ends, wanted)
    wrong = np.flatnonzero(ends[np.minimum(images, len(patches))] != wanted)
    if len(wrong) or images[-1] != len(patches):
        who = f"sample {wrong[0] - 1}" if len(wrong) else "the batch"
        count = int(wanted[wrong[0]] - wanted[wrong[0] - 1] if len(wrong) else wanted[-1])
        raise ConfigError(
            f"{who} has {count} {kind} tokens, which `{kind}_grid_thw` does not add up to; "
            "check `merge_size` and the token ids given to VisionTokens"
        )
    first, last = images[start], images[stop]
    if first == last:
        return None
    rows = _sums(patches) if per_patch else np.arange(len(patches) + 1)
    return fields[key][int(rows[first]) : int(rows[last])]


def _sums(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _placeholders(fields: Fields, kind: str, tokens: VisionTokens | None) -> np.ndarray:
    """Placeholder tokens of every sample."""
    token_id = getattr(tokens, f"{kind}_token_id", None)
    if token_id is not None:
        return to_numpy((fields["input_ids"] == token_id).sum(-1))
    if fields.get("mm_token_type_ids") is not None:
        return to_numpy((fields["mm_token_type_ids"] == _TYPE_IDS[kind]).sum(-1))
    raise ConfigError(
        "which images belong to which sample is not known; give "
        "BatchSplitter(vision=VisionTokens.from_config(model.config)), or let the processor return `mm_token_type_ids`"
    )
