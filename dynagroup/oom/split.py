"""Takes a range of samples out of a batch of any usual kind, without unneeded padding; finds the shape of a batch."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard, TypeVar

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape

B = TypeVar("B")
Fields: TypeAlias = dict[Any, Any]

# Fields with one entry per token, which are trimmed like `attention_mask`.
_TOKEN_KEYS = {
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "labels",
    "shift_labels",
    "inputs_embeds",
    "loss_mask",
    "special_tokens_mask",
    "mm_token_type_ids",
    "global_attention_mask",
    "assistant_masks",
    "completion_mask",
}
# Fields that describe the whole batch, whatever their size.
_SHARED_KEYS = {"cache_position", "num_items_in_batch", "logits_to_keep", "return_loss"}
_SIZED_BY = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "decoder_input_ids",
    "labels",
    "input_features",
    "input_values",
)
_WHOLE = (type(None), str, bytes, int, float, np.generic)
_IGNORED_LABEL = -100
_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
_LONGEST = ("max_length_q", "max_length_k", "max_seqlen")
# Fields in which all samples are joined: key -> (kind; True: one row per patch, False: one row per image).
_VISION_KEYS = {
    "pixel_values": ("image", True),
    "image_grid_thw": ("image", False),
    "pixel_values_videos": ("video", True),
    "video_grid_thw": ("video", False),
    "second_per_grid_ts": ("video", False),
}
_TYPE_IDS = {"image": 1, "video": 2}  # values in `mm_token_type_ids`


class Splitter(Protocol[B]):
    """Counts the samples of a batch, and takes a range of them out. Write one for your own kind of batch."""

    def num_samples(self, batch: B, /) -> int:
        """Returns the number of samples in the batch."""
        ...

    def take(self, batch: B, start: int, stop: int, /) -> B:
        """Returns samples ``start`` to ``stop - 1`` as a new batch; ``batch`` is not changed."""
        ...


@dataclass(frozen=True, kw_only=True)
class VisionTokens:
    """How ``input_ids`` represent images: with one placeholder token per ``merge_size ** 2`` patches."""

    image_token_id: int | None = None
    video_token_id: int | None = None
    merge_size: int = 2

    @classmethod
    def from_config(cls, config: Any) -> "VisionTokens | None":
        """Reads the token ids from a model's config; None: the model has no such tokens."""
        image, video = (
            getattr(config, "image_token_id", None),
            getattr(config, "video_token_id", None),
        )
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        if merge is None or (image is None and video is None):
            return None
        return cls(image_token_id=image, video_token_id=video, merge_size=merge)


