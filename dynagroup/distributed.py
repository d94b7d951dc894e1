"""The few collectives that dynagroup uses, behind an interface that tests can replace."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from operator import index
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.validation import check_number, explained, warn_user

if TYPE_CHECKING:
    import torch.distributed as dist

PARTS = "first or last samples in their datasets"
CONNECTS_S = 600.0  # until ranks must have connected, because a group's own timeout may be a month


class World(Protocol):
    """The ranks that run one job together. All ranks must call each method, with vectors of equal length. Maxima are
    computed in int64; sums in float64, exact for integers up to 2**53. All ranks get identical results."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_max(self, values: Sequence[int], /) -> list[int]: ...
    def all_sum(self, values: Sequence[float], /) -> list[float]: ...


def without_parts(differing: list[str]) -> list[str]:
    """Returns what differs between ranks. If it is only PARTS, it warns instead: files may have other names on each machine."""
    if differing != [PARTS]:
        return differing
    warn_user(
        f"ranks have different {PARTS}: give every rank the whole dataset, which the loader divides, or samples are lost"
    )
    return []


def as_int64(values: Sequence[int]) -> NDArray[np.int64]:
    """Returns ``values`` as int64. OverflowError: a value is too large for int64; TypeError: a value is no integer."""
    array = np.asarray(values)
    return (
        array.astype(np.int64)
        if array.dtype.kind in "bi"
        else np.array([index(v) for v in values], np.int64)
    )


class SingleProcess:
    """The ``World`` of a job with one rank: every exchange returns the given values."""

    rank = 0
    size = 1

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return as_int64(values).tolist()

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return [float(value) for value in values]


class DistributedWorld:
    """The ``World`` of a ``torch.distributed`` job: ranks exchange small CPU vectors through a gloo group of their own.

    The own group keeps these vectors apart from the job's collectives, works when the job uses NCCL only, and has its
    own timeout: if one rank stops, the others raise :class:`AlignmentError` instead of hanging. The first
    DistributedWorld of a process group creates the gloo group, so all ranks must create it together; others share it.

    Args:
        group: the ranks that take part, e.g. the data-parallel group of a device mesh. None: all ranks.
        timeout_s: float, seconds until a rank that does not answer counts as lost.

    Raises ConfigError if ``torch.distributed`` is not initialised, or this process is not in ``group``."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call init_process_group first")
        timeout_s, parent = (
            check_number("timeout_s", timeout_s),
            group if group is not None else dist.group.WORLD,
        )
        ranks = dist.get_process_group_ranks(parent)
        if dist.get_rank() not in ranks:
            raise ConfigError(
                f"`group` must include this process (rank {dist.get_rank()}), but has the ranks {ranks}"
            )
        self.rank, self.size = dist.get_rank(parent), len(ranks)
        lost = f"rank {self.rank} of {self.size} lost contact with the others: one was killed, failed, left its loop early, or"
        self._lost = f"{lost} did not answer within {timeout_s:,.10g} s; see the other ranks' logs"
        beside = _BESIDE.setdefault(parent, {})
        if timeout_s not in beside:
            part = (
                len(ranks) < dist.get_world_size()
            )  # connects only if its ranks are in equally many groups
            how: Any = {"timeout": timedelta(seconds=timeout_s), "use_local_synchronization": part}
            with explained(self._lost, kind=AlignmentError), ThreadPool(1) as pool:
                beside[timeout_s] = pool.apply_async(
                    dist.new_group, (ranks,), {"backend": "gloo", **how}
                ).get(CONNECTS_S)
        self._group = beside[timeout_s]

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return self._reduce(as_int64(values), "MAX")

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return self._reduce(np.asarray(values, np.float64), "SUM")

    def _reduce(self, values: NDArray[Any], op: str) -> list[Any]:
        import torch

        with torch.inference_mode(False):  # in which a view does not hold its tensor
            vector = torch.tensor(values)
            _HELD.append((vector, vector.view(-1)))
        with _despite_dead_workers(), explained(self._lost, kind=AlignmentError):
            torch.distributed.all_reduce(
                vector, op=getattr(torch.distributed.ReduceOp, op), group=self._group
            )
        return vector.tolist()


# A thread of gloo lets go of a vector some time after the exchange. If only Python holds it then, the thread takes a lock of the
# interpreter, and a worker that is forked at this moment waits for that lock for ever. So a view holds the vector, too.
_HELD: deque[Any] = deque(maxlen=64)


@contextmanager
def _despite_dead_workers() -> Iterator[None]:
    """When a DataLoader's worker dies, torch's signal handler raises an error wherever the main thread is. Inside a
    collective, the other ranks would not learn of it; but the next load fails as well, and tells them."""
    number, is_main = (
        getattr(signal, "SIGCHLD", 0),
        threading.current_thread() is threading.main_thread(),
    )  # not on Windows
    handler: Any = signal.getsignal(number) if number and is_main else None

    def later(*arguments: Any) -> None:
        with suppress(RuntimeError):
            handler(*arguments)

    if callable(handler):
        signal.signal(number, later)
    try:
        yield
    finally:
        if callable(handler):
            signal.signal(number, handler)


# A gloo group takes five file descriptors and three threads: each process group gets one per timeout, freed with it.
_BESIDE: WeakKeyDictionary[Any, dict[float, Any]] = WeakKeyDictionary()


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks from ``torch.distributed``; (0, 1) without it."""
    import torch.distributed as dist

    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_available() and dist.is_initialized()
        else (0, 1)
    )


def current_world(*, timeout_s: float = 600.0) -> World:
    """Returns the ``World`` of this process: of ``torch.distributed`` if it runs several ranks, else of one rank."""
    if rank_and_size()[1] > 1:
        return DistributedWorld(timeout_s=timeout_s)
    warn_if_launched()
    return SingleProcess()


def warn_if_launched() -> None:
    """Warns that every rank uses all samples, if ``torchrun`` is used but torch.distributed is not set up."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        told = "torchrun started this process, but torch.distributed is not initialised, so every rank uses all samples"
        warn_user(
            f"{told}; call torch.distributed.init_process_group() before the first batch is taken"
        )
