"""Describes settings as text, so that a saved state can be compared with the run that loads the state.

The text is the same in every process, and changes when a setting changes what it does. Values are described by their
content, objects by what a pickle of them would contain, the user's functions and classes by their code, constants and
closures, installed code by its name. Module globals are not: give objects that use one a text ``fingerprint``.
"""

import copyreg
import hashlib
import sys
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

LONGEST = (
    240  # characters of a description; the end of a longer one is replaced by a hash of the whole
)
PLAIN = (type(None), type(...), bool, int, float, complex, str, bytes)
MEMBERS = (*PLAIN, list, tuple, dict, set, partial, types.FunctionType)


def described(value: Any, *, ask: bool = True) -> str:
    """Returns text that describes a setting: without memory addresses, and independent of the order of sets.

    An object with a text attribute ``fingerprint`` is described by that text; ``ask=False`` ignores the attribute of
    ``value`` itself. Functions are described by compiled code, which depends on the Python version. Objects that cannot
    be pickled (locks, file handles) all get the same text, with a warning.

    >>> described({"window": np.int64(3)}), described((1, None))
    ("{'window': 3}", '(1, None)')
    >>> described(np.arange(9000)) == described(np.arange(9000) % 8999)
    False
    """
    describer = _Describer()
    text = describer.text(value) if ask else describer.pickled(value)
    if describer.unseen:
        what = f"the contents of {', '.join(sorted(describer.unseen))} in {text}"
        way_out = (
            "give the object a text attribute `fingerprint` that changes when its behaviour changes"
        )
        warnings.warn(
            f"cannot compare {what}, so a state with other contents would load; {way_out}",
            stacklevel=3,
        )
    return text


def hashed(text: str | bytes, digits: int = 16) -> str:
    """Returns the first ``digits`` hexadecimal digits of the hash of a text."""
    return hashlib.blake2b(
        text.encode() if isinstance(text, str) else text, digest_size=digits // 2
    ).hexdigest()


def ends_of(dataset: Any) -> str:
    """Returns text for the first and last sample of a list, an array or one of ``datasets``, read without the user's code."""
    data = dataset.indices if type(dataset).__name__ == "Subset" else dataset
    raw = data.with_format("arrow") if hasattr(data, "with_format") else data
    if not len(raw) or not (raw is not data or isinstance(raw, (list, tuple, range, np.ndarray))):
        return ""
    ends: Any = (raw[0], raw[len(raw) - 1])
    return _short(_Describer().text([end.to_pydict() if raw is not data else end for end in ends]))


