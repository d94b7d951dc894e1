"""Budgets: one monotone question, *does a batch of this shape fit?*

Law: a shape that fits still fits after a sample is taken away or shortened. Everything that forms batches rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.fingerprint import described
from dynagroup.memory.run import Layout
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up, said
from dynagroup.validation import LARGEST

__all__ = [
    "AdditiveCap",
    "AllOf",
    "BoolArray",
    "Budget",
    "Layout",
    "UNLIMITED",
    "cost_of",
    "fits_of",
    "largest_of",
    "padded_streams",
    "padded_tokens",
    "positive",
    "real_tokens",
]

BoolArray: TypeAlias = NDArray[np.bool_]

UNLIMITED = np.iinfo(np.int64).max // 4


class Budget(Protocol):
    """Decides which batch shapes fit. Subclass it and write :meth:`fits`; the rest has defaults.

    ``fits`` must be monotone: never from False to True when a sample is added or lengthened.
    ``dynagroup.testing.assert_budget_law`` checks a budget of your own.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> class AtMostFour(Budget):
    ...     def fits(self, shape, /):
    ...         return shape.num_samples <= 4
    >>> (AtMostFour() & TokenBudget(100)).fits(BatchShape.of([2, 4, 5], longest=30)).tolist()
    [True, False, False]
    """

    counts_every_stream: ClassVar[bool] = False
    """Whether ``fits`` takes every stream that it is shown for padded. One that an :class:`AdditiveCap` beside it names
    is not, so it is not shown."""

    knows_memory: ClassVar[bool] = False
    """Whether it predicts memory: then it says what a combination of budgets costs."""

    @property
    def layout(self) -> Layout:
        """ "padded": a batch costs samples times longest; "packed": it costs the sum of its tokens."""
        return "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        """The collate function rounds the longest sample of a batch up to a multiple of this."""
        return 1

    def padded_to(self, tokens: int, /) -> int:
        """How many tokens the collate function makes of a row, or of a packed batch, of so many: at most."""
        return -(-tokens // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def fits(self, shape: BatchShape, /) -> BoolArray:
        """Which of these K shapes fit: bool (K,)."""
        ...

    def pads(self, stream: str, /) -> bool:
        """Whether a stream beside ``tokens`` is padded, so that it counts as tokens in orders, predicted times and reports."""
        return True

    def bind(self, lengths: Streams, /) -> Budget:
        """This budget with its limit taken from the lengths of a whole dataset, where it needs that."""
        return self

    def largest(self, longest: IntArray, /) -> IntArray | None:
        """Most samples that fit a batch whose longest has so many tokens: int64 (K,), 0 where not even one fits.

        Only asked where tokens are the only stream. Must agree with :meth:`fits`; None (the default) where more must be
        known than the longest sample's tokens.
        """
        return None

    def cost(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """What this budget limits, for each shape, apart from what every batch costs: float64 (K,). It never falls when a
        sample is added or lengthened. Padded tokens, unless a budget knows better."""
        return np.asarray(padded_tokens(shape, self), dtype=np.float64)

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever answers may change: the class, its code where it is yours, and what it holds."""
        return described(self, ask=False)

    def __and__(self, other: Budget) -> Budget:
        return AllOf.of(self, other)


