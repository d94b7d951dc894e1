"""What packed batches that are being filled still take: limits on sums are compared, everything else is asked of the budget."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dynagroup.budget.base import UNLIMITED, AdditiveCap, AllOf, Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams

__all__ = ["Bin", "Room", "sum_limits"]

BOLD = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256])  # further samples that one question asks for
STEPS = np.arange(1, 65)


class SumLimits(NamedTuple):
    """What a budget says about sums over the samples of a packed batch."""

    sums: list[tuple[IntArray, int]]
    """Units of each sample, and the most that a batch may sum to."""
    samples: int
    """Most samples of a batch."""
    asks: bool
    """Some part of the budget knows more than sums and must be asked."""


def sum_limits(budget: Budget, lengths: Streams) -> SumLimits:
    """The limits of a budget that are mere sums, for these samples.

    >>> budget = TokenBudget(100, max_samples=7, layout="packed") & AdditiveCap("patches", 9)
    >>> limits = sum_limits(budget, {"tokens": np.array([3, 4]), "patches": np.array([1, 0])})
    >>> [(units.tolist(), limit) for units, limit in limits.sums], limits.samples, limits.asks
    ([([3, 4], 100), ([1, 0], 9)], 7, False)
    """
    parts = budget.parts if type(budget) is AllOf else (budget,)
    capped = {part.stream for part in parts if isinstance(part, AdditiveCap)} if type(budget) is AllOf else set()
    sums: list[tuple[IntArray, int]] = []
    samples, asks = UNLIMITED, False
    for part in parts:
        if type(part) is TokenBudget and part.layout == "packed":
            names = part.names_in(name for name in lengths if part.streams or name not in capped)
            most = part.max_tokens - part.max_tokens % budget.pad_to_multiple_of
            sums.append((np.stack([lengths[name] for name in names]).sum(axis=0, dtype=np.int64), most))
            samples = min(samples, part.max_samples or UNLIMITED, part.max_tokens)
        elif type(part) is AdditiveCap:
            sums.append((lengths[part.stream].astype(np.int64), part.limit))
        else:  # a class of its own may say anything
            asks = True
    return SumLimits(sums, samples, asks)


class _Caps:
    """Most tokens of a batch by (samples, longest), asked of the budget for a grid at once: two sides of nearly every answer.

    A batch of fewer samples and a shorter longest than a cell's fits with the cell's tokens; one of more and longer does not fit
    with more. Only between the two must the budget itself be asked.
    """

    def __init__(self, budget: Budget, tokens: IntArray) -> None:
        steps = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
        self.counts = [n for n in steps if n < len(tokens)] + [len(tokens)]
        self.longest: list[int] = np.unique(np.quantile(tokens, np.linspace(0, 1, 49), method="higher")).tolist()
        shape = (len(self.longest), len(self.counts))
        longest = np.repeat(np.asarray(self.longest, np.int64), len(self.counts))
        counts = np.tile(np.asarray(self.counts, np.int64), len(self.longest))
        low, high = np.full(len(counts), -1), np.full(len(counts), int(tokens.sum(dtype=np.int64)) + 1)
        while (high - low > 1).any():
            middle = (low + high) // 2
            fits = budget.fits(BatchShape.of(counts, longest, np.maximum(middle, 0)))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        self._most: list[list[int]] = low.reshape(shape).tolist()

    def sure(self, count: int, longest: int) -> int:
        """With at most so many tokens a batch of that many samples fits."""
        i, j = bisect_left(self.longest, longest), bisect_left(self.counts, count)
        return self._most[i][j] if i < len(self.longest) and j < len(self.counts) else -1

    def most(self, count: int, longest: int) -> int:
        """With more tokens than that it does not."""
        i, j = bisect_right(self.longest, longest) - 1, bisect_right(self.counts, count) - 1
        return self._most[max(i, 0)][max(j, 0)] if i >= 0 else UNLIMITED


@dataclass(slots=True)
class Bin:
    """A packed batch that is being filled."""

    load: float
    """Work it holds, plus what it was given beforehand so that others fill first."""
    room: int
    """A sample of more tokens does not fit."""
    members: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """What its samples sum to under the further limits."""
    tokens: int = 0
    longest: int = 0
    refused: int = UNLIMITED
    """The budget was asked, and a sample of more tokens than that does not fit."""
    sure_samples: int = 0
    sure_tokens: int = 0
    """So many samples and tokens are known to fit, as long as none is longer than the longest."""


class Room:
    """Puts samples into bins where they fit. Holds the facts; bins hold what has been decided.

    A budget that knows more than sums is asked boldly: whether the next sample fits *sixteen times over* answers for the
    sixteen that follow, which are no longer. A refused one is bisected for the most tokens that still fit, so that a full bin
    is not asked again for every sample. Both rest on the budget's law alone.
    """

    def __init__(self, lengths: Streams, budget: Budget) -> None:
        alone = BatchShape(np.ones(len(lengths[TOKENS]), np.int64), _wide(lengths), _wide(lengths))
        self.fits_alone: list[bool] = budget.fits(alone).tolist()  # first: it names a stream that is missing
        limits = sum_limits(budget, lengths)
        tokens, self.most_tokens = limits.sums[0] if limits.sums else (lengths[TOKENS].astype(np.int64), UNLIMITED)
        self.tokens: list[int] = tokens.tolist()
        self.most_samples = limits.samples
        self._further = [(units.tolist(), limit) for units, limit in limits.sums[1:]]
        self._asks, self._alone = limits.asks, len(lengths) == 1
        self._budget, self._streams = budget, lengths
        self._caps = _Caps(budget, tokens) if self._asks and self._alone and len(self.tokens) else None

    @property
    def known(self) -> bool:
        """Whether ``room`` alone decides for most samples."""
        return not self._asks

    def fewest(self, samples: Sequence[int]) -> int:
        """No division of these samples can do with fewer batches, by the sums alone."""
        sums = [(len(samples), self.most_samples), (sum(self.tokens[s] for s in samples), self.most_tokens)]
        sums += [(sum(units[s] for s in samples), limit) for units, limit in self._further]
        return max(-(-total // max(limit, 1)) for total, limit in sums)  # a limit of 0 admits samples without tokens

    def bin(self, load: float = 0.0) -> Bin:
        return Bin(load, self.most_tokens, used=[0] * len(self._further))

    def admits(self, bin: Bin, sample: int) -> bool:
        """Whether a sample of at most ``bin.room`` tokens fits; where its length is to blame, ``bin.room`` says so afterwards."""
        if len(bin.members) >= self.most_samples:
            bin.room = -1
            return False
        if any(used + units[sample] > limit for used, (units, limit) in zip(bin.used, self._further, strict=True)):
            return False
        return not self._asks or self._is_sure(bin, sample) or self._asked(bin, sample)

    def add(self, bin: Bin, sample: int, work: float) -> None:
        size = self.tokens[sample]
        bin.members.append(sample)
        bin.load += work
        bin.tokens += size
        bin.longest = max(bin.longest, size)
        bin.room = min(self.most_tokens - bin.tokens, bin.refused)
        for number, (units, _) in enumerate(self._further):
            bin.used[number] += units[sample]

    def fill(self, bin: Bin, members: list[int], work: float) -> None:
        """Let a bin hold these samples and no others; known to fit together."""
        bin.members, bin.load = members, work
        bin.tokens = sum(self.tokens[sample] for sample in members)

    def spare_tokens(self, bin: Bin) -> int:
        """Tokens that the limit on their sum leaves."""
        return self.most_tokens - bin.tokens

    def _is_sure(self, bin: Bin, sample: int) -> bool:
        size = self.tokens[sample]
        return len(bin.members) < bin.sure_samples and bin.tokens + size <= bin.sure_tokens and size <= bin.longest

    def _asked(self, bin: Bin, sample: int) -> bool:
        if self._caps is None:
            return self.together([*bin.members, sample])
        size, count, longest = self.tokens[sample], len(bin.members), max(self.tokens[sample], bin.longest)
        if bin.tokens + size <= self._caps.sure(count + 1, longest):
            return True
        most = self._caps.most(count + 1, longest) - bin.tokens
        if size > most:
            if size <= bin.longest:
                bin.refused = max(min(most, size - 1), -1)
                bin.room = min(bin.room, bin.refused)
            return False
        fits = self._budget.fits(BatchShape.of(count + BOLD, longest, bin.tokens + size * BOLD))
        if fits[0]:
            bold = int(BOLD[np.flatnonzero(fits)[-1]])
            bin.sure_samples, bin.sure_tokens = count + bold, bin.tokens + size * bold
            return True
        bin.refused = self._room_for_one(bin, size)
        bin.room = min(bin.room, bin.refused)
        return False

    def _room_for_one(self, bin: Bin, refused: int) -> int:
        """The longest sample that still fits, shorter than ``refused``; -1 where none does."""
        low, high = -1, refused
        while high - low > 1:
            tried = np.unique(low + (high - low) * STEPS // (len(STEPS) + 1))
            tried = tried[(tried > low) & (tried < high)]
            longest = np.maximum(tried, bin.longest)
            fits = self._budget.fits(BatchShape.of(len(bin.members) + 1, longest, bin.tokens + tried))
            low = int(tried[fits].max(initial=low))
            high = int(tried[~fits].min(initial=high))
        return low

    def together(self, members: Sequence[int]) -> bool:
        """Whether these samples fit one batch."""
        return bool(
            self._budget.fits(BatchShape.of_samples({n: v[list(members)] for n, v in self._streams.items()}))[0]
        )


def _wide(lengths: Streams) -> dict[str, IntArray]:
    return {name: values.astype(np.int64) for name, values in lengths.items()}
