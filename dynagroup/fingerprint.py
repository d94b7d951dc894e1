"""Describes settings as text, so that a saved state can be compared with the run that loads the state.

The text is the same in every process. Values are described by their content, objects by their class's name and their
attributes, functions, methods and classes by their name. What code does is never described: the user says that it has
changed, by ``identity=``.
"""

import hashlib
import json
import sys
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Any

import numpy as np

LONGEST = 240  # characters of a description; a hash of the whole replaces the end of a longer one
CHANGED_BY_CALLS = ("truncation", "padding")  # parts of a tokenizer's file
TOKENIZER_SETTINGS = ("truncation_side", "clean_up_tokenization_spaces", "split_special_tokens")
PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)


def described(value: Any, *, ask: bool = True) -> str:
    """Returns text that describes a setting: without memory addresses, and independent of the order of sets.

    An object with a text attribute ``fingerprint`` is described by that text; ``ask=False`` ignores the attribute of
    ``value`` itself. An object without attributes is described by its ``repr``, or if that has an address, by its class.

    >>> described({"window": np.int64(3)}), described((1, None)), described(len)
    ("{'window': 3}", '(1, None)', 'len')
    >>> described(np.arange(9000)) == described(np.arange(9000) % 8999)
    False
    """
    return _text(value, (), ask=ask)


def hashed(text: str | bytes, digits: int = 16) -> str:
    """Returns the first ``digits`` hexadecimal digits of the hash of a text."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.blake2b(data, digest_size=digits // 2).hexdigest()


def ends_of(dataset: Any) -> str:
    """Returns text for the first and last sample of a list, an array or one of ``datasets``, read without the user's code."""
    if type(dataset).__name__ == "Subset":
        dataset = dataset.indices
    if hasattr(dataset, "with_format"):  # of datasets
        rows = dataset.with_format("arrow")
        if not len(rows):
            return ""
        return described([rows[0].to_pydict(), rows[len(rows) - 1].to_pydict()])
    if not isinstance(dataset, (list, tuple, range, np.ndarray)) or not len(dataset):
        return ""
    return described([dataset[0], dataset[len(dataset) - 1]])


def tokenizer_text(tokenizer: Any) -> str:
    """Returns a checksum of a tokenizer's file, its special tokens and settings; other objects are :func:`described`."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if hasattr(backend, "to_str"):  # of the package `tokenizers`
        content = json.loads(backend.to_str())
    elif hasattr(tokenizer, "get_vocab"):
        content = tokenizer.get_vocab()
    else:
        return described(tokenizer)
    lasting = sorted(item for item in content.items() if item[0] not in CHANGED_BY_CALLS)
    special_tokens = sorted(getattr(tokenizer, "special_tokens_map", {}).items())
    settings = [getattr(tokenizer, name, None) for name in TOKENIZER_SETTINGS]
    return f"{type(tokenizer).__name__} #{hashed(repr((lasting, special_tokens, settings)))}"


def _text(value: Any, above: tuple[int, ...], *, ask: bool = True) -> str:
    """Describes one value. ``above``: ids of the objects that contain it, because objects can contain themselves."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return _short(repr(value))
    if id(value) in above:
        return f"^{len(above) - above.index(id(value))}"
    above = (*above, id(value))
    return _short(_text_of_any(value, above, ask=ask))


def _text_of_any(value: Any, above: tuple[int, ...], *, ask: bool) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__
    if hasattr(value, "__qualname__"):  # functions, methods and classes
        return value.__qualname__
    fingerprint = getattr(value, "fingerprint", None) if ask else None
    if isinstance(fingerprint, str):
        return fingerprint
    if isinstance(value, (Mapping, set, frozenset, list, tuple)):
        return _text_of_collection(value, above)
    if isinstance(value, np.ndarray) or _is_tensor(value):
        return _text_of_array(value)
    return _text_of_object(value, above)


def _text_of_collection(value: Any, above: tuple[int, ...]) -> str:
    name = "" if type(value) in (dict, frozenset, tuple, list) else type(value).__qualname__
    if isinstance(value, Mapping):
        items = sorted(f"{_text(key, above)}: {_text(item, above)}" for key, item in value.items())
        return f"{name}{{{', '.join(items)}}}"
    items = [_text(item, above) for item in value]
    if isinstance(value, (set, frozenset)):
        return f"{name}{{{', '.join(sorted(items))}}}"
    return f"{name}({', '.join(items)})"


def _text_of_array(value: Any) -> str:
    content = value
    if _is_tensor(value):
        numbers = value.detach().cpu().contiguous().reshape(-1)
        content = numbers.view(sys.modules["torch"].uint8).numpy()
    has_objects = content.dtype.hasobject
    checksum = hashed(repr(content.tolist()) if has_objects else content.tobytes())
    return f"{value.dtype}{list(value.shape)}#{checksum}"


def _text_of_object(value: Any, above: tuple[int, ...]) -> str:
    name = type(value).__qualname__
    if isinstance(value, Enum):
        return f"{name}.{value.name}"
    if isinstance(value, partial):
        return f"partial{_text((value.func, value.args, value.keywords), above)}"
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
    elif hasattr(value, "__dict__"):
        names = [name for name in vars(value) if not _is_cached(type(value), name)]
    else:
        text = repr(value)
        return name if " at 0x" in text else f"{name} {text}"
    attributes = (f"{key}={_text(getattr(value, key), above)}" for key in sorted(names))
    return f"{name}({', '.join(attributes)})"


def _is_cached(kind: type[Any], name: str) -> bool:
    return isinstance(getattr(kind, name, None), cached_property)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...#{hashed(text)}"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