def padded_streams(budget: Budget, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these streams whose tokens are padded: ``tokens``, and every other that is not laid end to end.

    >>> padded_streams(AdditiveCap("patches", 9), ["tokens", "target", "patches"])
    ('tokens', 'target')
    """
    return tuple(name for name in names if name == TOKENS or budget.pads(name))


def padded_tokens(shape: BatchShape, budget: Budget) -> IntArray:
    """Tokens that a device multiplies for each shape: with padding, or without it in a packed layout; all padded streams
    added. int64 (K,)."""
    if budget.layout == "packed":
        return real_tokens(shape, budget)
    streams = padded_streams(budget, shape.longest)
    widths = [round_up(shape.longest[name], budget.pad_to_multiple_of) for name in streams]
    return shape.num_samples * np.sum(widths, axis=0)


def padded_squares(shape: BatchShape, budget: Budget) -> IntArray:
    """Padded tokens of each shape, each times its sample's padded length, of all padded streams: what attention costs.
    int64 (K,)."""
    widths = [round_up(shape.longest[n], budget.pad_to_multiple_of) for n in padded_streams(budget, shape.longest)]
    return shape.num_samples * np.sum([width * width for width in widths], axis=0)


def real_tokens(shape: BatchShape, budget: Budget) -> IntArray:
    """Tokens of each shape's samples, of all padded streams: int64 (K,)."""
    return np.sum([shape.total[name] for name in padded_streams(budget, shape.longest)], axis=0)


def fits_of(budget: Budget, shape: BatchShape) -> BoolArray:
    """What a budget, which may be of the user's own, answers about these K shapes: bool (K,).

    Raises:
        ConfigError: it is no bool for each of the shapes, or is made by ``if``, ``and``, ``or`` or ``not`` of arrays.
    """
    answers: Any = _asked(budget, "fits", shape)
    if getattr(answers, "shape", None) != (len(shape),) or np.asarray(answers).dtype != np.bool_:
        raise ConfigError(
            f"{type(budget).__name__}.fits must answer for all shapes at once, a bool array of shape ({len(shape)},): the "
            f"numbers of a shape are arrays, one entry a batch (combine them by & and |, not by if, and, or); it gave {answers!r}"
        )
    return answers


def cost_of(budget: Budget, shape: BatchShape) -> NDArray[np.float64]:
    """What a budget, which may be of the user's own, says that these K shapes cost: float64 (K,).

    Raises:
        ConfigError: as :func:`fits_of`, for a number for each of the shapes.
    """
    answers: Any = _asked(budget, "cost", shape)
    if getattr(answers, "shape", None) != (len(shape),) or np.asarray(answers).dtype.kind not in "iuf":
        raise ConfigError(
            f"{type(budget).__name__}.cost must answer for all shapes at once, a float array of shape ({len(shape)},): the "
            f"numbers of a shape are arrays, one entry a batch; it gave {answers!r}"
        )
    return answers


def largest_of(budget: Budget, longest: IntArray) -> IntArray | None:
    """What a budget, which may be of the user's own, says of the largest batches: int64 (K,), or None.

    Raises:
        ConfigError: as :func:`fits_of`, for an integer for each length.
    """
    answers: Any = _asked(budget, "largest", longest)
    if answers is not None and (
        getattr(answers, "shape", None) != longest.shape or np.asarray(answers).dtype.kind not in "iu"
    ):
        raise ConfigError(
            f"{type(budget).__name__}.largest must answer for all lengths at once, an int array of shape {longest.shape}, or "
            f"None where samples and tokens do not say it all; it gave {answers!r}"
        )
    return answers


def _asked(budget: Budget, method: str, about: Any) -> Any:
    try:
        return getattr(budget, method)(about)
    except ValueError as error:
        if "truth value of an array" not in str(error):
            raise
        raise ConfigError(
            f"{type(budget).__name__}.{method} uses `if`, `and`, `or`, `not`, `min` or `max` on an array: it is asked about "
            "many batches at once, and the numbers of a shape have one entry a batch. Choose by np.where(condition, a, b), "
            "combine conditions by & and | (each in parentheses), compare by np.minimum and np.maximum"
        ) from error


def positive(name: str, value: float, kind: type = int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer) if kind is int else (int, float, np.number)):
        raise ConfigError(f"`{name}` must be a positive {kind.__name__}, but is {value!r}")
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"`{name}` must be greater than 0 and finite, but is {value!r}")
    if kind is int and value > LARGEST:  # 64-bit arithmetic would overflow
        raise ConfigError(f"`{name}` must be at most 2**62, but is {value!r}")


@dataclass(frozen=True)
class AdditiveCap(Budget):
    """At most ``limit`` units of a stream in a batch, summed over its samples; the batch's padding does not matter.

    For what is concatenated, not padded, such as vision patches. Combine it with a budget of tokens, which then leaves that
    stream alone: ``TokenBudget(16384) & AdditiveCap("patches", 40000)``. A stream that is padded needs no cap: budgets count it.

    Args:
        stream: name of the stream, as ``lengths`` or ``length_of`` call it.
        limit: units of it that a batch may have.

    Raises:
        ConfigError: ``limit`` is not positive, or ``lengths`` have no such stream.

    >>> AdditiveCap("patches", 100).fits(BatchShape.of(2, {"tokens": 9, "patches": [50, 51]})).tolist()
    [True, False]
    """

    stream: str
    limit: int

    def __post_init__(self) -> None:
        if not isinstance(self.stream, str) or not self.stream:
            raise ConfigError(f"`stream` must be the name of a length stream, but is {self.stream!r}")
        positive("limit", self.limit)

    def pads(self, stream: str, /) -> bool:
        return stream != self.stream

    def fits(self, shape: BatchShape, /) -> BoolArray:
        if self.stream not in shape.total:
            raise ConfigError(
                f"AdditiveCap needs the stream {self.stream!r}, but lengths have {sorted(map(said, shape.total))}; "
                f"pass lengths={{'tokens': ..., {self.stream!r}: ...}}"
            )
        return shape.total[self.stream] <= self.limit


