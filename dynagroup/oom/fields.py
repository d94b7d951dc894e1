"""The fields of a batch: what kinds of containers and caches there are, how one is cut and rebuilt, how it is described."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from dynagroup.errors import ConfigError
from dynagroup.oom.concatenated import packed_borders
from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    import torch

__all__ = [
    "agreed",
    "as_wide",
    "cache_samples",
    "cut",
    "describe",
    "fields_of",
    "first_dim",
    "has_columns",
    "holds_fields",
    "is_array",
    "is_cache",
    "longest_of",
    "rebuild",
    "shape_of",
    "take_cache",
    "to_numpy",
]


def cut(value: Any, name: str, num_samples: int, start: int, stop: int) -> Any:
    """One field's entries of the samples ``start`` to ``stop - 1``."""
    if value is None or isinstance(value, (str, bytes, int, float, complex, np.generic)):
        return value
    if is_cache(value):
        return take_cache(value, start, stop)
    if is_array(value):
        if value.ndim == 0:
            return value
        if len(value) == num_samples:
            return value[start:stop]
    elif isinstance(value, (list, tuple)) and len(value) == num_samples and not _nested(value, name):
        return _same_kind(value, list(value[start:stop]))
    else:
        fields = fields_of(value)
        if fields is not None:
            parts = {k: cut(v, f"{name}.{k}", num_samples, start, stop) for k, v in fields.items()}
            return rebuild(value, parts, start, stop)
    raise ConfigError(
        f"`{name}` ({_describe_one(value)}) has no entry per sample in a batch of {num_samples} and cannot be split; "
        f"give BatchSplitter(rules={{{name!r}: lambda value, batch, start, stop: ...}}) or shared_keys={{{name!r}}}"
    )


def _nested(value: Sequence[Any], name: str) -> bool:
    """A sequence of layers, not of samples: ``past_key_values`` of older models, hidden states per layer."""
    return name.endswith(("past_key_values", "hidden_states", "attentions"))


def fields_of(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return None


def rebuild(like: Any, parts: dict[Any, Any], start: int, stop: int) -> Any:
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


def is_array(value: Any) -> TypeGuard[Any]:
    """A tensor or an array (both slice, compare and reduce alike)."""
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


def to_numpy(value: torch.Tensor | np.ndarray) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.cpu().numpy()


def holds_fields(batch: list[Any]) -> bool:
    return bool(batch) and all(is_array(v) and v.ndim for v in batch) and len({len(v) for v in batch}) == 1


def has_columns(batch: Any, key: str) -> bool:
    return isinstance(batch, Mapping) and is_array(batch.get(key)) and batch[key].ndim >= 2


def as_wide(value: Any, num_samples: int, width: int) -> bool:
    if is_array(value):
        return tuple(value.shape[:2]) == (num_samples, width)
    fields = None if isinstance(value, (str, bytes)) else fields_of(value)
    return fields is not None and any(as_wide(part, num_samples, width) for part in fields.values())


def first_dim(value: Any) -> int | None:
    if is_cache(value):
        return cache_samples(value)
    if is_array(value):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) else None


def agreed(sizes: dict[str, int | None]) -> int:
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
            if has_columns(batch, key):
                return int(batch[key].shape[1])
    fields = [batch] if is_array(batch) else (fields_of(batch) or {}).values()
    return next((int(value.shape[1]) for value in fields if is_array(value) and value.ndim >= 2), 1)


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
    fields = fields_of(batch) if not is_array(batch) else None
    if fields is None or (isinstance(batch, list) and not holds_fields(batch)):
        return _describe_one(batch)
    shown = [f"{name}: {_describe_one(value)}" for name, value in list(fields.items())[:6]]
    return ", ".join(shown) + (", ..." if len(fields) > len(shown) else "")


def _describe_one(value: Any) -> str:
    if is_array(value):
        return str(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


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


def cache_samples(cache: Any) -> int | None:
    """Samples in a cache; None while it is empty."""
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
    keys = next((layer.keys for layer in layers if getattr(layer, "keys", None) is not None), None)
    return None if keys is None else len(keys)
