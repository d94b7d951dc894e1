"""Budgets decide whether a batch of a given shape fits. All code that forms batches asks a budget.

The rule for every budget: a shape that fits must still fit after a sample is removed or shortened.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.memory.phases import Layout
from dynagroup.shapes import BatchShape, IntArray, Streams, primary, round_up
from dynagroup.validation import check_int

BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float64]

UNLIMITED = np.iinfo(np.int64).max // 4


class Budget(ABC):
    """Decides which batch shapes fit. To make your own budget, subclass it and write :meth:`fits`.

    If a batch is too large, it must stay too large when a sample is added or becomes longer; check your own budget with
    ``dynagroup.testing.assert_budget_law``. All other methods have defaults. Below, three batches are asked about.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> class AtMostFour(Budget):
    ...     def fits(self, shape, /):
    ...         return shape.num_samples <= 4
    >>> (AtMostFour() & TokenBudget(100)).fits(BatchShape.of([2, 4, 5], longest=30)).tolist()
    [True, False, False]
    """

    @abstractmethod
    def fits(self, shape: BatchShape, /) -> BoolArray:
        """Returns, for each of K shapes, whether a batch of this shape fits: bool (K,)."""

    def largest(self, longest: IntArray, /) -> IntArray | None:
        """Returns the most samples that fit if the longest has this length, int64 (K,); only for a single stream. 0:
        not even one sample fits. None (the default): the longest length alone does not decide. There is always a most, so
        an empty sample must count, for example as one token."""
        return None

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the quantity that the budget limits, without what is the same for all batches: float64 (K,). The cost
        must never fall when a sample is added or lengthened. Default: padded tokens."""
        return np.asarray(padded_tokens(shape, self), dtype=np.float64)

    @property
    def layout(self) -> Layout:
        """ "padded": a batch costs samples times the longest length; "packed": the sum of its tokens."""
        return "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        """Multiple, in tokens, to which the collate function rounds up the longest length of a batch."""
        return 1

    def pads(self, stream: str, /) -> bool:
        """Returns whether a stream is padded. Orders and reports ignore unpadded streams, except the primary one."""
        return True

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        """Returns the shapes of these K batches after padding, as the model receives them."""
        if is_packed(self, shape.longest):
            return shape
        longest = dict(shape.longest)
        for name in padded_streams(self, longest):
            longest[name] = round_up(longest[name], self.pad_to_multiple_of)
        return BatchShape(shape.num_samples, longest, shape.total)

    @property
    def new_tokens(self) -> int:
        """Tokens that are generated for each sample, with as many steps of decoding; 0: the budget is for one pass."""
        return 0

    def bind(self, lengths: Streams, /) -> "Budget":
        """Returns this budget with limits that depend on a dataset computed from the dataset's lengths."""
        return self

    def with_memory(self, known: Callable[[], Any], /) -> "Budget":
        """Returns this budget; or if it predicts memory but has no model yet, one with the model of ``known()``."""
        return self

    @property
    def learner(self) -> Any:
        """The part of the budget that learns from out-of-memory errors: a :class:`LearningBudget`, or None."""
        return None

    @property
    def applied(self) -> float | None:
        """The learned limit that new plans use, an argument of :meth:`held`; None: no limit was learned."""
        return None

    def held(self, limit: float | None, /) -> "Budget":
        """Returns this budget with a fixed learned limit (None: no limit), so that a plan stays the same all epoch."""
        return self

    @property
    def ladder(self) -> Any:
        """The few shapes to which batches are padded: a :class:`ShapeLadder`, or None."""
        return None

    @property
    def fingerprint(self) -> str:
        """Text that changes with the class's name and the settings, but not with limits learned from failures."""
        return described(self, ask=False)

    def __repr__(self) -> str:
        return self.fingerprint

    def __and__(self, other: "Budget") -> "Budget":
        for budget in (self, other):
            if not isinstance(budget, Budget):
                raise ConfigError(
                    f"`&` joins budgets, e.g. TokenBudget(4096) & AdditiveCap(...), but got {budget!r}"
                )
            if budget.ladder is not None:
                raise ConfigError(
                    "a ShapeLadder cannot be a part of `&`; write ShapeLadder(lengths, budget & other)"
                )
        if isinstance(self, Wrapper):
            return self.around(self.base & other)
        if isinstance(other, Wrapper):
            return other.around(self & other.base)
        return AllOf.of(self, other)


