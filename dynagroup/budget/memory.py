"""Budgets that predict memory, relative to a batch that is known to fit, or in bytes of a device."""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar

import numpy as np

from dynagroup.budget.base import BoolArray, Budget, FloatArray
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.fingerprint import described
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import MASK_ALIGNMENT, Attention, Layout, MakeInputs, Mode, Sharding
from dynagroup.memory.protocols import BytesMemoryModel, LargestTable, MemoryModel, PaddedTokens
from dynagroup.memory.regressor import MemoryRegressor
from dynagroup.memory.traced import TracedMemory
from dynagroup.memory.workload import Workload
from dynagroup.shapes import (
    TOKENS,
    BatchShape,
    IntArray,
    Streams,
    largest_within,
    primary,
    round_up,
)
from dynagroup.validation import check_int, check_names, check_number

UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}
LENGTHS = [
    2**k for k in range(7, 16)
]  # lengths in printed tables: 128 to 32,768 tokens, or as many as a model accepts
WAY_OUT = "use checkpointing, a leaner optimizer, LoRA, sharding, a smaller model, or more memory"


def parsed_bytes(memory: str | float) -> int:
    """Returns a number of bytes, from text such as "80GB", "24G" or "24 GiB", or from a number.

    >>> parsed_bytes("80GB"), parsed_bytes("1.5 GiB"), parsed_bytes(24e9)
    (80000000000, 1610612736, 24000000000)
    """
    pattern = r"\s*(\d+\.?\d*(?:E\+?\d\d?)?)\s*((?:[KMGT]I?)?)B?\s*"
    found = re.fullmatch(pattern, str(memory).upper())
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"`memory` must be a size such as 80GB or 24GiB, or a number of bytes, but is {memory!r}"
        )
    if not found[2] and float(found[1]) < 1e6:
        raise ConfigError(
            f"`memory` is {memory!r} bytes, which is too few; for gigabytes write {found[1]}GB"
        )
    return int(float(found[1]) * UNITS[found[2]])


