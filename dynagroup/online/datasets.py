"""Worker side: datasets that are read a window at a time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import hashed
from dynagroup.online.messages import Request, WindowSamples, shorten

__all__ = ["IndexedDataset", "IterableWindows", "is_stream", "opening_of", "sample_bytes", "set_epoch"]

OPENING = 16
"""Samples by which ranks' and workers' shares are compared; fewer than a quarter of them different say nothing."""
FETCHED_AT_ONCE = 64
"""Samples that are read before their bytes are counted for the first time."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable-style.

    Raises:
        ConfigError: it is neither map-style nor iterable.
    """
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise ConfigError(f"`dataset` must have __getitem__ and __len__, or __iter__, but is a {type(dataset).__name__}")


def set_epoch(holder: Any, epoch: int) -> None:
    """Tell the epoch to what has a ``set_epoch``."""
    tell = getattr(holder, "set_epoch", None)
    if callable(tell):
        tell(epoch)


def sample_bytes(sample: Any) -> int:
    """About how many bytes a processed sample holds: those of its tensors, arrays and texts.

    >>> sample_bytes({"pixels": torch.zeros(3, 4), "name": "cat"})
    51
    """
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    if isinstance(sample, (str, bytes)):
        return len(sample)
    if isinstance(sample, Mapping) or hasattr(sample, "items"):
        return sum(sample_bytes(value) for value in sample.values())
    if isinstance(sample, (list, tuple)):
        flat = not sample or isinstance(sample[0], (int, float))
        return 8 * len(sample) if flat else sum(sample_bytes(value) for value in sample)
    return sum(sample_bytes(value) for value in getattr(sample, "__dict__", {}).values()) or 8


def opening_of(samples: Sequence[Any]) -> int:
    """63 bits of a share's first samples, to find shares that are one and the same; 0 where they are too few, too alike, or
    cannot be pickled.

    >>> opening_of(["a", "b", "c", "d"]) == opening_of(["a", "b", "c", "d"]) != opening_of(["b", "c", "d", "a"])
    True
    >>> opening_of(["a"] * 16)
    0
    """
    try:
        prints = [hashed(_content(sample)) for sample in samples[:OPENING]]
    except Exception:  # noqa: BLE001 - a sample's own code
        return 0
    return int(hashed("".join(prints)), 16) >> 1 if len(set(prints)) >= OPENING // 4 else 0


def _content(value: Any) -> bytes:
    """What a sample holds: of a tensor its numbers, where pickle would give an address."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy() if value.dtype is torch.bfloat16 else value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, Mapping) or (hasattr(value, "items") and not isinstance(value, np.ndarray)):
        return b"{%s}" % b",".join(_content(key) + b":" + _content(held) for key, held in value.items())
    if isinstance(value, (list, tuple)):
        return b"[%s]" % b",".join(map(_content, value))
    return pickle.dumps(value)


class _Forwarding:
    """Attributes that are not its own are the dataset's, also when set: ``worker_init_fn`` may know the dataset only."""

    _own: frozenset[str] = frozenset()
    dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own or "dataset" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.dataset, name, value)


class IndexedDataset(_Forwarding):
    """A map-style dataset whose batches keep their dataset indices on the way to a RefinementCollator.

    The dataset's own ``__getitems__`` is used where it has one. Its ``set_epoch`` is called in the workers, too.

    >>> window = IndexedDataset(["a", "b", "c"]).__getitems__([2, 0])
    >>> window.samples, window.request.indices
    (['c', 'a'], [2, 0])
    """

    _own = frozenset({"dataset", "_epoch"})

    def __init__(self, dataset: Any) -> None:
        object.__setattr__(self, "dataset", dataset)
        self._epoch = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, request: Request | list[int]) -> WindowSamples:
        if not isinstance(request, Request):
            asked = Request(np.arange(len(request)), (len(request),), number=0, indices=request)
            return WindowSamples(asked, _fetch(self.dataset, request))
        if self._epoch != request.epoch:
            self._epoch = request.epoch
            set_epoch(self.dataset, request.epoch)
        if request.max_bytes is None:
            return WindowSamples(request, _fetch(self.dataset, request.indices) if len(request) else [])
        samples = self._fetch_bounded(request, request.max_bytes)
        return WindowSamples(request.part(0, len(samples)), samples)

    def _fetch_bounded(self, request: Request, max_bytes: int) -> list[Any]:
        """As many samples as hold about ``max_bytes``: whole planned batches, at least one.

        The first samples say how large they are, the next read goes as far as the rest may be expected to fit. So a window
        of small samples takes two reads, and one of images ends where it should, with at most one planned batch too many.
        """
        ends = np.cumsum(request.groups) if request.groups is not None else np.arange(1, len(request) + 1)
        samples: list[Any] = []
        size, wanted = 0, FETCHED_AT_ONCE
        while len(samples) < len(request) and (not samples or size < max_bytes):
            stop = int(ends[min(np.searchsorted(ends, min(wanted, len(request))), len(ends) - 1)])
            fetched = _fetch(self.dataset, request.indices[len(samples) : stop])
            samples += fetched
            size += sum(sample_bytes(sample) for sample in fetched)
            wanted = max(int(max_bytes * len(samples) / max(size, 1)), len(samples) + 1)
        return samples


