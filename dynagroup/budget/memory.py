"""Budgets that predict memory, relative to a batch that is known to fit, or in bytes of a device."""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from dynagroup.budget.base import AllOf, BoolArray, Budget, FloatArray, Wrapper
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.fingerprint import described
from dynagroup.memory.phases import MASK_ALIGNMENT, Layout, Mode
from dynagroup.memory.protocols import BytesMemoryModel, LargestTable, MemoryModel
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
LENGTHS = [2**k for k in range(7, 16)]  # positions of a model, in printed tables: 128 to 32,768
TRACE_OPTIONS = ("lora", "optimizer", "inputs", "measured")  # of TracedMemory, besides a Workload's
WAY_OUT = "use checkpointing, a leaner optimizer, LoRA, sharding, a smaller model, or more memory"


def parsed_bytes(memory: str | float) -> int:
    """Returns a number of bytes, from text such as "80GB", "24G" or "24 GiB", or from a number.

    >>> parsed_bytes("80GB"), parsed_bytes("1.5 GiB"), parsed_bytes(24e9)
    (80000000000, 1610612736, 24000000000)
    """
    pattern = r"\s*(\d+\.?\d*(?:E\+?\d\d?)?)\s*((?:[KMGT]I?)?)B?\s*"
    match = re.fullmatch(pattern, str(memory).upper())
    if match is None or float(match[1]) == 0:
        raise ConfigError(
            f"`memory` must be a size such as 80GB or 24GiB, or a number of bytes, but is {memory!r}"
        )
    number = float(match[1])
    unit = match[2]
    if not unit and number < 1e6:
        raise ConfigError(
            f"`memory` is {memory!r} bytes, which is too few; for gigabytes write {match[1]}GB"
        )
    return int(number * UNITS[unit])


