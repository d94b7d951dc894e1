"""Worker side of the online half: the user's dataset, read a window at a time."""

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
from dynagroup.online.records import WindowRequest, WindowSamples, shorten

__all__ = ["IndexedDataset", "StreamDataset", "sample_bytes", "is_stream", "opening_of", "set_epoch"]

OPENING = 16
"""Samples by which shares of a stream are compared; fewer than a quarter of them different say nothing."""

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

    def __getitems__(self, request: WindowRequest | list[int]) -> WindowSamples:
        if not isinstance(request, WindowRequest):
            return WindowSamples(WindowRequest(0, request, (len(request),)), self._fetch(request))
        if self._epoch != request.epoch:
            self._epoch = request.epoch
            set_epoch(self.dataset, request.epoch)
        if request.max_bytes is None:
            return WindowSamples(request, self._fetch(request.indices) if len(request) else [])
        samples = self._fetch_bounded(request, request.max_bytes)
        return WindowSamples(request.first(len(samples)), samples)

    def _fetch_bounded(self, request: WindowRequest, max_bytes: int) -> list[Any]:
        """As many samples as hold about ``max_bytes``: whole planned batches, at least one.

        The first samples say how large they are, the next read goes as far as the rest may be expected to fit. So a window
        of small samples takes two reads, and one of images ends where it should, with at most one planned batch too many.
        """
        ends = np.cumsum(request.groups) if request.groups is not None else np.arange(1, len(request) + 1)
        samples: list[Any] = []
        size, wanted = 0, FETCHED_AT_ONCE
        while len(samples) < len(request) and (not samples or size < max_bytes):
            stop = int(ends[min(np.searchsorted(ends, min(wanted, len(request))), len(ends) - 1)])
            fetched = self._fetch(request.indices[len(samples) : stop])
            samples += fetched
            size += sum(sample_bytes(sample) for sample in fetched)
            wanted = max(int(max_bytes * len(samples) / max(size, 1)), len(samples) + 1)
        return samples

    def _fetch(self, indices: Sequence[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        if fetch is not None:
            try:
                samples = list(fetch(list(indices)))
            except Exception as error:
                raise RuntimeError(f"dataset items {shorten(indices)} raised {_said(error)}") from error
            if len(samples) != len(indices):
                raise RuntimeError(
                    f"the dataset's __getitems__ gave {len(samples)} samples for {len(indices)} indices "
                    f"{shorten(indices)}; it must give one for each, in their order"
                )
            return samples
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                raise RuntimeError(f"dataset item {index} raised {_said(error)}") from error
        return samples


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class StreamDataset(_Forwarding, IterableDataset):
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
        self._resume: Mapping[str, Any] | None = None

    def start(self, epoch: int, resume: Mapping[str, Any] | None) -> None:
        """Choose the epoch of the next iteration, and from where each worker resumes it."""
        self._epoch.fill_(epoch)
        self._resume = resume
        set_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[WindowSamples]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        epoch = int(self._epoch)
        set_epoch(self.dataset, epoch)
        resume = self._resume if self._resume and self._resume["epoch"] == epoch else None
        spot = (resume or {}).get("workers", {}).get(str(worker))
        read, until, keep = (spot["read"], spot["until"], set(spot["keep"])) if spot else (0, 0, set())
        if spot and spot["state"] is not None:
            self.dataset.load_state_dict(spot["state"])
        samples = iter(self.dataset)
        passed = list(islice(samples, 1 if spot and spot["state"] is None and read else 0))
        if passed:
            next(islice(samples, read - 1, read - 1), None)
        came = False
        while True:
            state, first, chosen, numbers, size = self._state(), read, [], [], 0
            while len(chosen) < self.window and (self.max_bytes is None or size < self.max_bytes):
                try:
                    sample = next(samples)
                except StopIteration:
                    break
                if read >= until or read in keep:
                    chosen.append(sample)
                    numbers.append(read)
                    size += 0 if self.max_bytes is None else sample_bytes(sample)
                elif not passed:
                    passed.append(sample)
                read += 1
            if not chosen:
                break
            came = True
            arrivals = [(n * workers + worker) * self.size + self.rank for n in numbers]
            place = {"read": first, "until": read, "state": state, "numbers": numbers}
            if not first:
                place["opening"] = opening_of(chosen)
            yield WindowSamples(WindowRequest(first, arrivals, epoch=epoch), chosen, place, worker)
        if passed and not came:
            yield WindowSamples(WindowRequest(-1, (0,), epoch=epoch), passed, {}, worker, spare=True)

    def _state(self) -> Any:
        """The dataset's own state before the next sample, where it keeps one."""
        if callable(getattr(self.dataset, "state_dict", None)) and hasattr(self.dataset, "load_state_dict"):
            return self.dataset.state_dict()
        return None
