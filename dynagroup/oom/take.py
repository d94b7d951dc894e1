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
# Fields that tell the number of samples; the first that a batch has is used.
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
# Fields of packed batches: where samples begin and end, and the length of the longest.
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
_NUM_DESCRIBED = 6  # fields of a batch in messages


class Splitter(Protocol[B]):
    """Counts the samples of a batch, and takes a range of them out. Write one for your own kind of batch."""

    def num_samples(self, batch: B, /) -> int:
        """Returns the number of samples in the batch."""
        ...

    def take(self, batch: B, start: int, stop: int, /) -> B:
        """Returns samples ``start`` to ``stop - 1`` as a new batch; ``batch`` is not changed."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchSplitter:
    """Splits dicts, ``BatchEncoding``, tuples and lists of fields, tensors, arrays and lists of samples.

    A list of tensors with equal first dimensions (as from ``default_collate``) is a list of fields. Numbers and strings
    are copied to every part. Other fields without an entry per sample raise an error. A packed batch (one row, with
    ``cu_seq_lens_q``, or ``position_ids`` that restart) is split between its samples.

    Args:
        trim: True removes padding columns on the right of a part, by its ``attention_mask``. (Padding on the left
            stays, because removing it would change positions.)
        rules: dict from key to ``rule(value, batch, start, stop)``, for values that need your own way of splitting.

    >>> import torch
    >>> ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> batch = {"input_ids": ids, "attention_mask": mask}
    >>> BatchSplitter().take(batch, 1, 2)["input_ids"].tolist()
    [[4]]
    """

    trim: bool = True
    rules: Mapping[str, Callable[[Any, Any, int, int], Any]] = field(default_factory=dict)

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
        sizes = {}
        for key, value in fields.items():
            has_own_size = key in self.rules or key in _SHARED_KEYS or key in _VISION_KEYS
            if not has_own_size and _is_sized(value):
                sizes[str(key)] = len(value)
        for key in _SIZED_BY:
            if key in sizes:
                return sizes[key]
        distinct = set(sizes.values())
        if len(distinct) != 1:
            raise ConfigError(
                f"cannot tell how many samples a batch has, from {sizes}; pass BatchSplitter(rules=...)"
            )
        return distinct.pop()

    def take(self, batch: Any, start: int, stop: int, /) -> Any:
        """Returns samples ``start`` to ``stop - 1`` as a new batch, trimmed; tensors are views of the batch's."""
        num_samples = self.num_samples(batch)
        samples = slice(start, stop)
        fields = _fields_of(batch)
        if fields is None or _holds_samples(batch):
            return batch[samples]
        borders = packed_borders(fields)
        parts: Fields = {}
        for key, value in fields.items():
            if key in self.rules:
                parts[key] = self.rules[key](value, batch, start, stop)
            elif borders is not None:
                parts[key] = _take_packed(key, value, borders, samples)
            elif _is_vision(fields, key):
                parts[key] = _take_vision(fields, key, samples)
            else:
                parts[key] = _take_padded(key, value, num_samples, samples)
        if borders is None and self.trim:
            self._trim(parts, fields, num_samples, samples)
        return _rebuild(batch, parts, samples)

    def _trim(self, parts: Fields, fields: Fields, num_samples: int, samples: slice) -> None:
        """Removes columns on the right of all fields with one entry per token."""
        mask = fields.get("attention_mask")
        if not _is_array(mask) or mask.ndim != 2:
            return
        width = int(mask.shape[1])
        num_kept = self._width_to_keep(fields, num_samples, samples)
        for key, value in fields.items():
            if key not in _TOKEN_KEYS or not _is_array(value) or _is_of_decoder(fields, key):
                continue
            part = parts[key]
            if key == "position_ids" and value.shape[-1] == width:
                parts[key] = _in_one_piece(part[..., :num_kept])
            elif tuple(value.shape[:2]) == (num_samples, width):
                parts[key] = _in_one_piece(part[:, :num_kept])

    def _width_to_keep(self, fields: Fields, num_samples: int, samples: slice) -> int:
        """Returns how many columns a part keeps: all, if a label or entries of an unknown field would go."""
        mask = fields["attention_mask"]
        width = int(mask.shape[1])
        if "past_key_values" in fields:
            return width
        known = _TOKEN_KEYS | _SHARED_KEYS | self.rules.keys()
        for key, value in fields.items():
            if key not in known and _has_width(value, num_samples, width):
                return width
        columns = np.flatnonzero((mask[samples] != 0).any(0).tolist())
        num_kept = int(columns[-1]) + 1 if len(columns) else width
        labels = fields.get("labels")
        if (
            _is_array(labels)
            and labels.shape[1:] == (width,)
            and not _is_of_decoder(fields, "labels")
        ):
            if (labels[samples, num_kept:] != _IGNORED_LABEL).any():
                return width
        return num_kept


def _is_of_decoder(fields: Fields, key: Any) -> bool:
    """Returns whether a field has a decoder's width, and not that of the attention mask."""
    return key == "labels" and "decoder_input_ids" in fields


