"""Budgets that predict memory: relative to a first batch that is known to fit, or in the bytes that a device has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.fingerprint import described
from dynagroup.memory.fits import largest_within, parsed_bytes
from dynagroup.memory.protocols import BytesMemoryModel, LargestTable, MemoryModel
from dynagroup.memory.regressor import MemoryRegressor
from dynagroup.memory.run import Layout, Mode
from dynagroup.memory.traced import TracedMemory
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, round_up, said
from dynagroup.validation import check_int, check_number

__all__ = ["MemoryBudget"]


class MemoryBudget(Budget):
    """As many samples as fit in the memory of the hardest batch, as a memory model predicts it.

    The hardest batch is the ``batch_size`` longest samples: you know that it fits your device. Every later batch grows as
    far as its predicted memory stays within ``headroom`` of that one's. Shapes no larger than the hardest one always fit.
    :meth:`from_model` and :meth:`from_bytes` hold batches against the bytes of a device instead: no batch needs to be known.

    Streams beside ``tokens`` are taken for padded, as those of a decoder are, but those that an ``AdditiveCap`` names.

    Args:
        batch_size: samples of the hardest batch.
        longest: tokens (or stream -> units) of its longest sample; default: taken from the dataset's lengths.
        model: any :class:`~dynagroup.memory.MemoryModel`; default: the pretrained regressor.
        headroom: share of the limit's memory that a batch may be predicted to take, in (0, 1].
        pad_to_multiple_of: the longest sample is rounded up to a multiple of this before the check, in every stream.

    Raises:
        ConfigError: an argument is wrong.

    >>> from dynagroup.memory.protocols import PaddedTokens
    >>> budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.9)
    >>> budget.fits(BatchShape.of([4, 7, 8], longest=[100, 50, 50])).tolist()
    [True, True, False]
    """

    counts_every_stream: ClassVar[bool] = True
    knows_memory: ClassVar[bool] = True

    def __init__(
        self,
        batch_size: int,
        *,
        longest: int | Mapping[str, int] | None = None,
        model: MemoryModel | None = None,
        headroom: float = 0.9,
        pad_to_multiple_of: int = 1,
    ) -> None:
        check_int("batch_size", batch_size)
        units = longest if longest is None or isinstance(longest, Mapping) else {TOKENS: longest}
        for name, value in (units or {}).items():
            check_int(name if isinstance(longest, Mapping) else "longest", value)
        if model is not None and not hasattr(model, "relative"):
            raise ConfigError(
                f"`model` must predict memory, but is {type(model).__name__}; for a model of transformers: "
                "MemoryBudget.from_model(model), or MemoryRegressor.pretrained(Workload.from_model(model))"
            )
        self._set(_FirstBatch(batch_size, units, model or _usual(), pad_to_multiple_of), headroom, pad_to_multiple_of)

    @classmethod
    def from_bytes(
        cls, limit_bytes: int, *, model: BytesMemoryModel, headroom: float = 0.9, pad_to_multiple_of: int = 1
    ) -> MemoryBudget:
        """A budget held against the bytes that a device has, static memory included.

        Raises:
            ConfigError: an argument is wrong. BudgetError: static memory alone exceeds the limit.
        """
        limit_bytes = check_int("limit_bytes", limit_bytes)
        if not isinstance(model, BytesMemoryModel):
            raise ConfigError(f"`model` must answer in bytes (ProfiledMemory does), but is {model!r}")
        budget = cls.__new__(cls)
        budget._set(_DeviceBytes(limit_bytes, model), headroom, pad_to_multiple_of)
        if model.static_bytes >= headroom * limit_bytes:
            raise BudgetError(
                f"static memory ({model.static_bytes:,} bytes) alone exceeds {headroom:.0%} of limit_bytes={limit_bytes:,}; "
                "use a smaller model, a leaner optimizer, LoRA, sharding, or more memory"
            )
        return budget

    @classmethod
    def from_model(
        cls,
        model_or_config: Any,
        memory: str | int | None = None,
        *,
        mode: Mode = "train",
        headroom: float = 0.9,
        pad_to_multiple_of: int = 1,
        **how: Any,
    ) -> MemoryBudget:
        """What fits a device, from the model alone: it is traced for a few seconds on the CPU, no weights are read.

        Args:
            model_or_config: a torch model, a transformers config or its name.
            memory: of the device: "24GB", bytes, or None: what this process can have of the device here.
            mode: "train", "forward" or "generate".
            headroom: share of ``memory`` that may be used; the rest is for the CUDA context and fragmentation.
            pad_to_multiple_of: as above. With 16 (or 32, ...) masks need no padding for their kernel, and more fits.
            how: how it is run: ``layout="packed"``, ``dtype``, ``autocast``, ``attention``, ``max_new_tokens``,
                ``gradient_checkpointing``, ``lora`` (True, a rank, or a config of peft), ``optimizer``, ``sharding``
                ("ddp", "zero1" to "zero3", "fsdp") with ``num_ranks``, ``keeps_outputs=False``, and ``measured``: rows that
                :func:`~dynagroup.memory.measure` took on a device, by which the trace is raised; see
                :meth:`~dynagroup.memory.TracedMemory.of`.

        Raises:
            ConfigError: an argument is wrong, or the model can neither be traced nor simulated.
            BudgetError: parameters, gradients and optimizer state alone do not fit.

        ``print`` it to check what it took for granted.

        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
        >>> budget = MemoryBudget.from_model(config, "2GB", mode="train", dtype="bf16")
        >>> bool(budget.fits(BatchShape.of(8, 512))[0])
        True
        """
        from dynagroup.device import free_bytes

        _check(headroom, pad_to_multiple_of)
        limit = free_bytes() if memory is None else parsed_bytes(memory)
        traced = TracedMemory.of(model_or_config, mode, **how).padded_to(pad_to_multiple_of)
        return cls.from_bytes(limit, model=traced, headroom=headroom, pad_to_multiple_of=pad_to_multiple_of)

    def _set(self, limit: _DeviceBytes | _FirstBatch, headroom: float, pad_to_multiple_of: int) -> None:
        _check(headroom, pad_to_multiple_of)
        self._limit, self.headroom, self._multiple = limit, headroom, pad_to_multiple_of

    @property
    def pad_to_multiple_of(self) -> int:
        return self._multiple

    @property
    def layout(self) -> Layout:
        return getattr(self.model, "layout", "padded")

    @property
    def model(self) -> MemoryModel:
        """What predicts memory."""
        return self._limit.model

    @property
    def limit(self) -> str:
        """What batches are held against, in words."""
        return str(self._limit)

    def bind(self, lengths: Streams, /) -> MemoryBudget:
        bound = self._limit.bind(lengths)
        if bound is self._limit:
            return self
        budget = type(self).__new__(type(self))
        budget._set(bound, self.headroom, self._multiple)
        return budget

    def predicted(self, shape: BatchShape, /) -> FloatArray:
        """Predicted memory as a share of the limit (a device's bytes, or what the hardest batch takes): float64 (K,)."""
        return self._limit.static_share + self.cost(shape)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Predicted memory that grows with the batch, as a share of the limit: float64 (K,)."""
        return self._limit.grown_share(self._padded(shape))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return self._limit.fits(self._padded(shape), self.headroom)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed" or self._limit.knows_streams:
            return None
        return largest_within(lambda count: self.fits(BatchShape.of(count, longest)), len(longest))

    @property
    def fingerprint(self) -> str:
        about = f"{self._limit.fingerprint}, headroom={self.headroom!r}, pad_to_multiple_of={self._multiple}"
        return f"{type(self).__qualname__}({about})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._limit}, headroom={self.headroom!r})"

    def __str__(self) -> str:
        """What batches are held against and what was taken for granted, a line each, to be checked.

        >>> from transformers import GPT2Config
        >>> print(MemoryBudget.from_model(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000), "2GB"))
        MemoryBudget: 1.8 GB (0.9 of 2,000,000,000 bytes)
          model    GPT2Config of 229,632 parameters, traced
          run      train, float32, sdpa attention, no checkpointing, AdamW of 8 bytes a trained parameter
          static   3.68 MB whatever the batch
          batch    1.8 GB: samples by tokens of the longest: 434 of 128, 99 of 512, 44 of 1,024
        """
        at_most, facts = self._limit.told(self)
        padding = f"to multiples of {self._multiple}" if self._multiple > 1 else ""
        lines = [f"  {name:<7}  {text}" for name, text in {**facts, "padding": padding}.items() if text]
        return "\n".join([f"{type(self).__name__}: {at_most}", *lines])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryBudget) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _padded(self, shape: BatchShape) -> BatchShape:
        longest = {name: round_up(values, self._multiple) for name, values in shape.longest.items()}
        return shape if self._multiple == 1 else BatchShape(shape.num_samples, longest, shape.total)


def _check(headroom: float, pad_to_multiple_of: int) -> None:
    check_int("pad_to_multiple_of", pad_to_multiple_of)
    check_number("headroom", headroom, most=1.0)


@dataclass(frozen=True)
class _DeviceBytes:
    """The limit is the bytes that a device has. Shapes come with their padding."""

    limit_bytes: int
    model: BytesMemoryModel
    knows_streams: ClassVar[bool] = False

    @property
    def static_share(self) -> float:
        return self.model.static_bytes / self.limit_bytes

    @property
    def fingerprint(self) -> str:
        return f"limit_bytes={self.limit_bytes}, model={described(self.model)}"

    def __str__(self) -> str:
        return f"{self.limit_bytes:,} bytes"

    def bind(self, lengths: Streams) -> _DeviceBytes:
        return self

    def told(self, budget: MemoryBudget) -> tuple[str, dict[str, str]]:
        room, model, static = budget.headroom * self.limit_bytes, self.model, self.model.static_bytes
        traced = model if isinstance(model, TracedMemory) else None
        longest = (traced.told.positions if traced else None) or max(SHOWN)
        return f"{_gb(room)} ({budget.headroom:g} of {self.limit_bytes:,} bytes)", {
            "model": str(model),
            "run": traced.assumes if traced else "",
            "static": f"{_gb(static)} whatever the batch",
            "batch": f"{_gb(room - static)}: {_largest_batches(budget, longest)}",
        }

    def grown_share(self, padded: BatchShape) -> FloatArray:
        return self.model.batch_bytes(padded) / self.limit_bytes

    def fits(self, padded: BatchShape, headroom: float) -> BoolArray:
        return self.model.static_bytes + self.model.batch_bytes(padded) <= headroom * self.limit_bytes


@dataclass(frozen=True)
class _FirstBatch:
    """The limit is a batch that is known to fit. Shapes come with their padding."""

    batch_size: int
    longest: Mapping[str, int] | None
    model: MemoryModel
    pad_to_multiple_of: int
    static_share: ClassVar[float] = 0.0

    @property
    def knows_streams(self) -> bool:
        """Whether streams beside tokens count."""
        return len(self._baseline.longest) > 1

    @property
    def fingerprint(self) -> str:
        longest = None if self.longest is None else dict(sorted(self.longest.items()))
        return f"batch_size={self.batch_size}, longest={longest}, model={described(self.model)}"

    def __str__(self) -> str:
        return "the hardest batch"

    def bind(self, lengths: Streams) -> _FirstBatch:
        known = self.longest or {}
        if all(name in known for name in lengths):
            return self
        return replace(self, longest={**{name: max(int(v.max(initial=1)), 1) for name, v in lengths.items()}, **known})

    def told(self, budget: MemoryBudget) -> tuple[str, dict[str, str]]:
        known = self.longest or {}
        units = " and ".join(f"{value:,} {said(name)}" for name, value in known.items())
        long = f" of {units}" if known else ", however long the longest prove to be"
        at_most = f"{budget.headroom:g} of the memory of the hardest batch, {self.batch_size:,} samples{long}"
        batch = _largest_batches(budget, known[TOKENS]) if len(known) == 1 else ""
        return at_most, {"model": str(self.model), "batch": batch}

    def grown_share(self, padded: BatchShape) -> FloatArray:
        return self.model.relative(padded, self._known(padded))

    def fits(self, padded: BatchShape, headroom: float) -> BoolArray:
        baseline = self._known(padded)
        inside = [padded.num_samples <= baseline.num_samples]
        inside += [longest <= baseline.longest[name] for name, longest in padded.longest.items()]
        return np.logical_and.reduce(inside) | self._grown(padded, headroom)

    def _grown(self, padded: BatchShape, headroom: float) -> BoolArray:
        """Shapes that are predicted to fit. A regressor is asked once, for a table; a formula is asked directly."""
        if not isinstance(self.model, MemoryRegressor) or not self.model.tabulated or len(padded.longest) > 2:
            return self.grown_share(padded) <= headroom
        tables: dict[Any, LargestTable] = self.__dict__.setdefault("_tables", {})
        key = (tuple(padded.longest), headroom)
        if key not in tables:
            tables[key] = LargestTable.of(self.model, self._known(padded), headroom)
        return padded.num_samples <= tables[key].largest(padded.longest)

    def _known(self, padded: BatchShape) -> BatchShape:
        """The first batch, in the streams that a shape has."""
        baseline = self._baseline
        missing = sorted(set(padded.longest) - set(baseline.longest))
        if missing:
            raise ConfigError(
                f"how long the first batch is in {missing[0]!r} is not known: give MemoryBudget(..., longest={{'tokens': ..., "
                f"{missing[0]!r}: ...}}), hand the budget to a sampler that has the lengths, or, where that stream is not "
                f"padded, combine it: & AdditiveCap({missing[0]!r}, limit)"
            )
        return baseline.without([name for name in baseline.longest if name not in padded.longest])

    @cached_property
    def _baseline(self) -> BatchShape:
        if self.longest is None:
            raise ConfigError(
                "`longest` is not known: give MemoryBudget(..., longest=tokens of your longest sample), "
                "or hand the budget to a sampler that has the lengths"
            )
        padded = {k: round_up(np.array([v]), self.pad_to_multiple_of) for k, v in self.longest.items()}
        return BatchShape.of(self.batch_size, padded)


SHOWN = (128, 512, 2048, 8192)


def _largest_batches(budget: MemoryBudget, longest: int) -> str:
    """How many samples of some lengths fit, none longer than ``longest``; packed, how many tokens."""
    if budget.layout == "packed":
        most = largest_within(lambda total: budget.fits(BatchShape.of(1, total, total)), 1)
        return f"{int(most[0]):,} tokens"
    lengths = [length for length in SHOWN if length < longest][-3:] + [longest]
    counts = largest_within(lambda count: budget.fits(BatchShape.of(count, lengths)), len(lengths))
    parts = [f"{count:,} of {length:,}" for length, count in zip(lengths, counts.tolist(), strict=True)]
    return f"samples by tokens of the longest: {', '.join(parts)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


@lru_cache(maxsize=1)
def _usual() -> MemoryRegressor:
    return MemoryRegressor.pretrained()
