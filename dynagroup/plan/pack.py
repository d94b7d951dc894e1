"""Packed batches."""

from __future__ import annotations

import numpy as np

from dynagroup.budget.base import Budget
from dynagroup.plan.batches import Batches, longest_first, offsets_of
from dynagroup.plan.rounding import RoundBatch, smaller_size
from dynagroup.shapes import BatchShape, IntArray, Streams

__all__ = ["pack"]

MAX_OPEN = 256  # open batches that first-fit looks at; more finds hardly better places and costs time per sample


def pack(lengths: Streams, budget: Budget, *, round_batch: RoundBatch | None = None) -> Batches:
    """First-fit decreasing."""
    order = longest_first(lengths)
    bins = _Bins(lengths, budget)
    for position in order.tolist():
        bins.place(position)
    batches = [np.sort(np.asarray(members)) for members in bins.members]
    if round_batch is not None:
        batches = [part for batch in batches for part in _rounded_parts(batch, round_batch)]
    batches.sort(key=lambda batch: int(batch[0]))
    return Batches(np.concatenate(batches), offsets_of(np.asarray([len(b) for b in batches])))


def _rounded_parts(batch: IntArray, round_batch: RoundBatch) -> list[IntArray]:
    size = smaller_size(len(batch), round_batch)
    return [batch] if size == len(batch) else [batch[:size], *_rounded_parts(batch[size:], round_batch)]


class _Bins:
    """Packed batches being filled; the ``MAX_OPEN`` youngest are open."""

    def __init__(self, lengths: Streams, budget: Budget) -> None:
        self.members: list[list[int]] = []
        self._lengths = {name: values.astype(np.int64) for name, values in lengths.items()}
        self._budget = budget
        self._count = np.zeros(0, np.int64)
        self._longest = {name: np.zeros(0, np.int64) for name in lengths}
        self._total = {name: np.zeros(0, np.int64) for name in lengths}

    def place(self, position: int) -> None:
        sample = {name: values[position] for name, values in self._lengths.items()}
        slot = self._first_that_fits(sample)
        if slot is None:
            slot = self._open()
            self.members.append([])
        self.members[len(self.members) - len(self._count) + slot].append(position)
        self._count[slot] += 1
        for name, units in sample.items():
            self._longest[name][slot] = max(self._longest[name][slot], units)
            self._total[name][slot] += units

    def _first_that_fits(self, sample: dict[str, np.int64]) -> int | None:
        if not len(self._count):
            return None
        shape = BatchShape(
            self._count + 1,
            {name: np.maximum(values, sample[name]) for name, values in self._longest.items()},
            {name: values + sample[name] for name, values in self._total.items()},
        )
        fits = self._budget.fits(shape)
        first = int(np.argmax(fits))
        return first if fits[first] else None

    def _open(self) -> int:
        keep = slice(1, None) if len(self._count) == MAX_OPEN else slice(None)
        self._count = np.append(self._count[keep], 0)
        for table in (self._longest, self._total):
            for name in table:
                table[name] = np.append(table[name][keep], 0)
        return len(self._count) - 1
