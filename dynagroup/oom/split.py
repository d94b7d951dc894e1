"""Take some samples out of a batch of any usual kind, trimmed to their own longest."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeGuard, TypeVar, cast

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.oom.cache import cache_samples, is_cache, take_cache
from dynagroup.oom.vision import VISION_KEYS, VisionTokens, take_vision

if TYPE_CHECKING:
    import torch

__all__ = ["BatchSplitter", "KeyRule", "Splitter", "Trim", "describe", "longest_of"]

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
    strings go to every part. What fits no rule is refused with its key: nothing is guessed.

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
        if _is_array(batch):
            return len(batch)
        if isinstance(batch, list) and not _holds_fields(batch):
            return len(batch)
        fields = _fields_of(batch)
        if fields is None:
            raise ConfigError(f"a {type(batch).__name__} as batch cannot be split; give `split` an object that can")
        return _agree({str(name): _first_dim(value) for name, value in fields.items()})

    def take(self, batch: Any, start: int, stop: int, /) -> Any:
        """Samples ``start`` to ``stop - 1``, trimmed. Tensors are views of the batch's."""
        num_samples = self.num_samples(batch)
        if not 0 <= start < stop <= num_samples:
            raise ConfigError(f"`start`:`stop` must lie within {num_samples} samples, but is {start}:{stop}")
        if isinstance(batch, Mapping):
            return self._take_mapping(batch, num_samples, start, stop)
        if _is_array(batch) or (isinstance(batch, list) and not _holds_fields(batch)):
            return batch[start:stop]
        fields = _fields_of(batch) or {}
        return _rebuild(batch, {k: _cut(v, str(k), num_samples, start, stop) for k, v in fields.items()}, start, stop)

    def columns(self, batch: Any, start: int, stop: int, /) -> tuple[int, int]:
        """Token columns of the batch that a part keeps: ``first, last + 1``."""
        num_samples = self.num_samples(batch)
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if not _is_array(mask) or mask.ndim != 2:
            width = next((batch[k].shape[1] for k in ("input_ids", "inputs_embeds") if _has_columns(batch, k)), 0)
            return 0, width
        width = int(mask.shape[1])
        if self.trim == "none" or not self._may_trim(batch, num_samples, width):
            return 0, width
        first, last = self._span(mask[start:stop], width)
        return (first, last) if _labels_allow(batch, start, stop, first, last) else (0, width)

    def _num_samples_by_key(self, batch: Mapping[str, Any]) -> int:
        for key in _SIZED_BY:
            if batch.get(key) is not None and key not in self.rules:
                return len(batch[key])
        own = {*self.rules, *self.shared_keys, *SHARED_KEYS, *VISION_KEYS}
        return _agree({k: _first_dim(v) for k, v in batch.items() if k not in own})

    def _take_mapping(self, batch: Mapping[str, Any], num_samples: int, start: int, stop: int) -> Any:
        first, last = self.columns(batch, start, stop)
        parts = {key: self._take_key(batch, key, num_samples, start, stop) for key in batch}
        mask = batch.get("attention_mask")
        if _is_array(mask) and (first, last) != (0, mask.shape[1]):
            for key in parts.keys() & (TOKEN_KEYS | self.token_keys):
                if self._per_token(batch, key, num_samples, mask.shape[1]):
                    value = parts[key]
                    parts[key] = value[..., first:last] if key == "position_ids" else value[:, first:last]
        if self.trim in ("both", "right"):
            _trim_targets(parts, batch)
        return _rebuild(batch, parts, start, stop)

    def _take_key(self, batch: Mapping[str, Any], key: str, num_samples: int, start: int, stop: int) -> Any:
        value = batch[key]
        if key in self.rules:
            return self.rules[key](value, batch, start, stop)
        if key in SHARED_KEYS or key in self.shared_keys:
            return value
        if key in VISION_KEYS and any(name in batch for name in ("image_grid_thw", "video_grid_thw")):
            return take_vision(batch, key, start, stop, self.vision)
        if key == "position_ids" and _is_array(value):
            if value.ndim == 3 and value.shape[1] == num_samples:  # one plane each for time, height, width
                return value[:, start:stop]
            if value.ndim == 1 or value.shape[0] == 1:
                return value
        return _cut(value, key, num_samples, start, stop)

    def _may_trim(self, batch: Mapping[str, Any], num_samples: int, width: int) -> bool:
        """Every field as wide as the mask is known to hold one entry per token, so all of them can be trimmed alike."""
        known = TOKEN_KEYS | self.token_keys | self.rules.keys() | self.shared_keys | SHARED_KEYS
        if any(is_cache(value) or key == "past_key_values" and value is not None for key, value in batch.items()):
            return False
        return not any(_as_wide(value, num_samples, width) for key, value in batch.items() if key not in known)

    @staticmethod
    def _per_token(batch: Mapping[str, Any], key: str, num_samples: int, width: int) -> bool:
        value = batch[key]
        if not _is_array(value):
            return False
        if key == "position_ids":
            return value.shape[-1] == width
        if value.shape[:2] != (num_samples, width):
            return False
        return not (key == "labels" and "decoder_input_ids" in batch)

    def _span(self, mask: Any, width: int) -> tuple[int, int]:
        used = np.flatnonzero(_to_numpy((mask != 0).any(0)))
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
    if _is_array(mask) and mask.ndim == 2:
        used = (mask != 0).any(0)
    elif _is_array(labels) and labels.ndim == 2 and _is_array(source) and _widths_differ(batch):
        used = (labels != _IGNORED_LABEL).any(0)
    else:
        return
    columns = np.flatnonzero(_to_numpy(used))
    last = int(columns[-1]) + 1 if len(columns) else 1
    width = len(used)
    for key in ("labels", "decoder_input_ids", "decoder_attention_mask"):
        value = parts.get(key)
        if not _is_array(value) or value.ndim < 2 or value.shape[1] != width:
            continue
        if key != "labels" or bool((value[:, last:] == _IGNORED_LABEL).all()):
            parts[key] = value[:, :last]


