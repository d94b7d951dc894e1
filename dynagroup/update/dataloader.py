"""What loaders ask of torch's ``DataLoader``: its arguments are checked before a worker starts, and a worker's death is told."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from dynagroup.errors import ConfigError
from dynagroup.validation import check_flag, check_function, check_int, check_number

__all__ = ["ENDED_EARLY", "answers_of", "checked_kwargs"]

ENDED_EARLY = (
    "the dataset, `collate_fn` or `weigh` raised StopIteration, which a DataLoader takes for its end, while samples of the "
    "epoch were left: look there for a next() of what has ended"
)
CHECKED = {
    "num_workers": lambda value: check_int("num_workers", value, least=0),
    "prefetch_factor": lambda value: check_int("prefetch_factor", value),
    "timeout": lambda value: check_number("timeout", value, or_zero=True),
    "pin_memory": lambda value: check_flag("pin_memory", value),
    "persistent_workers": lambda value: check_flag("persistent_workers", value),
    "in_order": lambda value: check_flag("in_order", value),
    "worker_init_fn": lambda value: check_function("worker_init_fn", value, "of a worker's number"),
    "collate_fn": lambda value: check_function("collate_fn", value, "from samples to a batch"),
}
MAY_BE_NONE = ("prefetch_factor", "worker_init_fn", "collate_fn")


def checked_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a ``DataLoader`` besides those that say what a batch is.

    Types are checked here, because torch finds many of them only in a worker, or waits for ever. What arguments mean
    together is torch's to say: a DataLoader of nothing is constructed, which starts no worker.

    Raises:
        ConfigError: names the argument and its value.

    >>> checked_kwargs({"num_workers": -1})
    Traceback (most recent call last):
    dynagroup.errors.ConfigError: `num_workers` must be an int of at least 0, but is -1
    """
    checked = dict(kwargs)
    unknown = sorted(set(checked) - set(inspect.signature(DataLoader).parameters))
    if unknown:
        raise ConfigError(f"`{unknown[0]}` is no argument of this loader, nor of torch's DataLoader")
    for name in CHECKED.keys() & checked.keys():
        if checked[name] is not None or name not in MAY_BE_NONE:
            checked[name] = CHECKED[name](checked[name])
    generator = checked.get("generator")
    if not isinstance(generator, (torch.Generator, type(None))):
        raise ConfigError(f"`generator` must be a torch.Generator or None, but is {generator!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said where the real one is made
            DataLoader([], **checked)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"torch's DataLoader refuses its arguments: {error}") from error
    return checked


def answers_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """What a DataLoader's workers answer. One that dies while it hands over a batch is a bare EOFError or a lost connection
    in torch; here it is told like one that dies between batches.

    Raises:
        RuntimeError: a worker died.
    """
    try:
        yield from loader
    except (EOFError, ConnectionError) as error:
        if not getattr(loader, "num_workers", 1) or "in DataLoader worker process" in str(error):  # the dataset's own
            raise
        raise RuntimeError(
            "a DataLoader worker died while it handed over a batch: it was killed, or the machine ran out of memory"
        ) from error
