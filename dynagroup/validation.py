"""What arguments and saved states must look like, checked once and said alike."""

from __future__ import annotations

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dynagroup.errors import ConfigError, StateError

__all__ = [
    "Check",
    "a_flag",
    "a_list",
    "a_mapping",
    "a_number",
    "a_text",
    "an_int",
    "anything",
    "check_choice",
    "check_int",
    "check_number",
    "either",
    "nothing",
    "warn_user",
]

LARGEST = 1 << 62
"""No count of a real run is larger; what claims to be is damaged."""


_NOT_THE_USER = (f"{Path(__file__).parent}{os.sep}", str(Path("torch", "utils", "data")) + os.sep)


def warn_user(message: str) -> None:
    """Warn at the line of the user's that led here, however many frames of dynagroup and of DataLoader lie between.

    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     warn_user("careful")
    >>> str(said[0].message)
    'careful'
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_int(name: str, value: Any, *, least: int = 1, most: int = LARGEST, where: str = "") -> int:
    """``value`` as a Python int, so that it can be saved as JSON.

    Raises:
        ConfigError: it is no integer, or outside ``least`` to ``most``.

    >>> check_int("window", np.int64(8))
    8
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"`{name}` must be an int of at least {least}, but is {value!r}{where}")
    if not least <= value <= most:
        bound = f"of at least {least}" if value < least else f"of at most {most}"
        raise ConfigError(f"`{name}` must be an int {bound}, but is {value!r}{where}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """``value`` as a Python bool.

    Raises:
        ConfigError: it is none; "no", 0 and None are not taken for False.

    >>> check_flag("shuffle", np.bool_(True))
    True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"`{name}` must be True or False, but is {value!r}")
    return bool(value)


def check_function(name: str, value: Any, what: str) -> Any:
    """``value``, if it can be called.

    Args:
        what: it is a function of, "from samples to a batch".

    Raises:
        ConfigError: it cannot.

    >>> check_function("key", len, "from a sample to a number") is len
    True
    """
    if not callable(value):
        raise ConfigError(f"`{name}` must be a function {what}, but is {value!r}")
    return value


def check_number(
    name: str, value: Any, *, above: float = 0.0, most: float = math.inf, or_zero: bool = False, finite: bool = True
) -> float:
    """``value`` as a float greater than ``above`` and at most ``most``.

    Args:
        or_zero: 0 is legal too.
        finite: False: so is infinity.

    Raises:
        ConfigError: it is no such number.

    >>> check_number("headroom", 1, most=1.0)
    1.0
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ConfigError(f"`{name}` must be a number greater than {above:g}, but is {value!r}")
    if or_zero and value == 0:
        return 0.0
    if not (above < value <= most) or (finite and math.isinf(value)):
        upper = "finite" if math.isinf(most) else f"at most {most:g}"
        raise ConfigError(f"`{name}` must be greater than {above:g} and {upper}, but is {value!r}")
    return float(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """``value``, if it is one of ``choices``.

    Raises:
        ConfigError: it is none of them.

    >>> check_choice("uneven", "drop", ("repeat", "drop"))
    'drop'
    """
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        shown = ", ".join(map(repr, choices))
        raise ConfigError(f"`{name}` must be one of {shown}, but is {value!r}")
    return value


# A saved state comes from a file: it may be of another run, of another version, cut in half, or made up. A schema says
# what each part must be before anything of it is used. A `Check` is called with a value and the value's place in the state
# and raises StateError; the functions below build checks of checks. Cost: one visit of every element.

Check: TypeAlias = Callable[[Any, str], None]


def _refuse(place: str, wanted: str, value: Any) -> None:
    shown = repr(value)
    raise StateError(
        f"the state is damaged: {place} must be {wanted}, but is {shown[:80] + '...' if len(shown) > 80 else shown}; "
        "load the checkpoint before it"
    )


def an_int(least: int = 0, most: int = LARGEST) -> Check:
    """An integer within bounds (a bool is none)."""

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not least <= value <= most:
            _refuse(place, f"an int from {least} to {most}", value)

    return check


def a_number(least: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number within bounds."""

    def check(value: Any, place: str) -> None:
        largest = sys.float_info.max  # an int may be larger, and math.isfinite raises then
        if type(value) not in (int, float) or not -largest <= value <= largest or not least <= value <= most:
            _refuse(place, f"a finite number from {least:g} to {most:g}", value)

    return check


def a_flag() -> Check:
    """True or False."""

    def check(value: Any, place: str) -> None:
        if type(value) is not bool:
            _refuse(place, "true or false", value)

    return check


def a_text(most: int = LARGEST) -> Check:
    """A string of at most so many characters."""

    def check(value: Any, place: str) -> None:
        if type(value) is not str or len(value) > most:
            _refuse(place, "a text", value)

    return check


def nothing() -> Check:
    """None."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            _refuse(place, "null", value)

    return check


def anything() -> Check:
    """Any value: what belongs to the user, such as a dataset's own state."""
    return lambda value, place: None


def either(*checks: Check) -> Check:
    """What one of the checks accepts; what the last of them says otherwise."""

    def check(value: Any, place: str) -> None:
        for one in checks[:-1]:
            try:
                return one(value, place)
            except StateError:
                continue
        checks[-1](value, place)

    return check


def a_list(of: Check, *, length: int | None = None, most: int = LARGEST) -> Check:
    """A list (or tuple) whose elements pass ``of``."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, (list, tuple)) or len(value) > most or (length is not None and len(value) != length):
            _refuse(place, "a list" if length is None else f"a list of {length}", value)
        for number, element in enumerate(value):
            of(element, f"{place}[{number}]")

    return check


def a_mapping(fields: Mapping[str, Check] | None = None, *, values: Check | None = None) -> Check:
    """A mapping with exactly these fields; or, with ``values``, from any texts to what passes ``values``."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return _refuse(place, "a mapping", value)
        if fields is not None and set(value) != set(fields):
            missing, unknown = sorted(set(fields) - set(value)), sorted(set(value) - set(fields))
            return _refuse(
                place, f"a mapping with the fields {sorted(fields)}", {"missing": missing, "unknown": unknown}
            )
        for key, element in value.items():
            (fields[key] if fields is not None else values or anything())(element, f"{place}[{key!r}]")

    return check