def _widths_differ(batch: Mapping[str, Any]) -> bool:
    return batch["labels"].shape[1] != batch["attention_mask"].shape[1]


def _labels_allow(batch: Mapping[str, Any], start: int, stop: int, first: int, last: int) -> bool:
    """Whether no label is lost. Labels as wide as the mask may also be a target side of the same width by accident."""
    labels, width = batch.get("labels"), batch["attention_mask"].shape[1]
    if not _is_array(labels) or labels.ndim != 2 or labels.shape[1] != width or "decoder_input_ids" in batch:
        return True
    rows = labels[start:stop]
    return all(bool((side == _IGNORED_LABEL).all()) for side in (rows[:, :first], rows[:, last:]))


def _cut(value: Any, name: str, num_samples: int, start: int, stop: int) -> Any:
    """One field's entries of the samples ``start`` to ``stop - 1``."""
    if value is None or isinstance(value, (str, bytes, int, float, complex, np.generic)):
        return value
    if is_cache(value):
        return take_cache(value, start, stop)
    if _is_array(value):
        if value.ndim == 0:
            return value
        if len(value) == num_samples:
            return value[start:stop]
    elif isinstance(value, (list, tuple)) and len(value) == num_samples and not _nested(value, name):
        return _same_kind(value, list(value[start:stop]))
    else:
        fields = _fields_of(value)
        if fields is not None:
            parts = {k: _cut(v, f"{name}.{k}", num_samples, start, stop) for k, v in fields.items()}
            return _rebuild(value, parts, start, stop)
    raise ConfigError(
        f"`{name}` ({_describe_one(value)}) has no entry per sample in a batch of {num_samples} and cannot be split; "
        f"give BatchSplitter(rules={{{name!r}: lambda value, batch, start, stop: ...}}) or shared_keys={{{name!r}}}"
    )


def _nested(value: Sequence[Any], name: str) -> bool:
    """A sequence of layers, not of samples: ``past_key_values`` of older models, hidden states per layer."""
    return name.endswith(("past_key_values", "hidden_states", "attentions"))


def _fields_of(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def _rebuild(like: Any, parts: dict[Any, Any], start: int, stop: int) -> Any:
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
    if isinstance(like, tuple) and hasattr(like, "_fields"):  # namedtuple
        return type(like)(*values)
    return type(like)(values)  # type: ignore[call-arg]


def _is_array(value: Any) -> TypeGuard[Any]:
    """A tensor or an array (both slice, compare and reduce alike)."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def _to_numpy(value: torch.Tensor | np.ndarray) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def _holds_fields(batch: list[Any]) -> bool:
    return bool(batch) and all(_is_array(v) and v.ndim for v in batch) and len({len(v) for v in batch}) == 1


def _has_columns(batch: Any, key: str) -> bool:
    return isinstance(batch, Mapping) and _is_array(batch.get(key)) and batch[key].ndim >= 2


def _as_wide(value: Any, num_samples: int, width: int) -> bool:
    if _is_array(value):
        return tuple(value.shape[:2]) == (num_samples, width)
    fields = None if isinstance(value, (str, bytes)) else _fields_of(value)
    return fields is not None and any(_as_wide(part, num_samples, width) for part in fields.values())


def _first_dim(value: Any) -> int | None:
    if is_cache(value):
        return cache_samples(value)
    if _is_array(value):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def _agree(sizes: dict[str, int | None]) -> int:
    known = {name: size for name, size in sizes.items() if size is not None}
    if len(set(known.values())) != 1:
        raise ConfigError(
            "how many samples the batch holds is not clear from the first dimensions of its fields: "
            f"{known or 'no tensors'}; "
            "give `split` an object with `num_samples` and `take`, or BatchSplitter(rules=..., shared_keys=...)"
        )
    return next(iter(known.values()))


def longest_of(batch: Any) -> int:
    """Width of a padded batch: its token columns, else the second dimension of its first tensor that has one, else 1."""
    if isinstance(batch, Mapping):
        for key in ("input_ids", "inputs_embeds", "attention_mask"):
            if _has_columns(batch, key):
                return int(batch[key].shape[1])
    fields = [batch] if _is_array(batch) else (_fields_of(batch) or {}).values()
    return next((int(value.shape[1]) for value in fields if _is_array(value) and value.ndim >= 2), 1)


def describe(batch: Any) -> str:
    """The shapes in a batch, short enough for a message.

    >>> describe({"input_ids": np.zeros((2, 7)), "names": ["a", "b"]})
    'input_ids: (2, 7), names: list of 2'
    """
    fields = _fields_of(batch) if not _is_array(batch) else None
    if fields is None or (isinstance(batch, list) and not _holds_fields(batch)):
        return _describe_one(batch)
    shown = [f"{name}: {_describe_one(value)}" for name, value in list(fields.items())[:6]]
    return ", ".join(shown) + (", ..." if len(fields) > len(shown) else "")


def _describe_one(value: Any) -> str:
    if _is_array(value):
        return str(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__