@dataclass(frozen=True)
class AllOf(Budget):
    """A batch fits when it fits every part. Made by ``&``."""

    parts: tuple[Budget, ...]

    @classmethod
    def of(cls, *budgets: Budget) -> AllOf:
        for budget in budgets:
            if isinstance(budget, type) or not (hasattr(budget, "fits") and hasattr(budget, "layout")):
                raise ConfigError(
                    f"`&` combines budgets, such as TokenBudget(4096) & AdditiveCap(...), but was given {budget!r}"
                )
        parts = tuple(p for b in budgets for p in (b.parts if isinstance(b, AllOf) else (b,)))
        layouts = {p.layout for p in parts if not isinstance(p, AdditiveCap)}
        if len(layouts) > 1:
            raise ConfigError("a batch is either padded or packed: budgets of both layouts cannot be combined with `&`")
        return cls(parts)

    @property
    def layout(self) -> Layout:
        layouts: list[Layout] = [p.layout for p in self.parts if not isinstance(p, AdditiveCap)]
        return layouts[0] if layouts else "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        return math.lcm(*(p.pad_to_multiple_of for p in self.parts))

    def padded_to(self, tokens: int, /) -> int:
        return max(super().padded_to(tokens), *(p.padded_to(tokens) for p in self.parts))

    @property
    def fingerprint(self) -> str:
        return " & ".join(p.fingerprint for p in self.parts)

    def pads(self, stream: str, /) -> bool:
        others = [p for p in self.parts if not isinstance(p, AdditiveCap)]
        return stream not in self._end_to_end and (not others or any(p.pads(stream) for p in others))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return np.logical_and.reduce([fits_of(p, self.seen_by(p, shape)) for p in self.parts])

    def seen_by(self, part: Budget, shape: BatchShape) -> BatchShape:
        """The streams that a part is shown: those that are laid end to end are not for who takes all for padded. A part that
        would round up by less than the collate function does, which follows all parts, is shown what that makes."""
        if part.pad_to_multiple_of != self.pad_to_multiple_of and not isinstance(part, AdditiveCap):
            shape = self._padded(shape)
        return shape.without(self._end_to_end) if part.counts_every_stream else shape

    def _padded(self, shape: BatchShape) -> BatchShape:
        multiple, names = self.pad_to_multiple_of, padded_streams(self, shape.longest)
        if self.layout == "packed":
            tokens = np.sum([shape.total[name] for name in names], axis=0)
            total = {**shape.total, TOKENS: shape.total[TOKENS] + round_up(tokens, multiple) - tokens}
            return BatchShape(shape.num_samples, shape.longest, total)
        longest = {**shape.longest, **{name: round_up(shape.longest[name], multiple) for name in names}}
        return BatchShape(shape.num_samples, longest, shape.total)

    def cost(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """Of the part that predicts memory, or else of the first that is not a mere cap."""
        parts = sorted((p for p in self.parts if not isinstance(p, AdditiveCap)), key=lambda p: not p.knows_memory)
        return cost_of(parts[0], self.seen_by(parts[0], shape)) if parts else super().cost(shape)

    def bind(self, lengths: Streams, /) -> AllOf:
        padded = {name: values for name, values in lengths.items() if name not in self._end_to_end}
        return AllOf(tuple(p.bind(padded if p.counts_every_stream else lengths) for p in self.parts))

    @property
    def _end_to_end(self) -> frozenset[str]:
        return frozenset(p.stream for p in self.parts if isinstance(p, AdditiveCap))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        padded = longest if self.layout == "packed" else round_up(longest, self.pad_to_multiple_of)
        answers = [largest_of(p, padded) for p in self.parts]
        known = [a for a in answers if a is not None]
        return np.minimum.reduce(known) if len(known) == len(answers) else None
