"""What a setting is, as text: the same in every process, another wherever it would act otherwise.

Saved states are compared by it. Values are described by what they hold, functions and own classes by what they do: their
code, and the constants, defaults, closures and globals that it reads. Installed code stands under its name.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

__all__ = ["described", "hashed"]

LONGEST = 240
"""Characters of a description; what is longer is cut and ends in a hash of the whole."""
ACCESSORS = (property, staticmethod, classmethod, functools.cached_property)
GENERATED = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__parameters__", "__hash__"}
GENERATED |= {"__abstractmethods__", "__dataclass_fields__", "__dataclass_params__", "__match_args__", "__orig_bases__"}
GENERATED |= {"__slots__", "__static_attributes__", "__firstlineno__", "__annotate__", "__qualname__"}


def described(value: Any, *, ask: bool = True) -> str:
    """Text for comparing settings between processes. It holds no address, and does not depend on the order of sets.

    An object with a ``fingerprint`` (text) is described by it; functions by their compiled code, so that another Python
    may tell them apart. What cannot be seen (locks, generators, handles) is warned of, and compares equal.

    Args:
        ask: whether ``value`` itself is asked for its ``fingerprint``; what it holds always is.

    >>> described(np.int64(3)), described(functools.partial(round, ndigits=np.int64(1)))
    ('3', "partial(builtins.round, (), {'ndigits': 1})")
    >>> described(np.arange(9000)) == described(np.arange(9000) % 8999)
    False
    """
    describer = _Describer()
    text = describer.instance(value) if not ask else describer.text(value)
    if describer.unseen:
        warnings.warn(
            f"cannot see what {', '.join(sorted(describer.unseen))} in the setting {text} holds: states of a run with another "
            "one would be accepted; give it an attribute `fingerprint`, a text that changes with what it does",
            stacklevel=3,
        )
    return text


def hashed(text: str | bytes, digits: int = 16) -> str:
    """So many hexadecimal digits of a text.

    >>> hashed("text") == hashed(b"text")
    True
    """
    return hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=digits // 2).hexdigest()


class _Describer:
    """One description under way. ``names``, where given, are the attributes that the code which holds a value reads:
    of an object that code refers to only these are a setting, the rest changes as a program runs."""

    def __init__(self) -> None:
        self.unseen: set[str] = set()
        self._open: list[int] = []
        self._done: dict[tuple[int, frozenset[str] | None], tuple[Any, str]] = {}

    def text(self, value: Any, names: frozenset[str] | None = None) -> str:
        if value is None or value is ... or isinstance(value, (bool, complex, float, int, str, bytes)):
            return _plain(value)
        if id(value) in self._open:
            return f"^{len(self._open) - self._open.index(id(value))}"
        key = (id(value), names)
        if key not in self._done:
            self._open.append(id(value))
            self._done[key] = value, _short(self._compound(value, names))
            self._open.pop()
        return self._done[key][1]

    def _compound(self, value: Any, names: frozenset[str] | None) -> str:
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, np.generic):
            return self.text(value.item(), names)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, Mapping):
            items = sorted(f"{self.text(k, names)}: {self.text(v, names)}" for k, v in value.items())
            return f"{_kind(value, dict)}{{{', '.join(items)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{_kind(value, frozenset)}{{{', '.join(sorted(self.text(v, names) for v in value))}}}"
        if isinstance(value, (list, tuple)):
            return f"{_kind(value, tuple)}({self._listed(value, names)})"
        if isinstance(value, types.ModuleType):
            return self._read(value, names or frozenset()) if _is_own(value) else value.__name__
        if isinstance(value, type):
            return self._class(value)
        return self._callable(value, names)

    def _callable(self, value: Any, names: frozenset[str] | None) -> str:
        if isinstance(value, functools.partial):
            return f"partial({self._listed([value.func, value.args, value.keywords], names)})"
        if isinstance(value, types.MethodType):
            return f"{self.text(value.__func__)} of {self.text(value.__self__, _names_in(value.__func__))}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, ACCESSORS):
            parts = [getattr(value, name, None) for name in ("fget", "fset", "func", "__func__")]
            return f"{type(value).__name__}({self._listed([p for p in parts if p is not None])})"
        if isinstance(value, (types.BuiltinFunctionType, np.ufunc)) or _is_descriptor(value):
            holder = getattr(value, "__self__", None)
            if holder is None or isinstance(holder, types.ModuleType):
                return _named(value)
            return f"{self.text(holder, names)}.{value.__name__}"
        if hasattr(value, "__wrapped__") and callable(value):
            return f"{type(value).__qualname__}({self.text(value.__wrapped__)})"  # pyright: ignore[reportFunctionMemberAccess]
        if isinstance(getattr(value, "fingerprint", None), str):
            return value.fingerprint
        return self.instance(value) if names is None or is_dataclass(value) else self._read(value, names)

    def instance(self, value: Any) -> str:
        """An object: its class, and what it holds."""
        kind = type(value)
        if _is_tensor(value):
            return self._tensor(value)
        if is_dataclass(value):
            held: Iterable[tuple[str, Any]] = [(f.name, getattr(value, f.name)) for f in fields(value)]
        elif kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ is object.__reduce_ex__ and _has_state(value):
            held = sorted(_state_of(value).items())
        else:
            return self._reduced(value)
        return f"{self._class(kind, short=True)}({', '.join(f'{name}={self.text(part)}' for name, part in held)})"

    def _reduced(self, value: Any) -> str:
        """As it would be pickled; what refuses to be is not seen."""
        try:
            parts = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 - whatever its class raises, it cannot be seen
            self.unseen.add(_named(type(value)))
            return f"{_named(type(value))}, which cannot be compared"
        return f"{self._class(type(value), short=True)}({self.text(parts)})"

    def _read(self, value: Any, names: frozenset[str]) -> str:
        """An object or module that code refers to: what that code reads of it."""
        if _is_tensor(value):
            return self._tensor(value)
        kind = value.__name__ if isinstance(value, types.ModuleType) else type(value).__qualname__
        held = getattr(value, "__dict__", {})
        parts = [f"{name}={self.text(held[name], names)}" for name in sorted(names) if name in held]
        if not isinstance(value, types.ModuleType) and _is_own(type(value)):
            found = {name: getattr(type(value), name, None) for name in sorted(names - set(held))}
            parts += [f"{name}={self.text(part, names)}" for name, part in found.items() if part is not None]
        return f"{kind}({', '.join(parts)})"

    def _listed(self, values: Iterable[Any], names: frozenset[str] | None = None) -> str:
        return ", ".join(self.text(value, names) for value in values)

    def _array(self, value: np.ndarray) -> str:
        if value.dtype.hasobject:
            return f"array({self.text(value.tolist())})"
        return f"{value.dtype}{list(value.shape)}#{hashed(np.ascontiguousarray(value).tobytes())}"

    def _tensor(self, value: Any) -> str:
        torch = sys.modules["torch"]
        try:
            raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        except (RuntimeError, TypeError):  # sparse, quantised, without storage
            self.unseen.add(_named(type(value)))
            return f"{value.dtype}{list(value.shape)}, which cannot be compared"
        return f"{value.dtype}{list(value.shape)}#{hashed(raw)}"

    def _class(self, kind: type, *, short: bool = False) -> str:
        if not _is_own(kind):
            return kind.__qualname__ if short else _named(kind)
        if id(kind) in self._open and short:
            return kind.__qualname__
        parts = [self.text(base) for base in kind.__bases__ if base is not object]
        for name, value in sorted(vars(kind).items()):
            if name not in GENERATED and not name.startswith(("_abc_", "_is_", "__protocol", "__non_callable")):
                if not _made_by_dataclass(kind, value):
                    parts.append(f"{name}={self.text(value)}")
        return f"{kind.__qualname__}#{hashed('; '.join(parts), 8)}"

    def _function(self, function: types.FunctionType) -> str:
        names = _names_in(function)
        parts = [self.text(function.__defaults__), self.text(function.__kwdefaults__)]
        for cell in function.__closure__ or ():
            try:
                parts.append(self.text(cell.cell_contents, names))
            except ValueError:  # not set yet
                parts.append("unset")
        if not _is_own(function):
            seen = [part for part in parts if part != "None"]
            return _named(function) + (f"[{', '.join(seen)}]" if seen else "")
        parts.append(self._code(function.__code__, function.__doc__))
        read = {
            name: function.__globals__[name] for name in _globals_in(function.__code__) if name in function.__globals__
        }
        parts += [f"{name}={self.text(value, names)}" for name, value in sorted(read.items())]
        return f"{function.__name__}#{hashed('; '.join(parts), 8)}"

    def _code(self, code: types.CodeType, doc: str | None = None) -> str:
        constants = [
            self._code(c) if isinstance(c, types.CodeType) else self.text(c) for c in code.co_consts if c != doc
        ]
        arguments = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags)
        return f"{sys.version_info[:2]} {code.co_code.hex()} {constants} {code.co_names} {arguments}"


def _plain(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic):
        value = value.item()
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...#{hashed(text)}"


def _kind(value: Any, plain: type) -> str:
    return "" if type(value) in (plain, list) else type(value).__qualname__


def _named(thing: Any) -> str:
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return f"{module}.{getattr(thing, '__qualname__', None) or getattr(thing, '__name__', type(thing).__qualname__)}"


def _is_own(thing: Any) -> bool:
    """Whether code is the user's: neither built in, nor of this library, nor installed."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    package = (name or "builtins").partition(".")[0]
    if package == "dynagroup" or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_descriptor(value: Any) -> bool:
    return isinstance(
        value,
        (types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType),
    ) or isinstance(value, (types.ClassMethodDescriptorType, types.MemberDescriptorType))


def _has_state(value: Any) -> bool:
    return hasattr(value, "__dict__") or any(getattr(kind, "__slots__", ()) for kind in type(value).__mro__)


def _state_of(value: Any) -> dict[str, Any]:
    """An object's attributes without what it merely keeps from computing it again."""
    slots = [name for kind in type(value).__mro__ for name in _as_names(vars(kind).get("__slots__", ()))]
    state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    state.update(getattr(value, "__dict__", {}))
    cached = {name for name in state if isinstance(getattr(type(value), name, None), functools.cached_property)}
    return {name: part for name, part in state.items() if name not in cached}


def _as_names(slots: str | Iterable[str]) -> list[str]:
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]


def _made_by_dataclass(kind: type, value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return "__dataclass_params__" in vars(kind) and code is not None and code.co_filename == "<string>"


def _nested(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Attributes and globals that a function's code mentions."""
    code = getattr(function, "__code__", None)
    return frozenset(name for inner in _nested(code) for name in inner.co_names) if code is not None else frozenset()


def _globals_in(code: types.CodeType) -> set[str]:
    return {
        i.argval
        for inner in _nested(code)
        for i in dis.get_instructions(inner)
        if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
