"""Take some samples out of a batch of any usual kind, trimmed to their own longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.oom.concatenated import VISION_KEYS, VisionTokens, packed_borders, take_packed, take_vision
from dynagroup.oom.fields import (
    agreed,
    as_wide,
    cut,
    fields_of,
    first_dim,
    has_columns,
    holds_fields,
    is_array,
    is_cache,
    rebuild,
    to_numpy,
)

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
_IGNORED_LABEL = -100
_SIZED_BY = (
    "input_ids", "inputs_embeds", "attention_mask", "decoder_input_ids", "labels", "input_features", "input_values",
)  # fmt: skip


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
        if self.trim not in ("both", "left", "right", "none"):
            raise ConfigError(f"`trim` must be 'both', 'left', 'right' or 'none', but is {self.trim!r}")

    def num_samples(self, batch: Any, /) -> int:
        """Samples in the batch, from its first dimension."""
        if isinstance(batch, Mapping):
            return self._num_samples_by_key(batch)
        if is_array(batch):
            return len(batch)
        if isinstance(batch, list) and not holds_fields(batch):
            return len(batch)
        fields = fields_of(batch)
        if fields is None:
            raise ConfigError(f"a {type(batch).__name__} as batch cannot be split; give `split` an object that can")
        return agreed({str(name): first_dim(value) for name, value in fields.items()})

    def take(self, batch: Any, start: int, stop: int, /) -> Any:
        """Samples ``start`` to ``stop - 1``, trimmed. Tensors are views of the batch's."""
        num_samples = self.num_samples(batch)
        if not 0 <= start < stop <= num_samples:
            raise ConfigError(f"`start`:`stop` must lie within {num_samples} samples, but is {start}:{stop}")
        if isinstance(batch, Mapping):
            return self._take_mapping(batch, num_samples, start, stop)
        if is_array(batch) or (isinstance(batch, list) and not holds_fields(batch)):
            return batch[start:stop]
        fields = fields_of(batch) or {}
        return rebuild(batch, {k: cut(v, str(k), num_samples, start, stop) for k, v in fields.items()}, start, stop)

    def columns(self, batch: Any, start: int, stop: int, /) -> tuple[int, int]:
        """Token columns of the batch that a part keeps: ``first, last + 1``."""
        num_samples = self.num_samples(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not is_array(mask) or mask.ndim != 2:
            width = next((batch[k].shape[1] for k in ("input_ids", "inputs_embeds") if has_columns(batch, k)), 0)
            return 0, width
        width = int(mask.shape[1])
        if self.trim == "none" or not self._may_trim(batch, num_samples, width):
            return 0, width
        first, last = self._span(mask[start:stop], width)
        return (first, last) if _labels_allow(batch, start, stop, first, last) else (0, width)

    def _num_samples_by_key(self, batch: Mapping[str, Any]) -> int:
        borders = packed_borders(batch)
        if borders is not None:
            return len(borders) - 1
        for key in _SIZED_BY:
            if batch.get(key) is not None and key not in self.rules:
                return len(batch[key])
        own = {*self.rules, *self.shared_keys, *SHARED_KEYS, *VISION_KEYS}
        return agreed({k: first_dim(v) for k, v in batch.items() if k not in own})

    def _take_mapping(self, batch: Mapping[str, Any], num_samples: int, start: int, stop: int) -> Any:
        borders = packed_borders(batch)
        if borders is not None:
            return rebuild(batch, {k: self._take_of_pack(batch, k, borders, start, stop) for k in batch}, start, stop)
        first, last = self.columns(batch, start, stop)
        parts = {key: self._take_key(batch, key, num_samples, start, stop) for key in batch}
        mask = batch.get("attention_mask")
        if is_array(mask) and (first, last) != (0, mask.shape[1]):
            for key in parts.keys() & (TOKEN_KEYS | self.token_keys):
                if self._per_token(batch, key, num_samples, mask.shape[1]):
                    value = parts[key]
                    parts[key] = value[..., first:last] if key == "position_ids" else value[:, first:last]
        if self.trim in ("both", "right"):
            _trim_targets(parts, batch)
        return rebuild(batch, parts, start, stop)

    def _take_of_pack(self, batch: Mapping[str, Any], key: str, borders: list[int], start: int, stop: int) -> Any:
        if key in self.rules:
            return self.rules[key](batch[key], batch, start, stop)
        shared = key in SHARED_KEYS or key in self.shared_keys
        return batch[key] if shared else take_packed(batch, key, borders, start, stop)

    def _take_key(self, batch: Mapping[str, Any], key: str, num_samples: int, start: int, stop: int) -> Any:
        value = batch[key]
        if key in self.rules:
            return self.rules[key](value, batch, start, stop)
        if key in SHARED_KEYS or key in self.shared_keys:
            return value
        if key in VISION_KEYS and any(name in batch for name in ("image_grid_thw", "video_grid_thw")):
            return take_vision(batch, key, start, stop, self.vision)
        if key == "position_ids" and is_array(value):
            if value.ndim == 3 and value.shape[1] == num_samples:  # one plane each for time, height, width
                return value[:, start:stop]
            if value.ndim == 1 or value.shape[0] == 1:
                return value
        return cut(value, key, num_samples, start, stop)

    def _may_trim(self, batch: Mapping[str, Any], num_samples: int, width: int) -> bool:
        """Every field as wide as the mask is known to hold one entry per token, so all of them can be trimmed alike."""
        known = TOKEN_KEYS | self.token_keys | self.rules.keys() | self.shared_keys | SHARED_KEYS
        if any(is_cache(value) or key == "past_key_values" and value is not None for key, value in batch.items()):
            return False
        return not any(as_wide(value, num_samples, width) for key, value in batch.items() if key not in known)

    @staticmethod
    def _per_token(batch: Mapping[str, Any], key: str, num_samples: int, width: int) -> bool:
        value = batch[key]
        if not is_array(value):
            return False
        if key == "position_ids":
            return value.shape[-1] == width
        if value.shape[:2] != (num_samples, width):
            return False
        return not (key == "labels" and "decoder_input_ids" in batch)

    def _span(self, mask: Any, width: int) -> tuple[int, int]:
        used = np.flatnonzero(to_numpy((mask != 0).any(0)))
        if not len(used):
            return 0, width
        first = int(used[0]) if self.trim in ("both", "left") else 0
        last = int(used[-1]) + 1 if self.trim in ("both", "right") else width
        wanted = min(width, -(-(last - first) // self.pad_to_multiple_of) * self.pad_to_multiple_of)
        last = min(width, first + wanted)
        return last - wanted, last


def _trim_targets(parts: dict[str, Any], batch: Mapping[str, Any]) -> None:
    """A sequence-to-sequence batch's other side: right padding shown by its own mask, or by ignored labels."""
    mask, labels = parts.get("decoder_attention_mask"), parts.get("labels")
    source = parts.get("attention_mask")
    if is_array(mask) and mask.ndim == 2:
        used = (mask != 0).any(0)
    elif is_array(labels) and labels.ndim == 2 and is_array(source) and _widths_differ(batch):
        used = (labels != _IGNORED_LABEL).any(0)
    else:
        return
    columns = np.flatnonzero(to_numpy(used))
    last = int(columns[-1]) + 1 if len(columns) else 1
    width = len(used)
    for key in ("labels", "decoder_input_ids", "decoder_attention_mask"):
        value = parts.get(key)
        if not is_array(value) or value.ndim < 2 or value.shape[1] != width:
            continue
        if key != "labels" or bool((value[:, last:] == _IGNORED_LABEL).all()):
            parts[key] = value[:, :last]


def _widths_differ(batch: Mapping[str, Any]) -> bool:
    return batch["labels"].shape[1] != batch["attention_mask"].shape[1]


def _labels_allow(batch: Mapping[str, Any], start: int, stop: int, first: int, last: int) -> bool:
    """Whether no label is lost. Labels as wide as the mask may also be a target side of the same width by accident."""
    labels, width = batch.get("labels"), batch["attention_mask"].shape[1]
    if not is_array(labels) or labels.ndim != 2 or labels.shape[1] != width or "decoder_input_ids" in batch:
        return True
    rows = labels[start:stop]
    return all(bool((side == _IGNORED_LABEL).all()) for side in (rows[:, :first], rows[:, last:]))