class MemoryBudget(Budget):
    """Allows batches that need no more memory than the ``batch_size`` longest samples, which you know to fit.

    A batch of shorter samples may have more samples, as long as its predicted memory is at most ``headroom`` of the
    hardest batch's. A shape no larger than the hardest one always fits. :meth:`from_model` and :meth:`from_bytes`
    compare with bytes of a device instead. All streams count as padded, except those with an :class:`AdditiveCap`.

    Args:
        batch_size: int, samples in the hardest batch.
        longest: int, tokens of the longest sample (or a dict by stream). None: taken from the dataset's lengths.
        model: a :class:`~dynagroup.memory.MemoryModel`. None: that of the Trainer or job, else a cautious one.
        headroom: float in (0, 1], share of the limit that a batch's predicted memory may use.
        pad_to_multiple_of: int, tokens: the longest length of each stream is rounded up to a multiple before the check.

    >>> from dynagroup.memory.protocols import PaddedTokens
    >>> budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.9)
    >>> budget.fits(BatchShape.of([4, 7, 8], longest=[100, 50, 50])).tolist()
    [True, True, False]
    """

    counts_every_stream: ClassVar[bool] = True
    knows_memory: ClassVar[bool] = True
    model: Any  # the :class:`~dynagroup.memory.MemoryModel` that predicts memory
    _lengths: Sequence[int] = ()
    _assumed = False  # True: no memory model was given

    def __init__(
        self,
        batch_size: int,
        *,
        longest: int | Mapping[str, int] | None = None,
        model: MemoryModel | None = None,
        headroom: float = 0.9,
        pad_to_multiple_of: int = 1,
    ) -> None:
        self._batch_size = check_int("batch_size", batch_size)
        named = isinstance(longest, Mapping)
        self._longest = dict(longest) if named else {} if longest is None else {TOKENS: longest}
        for name, value in self._longest.items():
            check_int(name if named else "longest", value)
        if model is not None and not hasattr(model, "relative"):
            way_out = "MemoryBudget.from_model(model), or MemoryRegressor.pretrained(Workload.from_model(model))"
            told = f"`model` must be a memory model, but is {type(model).__name__}"
            raise ConfigError(f"{told}; for a model of transformers: {way_out}")
        self._assumed = model is None
        self._set(model or MemoryRegressor.pretrained(), headroom, pad_to_multiple_of)

    def _set(self, model: Any, headroom: float, pad_to_multiple_of: int) -> None:
        self.model, self._multiple = model, check_int("pad_to_multiple_of", pad_to_multiple_of)
        self.headroom = check_number("headroom", headroom, most=1.0)
        self._tables: dict[Any, LargestTable] = {}

    @classmethod
    def from_bytes(
        cls,
        limit_bytes: str | float,
        *,
        model: BytesMemoryModel,
        headroom: float = 0.9,
        pad_to_multiple_of: int = 1,
    ) -> "MemoryBudget":
        """Returns a budget with a limit in bytes. BudgetError: static memory alone is above ``headroom`` of it."""
        return _DeviceBudget(limit_bytes, model, headroom, pad_to_multiple_of)

    @classmethod
    def from_model(
        cls,
        model_or_config: Any,
        memory: str | float | None = None,
        *,
        mode: Mode = "train",
        headroom: float = 0.9,
        layout: Layout | None = None,
        pad_to_multiple_of: int = 1,
        dtype: Any = None,
        autocast: Any = None,
        attention: Attention | None = None,
        gradient_checkpointing: bool | None = None,
        lora: Any = None,
        optimizer: str | float | None = None,
        sharding: Sharding | None = None,
        num_ranks: int | None = None,
        max_new_tokens: int | None = None,
        inputs: MakeInputs | None = None,
        measured: Measurements | None = None,
        **sizes: Any,
    ) -> "MemoryBudget":
        """Returns a budget for a device, from a model traced on the CPU in a few seconds; no weights are read.

        Args:
            model_or_config: a torch model, a transformers config, or a model's name.
            memory: memory of the device: "24GB", or 24e9 bytes. None: what this process can use of the local device.
            mode: "train", "forward" or "generate".
            headroom: float, share of ``memory`` to use; the rest is for the CUDA context and fragmentation.
            layout: "padded" (default) or "packed": samples are joined in one row.
            pad_to_multiple_of: int, tokens: lengths are rounded up to it. With 16 or 32 masks need no padding.
            dtype: dtype of the parameters, such as "bf16"; None: the model's. ``autocast``: that of ``torch.autocast``.
            attention: "eager", "sdpa" or "flash"; None: the model's.
            gradient_checkpointing: bool; None: the model's setting.
            lora: True, an int (rank of the adapters), or a peft config: only adapters are trained.
            optimizer: "adamw" (default), "adamw_8bit", "sgd", ..., or float: bytes of state per parameter.
            sharding: what is sharded over ``num_ranks`` ranks: "ddp" (nothing), "zero1", "zero2", "zero3" or "fsdp".
            max_new_tokens: int, tokens generated per prompt in mode "generate"; None: the generation config's.
            inputs: ``(model, num_samples, longest) -> arguments of model.forward``, if the model reads not only text.
            measured: rows of :func:`~dynagroup.memory.measure` from a device; they correct the trace.
            sizes: other fields of :class:`~dynagroup.memory.Workload`. Printing the budget shows all assumptions.

        Raises ConfigError if the model can neither be traced nor simulated, or an option does not exist;
        BudgetError if static memory alone does not fit.

        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
        >>> budget = MemoryBudget.from_model(config, "2GB", mode="train", dtype="bf16")
        >>> bool(budget.fits(BatchShape.of(8, 512))[0])
        True
        """
        from dynagroup.device import free_bytes

        padding = {"headroom": headroom, "pad_to_multiple_of": pad_to_multiple_of}
        how = {
            "layout": layout,
            "dtype": dtype,
            "autocast": autocast,
            "attention": attention,
            "lora": lora,
            "gradient_checkpointing": gradient_checkpointing,
            "optimizer": optimizer,
            "sharding": sharding,
            "num_ranks": num_ranks,
            "max_new_tokens": max_new_tokens,
            "inputs": inputs,
            "measured": measured,
        }
        check_names(
            "MemoryBudget.from_model",
            sizes,
            [*how, *padding, "mode", *(f.name for f in fields(Workload))],
        )
        MemoryBudget(
            1, model=PaddedTokens(), **padding
        )  # refuses wrong settings before the slow trace
        limit = free_bytes() if memory is None else parsed_bytes(memory)
        said = {name: value for name, value in (how | sizes).items() if value is not None}
        masks = {"pads_masks": pad_to_multiple_of % MASK_ALIGNMENT != 0}
        return cls.from_bytes(
            limit, model=replace(TracedMemory.of(model_or_config, mode, **said), **masks), **padding
        )

    @property
    def pad_to_multiple_of(self) -> int:
        return self._multiple

    @property
    def layout(self) -> Layout:
        known = (
            self.model,
            getattr(self.model, "workload", None),
        )  # a user's memory model may have its own `layout`
        return next(filter(None, (getattr(part, "layout", None) for part in known)), "padded")

    def bind(self, lengths: Streams, /) -> "MemoryBudget":
        given = _of_first_batch(self._longest, lengths)
        if all(name in given for name in lengths):
            return self
        found = {name: max(int(values.max(initial=1)), 1) for name, values in lengths.items()}
        return self._changed(_longest=found | given)

    def with_memory(self, known: Callable[[], MemoryModel], /) -> "MemoryBudget":
        return self._changed(model=known(), _assumed=False) if self._assumed else self

    def _changed(self, **attributes: Any) -> "MemoryBudget":
        changed = copy.copy(self)
        vars(changed).update(attributes, _tables={})
        return changed

    def predicted(self, shape: BatchShape, /) -> FloatArray:
        """Returns predicted memory as a share of the limit (a device's bytes, or the hardest batch): float64 (K,). A batch
        that is known to fit, because it is no larger than the hardest one, takes at most all of it."""
        share = self.cost(shape)
        return np.where(self.fits(shape), np.minimum(share, 1.0), share)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the predicted memory that depends on the batch, as a share of the limit: float64 (K,)."""
        padded = self._padded(shape)
        return self.model.relative(padded, self._first(padded))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        padded = self._padded(shape)
        first = self._first(padded)
        inside = [padded.num_samples <= first.num_samples]
        inside += [longest <= first.longest[name] for name, longest in padded.longest.items()]
        return np.logical_and.reduce(inside) | self._grown(padded, first)

    def _grown(self, padded: BatchShape, first: BatchShape) -> BoolArray:
        """Returns which shapes fit by prediction. A regressor is slow, so its predictions are made once, for a table."""
        if (
            not isinstance(self.model, MemoryRegressor)
            or self.layout == "packed"
            or len(padded.longest) > 2
        ):
            return self.model.relative(padded, first) <= self.headroom
        key = tuple(padded.longest)
        if key not in self._tables:
            self._tables[key] = LargestTable.of(self.model, first, self.headroom)
        return padded.num_samples <= self._tables[key].largest(padded.longest)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        return (
            None
            if self.layout == "packed" or len(self._longest) > 1
            else self.most_samples(longest)
        )

    def most_samples(self, longest: Any) -> IntArray:
        """Returns the most samples of one length that fit, for K lengths (tokens, or by stream): int64 (K,)."""
        return largest_within(
            lambda count: self.fits(BatchShape.of(count, longest)), len(BatchShape.of(1, longest))
        )

    def max_tokens(self, longest: int) -> int:
        """Returns the largest token budget with which every batch of samples of up to ``longest`` tokens fits. For
        generation, the token budget also counts the new tokens of each prompt.

        A budget of T tokens allows T // C(L) samples of L tokens (C: with new tokens and rounding). Memory allows M(L).
        So T is safe exactly if T < (M(L) + 1) * C(L) for all L."""
        if self.layout == "packed":  # only the sum of tokens matters
            total = largest_within(lambda count: self.fits(BatchShape.of(1, count, count)), 1)
            return int(total[0]) // self._multiple * self._multiple
        lengths = np.arange(1, longest + 1)
        return int(
            (
                (self.most_samples(lengths) + 1)
                * round_up(lengths + self.new_tokens, self._multiple)
            ).min()
            - 1
        )

    def figures(self, lengths: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns the table that ``print`` shows: per length the ``samples`` that fit, their ``tokens`` and ``share``
        of the limit; also ``reach`` (the longest length that fits, 0: none) and ``max_tokens`` for it."""
        longest = np.array(sorted(self._lengths if lengths is None else lengths), np.int64)
        if not longest.size or longest[0] < 1:
            raise ConfigError(
                f"`lengths` must be numbers of tokens of at least 1, but is {lengths!r}"
            )
        samples = self.most_samples(longest)
        tokens = samples * (round_up(longest, self._multiple) + self.new_tokens)
        share = np.where(
            samples, self.predicted(BatchShape.of(np.maximum(samples, 1), longest)), 0.0
        ).round(4)
        reach = int(longest[samples > 0].max(initial=0))
        columns = {"longest": longest, "samples": samples, "tokens": tokens, "share": share}
        found = {name: values.tolist() for name, values in columns.items()}
        return {**found, "reach": reach, "max_tokens": self.max_tokens(reach) if reach else 0}

    @property
    def new_tokens(self) -> int:
        workload = getattr(self.model, "workload", None)
        return workload.max_new_tokens or 0 if workload and workload.mode == "generate" else 0

    @property
    def fingerprint(self) -> str:
        about = f"{self._about}, model={described(self.model)}, headroom={self.headroom!r}"
        return f"MemoryBudget({about}, pad_to_multiple_of={self._multiple})"

    @property
    def _about(self) -> str:
        return (
            f"batch_size={self._batch_size}, longest={dict(sorted(self._longest.items())) or None}"
        )

    def __repr__(self) -> str:
        return f"MemoryBudget({self._about}, headroom={self.headroom!r})"

    def __str__(self) -> str:
        """Returns :attr:`about`, the table of :meth:`figures`, and a token budget for all lengths that fit."""
        if not self._lengths:
            return self.about
        found, new = self.figures(), self.new_tokens
        head = f"{'prompt' if new else 'longest':>8}  {'samples':>8}  {'tokens':>10}  {'of the limit':>12}"
        row, columns = (
            "{:>8}  {:>8}  {:>10}  {:>12.1%}".format,
            map(found.__getitem__, ("longest", "samples", "tokens", "share")),
        )
        lines = [self.about, head, *map(row, *columns)]
        if not found["reach"]:
            return "\n".join([*lines, f"not even one sample fits; {WAY_OUT}"])
        what, of = (
            (f"of lengths + {new} (prompts with what is generated) ", "for prompts of ")
            if new
            else ("", "")
        )
        options = "" if self._multiple == 1 else f", pad_to_multiple_of={self._multiple}"
        options += ', layout="packed"' if self.layout == "packed" else ""
        budget = f"TokenBudget({found['max_tokens']}{options})"
        return "\n".join(
            [
                *lines,
                f"a token budget {what}that is safe {of}up to {found['reach']} tokens: {budget}",
            ]
        )

    @property
    def about(self) -> str:
        """The limit, and what is assumed about the model, as text."""
        return f"MemoryBudget: {self.headroom:g} of {self._limit_told}\nmodel: {self.model}"

    @property
    def _limit_told(self) -> str:
        units = " and ".join(f"{value:,} {name}" for name, value in self._longest.items())
        long = f" of {units}" if units else ", with the longest lengths of the dataset"
        return f"the memory of the hardest batch, {self._batch_size:,} samples{long}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryBudget) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _padded(self, shape: BatchShape) -> BatchShape:
        longest = {name: round_up(values, self._multiple) for name, values in shape.longest.items()}
        return shape if self._multiple == 1 else BatchShape(shape.num_samples, longest, shape.total)

    def _first(self, padded: BatchShape) -> BatchShape:
        given = _of_first_batch(self._longest, padded.longest)
        for name in sorted(set(padded.longest) - set(given)):
            which = "`longest`" if not self._longest else f"the longest length of {name!r}"
            way_out = f"give MemoryBudget(..., longest={{{name!r}: units of your longest sample}})"
            cap = f"if the stream is not padded, join & AdditiveCap({name!r}, limit)"
            raise ConfigError(f"{which} is missing; {way_out}, or {cap}")
        known = {name: round_up(np.array([given[name]]), self._multiple) for name in padded.longest}
        return BatchShape.of(self._batch_size, known)


