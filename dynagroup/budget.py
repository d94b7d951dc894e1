"""Budgets: one monotone question, *does a batch of this shape fit?*

Law: a shape that fits still fits after a sample is taken away or shortened. Everything that forms batches rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import BudgetError, ConfigError
from dynagroup.memory.closed_form import TARGET
from dynagroup.memory.model import BytesMemoryModel, MemoryModel
from dynagroup.memory.regressor import MemoryRegressor
from dynagroup.memory.table import LargestTable
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up
from dynagroup.world import World

__all__ = ["AdditiveCap", "AllOf", "Budget", "Layout", "MemoryBudget", "TokenBudget", "padded_tokens"]

Layout: TypeAlias = Literal["padded", "packed"]
BoolArray: TypeAlias = NDArray[np.bool_]

UNLIMITED = np.iinfo(np.int64).max // 4


class Budget(Protocol):
    """Decides which batch shapes fit. Subclass it and write :meth:`fits`; the rest has defaults.

    ``fits`` must be monotone: never from False to True when a sample is added or lengthened.
    ``dynagroup.testing.assert_budget_law`` checks a budget of your own.

    >>> class AtMostFour(Budget):
    ...     def fits(self, shape, /):
    ...         return shape.num_samples <= 4
    >>> (AtMostFour() & TokenBudget(100)).fits(BatchShape.of([2, 4, 5], longest=30)).tolist()
    [True, False, False]
    """

    @property
    def layout(self) -> Layout:
        """ "padded": a batch costs samples times longest; "packed": it costs the sum of its tokens."""
        return "padded"

    @property
    def pad_to_multiple_of(self) -> int:
        """The collate function rounds the longest sample of a batch up to a multiple of this."""
        return 1

    def fits(self, shape: BatchShape, /) -> BoolArray:
        """Which of these K shapes fit: bool (K,)."""
        ...

    def bind(self, lengths: Streams, /) -> Budget:
        """This budget with its limit taken from the lengths of a whole dataset, where it needs that."""
        return self

    def largest(self, longest: IntArray, /) -> IntArray | None:
        """Most samples that fit a batch whose longest has so many tokens: int64 (K,), 0 where not even one fits.

        Must agree with :meth:`fits`; None (the default) where more must be known than the longest sample's tokens.
        """
        return None

    @property
    def fingerprint(self) -> str:
        """Text that changes whenever answers may change."""
        if is_dataclass(self):
            shown = ((f.name, getattr(self, f.name)) for f in fields(self))
        else:
            shown = sorted(vars(self).items())
        values = (f"{name}={getattr(value, 'fingerprint', value)!r}" for name, value in shown)
        return f"{type(self).__qualname__}({', '.join(values)})"

    def __and__(self, other: Budget) -> Budget:
        return AllOf.of(self, other)


def padded_tokens(shape: BatchShape, budget: Budget) -> IntArray:
    """Tokens that a device multiplies for each shape: with padding, or without it in a packed layout. int64 (K,)."""
    if budget.layout == "packed":
        return shape.total[TOKENS]
    return shape.num_samples * round_up(shape.longest[TOKENS], budget.pad_to_multiple_of)


def _positive(name: str, value: float, kind: type = int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer) if kind is int else (int, float, np.number)):
        raise ConfigError(f"`{name}` must be a positive {kind.__name__}, but is {value!r}")
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"`{name}` must be greater than 0 and finite, but is {value!r}")


@dataclass(frozen=True)
class TokenBudget(Budget):
    """At most ``max_tokens`` tokens a batch, padding counted.

    Args:
        max_tokens: tokens. Padded layout: ``num_samples * longest``; packed layout: the sum over the samples.
        max_samples: at most so many samples a batch.
        pad_to_multiple_of: the longest sample is rounded up to a multiple of this before the check.
        layout: "padded" or "packed".

    A sample of length 0 counts as one token, so that a batch stays finite.

    >>> TokenBudget(1024).fits(BatchShape.of([4, 5], longest=256)).tolist()
    [True, False]
    """

    max_tokens: int
    max_samples: int | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    layout: Layout = field(default="padded", kw_only=True)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _positive("max_tokens", self.max_tokens)
        _positive("pad_to_multiple_of", self.pad_to_multiple_of)
        if self.max_samples is not None:
            _positive("max_samples", self.max_samples)
        if self.layout not in ("padded", "packed"):
            raise ConfigError(f"`layout` must be 'padded' or 'packed', but is {self.layout!r}")

    @classmethod
    def from_sequence_length(cls, sequence_length: int, micro_batch_size: int) -> TokenBudget:
        """The budget of a run sized by hand: ``sequence_length * 2 * micro_batch_size`` tokens.

        The factor 2 is online-dynamic-batching's rule of thumb: the typical batch of a fixed-size run is about half padding.
        """
        _positive("sequence_length", sequence_length)
        _positive("micro_batch_size", micro_batch_size)
        return cls(sequence_length * 2 * micro_batch_size)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        ok = shape.num_samples <= min(self.max_tokens, self.max_samples or UNLIMITED)
        return ok & (padded_tokens(shape, self) <= self.max_tokens)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed":
            return None
        most = self.max_tokens // np.maximum(round_up(longest, self.pad_to_multiple_of), 1)
        return most if self.max_samples is None else np.minimum(most, self.max_samples)


@dataclass(frozen=True)
class AdditiveCap(Budget):
    """At most ``limit`` units of a stream in a batch, summed over its samples; the batch's padding does not matter.

    For what is concatenated, not padded, such as vision patches. Combine it with a budget of tokens:
    ``TokenBudget(16384) & AdditiveCap("patches", 40000)``.

    >>> AdditiveCap("patches", 100).fits(BatchShape.of(2, {"tokens": 9, "patches": [50, 51]})).tolist()
    [True, False]
    """

    stream: str
    limit: int

    def __post_init__(self) -> None:
        if not isinstance(self.stream, str) or not self.stream:
            raise ConfigError(f"`stream` must be the name of a length stream, but is {self.stream!r}")
        _positive("limit", self.limit)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        if self.stream not in shape.total:
            raise ConfigError(
                f"AdditiveCap needs the stream {self.stream!r}, but lengths have {sorted(shape.total)}; "
                f"pass lengths={{'tokens': ..., {self.stream!r}: ...}}"
            )
        return shape.total[self.stream] <= self.limit


@dataclass(frozen=True)
class AllOf(Budget):
    """A batch fits when it fits every part. Made by ``&``."""

    parts: tuple[Budget, ...]

    @classmethod
    def of(cls, *budgets: Budget) -> AllOf:
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

    @property
    def fingerprint(self) -> str:
        return " & ".join(p.fingerprint for p in self.parts)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return np.logical_and.reduce([p.fits(shape) for p in self.parts])

    def bind(self, lengths: Streams, /) -> AllOf:
        return AllOf(tuple(p.bind(lengths) for p in self.parts))

    def largest(self, longest: IntArray, /) -> IntArray | None:
        answers = [p.largest(longest) for p in self.parts]
        known = [a for a in answers if a is not None]
        return np.minimum.reduce(known) if len(known) == len(answers) else None


@dataclass(frozen=True)
class MemoryBudget(Budget):
    """As many samples as fit in the memory of the hardest batch, as a memory model predicts it.

    The hardest batch is the ``batch_size`` longest samples: you know that it fits your device. Every later batch grows as
    far as its predicted memory stays within ``headroom`` of that one's. Shapes no larger than the hardest one always fit.

    Args:
        batch_size: samples of the hardest batch.
        longest: tokens (or stream -> units) of its longest sample; default: taken from the dataset's lengths.
        model: any :class:`~dynagroup.memory.MemoryModel`; default: the pretrained regressor.
        headroom: share of the hardest batch's memory that a grown batch may be predicted to take, in (0, 1].
        max_growth: a batch has at most ``batch_size * max_growth`` samples; None: no limit.
        pad_to_multiple_of: the longest sample is rounded up to a multiple of this before the check.

    >>> from dynagroup.memory.model import PaddedTokens
    >>> budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.9)
    >>> budget.fits(BatchShape.of([4, 7, 8], longest=[100, 50, 50])).tolist()
    [True, True, False]
    """

    batch_size: int | None
    longest: int | Mapping[str, int] | None = field(default=None, kw_only=True)
    model: MemoryModel | None = field(default=None, kw_only=True)
    headroom: float = field(default=0.9, kw_only=True)
    max_growth: float | None = field(default=None, kw_only=True)
    pad_to_multiple_of: int = field(default=1, kw_only=True)  # type: ignore[assignment]
    limit_bytes: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.limit_bytes is None:
            _positive("batch_size", self.batch_size)  # type: ignore[arg-type]
        _positive("pad_to_multiple_of", self.pad_to_multiple_of)
        _positive("headroom", self.headroom, float)
        if self.headroom > 1:
            raise ConfigError(
                f"`headroom` is the share of the limit that may be used, at most 1.0, but is {self.headroom!r}"
            )
        for name, value in self.longest.items() if isinstance(self.longest, Mapping) else [("longest", self.longest)]:
            if value is not None:
                _positive(name, value)
        if self.model is not None and not hasattr(self.model, "relative"):
            raise ConfigError(
                f"`model` must predict memory, but is {type(self.model).__name__}; for a model of transformers: "
                "MemoryRegressor.pretrained(Workload.from_model(model))"
            )
        if self.max_growth is not None:
            _positive("max_growth", self.max_growth, float)

    @classmethod
    def from_bytes(
        cls, limit_bytes: int, *, model: BytesMemoryModel, headroom: float = 0.9, pad_to_multiple_of: int = 1
    ) -> MemoryBudget:
        """A budget held against the bytes that a device has, static memory included."""
        _positive("limit_bytes", limit_bytes)
        if not isinstance(model, BytesMemoryModel):
            raise ConfigError(f"`model` must answer in bytes (ProfiledMemory does), but is {model!r}")
        if model.static_bytes >= headroom * limit_bytes:
            raise BudgetError(
                f"static memory ({model.static_bytes:,} bytes) alone exceeds {headroom:.0%} of limit_bytes={limit_bytes:,}; "
                "use a smaller model, a leaner optimizer, sharding, or more memory"
            )
        return cls(None, model=model, headroom=headroom, pad_to_multiple_of=pad_to_multiple_of, limit_bytes=limit_bytes)

    def bind(self, lengths: Streams, /) -> MemoryBudget:
        if self.limit_bytes is not None or self.longest is not None:
            return self
        return replace(self, longest={name: int(v.max(initial=1)) for name, v in lengths.items()})

    def predicted(self, shape: BatchShape, /) -> NDArray[np.float64]:
        """Predicted memory as a share of the limit (``limit_bytes``, or what the hardest batch takes): float64 (K,)."""
        padded = self._padded(shape)
        if self.limit_bytes is not None:
            return (self._bytes_model.static_bytes + self._bytes_model.batch_bytes(padded)) / self.limit_bytes
        return self._model.relative(padded, self._baseline)

    def fits(self, shape: BatchShape, /) -> BoolArray:
        padded = self._padded(shape)
        if self.limit_bytes is not None:
            model = self._bytes_model
            return model.static_bytes + model.batch_bytes(padded) <= self.headroom * self.limit_bytes
        baseline = self._baseline
        known_safe = padded.num_samples <= baseline.num_samples
        for name, longest in padded.longest.items():
            known_safe = known_safe & (longest <= baseline.longest[name])
        ok = known_safe | self._grown(padded)
        return ok if self.max_growth is None else ok & (padded.num_samples <= int(self.batch_size * self.max_growth))  # type: ignore[operator]

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.limit_bytes is None and len(self._baseline.longest) > 1:
            return None
        low, high = np.zeros(len(longest), np.int64), np.full(len(longest), 2**40)
        while (high - low > 1).any():  # by bisection over `fits`, so that the two always agree
            middle = (low + high) // 2
            fits = self.fits(BatchShape.of(middle, longest))
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low

    @property
    def fingerprint(self) -> str:
        return super().fingerprint if self.model is not None else replace(self, model=self._model).fingerprint

    def _grown(self, padded: BatchShape) -> BoolArray:
        """Shapes that are predicted to fit. A regressor is asked once, for a table; a formula is asked directly."""
        table = self._table
        if table is None:
            return self._model.relative(padded, self._baseline) <= self.headroom
        return padded.num_samples <= table.largest(padded.longest)

    @cached_property
    def _table(self) -> LargestTable | None:
        model, baseline = self._model, self._baseline
        if not isinstance(model, MemoryRegressor):
            return None
        known = {name: v for name, v in baseline.longest.items() if name in (TOKENS, TARGET)}
        return LargestTable.of(model, BatchShape(baseline.num_samples, known, baseline.total), self.headroom)

    @cached_property
    def _model(self) -> MemoryModel:
        return self.model or MemoryRegressor.pretrained()

    @property
    def _bytes_model(self) -> BytesMemoryModel:
        assert isinstance(self.model, BytesMemoryModel)
        return self.model

    @property
    def _baseline(self) -> BatchShape:
        if self.longest is None:
            raise ConfigError(
                "`longest` is not known: give MemoryBudget(..., longest=tokens of your longest sample), "
                "or hand the budget to a sampler that has the lengths"
            )
        return self._padded(BatchShape.of(self.batch_size, self.longest))  # type: ignore[arg-type]

    def _padded(self, shape: BatchShape) -> BatchShape:
        if self.pad_to_multiple_of == 1:
            return shape
        longest = {**shape.longest, TOKENS: round_up(shape.longest[TOKENS], self.pad_to_multiple_of)}
        return BatchShape(shape.num_samples, longest, shape.total)


@runtime_checkable
class Learner(Protocol):
    """A budget that changes between epochs, such as :class:`dynagroup.oom.LearningBudget`. Loaders apply what it has
    learned when an epoch begins, and keep its state in their own."""

    def apply(self, world: World | None = None) -> None: ...

    def share_memory(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


def learner_of(budget: Budget) -> Learner | None:
    """The part of a budget that learns, if one does."""
    parts = budget.parts if isinstance(budget, AllOf) else (budget,)
    return next((part for part in parts if isinstance(part, Learner)), None)


def learned_state(budget: Budget) -> dict[str, Any] | None:
    """What the part that learns keeps in a checkpoint."""
    learner = learner_of(budget)
    return None if learner is None else learner.state_dict()


def restore_learned(budget: Budget, state: Any) -> None:
    """Take up what a loader's ``state`` has learned: before it is checked, because what is learned changes fingerprints."""
    learner = learner_of(budget)
    if learner is not None and isinstance(state, Mapping) and state.get("learned") is not None:
        learner.load_state_dict(state["learned"])