def _in_one_piece(part: Any) -> Any:
    """Returns a contiguous tensor, as models that call ``view`` need it."""
    return part if isinstance(part, np.ndarray) else part.contiguous()


def _take_padded(key: Any, value: Any, num_samples: int, samples: slice) -> Any:
    """Returns some samples' entries of a field. ``position_ids`` may have one row, or planes (time, height, width)."""
    if key in _SHARED_KEYS:
        return value
    if key == "position_ids" and _is_array(value):
        if value.ndim == 3 and value.shape[1] == num_samples:
            return value[:, samples]
        if value.ndim == 1 or value.shape[0] == 1:
            return value
    return _cut(value, str(key), num_samples, samples)


def _has_width(value: Any, num_samples: int, width: int) -> bool:
    """Returns whether a field, or a field in it, has one entry per sample and column."""
    if _is_array(value):
        return tuple(value.shape[:2]) == (num_samples, width)
    fields = _fields_of(value)
    if fields is None:
        return False
    return any(_has_width(part, num_samples, width) for part in fields.values())


def _is_array(value: Any) -> TypeGuard[Any]:
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def _is_sized(value: Any) -> bool:
    if _is_array(value):
        return value.ndim > 0
    return isinstance(value, (list, tuple))


def _fields_of(value: Any) -> Fields | None:
    """Returns the fields of a container by key or index; None: the value is no container."""
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if isinstance(value, Mapping):
        return dict(value)
    return None


def _holds_samples(batch: Any) -> bool:
    """Returns whether a batch is an array or a list of samples; a list of equally long tensors is a list of fields."""
    if not isinstance(batch, list):
        return _is_array(batch)
    if not all(_is_array(value) and value.ndim for value in batch):
        return True
    return len({len(value) for value in batch}) != 1


def _cut(value: Any, name: str, num_samples: int, samples: slice) -> Any:
    """Returns some samples' entries of a field, or of each field in it; numbers and texts as they are."""
    if isinstance(value, _WHOLE) or (_is_array(value) and not value.ndim):
        return value
    if _is_sized(value) and len(value) == num_samples:
        part = value[samples]
        return part if _is_array(value) else _rebuild(value, dict(enumerate(part)), samples)
    fields = _fields_of(value)
    if fields is None:
        raise ConfigError(
            f"field `{name}` ({describe(value)}) has no entry per sample in a batch of {num_samples}; "
            "say how to split it with BatchSplitter(rules=...)"
        )
    parts = {}
    for key, part in fields.items():
        parts[key] = _cut(part, f"{name}.{key}", num_samples, samples)
    return _rebuild(value, parts, samples)


def _rebuild(like: Any, parts: Fields, samples: slice) -> Any:
    """Returns a container of the same type with other fields."""
    if isinstance(like, (tuple, list)):
        is_named = hasattr(like, "_fields")
        return type(like)(*parts.values()) if is_named else type(like)(parts.values())
    encodings = getattr(like, "encodings", None)
    if encodings is not None:  # of a fast tokenizer, with offsets and words per sample
        return type(like)(parts, encoding=encodings[samples], n_sequences=like.n_sequences)
    new = copy.copy(like)
    new.update(parts)
    return new


def longest_of(batch: Any) -> int:
    """Returns a padded batch's width: that of its tokens, else of its first tensor with two dimensions, else 1."""
    values = [batch]
    if not _is_array(batch):
        fields = _fields_of(batch) or {}
        named = [fields.get(key) for key in ("input_ids", "inputs_embeds", "attention_mask")]
        values = [*named, *fields.values()]
    for value in values:
        if _is_array(value) and value.ndim >= 2:
            return int(value.shape[1])
    return 1


def shape_of(batch: Any, num_samples: int) -> BatchShape:
    """Returns the shape (K = 1) of a batch as it is run; that of a packed batch by its samples' lengths."""
    borders = packed_borders(batch) if isinstance(batch, Mapping) else None
    if borders is None:
        return BatchShape.of(num_samples, longest_of(batch))
    longest = int(np.diff(borders).max())
    return BatchShape.of(num_samples, longest, borders[-1])


def describe(batch: Any) -> str:
    """Returns the shapes in a batch as short text for messages."""
    if _is_array(batch):
        return str(tuple(batch.shape))
    if isinstance(batch, Mapping):
        first = list(batch.items())[:_NUM_DESCRIBED]
        return ", ".join(f"{name}: {describe(value)}" for name, value in first)
    if isinstance(batch, (list, tuple)):
        return f"{type(batch).__name__} of {len(batch)}"
    return type(batch).__name__


