"""Take some samples out of a batch of any usual kind, trimmed to their own longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.oom.fields import (
    VISION_KEYS,
    Fields,
    VisionTokens,
    cut,
    fields_of,
    first_dim,
    holds_samples,
    is_array,
    is_cache,
    is_table,
    packed_borders,
    rebuild,
    take_packed,
    take_vision,
    to_numpy,
)
from dynagroup.validation import check_choice

__all__ = ["BatchSplitter", "KeyRule", "Splitter", "Trim"]

B = TypeVar("B")
Trim: TypeAlias = Literal["both", "left", "right", "none"]
KeyRule: TypeAlias = Callable[[Any, Any, int, int], Any]

# One entry per token of the sample; trimmed together with `attention_mask`.
TOKEN_KEYS = frozenset(
    {
        "input_ids", "attention_mask", "token_type_ids", "position_ids", "labels", "shift_labels", "inputs_embeds",
        "special_tokens_mask", "mm_token_type_ids", "global_attention_mask", "loss_mask", "assistant_masks",
        "completion_mask",
    }
)  # fmt: skip
# About the batch as a whole, whatever their size.
SHARED_KEYS = frozenset({"cache_position", "num_items_in_batch", "logits_to_keep", "return_loss"})
_SIZED_BY = (
    "input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "labels", "input_features", "input_values",
)  # fmt: skip
_IGNORED_LABEL = -100


class Splitter(Protocol[B]):
    """Counts the samples of a batch and takes a range of them out. Write one for batches of your own kind."""

    def num_samples(self, batch: B, /) -> int:
        """Samples in the batch."""
        ...

    def take(self, batch: B, start: int, stop: int, /) -> B:
        """Samples ``start`` to ``stop - 1`` as a batch of their own; ``batch`` itself stays as it is."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchSplitter:
    """Splits dicts, ``BatchEncoding`` and ``ModelOutput``, tuples, tensors, arrays, lists and caches.

    A mapping, tuple or dataclass holds fields, each with one entry per sample. A list holds samples, unless it holds
    tensors of one first dimension, as ``default_collate`` returns them for tuples: then it holds fields. Numbers and
    strings go to every part. What fits no rule is refused with its key: nothing is guessed. A packed batch, one row with
    ``cu_seq_lens_q`` or with ``position_ids`` that start again, is split between its samples.

    Args:
        trim: sides on which a part loses its padding columns, as its ``attention_mask`` shows them. On the left this
            moves the positions of a model that is given no ``position_ids``; ``generate`` derives them from the mask.
        pad_to_multiple_of: trimmed widths are rounded up to a multiple of this, at most to the batch's own width.
        token_keys: further keys with one entry per token, to be trimmed alike.
        shared_keys: further keys that go whole to every part.
        rules: key -> ``rule(value, batch, start, stop)``, for values that only you know how to cut.
        vision: token ids of images and videos, where ``pixel_values`` of all samples are concatenated
            (``image_grid_thw``); not needed when the batch has ``mm_token_type_ids``.

    >>> import torch
    >>> ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    >>> batch = {"input_ids": ids, "attention_mask": mask}
    >>> BatchSplitter().take(batch, 1, 2)["input_ids"].tolist()
    [[4]]
    """

    trim: Trim = "both"
    pad_to_multiple_of: int = 1
    token_keys: frozenset[str] = frozenset()
    shared_keys: frozenset[str] = frozenset()
    rules: Mapping[str, KeyRule] = field(default_factory=dict)
    vision: VisionTokens | None = None

    def __post_init__(self) -> None:
        check_choice("trim", self.trim, ("both", "left", "right", "none"))

    def num_samples(self, batch: Any, /) -> int:
        """Samples in the batch, from its first dimension."""
        if holds_samples(batch):
            return len(batch)
        fields = fields_of(batch)
        if fields is None:
            raise ConfigError(f"a {type(batch).__name__} as batch cannot be split; give `split` an object that can")
        borders = packed_borders(fields)
        if borders is not None:
            return len(borders) - 1
        for key in _SIZED_BY:
            if fields.get(key) is not None and key not in self.rules:
                return len(fields[key])
        own = {*self.rules, *self.shared_keys, *SHARED_KEYS, *VISION_KEYS}
        return _agreed({str(key): first_dim(value) for key, value in fields.items() if key not in own})

    def take(self, batch: Any, start: int, stop: int, /) -> Any:
        """Samples ``start`` to ``stop - 1``, trimmed. Tensors are views of the batch's."""
        num_samples = self.num_samples(batch)
        if not 0 <= start < stop <= num_samples:
            raise ConfigError(f"`start`:`stop` must lie within {num_samples} samples, but is {start}:{stop}")
        fields = fields_of(batch)
        if fields is None or holds_samples(batch):
            return batch[start:stop]
        borders = packed_borders(fields)
        parts: Fields = {}
        for key, value in fields.items():
            if key in self.rules:
                parts[key] = self.rules[key](value, batch, start, stop)
            elif key in SHARED_KEYS or key in self.shared_keys:
                parts[key] = value
            elif borders is not None:
                parts[key] = take_packed(key, value, borders, start, stop)
            else:
                parts[key] = self._take_padded(fields, key, num_samples, start, stop)
        if borders is None:
            self._trim(parts, fields, num_samples, start, stop)
        return rebuild(batch, parts, start, stop)

    def columns(self, batch: Any, start: int, stop: int, /) -> tuple[int, int]:
        """Token columns of the batch that a part keeps: ``first, last + 1``."""
        fields = fields_of(batch) or {}
        mask = fields.get("attention_mask")
        if not is_table(mask):
            named = (fields.get(key) for key in ("input_ids", "inputs_embeds"))
            return 0, next((int(value.shape[1]) for value in named if is_array(value) and value.ndim > 1), 0)
        width = int(mask.shape[1])
        if self.trim == "none" or not self._may_trim(fields, self.num_samples(batch), width):
            return 0, width
        first, last = self._span(mask[start:stop], width)
        return (first, last) if _labels_allow(fields, start, stop, first, last) else (0, width)

    def _take_padded(self, fields: Fields, key: Any, num_samples: int, start: int, stop: int) -> Any:
        value = fields[key]
        if key in VISION_KEYS and ("image_grid_thw" in fields or "video_grid_thw" in fields):
            return take_vision(fields, key, start, stop, self.vision)
        if key == "position_ids" and is_array(value):
            if value.ndim == 3 and value.shape[1] == num_samples:  # one plane each for time, height, width
                return value[:, start:stop]
            if value.ndim == 1 or value.shape[0] == 1:
                return value
        return cut(value, str(key), num_samples, start, stop)

    def _may_trim(self, fields: Fields, num_samples: int, width: int) -> bool:
        """Every field as wide as the mask is known to hold one entry per token, so all of them can be trimmed alike."""
        known = TOKEN_KEYS | self.token_keys | self.rules.keys() | self.shared_keys | SHARED_KEYS
        if fields.get("past_key_values") is not None or any(map(is_cache, fields.values())):
            return False
        return not any(_as_wide(value, num_samples, width) for key, value in fields.items() if key not in known)

    def _trim(self, parts: Fields, fields: Fields, num_samples: int, start: int, stop: int) -> None:
        """Cut columns off all that has one entry per token, in place."""
        if not is_table(fields.get("attention_mask")):
            return
        width = fields["attention_mask"].shape[1]
        first, last = self.columns(fields, start, stop)
        for key in parts.keys() & (TOKEN_KEYS | self.token_keys):
            value = fields[key]
            if not is_array(value) or (key == "labels" and "decoder_input_ids" in fields):
                continue
            if key == "position_ids" and value.shape[-1] == width:
                parts[key] = parts[key][..., first:last]
            elif tuple(value.shape[:2]) == (num_samples, width):
                parts[key] = parts[key][:, first:last]

    def _span(self, mask: Any, width: int) -> tuple[int, int]:
        used = np.flatnonzero(to_numpy((mask != 0).any(0)))
        if not len(used):
            return 0, width
        first = int(used[0]) if self.trim in ("both", "left") else 0
        last = int(used[-1]) + 1 if self.trim in ("both", "right") else width
        wanted = min(width, -(-(last - first) // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        last = min(width, first + wanted)
        return last - wanted, last


def _labels_allow(fields: Fields, start: int, stop: int, first: int, last: int) -> bool:
    """Whether no label is lost. Labels as wide as the mask may also be a target side of the same width by accident."""
    labels, width = fields.get("labels"), fields["attention_mask"].shape[1]
    if not is_table(labels) or labels.shape[1] != width or "decoder_input_ids" in fields:
        return True
    rows = labels[start:stop]
    return all(bool((side == _IGNORED_LABEL).all()) for side in (rows[:, :first], rows[:, last:]))


def _as_wide(value: Any, num_samples: int, width: int) -> bool:
    if is_array(value):
        return tuple(value.shape[:2]) == (num_samples, width)
    fields = fields_of(value) or {}
    return any(_as_wide(part, num_samples, width) for part in fields.values())


def _agreed(sizes: dict[str, int | None]) -> int:
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) != 1:
        raise ConfigError(
            "how many samples the batch holds is not clear from the first dimensions of its fields: "
            f"{known or 'no tensors'}; "
            "give `split` an object with `num_samples` and `take`, or BatchSplitter(rules=..., shared_keys=...)"
        )
    return next(iter(known.values()))