def in_words(num_bytes: float) -> str:
    """Returns a size as text.

    >>> in_words(7_904_082_944), in_words(24_000_000)
    ('7.9 GB', '24 MB')
    """
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"


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

    model: Any  # the :class:`~dynagroup.memory.MemoryModel` that predicts memory
    headroom: float
    _batch_size: int
    _longest: dict[str, int]  # by stream, of the hardest batch; empty: not known before bind()
    _table_lengths: Sequence[int] = ()
    _has_assumed_model = False

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
        if longest is None:
            self._longest = {}
        elif isinstance(longest, Mapping):
            self._longest = {name: check_int(name, units) for name, units in longest.items()}
        else:
            self._longest = {TOKENS: check_int("longest", longest)}
        if model is None:
            model = MemoryRegressor.pretrained()
            self._has_assumed_model = True
        elif not hasattr(model, "relative"):
            raise ConfigError(
                f"`model` must be a memory model, but is {type(model).__name__}; for a model of transformers: "
                "MemoryBudget.from_model(model), or MemoryRegressor.pretrained(Workload.from_model(model))"
            )
        self._set(model, headroom, pad_to_multiple_of)

    def _set(self, model: Any, headroom: float, pad_to_multiple_of: int) -> None:
        self.model = model
        self.headroom = check_number("headroom", headroom, most=1.0)
        self._multiple = check_int("pad_to_multiple_of", pad_to_multiple_of)
        self._tables: dict[Any, LargestTable] = {}  # by the streams' names

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
        pad_to_multiple_of: int = 1,
        **workload: Any,
    ) -> "MemoryBudget":
        """Returns a budget for a device, from a model traced on the CPU in a few seconds; no weights are read.

        Args:
            model_or_config: a torch model, a transformers config, or a model's name.
            memory: memory of the device: "24GB", or 24e9 bytes. None: what this process can use of the local device.
            mode: "train", "forward" or "generate".
            headroom: float, share of ``memory`` to use; the rest is for the CUDA context and fragmentation.
            pad_to_multiple_of: int, tokens: lengths are rounded up to it. With 16 or 32 masks need no padding.
            workload: how the model runs, each option None for the default:
                ``layout``: "padded" (default) or "packed": samples are joined in one row;
                ``dtype``: dtype of the parameters, such as "bf16"; None: the model's;
                ``autocast``: dtype of ``torch.autocast``;
                ``attention``: "eager", "sdpa" or "flash"; None: the model's;
                ``gradient_checkpointing``: bool; None: the model's setting;
                ``lora``: True, an int (rank of the adapters), or a peft config: only adapters are trained;
                ``optimizer``: "adamw" (default), "adamw_8bit", "sgd", ..., or float: bytes of state per parameter;
                ``sharding``: what is sharded over ``num_ranks`` ranks: "ddp" (nothing), "zero1", "zero2", "zero3" or
                "fsdp";
                ``max_new_tokens``: int, tokens generated per prompt in mode "generate"; None: the generation config's;
                ``inputs``: ``(model, num_samples, longest) -> arguments of model.forward``, for more than text;
                ``measured``: rows of :func:`~dynagroup.memory.measure` from a device; they correct the trace;
                and other fields of :class:`~dynagroup.memory.Workload`. Printing the budget shows all assumptions.

        Raises ConfigError if the model can neither be traced nor simulated, or an option does not exist;
        BudgetError if static memory alone does not fit.

        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000)
        >>> budget = MemoryBudget.from_model(config, "2GB", mode="train", dtype="bf16")
        >>> bool(budget.fits(BatchShape.of(8, 512))[0])
        True
        """
        from dynagroup.device import free_bytes

        options = [*TRACE_OPTIONS, *(field.name for field in fields(Workload))]
        check_names("MemoryBudget.from_model", workload, options)
        limit_bytes = free_bytes() if memory is None else parsed_bytes(memory)
        known = {name: value for name, value in workload.items() if value is not None}
        model = TracedMemory.of(model_or_config, mode, **known)
        model = replace(model, pads_masks=pad_to_multiple_of % MASK_ALIGNMENT != 0)
        return cls.from_bytes(
            limit_bytes, model=model, headroom=headroom, pad_to_multiple_of=pad_to_multiple_of
        )

    @property
    def pad_to_multiple_of(self) -> int:
        return self._multiple

    @property
    def layout(self) -> Layout:
        return self._workload.layout or "padded"

    @property
    def new_tokens(self) -> int:
        if self._workload.mode != "generate":
            return 0
        return self._workload.max_new_tokens or 0

    @property
    def _workload(self) -> Workload:
        """What the memory model knows of the model and how it runs."""
        return getattr(self.model, "workload", None) or Workload()

    def bind(self, lengths: Streams, /) -> "MemoryBudget":
        known = _under_names_of(lengths, self._longest)
        if all(name in known for name in lengths):
            return self
        measured = {name: int(values.max(initial=1)) for name, values in lengths.items()}
        bound = self._copy()
        bound._longest = {**measured, **known}
        return bound

    def with_memory(self, known: Callable[[], MemoryModel], /) -> "MemoryBudget":
        if not self._has_assumed_model:
            return self
        informed = self._copy()
        informed.model = known()
        informed._has_assumed_model = False
        return informed

    def _copy(self) -> "MemoryBudget":
        other = copy.copy(self)
        other._tables = {}
        return other

    def predicted(self, shape: BatchShape, /) -> FloatArray:
        """Returns predicted memory as a share of the limit (a device's bytes, or the hardest batch): float64 (K,).

        A batch that is known to fit, because it is no larger than the hardest one, takes at most all of it.
        """
        share = self.cost(shape)
        return np.where(self.fits(shape), np.minimum(share, 1.0), share)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        """Returns the predicted memory that depends on the batch, as a share of the limit: float64 (K,)."""
        padded = self.as_run(shape)
        return self.model.relative(padded, self._hardest(padded))

    def fits(self, shape: BatchShape, /) -> BoolArray:
        padded = self.as_run(shape)
        hardest = self._hardest(padded)
        is_smaller = padded.num_samples <= hardest.num_samples
        for name, longest in padded.longest.items():
            is_smaller = is_smaller & (longest <= hardest.longest[name])
        return is_smaller | self._fits_by_prediction(padded, hardest)

    def _fits_by_prediction(self, padded: BatchShape, hardest: BatchShape) -> BoolArray:
        """A regressor is slow: its predictions for padded batches are made once, for a table."""
        is_slow = isinstance(self.model, MemoryRegressor)
        if not is_slow or self.layout == "packed" or len(padded.longest) > 2:
            return self.model.relative(padded, hardest) <= self.headroom
        names = tuple(padded.longest)
        if names not in self._tables:
            self._tables[names] = LargestTable.of(self.model, hardest, self.headroom)
        return padded.num_samples <= self._tables[names].largest(padded.longest)

    def largest(self, longest: IntArray, /) -> IntArray | None:
        if self.layout == "packed" or len(self._longest) > 1:
            return None
        return self.most_samples(longest)

    def most_samples(self, longest: Any) -> IntArray:
        """Returns the most samples of one length that fit, for K lengths (tokens, or by stream): int64 (K,)."""
        return largest_within(
            lambda count: self.fits(BatchShape.of(count, longest)),
            size=len(BatchShape.of(1, longest)),
        )

    def bytes_of(self, num_samples: int, longest: int | Mapping[str, int]) -> int:
        """Returns the predicted peak bytes of one batch, with parameters and optimizer; ``longest`` in tokens, or a dict by
        stream. ConfigError: this budget compares with the hardest batch, and knows no bytes."""
        raise ConfigError(
            "this MemoryBudget compares batches with the hardest one, and knows no bytes; use "
            "MemoryBudget.from_model(model, memory), or why(), which gives shares"
        )

    def why(self, num_samples: int, longest: int | Mapping[str, int]) -> str:
        """Returns a sentence that says why a batch fits or not, and how many samples of these lengths would.

        >>> from dynagroup.memory.protocols import PaddedTokens
        >>> MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=1.0).why(9, 50)
        '9 samples of 50 tokens do not fit: 112.5% of the limit, 100% may be used; 8 would fit'
        """
        shape = BatchShape.of(check_int("num_samples", num_samples), longest)
        verdict = "fit" if self.fits(shape)[0] else "do not fit"
        units = " and ".join(f"{values[0]:,} {name}" for name, values in shape.longest.items())
        return (
            f"{num_samples:,} samples of {units} {verdict}: {self._needed_in_words(shape)}, "
            f"{self.headroom:.0%} may be used; {int(self.most_samples(longest)[0]):,} would fit"
        )

    def _needed_in_words(self, shape: BatchShape) -> str:
        return f"{float(self.cost(shape)[0]):.1%} of the limit"

    def max_tokens(self, longest: int) -> int:
        """Returns the largest token budget with which every batch of samples of up to ``longest`` tokens fits. For
        generation, the token budget also counts the new tokens of each prompt.

        A budget of T tokens allows T // C(L) samples of L tokens (C: with new tokens and rounding). Memory allows M(L).
        So T is safe exactly if T < (M(L) + 1) * C(L) for all L. Above 32,768 units, T may be up to 1 % too small."""
        if self.layout == "packed":  # only the sum of tokens matters
            most = largest_within(lambda tokens: self.fits(BatchShape.of(1, tokens, tokens)), 1)
            return int(most[0]) // self._multiple * self._multiple
        # Every length up to 32,768. Above, every n-th: memory for that length, and the tokens of the shortest up to it.
        longest = check_int("longest", longest)
        num_exact = min(longest, LENGTHS[-1])
        step = -(-longest // LENGTHS[-1])
        exact = np.arange(1, num_exact + 1)
        lengths = np.append(exact, np.arange(longest, num_exact, -step)[::-1])
        shortest = np.append(1, lengths[:-1] + 1)
        tokens_of_sample = round_up(shortest + self.new_tokens, self._multiple)
        too_many = (self.most_samples(lengths) + 1) * tokens_of_sample
        return int(too_many.min()) - 1

    def figures(self, lengths: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns the table that ``print`` shows: per length the ``samples`` that fit, their ``tokens`` and ``share``
        of the limit; also ``reach`` (the longest length that fits, 0: none) and ``max_tokens`` for it."""
        longest = np.array(sorted(self._table_lengths if lengths is None else lengths), np.int64)
        if not longest.size or longest[0] < 1:
            raise ConfigError(
                f"`lengths` must be numbers of tokens of at least 1, but is {lengths!r}"
            )
        samples = self.most_samples(longest)
        tokens = samples * (round_up(longest, self._multiple) + self.new_tokens)
        share = self.predicted(BatchShape.of(np.maximum(samples, 1), longest))
        reach = int(longest[samples > 0].max(initial=0))
        return {
            "longest": longest.tolist(),
            "samples": samples.tolist(),
            "tokens": tokens.tolist(),
            "share": np.where(samples, share, 0.0).round(4).tolist(),
            "reach": reach,
            "max_tokens": self.max_tokens(reach) if reach else 0,
        }

    @property
    def fingerprint(self) -> str:
        return (
            f"MemoryBudget({self._limit}, model={described(self.model)}, headroom={self.headroom!r}, "
            f"pad_to_multiple_of={self._multiple})"
        )

    def __repr__(self) -> str:
        return f"MemoryBudget({self._limit}, headroom={self.headroom!r})"

    @property
    def _limit(self) -> str:
        longest = dict(sorted(self._longest.items())) or None
        return f"batch_size={self._batch_size}, longest={longest}"

    def __str__(self) -> str:
        """Returns :attr:`about`, the table of :meth:`figures`, and a token budget for all lengths that fit."""
        if not self._table_lengths:
            return self.about
        figures = self.figures()
        length = "prompt" if self.new_tokens else "longest"
        lines = [self.about, f"{length:>8}  {'samples':>8}  {'tokens':>10}  {'of the limit':>12}"]
        columns = [figures[name] for name in ("longest", "samples", "tokens", "share")]
        for longest, samples, tokens, share in zip(*columns, strict=True):
            lines.append(f"{longest:>8}  {samples:>8}  {tokens:>10}  {share:>12.1%}")
        lines.append(self._advice(figures["max_tokens"], figures["reach"]))
        return "\n".join(lines)

    def _advice(self, max_tokens: int, reach: int) -> str:
        if reach == 0:
            return f"not even one sample fits; {WAY_OUT}"
        options = ""
        if self._multiple != 1:
            options += f", pad_to_multiple_of={self._multiple}"
        if self.layout == "packed":
            options += ', layout="packed"'
        budget = f"TokenBudget({max_tokens}{options})"
        if self.new_tokens:
            return (
                f"a token budget of lengths + {self.new_tokens} (prompts with what is generated) "
                f"that is safe for prompts of up to {reach} tokens: {budget}"
            )
        return f"a token budget that is safe up to {reach} tokens: {budget}"

    @property
    def about(self) -> str:
        """The limit, and what is assumed about the model, as text."""
        return (
            f"MemoryBudget: limit {self._limit_in_words}; headroom {self.headroom:g}\n"
            f"model: {self.model}"
        )

    @property
    def limit_in_short(self) -> str:
        """What predictions are shares of."""
        return "the hardest batch, which fits"

    @property
    def _limit_in_words(self) -> str:
        batch = f"the memory of the hardest batch, {self._batch_size:,} samples"
        if not self._longest:
            return f"{batch}, with the longest lengths of the dataset"
        units = " and ".join(f"{longest:,} {name}" for name, longest in self._longest.items())
        return f"{batch} of {units}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryBudget) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def _hardest(self, padded: BatchShape) -> BatchShape:
        """Returns the hardest batch, in the streams of ``padded``."""
        known = _under_names_of(padded.longest, self._longest)
        for name in sorted(padded.longest):
            if name not in known:
                missing = f"the longest length of {name!r}" if self._longest else "`longest`"
                raise ConfigError(
                    f"{missing} is missing; give MemoryBudget(..., longest={{{name!r}: units of your longest sample}}), "
                    f"or if the stream is not padded, join & AdditiveCap({name!r}, limit)"
                )
        longest = {
            name: round_up(np.array([known[name]]), self._multiple) for name in padded.longest
        }
        return BatchShape.of(self._batch_size, longest)


def _under_names_of(streams: Collection[str], longest: Mapping[str, int]) -> dict[str, int]:
    """Returns the longest lengths under the names of these streams, whose primary one may be called otherwise."""
    renamed = dict(longest)
    first = primary(streams)
    if renamed and first not in renamed and primary(renamed) not in streams:
        renamed[first] = renamed.pop(primary(renamed))
    return renamed


class _DeviceBudget(MemoryBudget):
    """A memory budget whose limit is a number of bytes."""

    model: BytesMemoryModel

    def __init__(
        self, limit: str | float, model: BytesMemoryModel, headroom: float, pad_to_multiple_of: int
    ) -> None:
        limit_bytes = parsed_bytes(limit) if isinstance(limit, (str, float)) else limit
        self._limit_bytes = check_int("limit_bytes", limit_bytes)
        self._longest = {}
        if not isinstance(model, BytesMemoryModel):
            raise ConfigError(
                f"`model` must predict bytes (as ProfiledMemory does), but is {model!r}"
            )
        self._set(model, headroom, pad_to_multiple_of)
        lengths = LENGTHS
        longest = LENGTHS[-1]
        if isinstance(model, TracedMemory):
            lengths = [length * model.stride for length in LENGTHS]
            longest = min(model.longest or lengths[-1], lengths[-1])
        self._table_lengths = [length for length in lengths if length < longest] + [longest]
        if model.static_bytes >= headroom * self._limit_bytes:
            raise BudgetError(
                f"static memory ({model.static_bytes:,} bytes) alone exceeds {headroom:.0%} of "
                f"limit_bytes={limit_bytes:,}; {WAY_OUT}"
            )

    def bind(self, lengths: Streams, /) -> MemoryBudget:
        return self

    def predicted(self, shape: BatchShape, /) -> FloatArray:
        return self.model.static_bytes / self._limit_bytes + self.cost(shape)

    def cost(self, shape: BatchShape, /) -> FloatArray:
        return self._batch_bytes(shape) / self._limit_bytes

    def fits(self, shape: BatchShape, /) -> BoolArray:
        needed = self.model.static_bytes + self._batch_bytes(shape)
        return needed <= self.headroom * self._limit_bytes

    def _batch_bytes(self, shape: BatchShape) -> FloatArray:
        return self.model.batch_bytes(self.as_run(shape))

    def bytes_of(self, num_samples: int, longest: int | Mapping[str, int]) -> int:
        shape = BatchShape.of(check_int("num_samples", num_samples), longest)
        return int(self.model.static_bytes + self._batch_bytes(shape)[0])

    def _needed_in_words(self, shape: BatchShape) -> str:
        of_batch = float(self._batch_bytes(shape)[0])
        static = self.model.static_bytes
        return (
            f"{in_words(static + of_batch)} ({in_words(static)} of them for the model) of "
            f"{in_words(self._limit_bytes)}"
        )

    @property
    def _limit(self) -> str:
        return f"limit_bytes={self._limit_bytes}"

    @property
    def limit_in_short(self) -> str:
        return in_words(self._limit_bytes)

    @property
    def _limit_in_words(self) -> str:
        static = in_words(self.model.static_bytes)
        return f"{self._limit_bytes:,} bytes, of which {static} are static"


def predicted_memory(budget: Budget, shape: BatchShape) -> FloatArray | None:
    """Returns the largest predicted memory by the parts of a budget that predict it, as a share of the limit: float64 (K,).
    None: no part predicts it."""
    shares = [predicted for _, predicted in memory_by_part(budget, shape)]
    return np.max(shares, axis=0) if shares else None


def memory_by_part(budget: Budget, shape: BatchShape) -> Iterator[tuple[MemoryBudget, FloatArray]]:
    """Yields each part of a budget that predicts memory, and its predictions as shares of its limit: float64 (K,)."""
    while isinstance(budget, Wrapper):
        shape = budget.as_run(shape)  # a ladder of few shapes pads them further
        budget = budget.base
    whole = budget if isinstance(budget, AllOf) else AllOf((budget,))
    for part in whole.parts:
        if isinstance(part, MemoryBudget):
            # Batches are padded as far as any part of the budget requires.
            yield part, part.predicted(whole.seen_by(part, shape))