def padded_streams(budget: Budget, names: Collection[str]) -> tuple[str, ...]:
    """Returns the streams that count as padded: the primary one, and all others without an :class:`AdditiveCap`.

    >>> padded_streams(AdditiveCap("patches", 9), ["tokens", "target", "patches"])
    ('tokens', 'target')
    """
    return tuple(name for name in names if name == primary(names) or budget.pads(name))


def is_packed(budget: Budget, names: Collection[str]) -> bool:
    """Returns whether samples are packed: by the layout, or because all parts are caps, also of the primary stream.

    >>> is_packed(AdditiveCap("nodes", 9) & AdditiveCap("edges", 30), ["nodes", "edges"])
    True
    """
    if budget.layout == "packed":
        return True
    parts = budget.parts if isinstance(budget, AllOf) else (budget,)
    caps = [part for part in parts if isinstance(part, AdditiveCap)]
    return len(caps) == len(parts) and primary(names) in {cap.stream for cap in caps}


def padded_tokens(shape: BatchShape, budget: Budget) -> IntArray:
    """Returns the tokens that a device computes for each shape, over all padded streams: int64 (K,)."""
    run = budget.as_run(shape)
    if is_packed(budget, shape.longest):
        return round_up(real_tokens(run, budget), budget.pad_to_multiple_of)
    return run.num_samples * sum(run.longest[name] for name in padded_streams(budget, run.longest))


def real_tokens(shape: BatchShape, budget: Budget) -> IntArray:
    """Returns the tokens of each shape's samples, without padding, over all padded streams: int64 (K,)."""
    return np.sum([shape.total[name] for name in padded_streams(budget, shape.longest)], axis=0)


def fits_of(budget: Budget, shape: BatchShape) -> BoolArray:
    """Returns ``budget.fits(shape)`` as bool (K,). ConfigError: the user's method returned anything else."""
    answer = budget.fits(shape)
    if not _is_array(answer, len(shape), "b"):
        raise ConfigError(
            f"`{type(budget).__name__}.fits` must return an array with one bool for each of "
            f"{len(shape)} batches, but returned {answer!r}"
        )
    return answer


def largest_of(budget: Budget, longest: IntArray) -> IntArray | None:
    """Returns ``budget.largest(longest)``, int64 (K,) or None. ConfigError: the method returned anything else."""
    answer = budget.largest(longest)
    if answer is not None and not _is_array(answer, len(longest), "iu"):
        raise ConfigError(
            f"`{type(budget).__name__}.largest` must return an array with one number for each of "
            f"{len(longest)} batches, but returned {answer!r}"
        )
    return answer


def _is_array(answer: Any, size: int, kinds: str) -> bool:
    return isinstance(answer, np.ndarray) and answer.shape == (size,) and answer.dtype.kind in kinds


class Wrapper(Budget):
    """A budget that changes the answers of another one, ``base``; methods that it does not define ask ``base``."""

    base: Budget

    def around(self, base: Budget) -> Any:
        """Returns this wrapper around another budget; both share what they learn."""
        other = copy.copy(self)
        other.base = base
        return other

    @property
    def layout(self) -> Layout:
        return self.base.layout

    @property
    def pad_to_multiple_of(self) -> int:
        return self.base.pad_to_multiple_of

    @property
    def new_tokens(self) -> int:
        return self.base.new_tokens

    @property
    def learner(self) -> Any:
        return self.base.learner

    @property
    def applied(self) -> float | None:
        return self.base.applied

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        return self.base.as_run(shape)

    def pads(self, stream: str, /) -> bool:
        return self.base.pads(stream)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self.base.cost(shape)

    def held(self, limit: float | None, /) -> Budget:
        return self.around(self.base.held(limit))


