"""Budgets decide whether a batch of a given shape fits. All code that forms batches asks a budget. The rule for every
budget: a shape that fits must still fit after a sample is removed or shortened."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

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

    counts_every_stream: ClassVar[bool] = False
    """True: ``fits`` must not be asked about streams with an :class:`AdditiveCap`, because it counts all as padded."""
    knows_memory: ClassVar[bool] = False
    """True: the budget predicts memory. Budgets joined by ``&`` take their cost from the part that predicts memory."""

    @property
    def layout(self) -> Layout:
        """ "padded": a batch costs samples times the longest length; "packed": the sum of its tokens."""
        return "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        """Multiple, in tokens, to which the collate function rounds up the longest length of a batch."""
        return 1

    @property
    def new_tokens(self) -> int:
        """Tokens that are generated for each sample, with as many steps of decoding; 0: the budget is for one pass."""
        return 0

    @property
    def learner(self) -> Any:
        """The part of the budget that learns from out-of-memory errors: a :class:`LearningBudget`, or None."""
        return None

    @property
    def applied(self) -> float | None:
        """The learned limit that new plans use, an argument of :meth:`held`; None: no limit was learned."""
        return None if self.learner is None else self.learner.applied

    @property
    def ladder(self) -> Any:
        """The few shapes to which batches are padded: a :class:`ShapeLadder`, or None."""
        return None

    def as_run(self, shape: BatchShape, /) -> BatchShape:
        """Returns the shapes of these K batches after padding, as the model receives them."""
        if is_packed(self, shape.longest):
            return shape
        names, multiple = padded_streams(self, shape.longest), self.pad_to_multiple_of
        padded = {name: round_up(shape.longest[name], multiple) for name in names}
        return BatchShape(shape.num_samples, {**shape.longest, **padded}, shape.total)

    @abstractmethod
    def fits(self, shape: BatchShape, /) -> BoolArray:
        """Returns, for each of K shapes, whether a batch of this shape fits: bool (K,)."""

    def pads(self, stream: str, /) -> bool:
        """Returns whether a stream is padded. Orders and reports ignore unpadded streams, except the primary one."""
        return True

    def bind(self, lengths: Streams, /) -> "Budget":
        """Returns this budget with limits that depend on a dataset computed from the dataset's lengths."""
        return self

    def with_memory(self, known: Callable[[], Any], /) -> "Budget":
        """Returns this budget; or if it predicts memory but has no model yet, one with the model of ``known()``."""
        return self

    def held(self, limit: float | None, /) -> "Budget":
        """Returns this budget with a fixed learned limit (None: no limit), so that a plan stays the same all epoch."""
        return self

    def largest(self, longest: IntArray, /) -> IntArray | None:
        """Returns the most samples that fit if the longest has this length, int64 (K,); only for a single stream. 0:
        not even one sample fits. None (the default): the longest length alone does not decide."""
        return None

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the quantity that the budget limits, without what is the same for all batches: float64 (K,). The cost
        must never fall when a sample is added or lengthened. Default: padded tokens."""
        return np.asarray(padded_tokens(shape, self), dtype=np.float64)

    @property
    def fingerprint(self) -> str:
        """Text that changes with the class's name and the settings, but not with limits learned from failures."""
        return described(self, ask=False)

    def __and__(self, other: "Budget") -> "Budget":
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
    parts = budget.parts if isinstance(budget, AllOf) else (budget,)
    capped = [part.stream for part in parts if isinstance(part, AdditiveCap)]
    return budget.layout == "packed" or (len(capped) == len(parts) and primary(names) in capped)


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
    return _checked(budget.fits(shape), len(shape), "b", f"{type(budget).__name__}.fits")


def largest_of(budget: Budget, longest: IntArray) -> IntArray | None:
    """Returns ``budget.largest(longest)``, int64 (K,) or None. ConfigError: the method returned anything else."""
    answer = budget.largest(longest)
    return (
        None
        if answer is None
        else _checked(answer, len(longest), "iu", f"{type(budget).__name__}.largest")
    )


def _checked(answer: Any, size: int, kinds: str, asked: str) -> Any:
    if getattr(answer, "shape", None) != (size,) or answer.dtype.kind not in kinds:
        wanted = (
            f"an array with one {'bool' if kinds == 'b' else 'number'} for each of {size} batches"
        )
        raise ConfigError(f"`{asked}` must return {wanted}, but returned {answer!r}")
    return answer


class Wrapper(Budget):
    """A budget that changes the answers of another one, ``base``; methods that it does not define ask ``base``."""

    base: Budget
    layout: Any = property(attrgetter("base.layout"))
    pad_to_multiple_of: Any = property(attrgetter("base.pad_to_multiple_of"))
    learner: Any = property(attrgetter("base.learner"))
    new_tokens: Any = property(attrgetter("base.new_tokens"))
    as_run: Any = property(attrgetter("base.as_run"))
    pads: Any = property(attrgetter("base.pads"))
    cost: Any = property(attrgetter("base.cost"))
    fingerprint: Any = property(attrgetter("base.fingerprint"))

    def around(self, base: Budget) -> Any:
        other = copy.copy(self)
        other.base = base
        return other

    def held(self, limit: float | None, /) -> Budget:
        return self.around(self.base.held(limit))