def packed_borders(batch: Mapping[Any, Any]) -> list[int] | None:
    """Returns where the samples of a packed batch begin and where the last one ends; None: the batch is not packed.

    >>> packed_borders({"input_ids": np.zeros((1, 5)), "position_ids": np.array([[0, 1, 0, 1, 2]])})
    [0, 2, 5]
    """
    row = _packed_row(batch)
    if row is None:
        return None
    for key in _BORDERS:
        if batch.get(key) is not None:
            return [int(border) for border in batch[key]]
    positions = batch.get("position_ids")
    num_tokens = int(row.shape[1])
    if positions is None or batch.get("attention_mask") is not None:
        return None
    if tuple(positions.shape) != (1, num_tokens):
        return None
    restarts = np.flatnonzero(np.diff(positions[0].tolist()) != 1) + 1
    return [0, *restarts.tolist(), num_tokens]


def _packed_row(batch: Mapping[Any, Any]) -> Any:
    """Returns the tokens of a batch that has one row; None: it has several, or no tokens."""
    for key in ("input_ids", "inputs_embeds"):
        tokens = batch.get(key)
        if _is_array(tokens) and tokens.ndim >= 2:
            return tokens if tokens.shape[0] == 1 else None
    return None


def _take_packed(key: str, value: Any, borders: list[int], samples: slice) -> Any:
    """Returns the part of a packed batch's field that belongs to some samples."""
    num_samples = len(borders) - 1
    if key in _SHARED_KEYS:
        return value
    if key in _BORDERS:
        return value[samples.start : samples.stop + 1] - value[samples.start]
    if key in _LONGEST:
        sizes = np.diff(borders)[samples]
        longest = int(sizes.max())
        return longest if isinstance(value, int) else value * 0 + longest
    is_array = _is_array(value) and value.ndim > 0
    if is_array:
        part = _take_tokens(key, value, borders, samples)
        if part is not None:
            return part
    if _is_sized(value) and len(value) == num_samples:
        return value[samples]
    if not is_array:
        return value
    raise ConfigError(
        f"field `{key}` {tuple(value.shape)} has no entry for each of {borders[-1]} tokens or of {num_samples} samples "
        "in a packed batch; say how to split it with BatchSplitter(rules=...)"
    )


def _take_tokens(key: str, value: Any, borders: list[int], samples: slice) -> Any:
    """Returns the entries of some samples' tokens in a packed field; None: it has not one entry per token."""
    num_tokens = borders[-1]
    tokens = slice(borders[samples.start], borders[samples.stop])
    if value.ndim >= 2 and tuple(value.shape[-2:]) == (num_tokens, num_tokens):
        return value[..., tokens, tokens]
    if value.ndim >= 2 and tuple(value.shape[:2]) == (1, num_tokens):
        part = value[:, tokens]
        return part - part[:, :1] if key == "seq_idx" else part
    if key == "position_ids" and value.shape[-1] == num_tokens:  # planes: time, height, width
        return value[..., tokens]
    return None


def _is_vision(fields: Fields, key: Any) -> bool:
    """Returns whether a field joins the images of all samples, and the batch says how many patches each has."""
    if fields[key] is None or key not in _VISION_KEYS:
        return False
    kind, _ = _VISION_KEYS[key]
    return fields.get(f"{kind}_grid_thw") is not None


def _take_vision(fields: Fields, key: str, samples: slice) -> Any:
    """Returns the rows of images that belong to some samples (None: no images), judged by placeholder tokens."""
    kind, has_row_per_patch = _VISION_KEYS[key]
    patches = np.asarray(fields[f"{kind}_grid_thw"].prod(-1).tolist())  # of each image
    first_images = _first_images(fields, kind, patches)
    first = first_images[samples.start]
    last = first_images[samples.stop]
    if first == last:
        return None
    rows = _sums(patches) if has_row_per_patch else np.arange(len(patches) + 1)
    return fields[key][int(rows[first]) : int(rows[last])]


def _first_images(fields: Fields, kind: str, patches: np.ndarray) -> np.ndarray:
    """Returns the number of each sample's first image, and the number of images: int (samples + 1,).

    A sample's images are those whose placeholder tokens add up to the tokens in its row."""
    types = fields.get("mm_token_type_ids")
    if types is None:
        raise ConfigError(
            f"cannot tell which {kind}s belong to which sample without `mm_token_type_ids`; call the processor "
            "with return_mm_token_type_ids=True"
        )
    num_tokens = np.asarray((types == _TYPE_IDS[kind]).sum(-1).tolist())  # of each sample
    patches_per_token = max(patches.sum(), 1) / max(num_tokens.sum(), 1)
    after_images = _sums(patches) / patches_per_token
    after_samples = _sums(num_tokens)
    images = np.searchsorted(after_images, after_samples)
    reached = after_images[np.minimum(images, len(patches))]
    is_square = float(patches_per_token**0.5).is_integer()  # a token stands for n x n patches
    if not is_square or images[-1] != len(patches) or (reached != after_samples).any():
        raise ConfigError(
            f"samples have {num_tokens.tolist()} {kind} tokens, which do not add up to {kind}s of {patches.tolist()} "
            "patches; check that the processor made both"
        )
    return images


def _sums(counts: Any) -> np.ndarray:
    """Returns cumulative sums that begin with 0."""
    return np.concatenate([[0], np.cumsum(counts)])
