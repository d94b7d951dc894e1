"""Reads datasets in the workers, one window of samples at a time."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed
from dynagroup.online.messages import Request, WindowSamples
from dynagroup.validation import fetch, sendable, set_epoch

OPENING = 16  # first samples that are compared between workers and ranks; ignored if most are equal
FETCHED_AT_ONCE = 64  # samples that are read before their bytes are counted for the first time


def is_stream(dataset: Any) -> bool:
    """Returns whether a dataset is iterable-style. ConfigError: it is neither iterable-style nor map-style."""
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not map_style):
        return True
    if map_style:
        return False
    raise ConfigError(
        f"`dataset` must have __getitem__ and __len__, or __iter__, but is a {type(dataset).__name__}"
    )


def sample_bytes(sample: Any, seen: dict[int, Any] | None = None) -> int:
    """Returns the approximate bytes of a processed sample. ``seen``: objects, by id, that are counted (a node's parent)."""
    seen = {} if seen is None else seen
    if type(sample) is dict or hasattr(
        sample, "items"
    ):  # dicts first, because the check runs once per sample
        return sum([sample_bytes(value, seen) for value in sample.values()])
    if isinstance(sample, (torch.Tensor, np.ndarray)):
        return sample.nbytes
    if isinstance(sample, (list, tuple)):
        plain = not sample or isinstance(sample[0], (int, float))
        return 8 * len(sample) if plain else sum([sample_bytes(value, seen) for value in sample])
    if isinstance(sample, (str, bytes)):
        return len(sample)
    held = (
        ()
        if isinstance(sample, type) or id(sample) in seen
        else getattr(sample, "__dict__", {}).values()
    )
    seen[id(sample)] = sample
    return sum([sample_bytes(value, seen) for value in held]) or 8


def opening_of(samples: Sequence[Any]) -> int:
    """Returns a hash (63 bits) of the first samples, to find workers that read the same; 0: too few, or too alike."""
    try:
        shown = [repr(sample) for sample in samples[:OPENING]]
    except Exception:
        return 0
    return int(hashed("\n".join(shown)), 16) >> 1 if len(set(shown)) >= OPENING // 4 else 0


class _Forwarding:
    """Passes other attributes on to the dataset: a ``worker_init_fn`` may expect to get the dataset."""

    def __init__(self, **own: Any) -> None:
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.dataset, name, value)


