"""Rounds the shares of sources to whole samples, update after update, so that no source falls behind or gets ahead."""

import numpy as np
from numpy.typing import NDArray

from dynagroup.shapes import IntArray

TOLERANCE = 1e-6  # of sums of shares: far above their rounding errors, far below a sample
LOOKAHEAD = 16  # samples of a source whose deadlines are compared

FloatArray = NDArray[np.float64]


def rounded_shares(exact: FloatArray, behind: FloatArray) -> IntArray:
    """Returns how many samples each source gives to each update: (updates, sources).

    Pfair scheduling (Baruah, Cohen, Plaxton and Varvel, "Proportionate progress", 1996). Each source gives its share
    rounded down, or one sample more. The further samples have a deadline, the update in which a source would fall a
    whole sample behind; the earliest deadlines come first. Takes O(updates * sources).

    Args:
        exact: (updates, sources), the exact shares in samples; each row has an integer sum.
        behind: (sources,), how many samples each source is behind at the start.

    >>> rounded_shares(np.full((4, 2), [0.75, 0.25]), np.zeros(2)).tolist()
    [[1, 0], [1, 0], [0, 1], [1, 0]]
    """
    whole = np.floor(exact + TOLERANCE)
    parts = np.maximum(exact - whole, 0.0)
    due = behind + np.cumsum(parts, axis=0)
    sources = [_Source(column) for column in due.T]
    counts = whole.astype(np.int64)
    for update, num_more in enumerate(np.rint(parts.sum(axis=1)).astype(int).tolist()):
        if not num_more:
            continue
        candidates = np.flatnonzero(parts[update] > TOLERANCE).tolist()
        candidates.sort(key=lambda source: sources[source].urgency(update))
        for source in candidates[:num_more]:
            sources[source].give()
            counts[update, source] += 1
    return counts


class _Source:
    """One source's further samples, and when each is due.

    Args:
        due: (updates,), how many further samples it should have given after each update."""

    def __init__(self, due: FloatArray) -> None:
        self._due = due.tolist()
        counts = np.arange(1, max(int(due[-1]), 0) + 2)
        self._deadlines = due.searchsorted(counts - TOLERANCE).tolist()
        self._num_given = 0
        self._times = self._times_of_next()

    def give(self) -> None:
        self._num_given += 1
        self._times = self._times_of_next()

    def urgency(self, update: int) -> tuple[bool, list[tuple[int, bool]], float]:
        """Returns a key that sorts the most urgent source first. A source that would get ahead is the last."""
        behind = self._due[update] - self._num_given
        return behind <= TOLERANCE, self._times, -behind

    def _times_of_next(self) -> list[tuple[int, bool]]:
        """Returns the deadlines of the next samples, as long as each may come in the deadline of the one before."""
        times = []
        for sample in range(self._num_given, self._num_given + LOOKAHEAD):
            if sample >= len(self._deadlines) or self._deadlines[sample] == len(self._due):
                times.append((len(self._due), True))
                break
            deadline = self._deadlines[sample]
            is_last = self._due[deadline] <= sample + 1 + TOLERANCE
            times.append((deadline, is_last))
            if is_last:
                break
        return times
