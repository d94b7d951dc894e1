"""Checks arguments, so that the same mistake gives the same error message everywhere."""

import difflib
import json
import math
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.errors import ConfigError

LARGEST = 1 << 62  # largest count that arguments accept; no real run needs more
_PACKAGE = str(Path(__file__).parent)


def warn_user(message: str) -> None:
    """Warns at the line of code that called dynagroup; before Python 3.12, at the caller of the warning function."""
    if sys.version_info >= (3, 12):
        warnings.warn(message, skip_file_prefixes=(_PACKAGE,))
    else:
        warnings.warn(message, stacklevel=3)


@contextmanager
def explained(
    what: str, *passed: type[BaseException], way_out: str = "", kind: Any = ConfigError
) -> Iterator[None]:
    """Turns errors into ``kind`` with the text ``what``, except errors of the types ``passed``: a context manager."""
    try:
        yield
    except passed:
        raise
    except Exception as error:  # the code inside may belong to the user or another library
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]
        raise kind(f"{what} ({reason}){way_out}") from error


class sendable(ContextDecorator):
    """Context manager for the user's code in a worker: turns some errors into RuntimeErrors that begin with ``what()``.

    These are errors that torch cannot send to the main process, which would wait for them without end, and StopIteration,
    which torch takes for the end of the data; with ``always`` all errors but ConfigErrors.
    """

    def __init__(self, what: Callable[[], str], *, always: bool = False) -> None:
        self._what = what
        self._always = always

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception):
            return
        from torch.utils.data import get_worker_info  # heavy

        if self._always:
            is_turned = not isinstance(error, ConfigError)
        else:
            is_turned = get_worker_info() is not None and not _arrives(type(error))
        if is_turned or isinstance(error, StopIteration):
            raise RuntimeError(f"{self._what()}: {type(error).__name__}: {error}") from error


def called(name: str, function: Callable[..., Any], *args: Any, of: int | list[int]) -> Any:
    """Calls the user's function; errors name it and its samples."""

    try:  # a context manager around every call would take longer than all that surrounds it
        return function(*args)
    except Exception:
        which = f"sample {of}"
        if isinstance(of, list):
            which = f"the batch of dataset indices {shorten(of)}"
        with sendable(lambda: f"{name} failed on {which}", always=True):
            raise


def _arrives(kind: Any) -> bool:
    with suppress(Exception):  # torch sends the class and a text, and makes a new error of them
        pickle.dumps(kind)
        return not getattr(kind, "message", None) or kind(message="") is not None
    return False


def fetch(dataset: Any, indices: Sequence[int], *, always: bool = False) -> Any:
    """Returns samples, read together if the dataset can. Errors name their indices, as :func:`sendable` says. RuntimeError:
    the dataset returned too few or too many. ``always``: also reads samples that are not in a list."""
    if not hasattr(dataset, "__getitems__"):
        return _fetched_one_by_one(dataset, indices, always)
    with sendable(lambda: f"dataset samples {shorten(indices)} failed", always=always):
        samples = dataset.__getitems__(list(indices))
        if always or isinstance(samples, Iterator):
            samples = list(samples)
    has_columns = hasattr(samples, "keys")
    if hasattr(samples, "__len__") and not has_columns and len(samples) != len(indices):
        raise RuntimeError(
            f"the dataset's __getitems__ returned {len(samples)} samples for the indices {shorten(indices)}; "
            "it must return one sample per index, in order"
        )
    return samples


def _fetched_one_by_one(dataset: Any, indices: Sequence[int], always: bool) -> list[Any]:
    samples = []
    index = 0
    with sendable(lambda: f"dataset samples [{index}] failed", always=always):
        for index in indices:
            samples.append(dataset[index])
    return samples


def set_epoch(holder: Any, epoch: int) -> None:
    if hasattr(holder, "set_epoch"):
        holder.set_epoch(epoch)


def shorten(indices: Sequence[int], most: int = 16) -> str:
    shown = ", ".join(map(str, indices[:most]))
    return f"[{shown}]" if len(indices) <= most else f"[{shown}, ... {len(indices)} in all]"


def check_int(
    name: str, value: Any, *, least: int = 1, most: int = LARGEST, where: str = ""
) -> int:
    """Returns ``value`` as a Python int, which JSON can save. ConfigError: not an int from ``least`` to ``most``."""
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if is_int and value > most:
        raise ConfigError(f"`{name}` must be an int of at most {most}, but is {value!r}{where}")
    if not is_int or value < least:
        raise ConfigError(f"`{name}` must be an int of at least {least}, but is {value!r}{where}")
    return int(value)


def check_flag(name: str, value: Any) -> bool:
    """Returns ``value`` as a Python bool. ConfigError: not True or False; "no", 0 and None are refused as well."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"`{name}` must be True or False, but is {value!r}")
    return bool(value)


def check_identity(value: Any) -> Any:
    """Returns the user's ``identity`` as it comes back from JSON. ConfigError: JSON cannot store it."""
    with explained(
        f"`identity` must be a text, or another value that JSON can store, but is {value!r:.80}"
    ):
        return json.loads(json.dumps(value))


def check_function(name: str, value: Any, what: str) -> Any:
    """Returns ``value`` if it is callable or None, else raises ConfigError with ``what``, e.g. "from int to int"."""
    if value is not None and not callable(value):
        raise ConfigError(f"`{name}` must be a function {what}, but is {value!r}")
    return value


def check_collating(collate_fn: Any, pad: Any) -> None:
    """Checks a loader's ``collate_fn`` and ``pad``. ConfigError: neither None nor a function, nor (``pad``) a dict."""
    check_function("collate_fn", collate_fn, "from samples to a batch")
    if not (pad is None or callable(pad) or isinstance(pad, Mapping)):
        raise ConfigError(
            f"`pad` must be a dict from field to padding value, or a function, but is {pad!r}"
        )


def check_number(
    name: str, value: Any, *, most: float = math.inf, or_zero: bool = False, finite: bool = True
) -> float:
    """Returns ``value`` as a float greater than 0 and at most ``most``. ``or_zero``: 0 is allowed too; ``finite``: False
    allows infinity. ConfigError: ``value`` is no such number."""
    is_number = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not is_number:
        raise ConfigError(f"`{name}` must be a number greater than 0, but is {value!r}")
    if or_zero and value == 0:
        return 0.0
    if not 0 < value <= most or (finite and math.isinf(value)):
        upper = "finite" if math.isinf(most) else f"at most {most:g}"
        raise ConfigError(f"`{name}` must be greater than 0 and {upper}, but is {value!r}")
    return float(value)


def check_names(where: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError if a name is not in ``known``, and suggests the most similar known name."""
    for name in given:
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean `{similar[0]}`?" if similar else ""
            raise ConfigError(f"{where} has no option `{name}`{hint}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Returns ``value`` if it equals one of ``choices`` and has the same type, else raises ConfigError."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    raise ConfigError(f"`{name}` must be one of {', '.join(map(repr, choices))}, but is {value!r}")
