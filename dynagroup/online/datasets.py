"""Reads datasets in the workers, one window of samples at a time."""

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed
from dynagroup.online.messages import Request, Sample, WindowSamples
from dynagroup.online.state import State
from dynagroup.validation import fetch, sendable, set_epoch

OPENING = 16  # first samples that are compared between workers and ranks; ignored if most are equal
FETCHED_AT_ONCE = 64  # samples that are read before their bytes are counted


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


def sample_bytes(sample: Sample, counted: dict[int, Any] | None = None) -> int:
    """Returns the approximate bytes of a processed sample. ``counted``: objects, by id, that count as 8
    bytes from now on, because they are counted already (a node's parent)."""
    if counted is None:
        counted = {}
    num_bytes = getattr(sample, "nbytes", None)  # of tensors and arrays, which are most values
    if isinstance(num_bytes, int):
        return num_bytes
    if hasattr(sample, "items"):
        return _sum_of_bytes(sample.values(), counted)
    if isinstance(sample, (list, tuple)):
        if not sample or isinstance(sample[0], (int, float)):
            return 8 * len(sample)
        return _sum_of_bytes(sample, counted)
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, type) or id(sample) in counted:
        return 8
    counted[id(sample)] = sample
    return _sum_of_bytes(getattr(sample, "__dict__", {}).values(), counted) or 8


def _sum_of_bytes(values: Iterable[Any], counted: dict[int, Any]) -> int:
    num_bytes = 0
    for value in values:
        size = getattr(value, "nbytes", None)  # most are tensors: a call for each takes longer
        num_bytes += size if isinstance(size, int) else sample_bytes(value, counted)
    return num_bytes


def opening_of(samples: Sequence[Sample]) -> int:
    """Returns a hash (63 bits) of the first samples, to find workers that read the same; 0: too few, or too alike."""
    try:
        shown = [repr(sample) for sample in samples[:OPENING]]
    except Exception:
        return 0
    if len(set(shown)) < OPENING // 4:
        return 0
    return int(hashed("\n".join(shown)), 16) >> 1


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
        if not len(request):
            return WindowSamples(request, [])
        if request.max_bytes is None:
            return WindowSamples(request, fetch(self.dataset, request.indices, always=True))
        samples = self._fetch_bounded(request, request.max_bytes)
        return WindowSamples(request.part(0, len(samples)), samples)

    def _fetch_bounded(self, request: Request, max_bytes: int) -> list[Sample]:
        """Reads whole planned batches, at least one, until they have about ``max_bytes``."""
        if request.groups is None:
            ends = np.arange(1, len(request) + 1)
        else:
            ends = np.cumsum(request.groups)
        samples: list[Sample] = []
        num_bytes = 0
        while len(samples) < len(request) and (not samples or num_bytes < max_bytes):
            wanted = min(len(samples) + FETCHED_AT_ONCE, len(request))
            stop = int(ends[np.searchsorted(ends, wanted)])
            fetched = fetch(self.dataset, request.indices[len(samples) : stop], always=True)
            samples += fetched
            num_bytes += sum(map(sample_bytes, fetched))
        return samples