@dataclass(frozen=True, kw_only=True)
class BatchSplitter:
    """Splits dicts, ``BatchEncoding``, tuples and lists of fields, tensors, arrays and lists of samples.

    A list of tensors with equal first dimensions (as from ``default_collate``) is a list of fields. Numbers and strings
    are copied to every part. Other fields without an entry per sample raise an error. A packed batch (one row, with
    ``cu_seq_lens_q``, or ``position_ids`` that restart) is split between its samples.

    Args:
        trim: True removes padding columns on the right of a part, by its ``attention_mask``. (Padding on the left
            stays, because removing it would change positions.)
        pad_to_multiple_of: int, tokens: trimmed widths are rounded up to a multiple, at most to the batch's width.
        rules: dict from key to ``rule(value, batch, start, stop)``, for values that need your own way of splitting.
        vision: token ids of images and videos, if ``pixel_values`` are joined and there are no ``mm_token_type_ids``.

    >>> import torch
    >>> ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> batch = {"input_ids": ids, "attention_mask": mask}
    >>> BatchSplitter().take(batch, 1, 2)["input_ids"].tolist()
    [[4]]
    """

    trim: bool = True
    pad_to_multiple_of: int = 1
    rules: Mapping[str, Callable[[Any, Any, int, int], Any]] = field(default_factory=dict)
    vision: VisionTokens | None = None

    def num_samples(self, batch: Any, /) -> int:
        """Returns the number of samples in the batch, from its first dimension."""
        if _holds_samples(batch):
            return len(batch)
        fields = _fields_of(batch)
        if fields is None:
            raise ConfigError(
                f"a batch of type {type(batch).__name__} cannot be split; pass your own `split`"
            )
        borders = packed_borders(fields)
        if borders is not None:
            return len(borders) - 1
        own = {*self.rules, *_SHARED_KEYS, *_VISION_KEYS}
        sizes = {
            str(key): len(value)
            for key, value in fields.items()
            if key not in own and _is_sized(value)
        }
        found = [sizes[key] for key in _SIZED_BY if key in sizes][:1] or [*{*sizes.values()}]
        if len(found) != 1:
            raise ConfigError(
                f"cannot tell how many samples a batch has, from {sizes}; pass BatchSplitter(rules=...)"
            )
        return found[0]

    def take(self, batch: Any, start: int, stop: int, /) -> Any:
        """Returns samples ``start`` to ``stop - 1`` as a new batch, trimmed; tensors are views of the batch's."""
        num_samples, fields = self.num_samples(batch), _fields_of(batch)
        if fields is None or _holds_samples(batch):
            return batch[start:stop]
        borders = packed_borders(fields)
        images = {
            key
            for key, (kind, _) in _VISION_KEYS.items()
            if fields.get(f"{kind}_grid_thw") is not None
        }
        parts: Fields = {}
        for key, value in fields.items():
            if key in self.rules:
                parts[key] = self.rules[key](value, batch, start, stop)
            elif key in _SHARED_KEYS:
                parts[key] = value
            elif borders is not None:
                parts[key] = _take_packed(key, value, borders, start, stop)
            elif key in images and value is not None:
                parts[key] = _take_vision(fields, key, start, stop, self.vision)
            else:
                parts[key] = _take_padded(key, value, num_samples, start, stop)
        if borders is None and self.trim:
            self._trim(parts, fields, num_samples, start, stop)
        return _rebuild(batch, parts, start, stop)

    def _trim(self, parts: Fields, fields: Fields, num_samples: int, start: int, stop: int) -> None:
        """Trims all fields with one entry per token, or none, if a label or a part of an unknown field would go."""
        mask, known = fields.get("attention_mask"), _TOKEN_KEYS | self.rules.keys() | _SHARED_KEYS
        if not _is_array(mask) or mask.ndim != 2:
            return
        width, used = int(mask.shape[1]), np.flatnonzero((mask[start:stop] != 0).any(0).tolist())
        tokens, multiple = int(used[-1]) + 1 if len(used) else width, self.pad_to_multiple_of
        kept = min(width, -(-tokens // multiple) * multiple)
        unknown = any(_as_wide(fields[key], num_samples, width) for key in fields.keys() - known)
        kept = width if unknown or "past_key_values" in fields else kept
        targets = (
            {"labels"} if "decoder_input_ids" in fields else set()
        )  # labels of a decoder have another width
        wide = {
            key: fields[key]
            for key in parts.keys() & _TOKEN_KEYS - targets
            if _is_array(fields[key])
        }
        labels = wide.get("labels", np.empty(0))
        if labels.shape[1:] == (width,) and (labels[start:stop, kept:] != _IGNORED_LABEL).any():
            kept = width
        for key, value in wide.items():
            if (key == "position_ids" and value.shape[-1] == width) or tuple(value.shape[:2]) == (
                num_samples,
                width,
            ):
                part = parts[key][..., :kept] if key == "position_ids" else parts[key][:, :kept]
                parts[key] = (
                    part.contiguous() if hasattr(part, "contiguous") else part
                )  # models need it for `view`


def _take_padded(key: Any, value: Any, num_samples: int, start: int, stop: int) -> Any:
    """Returns some samples' entries of a field. ``position_ids`` may have one row, or planes (time, height, width)."""
    if key == "position_ids" and _is_array(value):
        if value.ndim == 3 and value.shape[1] == num_samples:
            return value[:, start:stop]
        if value.ndim == 1 or value.shape[0] == 1:
            return value
    return _cut(value, str(key), num_samples, start, stop)


def _as_wide(value: Any, num_samples: int, width: int) -> bool:
    if _is_array(value):
        return tuple(value.shape[:2]) == (num_samples, width)
    return any(_as_wide(part, num_samples, width) for part in (_fields_of(value) or {}).values())


def _is_array(value: Any) -> TypeGuard[Any]:
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def _is_sized(value: Any) -> bool:
    return value.ndim > 0 if _is_array(value) else isinstance(value, (list, tuple))


def _fields_of(value: Any) -> Fields | None:
    """Returns the fields of a container by key or index; None: the value is no container."""
    return (
        dict(enumerate(value))
        if isinstance(value, (tuple, list))
        else dict(value)
        if isinstance(value, Mapping)
        else None
    )


def _holds_samples(batch: Any) -> bool:
    """Returns whether a batch is an array or a list of samples; a list of equally long tensors is a list of fields."""
    if not isinstance(batch, list):
        return _is_array(batch)
    return (
        not batch
        or not all(_is_array(v) and v.ndim for v in batch)
        or len({len(v) for v in batch}) > 1
    )


def _cut(value: Any, name: str, num_samples: int, start: int, stop: int) -> Any:
    if isinstance(value, _WHOLE) or (_is_array(value) and not value.ndim):
        return value
    if _is_sized(value) and len(value) == num_samples:
        part = value[start:stop]
        return part if _is_array(value) else _rebuild(value, dict(enumerate(part)), start, stop)
    fields = _fields_of(value)
    if fields is not None:
        parts = {
            key: _cut(part, f"{name}.{key}", num_samples, start, stop)
            for key, part in fields.items()
        }
        return _rebuild(value, parts, start, stop)
    found = (
        f"field `{name}` ({describe(value)}) has no entry per sample in a batch of {num_samples}"
    )
    raise ConfigError(f"{found}; say how to split it with BatchSplitter(rules=...)")


def _rebuild(like: Any, parts: Fields, start: int, stop: int) -> Any:
    if isinstance(like, (tuple, list)):
        return (
            type(like)(*parts.values()) if hasattr(like, "_fields") else type(like)(parts.values())
        )
    encodings = getattr(like, "encodings", None)
    if (
        encodings is not None
    ):  # BatchEncoding of a fast tokenizer, with offsets and words per sample
        return type(like)(parts, encoding=encodings[start:stop], n_sequences=like.n_sequences)
    new = copy.copy(like)
    new.update(parts)
    return new


def longest_of(batch: Any) -> int:
    """Returns a padded batch's width: that of its tokens, else of its first tensor with two dimensions, else 1."""
    fields = {} if _is_array(batch) else _fields_of(batch) or {}
    named = (fields.get(key) for key in ("input_ids", "inputs_embeds", "attention_mask"))
    wide = (
        value for value in (*named, batch, *fields.values()) if _is_array(value) and value.ndim >= 2
    )
    return next((int(value.shape[1]) for value in wide), 1)


def shape_of(batch: Any, num_samples: int) -> BatchShape:
    """Returns the shape (K = 1) of a batch as it is run; that of a packed batch by its samples' lengths."""
    borders = packed_borders(batch) if isinstance(batch, Mapping) else None
    if borders is None:
        return BatchShape.of(num_samples, longest_of(batch))
    return BatchShape.of(num_samples, int(np.diff(borders).max()), borders[-1])


def describe(batch: Any) -> str:
    """Returns the shapes in a batch as short text for messages."""
    if _is_array(batch):
        return str(tuple(batch.shape))
    if isinstance(batch, Mapping):
        return ", ".join(f"{name}: {describe(value)}" for name, value in list(batch.items())[:6])
    return type(batch).__name__ + (f" of {len(batch)}" if isinstance(batch, (list, tuple)) else "")


def packed_borders(batch: Mapping[Any, Any]) -> list[int] | None:
    """Returns where the samples of a packed batch begin and where the last one ends; None: the batch is not packed.

    >>> packed_borders({"input_ids": np.zeros((1, 5)), "position_ids": np.array([[0, 1, 0, 1, 2]])})
    [0, 2, 5]
    """
    row = next(
        (batch[k] for k in ("input_ids", "inputs_embeds") if getattr(batch.get(k), "ndim", 0) >= 2),
        None,
    )
    if row is None or row.shape[0] != 1:
        return None
    marks = next((batch[key] for key in _BORDERS if batch.get(key) is not None), None)
    if marks is not None:
        return [int(mark) for mark in marks]
    places, tokens = batch.get("position_ids"), int(row.shape[1])
    if (
        places is None
        or tuple(places.shape) != (1, tokens)
        or batch.get("attention_mask") is not None
    ):
        return None
    return [0, *(np.flatnonzero(np.diff(places[0].tolist()) != 1) + 1).tolist(), tokens]


def _take_packed(key: str, value: Any, borders: list[int], start: int, stop: int) -> Any:
    """Returns the part of a packed batch's field that belongs to samples ``start`` to ``stop - 1``."""
    tokens, num_samples, first, last = borders[-1], len(borders) - 1, borders[start], borders[stop]
    if key in _BORDERS:
        return value[start : stop + 1] - value[start]
    if key in _LONGEST:
        longest = int(np.diff(borders[start : stop + 1]).max())
        return longest if isinstance(value, int) else value * 0 + longest
    if not _is_array(value) or value.ndim == 0:
        return (
            value[start:stop]
            if isinstance(value, (list, tuple)) and len(value) == num_samples
            else value
        )
    if value.ndim >= 2 and tuple(value.shape[-2:]) == (tokens, tokens):
        return value[..., first:last, first:last]
    if value.ndim >= 2 and tuple(value.shape[:2]) == (1, tokens):
        part = value[:, first:last]
        return part - part[:, :1] if key == "seq_idx" else part
    if key == "position_ids" and value.shape[-1] == tokens:  # planes for time, height and width
        return value[..., first:last]
    if len(value) == num_samples:
        return value[start:stop]
    has = f"field `{key}` {tuple(value.shape)} has no entry for each of {tokens} tokens or of {num_samples} samples"
    raise ConfigError(f"{has} in a packed batch; say how to split it with BatchSplitter(rules=...)")


def _take_vision(
    fields: Mapping[Any, Any], key: str, start: int, stop: int, tokens: VisionTokens | None
) -> Any:
    """Returns the rows of images that belong to some samples (None: no images), judged by placeholder tokens."""
    kind, per_patch = _VISION_KEYS[key]
    token_id, types = getattr(tokens, f"{kind}_token_id", None), fields.get("mm_token_type_ids")
    if token_id is None and types is None:
        way_out = "BatchSplitter(vision=VisionTokens.from_config(model.config))"
        raise ConfigError(f"cannot tell which {kind}s belong to which sample; give {way_out}")
    shown = types == _TYPE_IDS[kind] if token_id is None else fields["input_ids"] == token_id
    patches = np.asarray(fields[f"{kind}_grid_thw"].prod(-1).tolist())
    ends, wanted = (
        _sums(patches // (2 if tokens is None else tokens.merge_size) ** 2),
        _sums(shown.sum(-1).tolist()),
    )
    images = np.searchsorted(ends, wanted)
    wrong = np.flatnonzero(ends[np.minimum(images, len(patches))] != wanted)
    if len(wrong) or images[-1] != len(patches):
        sample = wrong[0] - 1 if len(wrong) else len(wanted) - 2
        has = f"sample {sample} has {wanted[sample + 1] - wanted[sample]} {kind} tokens, but another number of patches"
        raise ConfigError(f"{has} in `{kind}_grid_thw`; check the VisionTokens that you gave")
    first, last = images[start], images[stop]
    if first == last:
        return None
    rows = _sums(patches) if per_patch else np.arange(len(patches) + 1)
    return fields[key][int(rows[first]) : int(rows[last])]


def _sums(counts: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])
