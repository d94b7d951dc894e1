"""The few collectives that dynagroup uses, behind an interface that tests can replace."""

from __future__ import annotations

import logging
import signal
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.validation import check_number, explained, warn_user

if TYPE_CHECKING:
    import torch.distributed as dist

PARTS = "first or last samples in their datasets"
CONNECTS_S = 600.0  # until ranks must have connected, because a group's own timeout may be a month
R = TypeVar("R")
_log = logging.getLogger(__name__)


@runtime_checkable
class World(Protocol):
    """The ranks that run one job together. All ranks must call each method, the first two with vectors of equal length.
    Maxima are computed in int64; sums in float64, exact for integers up to 2**53. All ranks get identical results.
    ``exchange`` sends one int64 vector, of any length, to each rank, and returns those that each rank sent."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_max(self, values: Sequence[int], /) -> list[int]: ...
    def all_sum(self, values: Sequence[float], /) -> list[float]: ...
    def exchange(self, vectors: Sequence[NDArray[np.int64]], /) -> list[NDArray[np.int64]]: ...


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
    if array.dtype.kind in "bi":
        return array.astype(np.int64)
    return np.array([index(value) for value in values], np.int64)


class SingleProcess:
    """The ``World`` of a job with one rank: every exchange returns the given values."""

    rank = 0
    size = 1

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return as_int64(values).tolist()

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return [float(value) for value in values]

    def exchange(self, vectors: Sequence[NDArray[np.int64]], /) -> list[NDArray[np.int64]]:
        return list(vectors)


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
        timeout_s = check_number("timeout_s", timeout_s)
        parent = group if group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(parent)
        if dist.get_rank() not in ranks:
            raise ConfigError(
                f"`group` must include this process (rank {dist.get_rank()}), but has the ranks {ranks}"
            )
        self.rank = dist.get_rank(parent)
        self.size = len(ranks)
        self._lost = (
            f"rank {self.rank} of {self.size} lost contact with the others: one was killed, failed, left its loop "
            f"early, or did not answer within {timeout_s:,.10g} s; see the other ranks' logs"
        )
        groups = _GROUPS_BESIDE.setdefault(parent, {})
        if timeout_s not in groups:
            with explained(self._lost, kind=AlignmentError):
                groups[timeout_s] = _new_gloo_group(ranks, timeout_s)
        self._group = groups[timeout_s]

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return self._reduce(as_int64(values), "MAX")

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return self._reduce(np.asarray(values, np.float64), "SUM")

    def _reduce(self, values: NDArray[Any], op: str) -> list[Any]:
        import torch

        with torch.inference_mode(False):  # in which a view does not hold its tensor
            vector = torch.tensor(values)
            _RECENT_VECTORS.append((vector, vector.view(-1)))
        with _despite_dead_workers(), explained(self._lost, kind=AlignmentError):
            torch.distributed.all_reduce(
                vector, op=getattr(torch.distributed.ReduceOp, op), group=self._group
            )
        return vector.tolist()

    def exchange(self, vectors: Sequence[NDArray[np.int64]], /) -> list[NDArray[np.int64]]:
        sizes = [len(vector) for vector in vectors]
        ones = [1] * self.size
        sizes_to_come = self._all_to_all(np.asarray(sizes, np.int64), ones, ones).tolist()
        received = self._all_to_all(np.concatenate(vectors), sizes, sizes_to_come)
        borders = np.cumsum(sizes_to_come)[:-1]
        return np.split(received, borders)

    def _all_to_all(
        self, values: NDArray[np.int64], sizes: list[int], sizes_to_come: list[int]
    ) -> NDArray[np.int64]:
        import torch

        with torch.inference_mode(False):
            sent = torch.from_numpy(values)
            received = torch.empty(sum(sizes_to_come), dtype=torch.int64)
            _RECENT_VECTORS.append((sent, sent.view(-1), received, received.view(-1)))
        with _despite_dead_workers(), explained(self._lost, kind=AlignmentError):
            torch.distributed.all_to_all_single(
                received, sent, sizes_to_come, sizes, group=self._group
            )
        return received.numpy()


def differing(world: World, facts: Mapping[str, object]) -> list[str]:
    """Returns the names of facts of which ranks have different values. All ranks must call it."""
    marks = [zlib.crc32(repr(fact).encode()) for fact in facts.values()]
    highest = world.all_max([*marks, *(-mark for mark in marks)])
    pairs = zip(highest[: len(marks)], highest[len(marks) :], strict=True)
    return [
        name
        for name, (most, negative_least) in zip(facts, pairs, strict=True)
        if most != -negative_least
    ]


def on_all_ranks(world: World, act: Callable[[], R], what: str) -> R:
    """Returns the result of ``act``. If it fails on one rank, all raise after all have run it: that rank its error, the
    others AlignmentError ("rank 1 of 2 could not read the samples", with ``what`` as "read the samples")."""
    result: Any = None
    error = None
    try:
        result = act()
    except Exception as caught:  # raised when all ranks know; the others first finish their part
        error = caught
        level = logging.ERROR if world.size > 1 else logging.DEBUG
        _log.log(level, "rank %d failed: %r", world.rank, error)
    try:
        (failed_rank,) = world.all_max([-1 if error is None else world.rank])
    except AlignmentError as lost:
        raise error or lost from None
    if error is not None:
        raise error
    if failed_rank >= 0:
        raise AlignmentError(
            f"rank {failed_rank} of {world.size} could not {what}; see that rank's error"
        )
    return result


# A thread of gloo lets go of a vector some time after the exchange. If only Python holds it then, the thread takes a lock of the
# interpreter, and a worker that is forked at this moment waits for that lock for ever. So a view holds the vector, too.
_RECENT_VECTORS: deque[Any] = deque(maxlen=64)


def _new_gloo_group(ranks: list[int], timeout_s: float) -> Any:
    import torch.distributed as dist

    is_part = len(ranks) < dist.get_world_size()
    options = {
        "ranks": ranks,
        "timeout": timedelta(seconds=timeout_s),
        "backend": "gloo",
        # connects only the ranks of a part, which works if they are in equally many groups
        "use_local_synchronization": is_part,
    }
    with ThreadPool(1) as pool:  # in a thread, whose end can be waited for until a deadline
        return pool.apply_async(dist.new_group, kwds=options).get(CONNECTS_S)


@contextmanager
def _despite_dead_workers() -> Iterator[None]:
    """When a DataLoader's worker dies, torch's signal handler raises an error wherever the main thread is. Inside a
    collective, the other ranks would not learn of it; but the next load fails as well, and tells them."""
    is_main = threading.current_thread() is threading.main_thread()
    handler: Any = None
    if is_main and hasattr(signal, "SIGCHLD"):  # not on Windows
        handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler):
        yield
        return

    def handle_silently(*arguments: Any) -> None:
        with suppress(RuntimeError):
            handler(*arguments)

    signal.signal(signal.SIGCHLD, handle_silently)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


# A gloo group takes five file descriptors and three threads: each process group gets one per timeout, freed with it.
_GROUPS_BESIDE: WeakKeyDictionary[Any, dict[float, Any]] = WeakKeyDictionary()


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks from ``torch.distributed``; (0, 1) without it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


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
        warn_user(
            "torchrun started this process, but torch.distributed is not initialised, so every rank uses all "
            "samples; call torch.distributed.init_process_group() before the first batch is taken"
        )