def _resumes(dataset: Any) -> bool:
    """Returns whether a stream can resume by its own state. Those of LitData and MosaicML cannot, because theirs needs
    arguments; nor can one of ``datasets`` (5.2) that is shuffled, because its state leaves out the buffered samples.
    Streams that cannot are read again."""
    try:
        inspect.signature(getattr(dataset, "state_dict", None)).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return hasattr(dataset, "load_state_dict") and not _has_shuffle_buffer(dataset)


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Returns whether a stream of ``datasets`` is shuffled, at any of its stages."""
    if "BufferShuffled" in type(dataset).__name__:
        return True
    for name, value in getattr(dataset, "__dict__", {}).items():
        if "ex_iterable" in name:
            stages = value if isinstance(value, list) else [value]
            if any(map(_has_shuffle_buffer, stages)):
                return True
    return False


FRESH: State = {"read": 0, "until": 0, "keep": (), "state": None}


class IterableWindows(_Forwarding, IterableDataset):
    """Reads an iterable dataset by windows of samples or bytes. The dataset must shard its samples over ranks and
    workers. Sample n of a worker gets the number ``(n * workers + worker) * size + rank``. A resumed worker begins with
    its first window that has unused samples, and leaves out the used ones."""

    def __init__(
        self, dataset: Any, *, _window: int, _max_bytes: int | None, _rank: int, _size: int
    ) -> None:
        super().__init__(
            dataset=dataset,
            _epoch=torch.zeros((), dtype=torch.int64).share_memory_(),  # for persistent workers
            _resume=(0, {}),
            _window=_window,
            _max_bytes=_max_bytes,
            _rank=_rank,
            _size=_size,
        )

    def __iter__(self) -> Iterator[WindowSamples]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        num_workers = 1 if info is None else info.num_workers
        epoch = int(self._epoch)
        resumed_epoch, spots = self._resume
        spot = spots.get(str(worker), FRESH) if resumed_epoch == epoch else FRESH
        with sendable(lambda: f"the dataset of worker {worker} failed"):
            set_epoch(self.dataset, epoch)
            for place, samples in self._windows(self._read(spot), spot):
                numbers = np.asarray(place["numbers"])
                arrivals = (numbers * num_workers + worker) * self._size + self._rank
                request = Request(
                    arrivals, number=place["read"], indices=arrivals.tolist(), epoch=epoch
                )
                yield WindowSamples(request, samples, {**place, "worker": worker})

    def _read(self, spot: State) -> Iterator[tuple[int, Sample]]:
        """Yields the dataset's samples from a resume point on, with their numbers in this worker's part."""
        number = 0
        if spot["state"] is not None:
            number = spot["read"]
            self.dataset.load_state_dict(deepcopy(spot["state"]))
        with sendable(lambda: f"sample {number} of this worker's part failed"):
            for sample in self.dataset:
                if number >= spot["read"]:
                    yield number, sample
                number += 1

    def _windows(
        self, samples: Iterator[tuple[int, Sample]], spot: State
    ) -> Iterator[tuple[State, list[Sample]]]:
        """Yields windows: resume point (with the dataset's state before the window) and samples."""
        keep = set(spot["keep"])
        state = spot["state"]
        keeps_state = _resumes(self.dataset)
        most_bytes = math.inf if self._max_bytes is None else self._max_bytes
        stop = spot["read"]
        while True:
            start = stop
            window: list[Sample] = []
            numbers: list[int] = []
            num_bytes = 0
            for number, sample in samples:
                stop = number + 1
                if number < spot["until"] and number not in keep:
                    continue
                window.append(sample)
                numbers.append(number)
                num_bytes += self._counted_bytes(sample)
                if len(window) >= self._window or num_bytes >= most_bytes:
                    break
            if not window:
                return
            place = {
                "read": start,
                "until": stop,
                "state": state,
                "numbers": numbers,
                "opening": 0 if start else opening_of(window),
            }
            yield place, window
            state = None
            if keeps_state:
                # Asked for after the first read: before that, a dataset may report the state of an earlier run.
                state = deepcopy(self.dataset.state_dict())  # may be its living one

    def _counted_bytes(self, sample: Sample) -> int:
        return 0 if self._max_bytes is None else sample_bytes(sample)


def begin_at(windows: IterableWindows, epoch: int, spots: State) -> None:
    """Sets the epoch of the next iteration, and for each worker the point from which it resumes. (A public name of the
    class would hide the dataset's own of that name from a ``worker_init_fn``.)"""
    windows._epoch.fill_(epoch)
    windows._resume = epoch, spots
    set_epoch(windows.dataset, epoch)
