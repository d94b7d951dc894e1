"""The few collectives that dynagroup needs, behind an interface that tests can replace."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from operator import index
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.validation import check_number, warn_user

if TYPE_CHECKING:
    import torch.distributed as dist


class World(Protocol):
    """The ranks that run one job together. Every method is collective: all ranks call it, with vectors of equal length.

    Maxima are exact int64; sums are float64, exact for integers up to 2**53. All ranks get the same bits.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_max(self, values: Sequence[int], /) -> list[int]: ...
    def all_sum(self, values: Sequence[float], /) -> list[float]: ...


def as_int64(values: Sequence[int]) -> NDArray[np.int64]:
    """An int64 array for a maximum. OverflowError: a value does not fit; TypeError: it is not an integer."""
    array = np.asarray(values)
    return array.astype(np.int64) if array.dtype.kind in "bi" else np.array([index(v) for v in values], np.int64)


class SingleProcess:
    """A world of one rank."""

    rank = 0
    size = 1

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return as_int64(values).tolist()

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return [float(value) for value in values]


class DistributedWorld:
    """Ranks of ``torch.distributed``. They exchange small CPU vectors in a gloo group beside the job's group.

    This second group keeps these vectors apart from the job's collectives, works for NCCL-only jobs, and has its own
    timeout: if a rank ends, others raise :class:`AlignmentError` and do not hang. Each group of ranks has one: the
    first world makes it, which is collective, all others share it, and ``destroy_process_group`` closes it.

    Args:
        group: the ranks that take part (say, the data-parallel group of a device mesh); default: all.
        timeout_s: seconds after which a rank that does not answer counts as gone.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised, or this process is not in ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call init_process_group first")
        self._timeout_s = check_number("timeout_s", timeout_s)
        parent = group if group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(parent)
        if dist.get_rank() not in ranks:
            raise ConfigError(f"`group` has the ranks {ranks}, but this process is rank {dist.get_rank()}")
        beside = _BESIDE.setdefault(parent, {})
        if self._timeout_s not in beside:
            how: Any = {"timeout": timedelta(seconds=self._timeout_s), "use_local_synchronization": group is not None}
            beside[self._timeout_s] = dist.new_group(ranks, backend="gloo", **how)
        self._group = beside[self._timeout_s]
        self.rank, self.size = dist.get_rank(self._group), dist.get_world_size(self._group)

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return self._reduce(as_int64(values), "MAX")

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return self._reduce(np.asarray(values, np.float64), "SUM")

    def _reduce(self, values: NDArray[Any], op: str) -> list[Any]:
        import torch

        dist, vector = torch.distributed, torch.from_numpy(values.copy())
        try:
            dist.all_reduce(vector, op=getattr(dist.ReduceOp, op), group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
            raise AlignmentError(
                f"rank {self.rank} of {self.size} lost contact with the other ranks during an exchange: a rank was killed, "
                f"raised an error, stopped iterating early, or did not answer within {self._timeout_s:g} s ({error})"
            ) from error
        return vector.tolist()


# One gloo group costs five file descriptors and three threads, and nobody closes it before the job ends. So each group
# of the job has one, found by that group's identity. The reference is weak, so that it goes when the job's group goes.
_BESIDE: WeakKeyDictionary[Any, dict[float, Any]] = WeakKeyDictionary()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: from ``torch.distributed`` once initialised, else (0, 1)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def current_world(*, timeout_s: float = 600.0) -> World:
    """The world of this process: ``torch.distributed`` if it is initialised with several ranks, else a world of one."""
    if rank_and_size()[1] > 1:
        return DistributedWorld(timeout_s=timeout_s)
    warn_if_launched()
    return SingleProcess()


def warn_if_launched() -> None:
    """Warn that every rank uses all samples, if ``torchrun`` started them without torch.distributed set up."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_torchelastic_launched() and not dist.is_initialized():
        warn_user(
            "torchrun started this process, but torch.distributed is not initialised, so every rank uses all samples; "
            "call torch.distributed.init_process_group() before the first batch is taken"
        )