@dataclass(frozen=True)
class AdditiveCap(Budget):
    """Limits the sum of one stream over a batch's samples, without padding. It has no subclasses.

    Use it for streams that are concatenated, not padded, such as vision patches. A budget joined by ``&`` then does not
    see the stream: ``TokenBudget(16384) & AdditiveCap("patches", 40000)``.

    Args:
        stream: str, name of the stream in ``lengths`` or ``length_of``. ConfigError: there is no such stream.
        limit: int, most units of the stream in a batch.

    >>> AdditiveCap("patches", 100).fits(BatchShape.of(2, {"tokens": 9, "patches": [50, 51]})).tolist()
    [True, False]
    """

    stream: str
    limit: int

    def __init_subclass__(cls) -> None:
        # packed plans read `stream` and `limit`, and would not ask a `fits` of its own
        raise ConfigError(
            f"{cls.__name__} cannot be a subclass of AdditiveCap; write a subclass of Budget"
        )

    def __post_init__(self) -> None:
        check_int("limit", self.limit)

    def pads(self, stream: str, /) -> bool:
        return stream != self.stream

    def fits(self, shape: BatchShape, /) -> BoolArray:
        if self.stream not in shape.total:
            raise ConfigError(
                f"AdditiveCap needs the stream {self.stream!r}, but `lengths` has only "
                f"{sorted(shape.total)}; add the stream to `lengths`"
            )
        return shape.total[self.stream] <= self.limit


@dataclass(frozen=True)
class AllOf(Budget):
    """Budgets joined by ``&``: a batch fits if all of them accept it. Streams with a cap are shown to caps only."""

    parts: tuple[Budget, ...]

    @classmethod
    def of(cls, *budgets: Budget) -> "AllOf":
        parts: list[Budget] = []
        for budget in budgets:
            parts += budget.parts if isinstance(budget, AllOf) else [budget]
        combined = cls(tuple(parts))
        if len({part.layout for part in combined._others}) > 1:
            raise ConfigError(
                "`&` cannot join padded and packed budgets; give all of them the same `layout`"
            )
        return combined

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.parts))

    @property
    def _others(self) -> list[Budget]:
        return [part for part in self.parts if not isinstance(part, AdditiveCap)]

    @property
    def _capped(self) -> set[str]:
        return {part.stream for part in self.parts if isinstance(part, AdditiveCap)}

    @property
    def layout(self) -> Layout:
        return self._others[0].layout if self._others else "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        return math.lcm(*(part.pad_to_multiple_of for part in self.parts))

    @property
    def new_tokens(self) -> int:
        return max(part.new_tokens for part in self.parts)

    @property
    def fingerprint(self) -> str:
        return " & ".join(part.fingerprint for part in self.parts)

    def pads(self, stream: str, /) -> bool:
        if stream in self._capped:
            return False
        return not self._others or any(part.pads(stream) for part in self._others)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        answers = [fits_of(part, self.seen_by(part, shape)) for part in self.parts]
        return np.logical_and.reduce(answers)

    def seen_by(self, part: Budget, shape: BatchShape) -> BatchShape:
        """Returns the shape that one part is asked about. A cap sees true lengths. All others see no capped streams, and
        lengths as the collate function pads them: to the least common multiple of all parts."""
        if isinstance(part, AdditiveCap):
            return shape
        if part.pad_to_multiple_of != self.pad_to_multiple_of:
            shape = self._rounded_up(shape)
        return shape.without(self._capped)

    def _rounded_up(self, shape: BatchShape) -> BatchShape:
        if self.layout == "padded":
            return self.as_run(shape)
        name = primary(shape.total)
        padding = padded_tokens(shape, self) - real_tokens(shape, self)
        total = {**shape.total, name: shape.total[name] + padding}
        return BatchShape(shape.num_samples, shape.longest, total)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the cost by the first part that is not a cap, without such a part padded tokens."""
        if not self._others:
            return super().cost(shape)
        part = self._others[0]
        return part.cost(self.seen_by(part, shape))

    def bind(self, lengths: Streams, /) -> "AllOf":
        hidden = self._capped - {primary(lengths)}  # any part may need the primary stream
        seen = {name: values for name, values in lengths.items() if name not in hidden}
        return AllOf(tuple(part.bind(seen) for part in self.parts))

    def with_memory(self, known: Callable[[], Any], /) -> "AllOf":
        return AllOf(tuple(part.with_memory(known) for part in self.parts))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "padded":
            longest = round_up(longest, self.pad_to_multiple_of)
        counts = []
        for part in self.parts:
            count = largest_of(part, longest)
            if count is None:
                return None
            counts.append(count)
        return np.minimum.reduce(counts)