def _fetch(dataset: Any, indices: Sequence[int]) -> list[Any]:
    together = getattr(dataset, "__getitems__", None)
    if together is None:
        return [_item(dataset, index) for index in indices]
    try:
        samples = list(together(list(indices)))
    except Exception as error:
        raise RuntimeError(f"dataset items {shorten(indices)} raised {type(error).__name__}: {error}") from error
    if len(samples) != len(indices):
        raise RuntimeError(
            f"the dataset's __getitems__ gave {len(samples)} samples for {len(indices)} indices "
            f"{shorten(indices)}; it must give one for each, in their order"
        )
    return samples


def _item(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:
        raise RuntimeError(f"dataset item {index} raised {type(error).__name__}: {error}") from error


FRESH: Mapping[str, Any] = {"read": 0, "until": 0, "keep": (), "state": None}


class IterableWindows(_Forwarding, IterableDataset):
    """An iterable dataset, a window at a time. Sharding over ranks and workers is the dataset's own affair.

    Resumed, a worker reads on from its first window that was not used up, leaves out what was used of it, and where nothing
    else is left gives one used sample, marked as spare, for its rank to idle on.

    Args:
        window: samples a window, at most.
        max_bytes: a window ends when its samples hold so many bytes.
        rank, size: a worker's n-th sample is given the number ``(n * workers + worker) * size + rank``.
    """

    _own = frozenset({"dataset", "window", "max_bytes", "rank", "size", "_epoch", "_resume"})

    def __init__(
        self, dataset: Any, window: int, *, max_bytes: int | None = None, rank: int = 0, size: int = 1
    ) -> None:
        object.__setattr__(self, "dataset", dataset)
        self.window, self.max_bytes, self.rank, self.size = window, max_bytes, rank, size
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # persistent workers see it change
        self._resume: tuple[int, Mapping[str, Any]] = (0, {})

    def start(self, epoch: int, spots: Mapping[str, Any]) -> None:
        """Choose the epoch of the next iteration, and the spot from where each worker resumes it."""
        self._epoch.fill_(epoch)
        self._resume = epoch, spots
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[WindowSamples]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch = int(self._epoch)
        set_epoch(self.dataset, epoch)
        resumed, spots = self._resume
        spot = spots.get(str(worker), FRESH) if resumed == epoch else FRESH
        if spot["state"] is not None:
            self.dataset.load_state_dict(spot["state"])
        samples = iter(self.dataset)
        spare = []
        if spot["state"] is None:
            spare = list(islice(samples, min(spot["read"], 1)))
            for _ in islice(samples, max(spot["read"] - 1, 0)):
                pass
        came = False
        for first, numbers, chosen, place in self._windows(samples, spot, spare):
            came = True
            arrivals = [(n * workers + worker) * self.size + self.rank for n in numbers]
            request = Request(np.asarray(arrivals), number=first, indices=arrivals, epoch=epoch)
            yield WindowSamples(request, chosen, place, worker)
        if spare and not came:
            yield WindowSamples(
                Request(np.zeros(1, np.int64), indices=(0,), epoch=epoch), spare[:1], {}, worker, spare=True
            )

    def _windows(
        self, samples: Iterator[Any], spot: Mapping[str, Any], spare: list[Any]
    ) -> Iterator[tuple[int, list[int], list[Any], dict[str, Any]]]:
        """(its first sample's number, numbers of those not used yet, these samples, its place) of each window."""
        read, until, keep = spot["read"], spot["until"], set(spot["keep"])
        while True:
            state, first, chosen, numbers, size = self._state(), read, [], [], 0
            while len(chosen) < self.window and (self.max_bytes is None or size < self.max_bytes):
                found = list(islice(samples, 1))
                if not found:
                    break
                if read >= until or read in keep:
                    chosen += found
                    numbers.append(read)
                    size += 0 if self.max_bytes is None else sample_bytes(found[0])
                elif not spare:
                    spare += found
                read += 1
            if not chosen:
                return
            place = {"read": first, "until": read, "state": state, "numbers": numbers}
            yield first, numbers, chosen, place if first else {**place, "opening": opening_of(chosen)}

    def _state(self) -> Any:
        """The dataset's own state before the next sample, where it keeps one."""
        if callable(getattr(self.dataset, "state_dict", None)) and hasattr(self.dataset, "load_state_dict"):
            return self.dataset.state_dict()
        return None
