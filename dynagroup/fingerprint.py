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
    data = dataset.indices if type(dataset).__name__ == "Subset" else dataset
    raw = data.with_format("arrow") if hasattr(data, "with_format") else data
    if not len(raw) or not (raw is not data or isinstance(raw, (list, tuple, range, np.ndarray))):
        return ""
    ends: Any = (raw[0], raw[len(raw) - 1])
    return described([end.to_pydict() if raw is not data else end for end in ends])


def tokenizer_text(tokenizer: Any) -> str:
    """Returns a checksum of a tokenizer's file, its special tokens and settings; other objects are :func:`described`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None and not hasattr(tokenizer, "get_vocab"):
        return described(tokenizer)
    rules = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    lasting = sorted(item for item in rules.items() if item[0] not in CHANGED_BY_CALLS)
    names = ("truncation_side", "clean_up_tokenization_spaces", "split_special_tokens")
    options = [getattr(tokenizer, name, None) for name in names]
    content = repr((lasting, sorted(tokenizer.special_tokens_map.items()), options))
    return f"{type(tokenizer).__name__} #{hashed(content)}"


def _text(value: Any, above: tuple[int, ...], *, ask: bool = True) -> str:
    """Describes one value. ``above``: ids of the objects that contain it, because objects can contain themselves."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, PLAIN):
        return _short(repr(value))
    if id(value) in above:
        return f"^{len(above) - above.index(id(value))}"
    return _short(_compound(value, (*above, id(value)), ask=ask))


def _compound(value: Any, above: tuple[int, ...], *, ask: bool) -> str:
    kind = type(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if hasattr(value, "__qualname__"):  # functions, methods and classes
        return value.__qualname__
    if ask and isinstance(fingerprint := getattr(value, "fingerprint", None), str):
        return fingerprint
    name = "" if kind in (dict, frozenset, tuple, list) else kind.__qualname__
    if isinstance(value, Mapping):
        items = sorted(f"{_text(key, above)}: {_text(item, above)}" for key, item in value.items())
        return f"{name}{{{', '.join(items)}}}"
    if isinstance(value, (set, frozenset)):
        return f"{name}{{{', '.join(sorted(_text(item, above) for item in value))}}}"
    if isinstance(value, (list, tuple)):
        return f"{name}({', '.join(_text(item, above) for item in value)})"
    if isinstance(value, Enum):
        return f"{name}.{value.name}"
    if isinstance(value, partial):
        return f"partial{_text((value.func, value.args, value.keywords), above)}"
    if _is_tensor(value):
        numbers = value.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
        return f"{value.dtype}{list(value.shape)}#{hashed(numbers.numpy().tobytes())}"
    if isinstance(value, np.ndarray):
        content = repr(value.tolist()) if value.dtype.hasobject else value.tobytes()
        return f"{value.dtype}{list(value.shape)}#{hashed(content)}"
    attributes = _attributes(value)
    if attributes is None:
        shown = repr(value)
        return name if " at 0x" in shown else f"{name} {shown}"
    parts = (f"{key}={_text(item, above)}" for key, item in sorted(attributes.items()))
    return f"{name}({', '.join(parts)})"


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns a dataclass's fields, or an object's attributes without cached values; None: it has none."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if not hasattr(value, "__dict__"):
        return None
    found = dict(vars(value))
    for name in vars(value):
        if isinstance(getattr(type(value), name, None), cached_property):
            del found[name]
    return found


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...#{hashed(text)}"


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