def _of_first_batch(longest: Mapping[str, int], names: Collection[str]) -> dict[str, int]:
    """Returns the given longest lengths under the names of these streams; the primary stream may have another name."""
    given, first = dict(longest), primary(names)
    if given and first not in given and primary(given) not in names:
        given[first] = given.pop(primary(given))
    return given


class _DeviceBudget(MemoryBudget):
    """A memory budget whose limit is a number of bytes."""

    model: BytesMemoryModel

    def __init__(
        self, limit: str | float, model: BytesMemoryModel, headroom: float, pad_to_multiple_of: int
    ) -> None:
        limit_bytes = parsed_bytes(limit) if isinstance(limit, (str, float)) else limit
        self._limit_bytes, self._longest = check_int("limit_bytes", limit_bytes), {}
        if not isinstance(model, BytesMemoryModel):
            raise ConfigError(
                f"`model` must predict bytes (as ProfiledMemory does), but is {model!r}"
            )
        self._set(model, headroom, pad_to_multiple_of)
        most = min(getattr(model, "longest", None) or LENGTHS[-1], LENGTHS[-1])
        self._lengths = [length for length in LENGTHS if length < most] + [most]
        if model.static_bytes >= headroom * self._limit_bytes:
            told = f"static memory ({model.static_bytes:,} bytes) alone exceeds {headroom:.0%}"
            raise BudgetError(f"{told} of limit_bytes={limit_bytes:,}; {WAY_OUT}")

    def bind(self, lengths: Streams, /) -> MemoryBudget:
        return self

    def predicted(self, shape: BatchShape, /) -> FloatArray:
        return self.model.static_bytes / self._limit_bytes + self.cost(shape)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self.model.batch_bytes(self._padded(shape)) / self._limit_bytes

    def fits(self, shape: BatchShape, /) -> BoolArray:
        return (
            self.model.static_bytes + self.model.batch_bytes(self._padded(shape))
            <= self.headroom * self._limit_bytes
        )

    @property
    def _about(self) -> str:
        return f"limit_bytes={self._limit_bytes}"

    @property
    def _limit_told(self) -> str:
        static = self.model.static_bytes
        size = f"{static / 1e9:.3g} GB" if static >= 1e8 else f"{static / 1e6:.3g} MB"
        return f"{self._limit_bytes:,} bytes, of which {size} are static"
