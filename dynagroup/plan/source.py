"""A user's sampler of indices, read once an epoch."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np

from dynagroup.distributed import current_world
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.shapes import IntArray

__all__ = ["OrderSource", "check_alike"]


class OrderSource:
    """Reads a user's sampler of indices once an epoch and keeps the epoch that is running.

    A sampler with ``set_epoch`` is told the epoch. One with a ``generator`` (of torch, NumPy or ``random``) reaches an epoch by
    drawing all before it, from where its generator stood at first: an epoch has the same order whenever it is asked for. Any
    other is read once for each epoch, as it comes.

    Raises:
        ConfigError: it is no iterable, can be read only once, or gives what is no index.
    """

    def __init__(self, source: Iterable[int], num_samples: int) -> None:
        if not isinstance(source, Iterable):
            raise ConfigError(f"`order` must be an iterable of dataset indices, but is {source!r}")
        if isinstance(source, Iterator):
            raise ConfigError(
                f"`order` must give indices anew every epoch, but {type(source).__name__} can be read only once; "
                "pass a list or a sampler"
            )
        self._source = source
        self._num_samples = num_samples
        self._epoch = -1
        self._counted: int | None = None
        self._indices: IntArray = np.zeros(0, np.int64)
        self._generator = getattr(source, "generator", None)
        start = _state_of(self._generator)
        self._before: dict[int, Any] = {} if start is None else {0: start}

    def __len__(self) -> int:
        """Indices an epoch draws, without drawing them where the source can say."""
        return len(self._source) if isinstance(self._source, Sized) else len(self.of_epoch(max(self._epoch, 0)))

    @property
    def counted(self) -> int:
        """Indices that every epoch draws, where updates are counted by it: what ``len`` said first."""
        if self._counted is None:
            self._counted = len(self)
        return self._counted

    def counted_epoch(self, epoch: int) -> IntArray:
        """:meth:`of_epoch`, of exactly :attr:`counted` indices.

        Raises:
            ConfigError: it gives more or fewer; some would be lost, or looked for in vain.
        """
        counted, indices = self.counted, self.of_epoch(epoch)
        if len(indices) != counted:
            raise ConfigError(
                f"`sampler` gives {len(indices)} indices in epoch {epoch}, but its len(), or the epoch before, said {counted}; "
                "with `samples_per_update` every epoch draws as many, so that updates can be counted: correct its __len__, "
                "or make a new loader where the number changes"
            )
        return indices

    def of_epoch(self, epoch: int) -> IntArray:
        if epoch != self._epoch:
            set_epoch = getattr(self._source, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
                self._indices = self._checked(list(self._source))
            elif self._before:
                self._indices = self._drawn(epoch)
            else:
                for _ in range(max(1, epoch - self._epoch)):  # it may be seeded in a way that cannot be seen
                    self._indices = self._read_again()
            self._epoch = epoch
        return self._indices

    def _read_again(self) -> IntArray:
        indices = self._checked(list(self._source))
        if len(self._indices) and not len(indices):
            raise ConfigError(
                f"`order` must give indices anew every epoch, but {type(self._source).__name__} gave {len(self._indices)} once "
                "and then none; its __iter__ must begin anew"
            )
        return indices

    def _drawn(self, epoch: int) -> IntArray:
        known = max(e for e in self._before if e <= epoch)
        _rewind(self._generator, self._before[known])
        indices: list[int] = []
        for drawn in range(known, epoch + 1):
            self._before[drawn] = _state_of(self._generator)
            indices = list(self._source)
        self._before = {e: state for e, state in self._before.items() if e in (0, epoch)}
        return self._checked(indices)

    def checksum(self, epoch: int) -> int:
        return zlib.crc32(self.of_epoch(epoch).data)

    def _checked(self, indices: list[int]) -> IntArray:
        try:
            array = np.asarray(indices)
        except ValueError:  # ragged
            array = np.asarray(indices, object)
        if len(array) and not np.issubdtype(array.dtype, np.integer):
            raise ConfigError(f"`order` must give integer indices, but gives {array.dtype}")
        outside = np.flatnonzero((array < 0) | (array >= self._num_samples))
        if len(outside):
            raise ConfigError(
                f"`order` gives index {array[outside[0]]}, but there are lengths for {self._num_samples} samples"
            )
        return array.astype(np.int64)


def _state_of(generator: Any) -> Any:
    """Where a generator stands; None if it is none that can be set back."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else None


def _rewind(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def check_alike(order: OrderSource, epoch: int) -> None:
    """Refuse an `order` that differs between the ranks of this job. Collective, once an epoch."""
    crc = order.checksum(epoch)
    highest, lowest = current_world().all_max([crc, -crc])
    if highest != -lowest:
        raise AlignmentError(
            f"`order` gives other indices on other ranks in epoch {epoch}, so samples would be lost and repeated; "
            "seed it alike on all ranks, e.g. RandomSampler(data, generator=torch.Generator().manual_seed(0))"
        )