class _Describer:
    """Builds one description. ``names``, if given, are the attributes of an object that the described code reads: only
    these are described, because other attributes may change while a program runs."""

    def __init__(self) -> None:
        self.unseen: set[str] = set()
        self._open: list[int] = []
        self._done: dict[tuple[int, frozenset[str] | None], tuple[Any, str]] = {}

    def text(self, value: Any, names: frozenset[str] | None = None) -> str:
        value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, PLAIN):
            return _short(repr(value))
        if id(value) in self._open:  # a reference cycle; the text says how many levels up
            return f"^{len(self._open) - self._open.index(id(value))}"
        if (id(value), names) not in self._done:
            self._open.append(id(value))
            self._done[id(value), names] = value, _short(self._compound(value, names))
            self._open.pop()
        return self._done[id(value), names][1]

    def _compound(self, value: Any, names: frozenset[str] | None) -> str:
        kind = "" if type(value) in (dict, frozenset, tuple, list) else type(value).__qualname__
        if isinstance(value, Mapping):
            items = sorted(
                f"{self.text(k, names)}: {self.text(v, names)}" for k, v in value.items()
            )
            return f"{kind}{{{', '.join(items)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{kind}{{{', '.join(sorted(self.text(v, names) for v in value))}}}"
        if isinstance(value, (list, tuple)):
            return f"{kind}({self._listed(value, names)})"
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.MethodType):
            code = getattr(value.__func__, "__code__", None)
            return f"{self.text(value.__func__)} of {self.text(value.__self__, code and _names_in(code))}"
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if callable(value) and hasattr(value, "__wrapped__"):
            return f"{kind}({self.text(value.__wrapped__)})"  # pyright: ignore[reportFunctionMemberAccess]
        if isinstance(own := getattr(value, "fingerprint", None), str):
            return own
        whole = isinstance(value, (np.ndarray, partial)) or is_dataclass(value) or _is_tensor(value)
        if names is None or whole or not hasattr(value, "__dict__"):
            return self.pickled(value)
        names = _reached(type(value), names)
        return f"{self._class(type(value))}({self._parts({k: v for k, v in vars(value).items() if k in names}, names)})"

    def pickled(self, value: Any) -> str:
        """Describes an object by its class and by what a pickle of the object would contain."""
        kind = type(value)
        try:
            if _is_tensor(value):
                raw = (
                    value.detach()
                    .cpu()
                    .contiguous()
                    .reshape(-1)
                    .view(sys.modules["torch"].uint8)
                    .numpy()
                )
                return f"{value.dtype}{list(value.shape)}#{hashed(raw.tobytes())}"
            if isinstance(value, np.ndarray) and not value.dtype.hasobject:
                return f"{value.dtype}{list(value.shape)}#{hashed(value.tobytes())}"
            reduce = copyreg.dispatch_table.get(kind)
            reduced: Any = value.__reduce_ex__(2) if reduce is None else reduce(value)
        except Exception:
            self.unseen.add(_named(kind))
            return f"{_named(kind)}, which cannot be compared"
        if isinstance(reduced, str):  # an object that is pickled by name
            return _named(value) if hasattr(value, "__qualname__") else f"{_named(kind)}.{reduced}"
        make, arguments, state, *rest = (*reduced, None)[:5]
        if isinstance(state, dict):  # cached values are left out
            state = {
                k: v
                for k, v in state.items()
                if not isinstance(getattr(kind, k, None), cached_property)
            }
            if getattr(make, "__name__", "") == "__newobj__":
                return f"{self._class(kind)}({self._parts(state)})"
        items = [part if part is None or isinstance(part, dict) else list(part) for part in rest]
        return f"{self._class(kind)}({self._listed([make, arguments, state, *items])})"

    def _listed(self, values: Iterable[Any], names: frozenset[str] | None = None) -> str:
        return ", ".join(self.text(value, names) for value in values)

    def _parts(self, parts: Mapping[str, Any], names: frozenset[str] | None = None) -> str:
        return ", ".join(f"{name}={self.text(part, names)}" for name, part in sorted(parts.items()))

    def _class(self, kind: type) -> str:
        if not is_own(kind):
            return kind.__qualname__
        own = [item for base in kind.__mro__ if is_own(base) for item in sorted(vars(base).items())]
        own = [
            (k, v) for k, v in own if not k.startswith("__") or isinstance(v, types.FunctionType)
        ]
        return (
            f"{kind.__qualname__}#{hashed('; '.join(f'{k}={self._member(v)}' for k, v in own), 8)}"
        )

    def _member(self, member: Any) -> str:
        for name in (
            "fget",
            "func",
            "__func__",
        ):  # unwraps properties, cached properties and class methods
            member = member if isinstance(member, MEMBERS) else getattr(member, name, member)
        return self.text(member) if isinstance(member, MEMBERS) else ""

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        parts = [
            self.text(part) for part in (function.__defaults__, function.__kwdefaults__) if part
        ]
        for cell in function.__closure__ or ():
            try:
                parts.append(self.text(cell.cell_contents, _names_in(code)))
            except ValueError:
                parts.append("unset")
        if not is_own(function):
            return _named(function) + (f"[{', '.join(parts)}]" if parts else "")
        return f"{function.__name__}#{hashed('; '.join([*parts, self._code(code, function.__doc__)]), 8)}"

    def _code(self, code: types.CodeType, doc: str | None = None) -> str:
        inner = [
            self._code(c) if isinstance(c, types.CodeType) else self.text(c)
            for c in code.co_consts
            if c != doc
        ]
        arguments = (
            code.co_argcount,
            code.co_kwonlyargcount,
            code.co_posonlyargcount,
            code.co_flags,
        )
        return f"{sys.version_info[:2]} {code.co_code.hex()} {inner} {code.co_names} {arguments}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...#{hashed(text)}"


def _named(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or type(thing).__module__}.{thing.__qualname__}"


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of all attributes and globals that code reads, nested functions included."""
    nested = (
        _names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)
    )
    return frozenset(code.co_names).union(*nested)


def _reached(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Returns the names, and those that the user's own methods and properties of these names read in turn."""
    members = [getattr(member := getattr(kind, name, None), "fget", member) for name in names]
    codes = (m.__code__ for m in members if isinstance(m, types.FunctionType) and is_own(m))
    wider = names.union(*map(_names_in, codes))
    return names if wider == names else _reached(kind, wider)


def is_own(thing: Any) -> bool:
    """Returns whether code is the user's own: not built in, not part of dynagroup, and not an installed package."""
    name = getattr(thing, "__module__", None) or "builtins"
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    known = name.partition(".")[0] in (
        "dynagroup",
        "transformers_modules",
        *sys.stdlib_module_names,
    )
    return not known and "site-packages" not in file and "dist-packages" not in file


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
