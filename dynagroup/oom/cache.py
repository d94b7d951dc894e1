"""Key-value caches of transformers: a part of one, and a copy that an attempt may spoil."""

from __future__ import annotations

import copy
import sys
from typing import Any

from dynagroup.errors import ConfigError

__all__ = ["cache_samples", "is_cache", "take_cache"]


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