class IndexedDataset(_Forwarding):
    """A map-style dataset that returns samples together with their dataset indices, for a :class:`RefinementCollator`.
    Workers use the dataset's own ``__getitems__`` and ``set_epoch``.

    >>> window = IndexedDataset(["a", "b", "c"]).__getitems__([2, 0])
    >>> window.samples, window.request.indices
    (['c', 'a'], [2, 0])
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset=dataset, _epoch=None)

    def __len__(self) -> int:
        return len(self.dataset)

    @sendable(lambda: "the dataset failed")
    def __getitems__(self, request: Request | list[int]) -> WindowSamples:
        if not isinstance(request, Request):
            return WindowSamples(Request.of(request), fetch(self.dataset, request, always=True))
        if self._epoch != request.epoch:
            self._epoch = request.epoch
            set_epoch(self.dataset, request.epoch)
        if request.max_bytes is None:
            return WindowSamples(
                request, fetch(self.dataset, request.indices, always=True) if len(request) else []
            )
        samples = self._fetch_bounded(request, request.max_bytes)
        return WindowSamples(request.part(0, len(samples)), samples)

    def _fetch_bounded(self, request: Request, max_bytes: int) -> list[Any]:
        """Reads about ``max_bytes`` of samples: whole planned batches, and at least one. A first read shows how large
        samples are; if they are small, a second read adds the rest."""
        ends = (
            np.cumsum(request.groups)
            if request.groups is not None
            else np.arange(1, len(request) + 1)
        )
        samples: list[Any] = []
        size, wanted = 0, FETCHED_AT_ONCE
        while len(samples) < len(request) and (not samples or size < max_bytes):
            stop = int(ends[min(np.searchsorted(ends, min(wanted, len(request))), len(ends) - 1)])
            fetched = fetch(self.dataset, request.indices[len(samples) : stop], always=True)
            samples += fetched
            size += sum(map(sample_bytes, fetched))
            wanted = max(int(max_bytes * len(samples) / max(size, 1)), len(samples) + 1)
        return samples


def _resumes(dataset: Any) -> bool:
    """Returns whether a stream can resume by its own state: that of ``datasets`` (5.2) leaves out the samples that
    ``shuffle`` buffers, and those of LitData and MosaicML need arguments. Streams that cannot are read again."""
    parts = [dataset]
    for part in parts:
        held = [
            value for name, value in getattr(part, "__dict__", {}).items() if "ex_iterable" in name
        ]
        parts += [one for value in held for one in (value if isinstance(value, list) else [value])]
    try:
        inspect.signature(getattr(dataset, "state_dict", None)).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return hasattr(dataset, "load_state_dict") and not any(
        "BufferShuffled" in type(part).__name__ for part in parts
    )


FRESH: Mapping[str, Any] = {"read": 0, "until": 0, "keep": (), "state": None}


class IterableWindows(_Forwarding, IterableDataset):
    """Reads an iterable dataset by windows of samples or bytes. The dataset must shard its samples over ranks and
    workers. Sample n of a worker gets the number ``(n * workers + worker) * size + rank``. A resumed worker begins with
    its first window that has unused samples, and leaves out the used ones."""

    def __init__(
        self, dataset: Any, **how: int | None
    ) -> None:  # _window, _max_bytes, _rank, _size
        epoch = torch.zeros(
            (), dtype=torch.int64
        ).share_memory_()  # so that persistent workers see changes
        super().__init__(dataset=dataset, _epoch=epoch, _resume=(0, {}), **how)

    def __iter__(self) -> Iterator[WindowSamples]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, (resumed, spots) = int(self._epoch), self._resume
        spot = spots.get(str(worker), FRESH) if resumed == epoch else FRESH
        with sendable(lambda: f"the dataset of worker {worker} failed"):
            set_epoch(self.dataset, epoch)
            for place, chosen in self._windows(self._read(spot), spot):
                arrivals = [
                    (number * workers + worker) * self._size + self._rank
                    for number in place["numbers"]
                ]
                request = Request(
                    np.asarray(arrivals), number=place["read"], indices=arrivals, epoch=epoch
                )
                yield WindowSamples(request, chosen, {**place, "worker": worker})

    def _read(self, spot: Mapping[str, Any]) -> Iterator[Any]:
        """Yields the dataset's samples from a resume point on."""
        number = 0 if spot["state"] is None else spot["read"]
        if spot["state"] is not None:
            self.dataset.load_state_dict(deepcopy(spot["state"]))
        with sendable(lambda: f"sample {number} of this worker's part failed"):
            for sample in self.dataset:
                if number >= spot["read"]:
                    yield sample
                number += 1

    def _windows(
        self, samples: Iterator[Any], spot: Mapping[str, Any]
    ) -> Iterator[tuple[dict[str, Any], list[Any]]]:
        """Yields windows: resume point (with the dataset's state before the window) and samples."""
        read, until, keep, state = spot["read"], spot["until"], set(spot["keep"]), spot["state"]
        keeps_state = _resumes(self.dataset)
        while True:
            first, chosen, numbers, size = read, [], [], 0
            for sample in samples:
                if read >= until or read in keep:
                    chosen.append(sample)
                    numbers.append(read)
                    size += 0 if self._max_bytes is None else sample_bytes(sample)
                read += 1
                if len(chosen) >= self._window or (
                    self._max_bytes is not None and size >= self._max_bytes
                ):
                    break
            if not chosen:
                return
            opening = 0 if first else opening_of(chosen)
            yield (
                {
                    "read": first,
                    "until": read,
                    "state": state,
                    "numbers": numbers,
                    "opening": opening,
                },
                chosen,
            )
            # Asked for after the first read: before that, a dataset may report the state of an earlier run.
            state = (
                deepcopy(self.dataset.state_dict()) if keeps_state else None
            )  # may be its living one


def begin_at(windows: IterableWindows, epoch: int, spots: Mapping[str, Any]) -> None:
    """Sets the epoch of the next iteration, and for each worker the point from which it resumes. (A public name of the
    class would hide the dataset's own of that name from a ``worker_init_fn``.)"""
    windows._epoch.fill_(epoch)
    windows._resume = epoch, spots
    set_epoch(windows.dataset, epoch)
