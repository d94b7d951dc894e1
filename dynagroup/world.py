"""The few collectives that dynagroup needs, behind an interface that tests can stand in for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from dynagroup.errors import AlignmentError, ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["DistributedWorld", "SingleProcess", "World", "current_world", "rank_and_size"]


class World(Protocol):
    """The ranks that run one job together. Every method is collective: all ranks call it, with equally long vectors."""

    @property
    def rank(self) -> int:
        """This process, from 0 to ``size - 1``."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_max(self, values: Sequence[int], /) -> list[int]:
        """Element-wise maximum over ranks."""
        ...

    def all_sum(self, values: Sequence[int], /) -> list[int]:
        """Element-wise sum over ranks."""
        ...


class SingleProcess:
    """A world of one.

    >>> SingleProcess().all_max([3, 4])
    [3, 4]
    """

    rank = 0
    size = 1

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return list(values)

    def all_sum(self, values: Sequence[int], /) -> list[int]:
        return list(values)


class DistributedWorld:
    """Ranks of ``torch.distributed``; small CPU vectors travel over a gloo group of their own.

    A group of our own keeps this metadata apart from the job's collectives, works for NCCL-only jobs, and has a
    timeout of its own: a rank that has gone ends in :class:`AlignmentError`, not in a hang. Constructing it is
    collective.

    Args:
        group: the ranks that take part (say, the data-parallel group of a device mesh); default: all.
        timeout_s: seconds after which a rank that does not answer counts as gone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group first, or leave world=None"
            )
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._group = dist.new_group(
            ranks, backend="gloo", timeout=timedelta(seconds=timeout_s), use_local_synchronization=group is not None
        )
        self._timeout_s = timeout_s
        self.rank = dist.get_rank(self._group)  # pyright: ignore[reportArgumentType] - we are in the group
        self.size = len(ranks)

    def all_max(self, values: Sequence[int], /) -> list[int]:
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.MAX)

    def all_sum(self, values: Sequence[int], /) -> list[int]:
        import torch.distributed as dist

        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        import torch
        import torch.distributed as dist

        vector = torch.tensor(list(values), dtype=torch.int64)
        try:
            dist.all_reduce(vector, op=op, group=self._group)
        except RuntimeError as error:
            raise AlignmentError(
                f"rank {self.rank} of {self.size} lost contact with the other ranks during an exchange: a rank was killed, "
                f"raised an error, stopped iterating early, or did not answer within {self._timeout_s:g} s ({error})"
            ) from error
        return vector.tolist()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: from ``torch.distributed`` once initialised, else (0, 1)."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def current_world(*, timeout_s: float = 600.0) -> World:
    """The world of this process: ``torch.distributed`` if it is initialised with several ranks, else a world of one."""
    return DistributedWorld(timeout_s=timeout_s) if rank_and_size()[1] > 1 else SingleProcess()