@dataclass(frozen=True)
class AdditiveCap(Budget):
    """Limits the sum of one stream over a batch's samples, without padding.

    Use it for streams that are concatenated, not padded, such as vision patches. A token budget joined by ``&`` then
    ignores the stream: ``TokenBudget(16384) & AdditiveCap("patches", 40000)``.

    Args:
        stream: str, name of the stream in ``lengths`` or ``length_of``. ConfigError: there is no such stream.
        limit: int, most units of the stream in a batch.

    >>> AdditiveCap("patches", 100).fits(BatchShape.of(2, {"tokens": 9, "patches": [50, 51]})).tolist()
    [True, False]
    """

    stream: str
    limit: int

    def __post_init__(self) -> None:
        check_int("limit", self.limit)

    def pads(self, stream: str, /) -> bool:
        return stream != self.stream

    def fits(self, shape: BatchShape, /) -> BoolArray:
        if self.stream not in shape.total:
            known = f"`lengths` has only {sorted(shape.total)}; add the stream to `lengths`"
            raise ConfigError(f"AdditiveCap needs the stream {self.stream!r}, but {known}")
        return shape.total[self.stream] <= self.limit


@dataclass(frozen=True)
class AllOf(Budget):
    """Budgets joined by ``&``: a batch fits if all of them accept it."""

    parts: tuple[Budget, ...]

    @classmethod
    def of(cls, *budgets: Budget) -> "AllOf":
        if foreign := [budget for budget in budgets if not isinstance(budget, Budget)]:
            raise ConfigError(
                f"`&` joins budgets, e.g. TokenBudget(4096) & AdditiveCap(...), but got {foreign[0]!r}"
            )
        combined = cls(
            tuple(p for b in budgets for p in (b.parts if isinstance(b, AllOf) else (b,)))
        )
        if any(p.ladder is not None for p in combined.parts):
            raise ConfigError(
                "a ShapeLadder cannot be a part of `&`; write ShapeLadder(lengths, budget & other)"
            )
        if len({p.layout for p in combined._others}) > 1:
            raise ConfigError(
                "`&` cannot join padded and packed budgets; give all of them the same `layout`"
            )
        return combined

    @property
    def _others(self) -> list[Budget]:
        return [p for p in self.parts if not isinstance(p, AdditiveCap)]

    @property
    def _end_to_end(self) -> set[str]:
        return {p.stream for p in self.parts if isinstance(p, AdditiveCap)}

    @property
    def layout(self) -> Layout:
        return self._others[0].layout if self._others else "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        return math.lcm(*(p.pad_to_multiple_of for p in self.parts))

    @property
    def new_tokens(self) -> int:
        return max(p.new_tokens for p in self.parts)

    @property
    def learner(self) -> Any:
        return next((p.learner for p in self.parts if p.learner is not None), None)

    @property
    def fingerprint(self) -> str:
        return " & ".join(p.fingerprint for p in self.parts)

    def pads(self, stream: str, /) -> bool:
        return stream not in self._end_to_end and (
            not self._others or any(p.pads(stream) for p in self._others)
        )

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return np.logical_and.reduce([fits_of(p, self.seen_by(p, shape)) for p in self.parts])

    def seen_by(self, part: Budget, shape: BatchShape) -> BatchShape:
        """Returns the shape that one part is asked about: without capped streams, if the part counts all streams as
        padded; and rounded up as far as any part rounds up (except for caps, which do not count padding)."""
        if part.pad_to_multiple_of != self.pad_to_multiple_of and not isinstance(part, AdditiveCap):
            shape = self._packed(shape) if self.layout == "packed" else self.as_run(shape)
        return shape.without(self._end_to_end) if part.counts_every_stream else shape

    def _packed(self, shape: BatchShape) -> BatchShape:
        tokens, first = real_tokens(shape, self), primary(shape.total)
        more = round_up(tokens, self.pad_to_multiple_of) - tokens
        return BatchShape(
            shape.num_samples, shape.longest, {**shape.total, first: shape.total[first] + more}
        )

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the cost by the part that predicts memory, else by the first part that is not a cap."""
        parts = sorted(self._others, key=lambda p: not p.knows_memory)
        return parts[0].cost(self.seen_by(parts[0], shape)) if parts else super().cost(shape)

    def bind(self, lengths: Streams, /) -> "AllOf":
        padded = {
            name: values
            for name, values in lengths.items()
            if name not in self._end_to_end - {primary(lengths)}
        }
        return AllOf(
            tuple(p.bind(padded if p.counts_every_stream else lengths) for p in self.parts)
        )

    def with_memory(self, known: Callable[[], Any], /) -> "AllOf":
        return AllOf(tuple(p.with_memory(known) for p in self.parts))

    def held(self, limit: float | None, /) -> "AllOf":
        return AllOf(tuple(p.held(limit) for p in self.parts))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        padded = longest if self.layout == "packed" else round_up(longest, self.pad_to_multiple_of)
        answers = [answer for p in self.parts if (answer := largest_of(p, padded)) is not None]
        return np.minimum.reduce(answers) if len(answers) == len(self.parts) else None
