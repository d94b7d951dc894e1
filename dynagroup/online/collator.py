"""Measures processed samples in the workers, cuts them into batches that fit, and collates. Needs no collectives."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from dynagroup.budget.base import Budget, is_packed, padded_streams, padded_tokens, real_tokens
from dynagroup.budget.memory import predicted_memory
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import LONGEST, Kinds, by_stream
from dynagroup.online.messages import (
    Label,
    Refined,
    RefinedWindow,
    Request,
    Sample,
    WindowSamples,
    number_of,
)
from dynagroup.online.pools import deal_updates
from dynagroup.plan.batches import Batches, offsets_of, shapes_of, tokens_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.cut import cut_kinds
from dynagroup.plan.inputs import OneKind
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import (
    TOKENS,
    IntArray,
    Streams,
    check_names,
    primary,
    round_up,
    units_of,
)
from dynagroup.update.filling import FillingCollator, Pad
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.step import collated_shape, collated_tokens, has_rows_of_all, total_of
from dynagroup.validation import (
    called,
    check_choice,
    check_collating,
    check_function,
    explained,
    sendable,
    shorten,
    warn_user,
)

LengthOf: TypeAlias = Callable[[Any], "int | Mapping[str, int]"]
Oversize: TypeAlias = Literal["alone", "error"]


def measure_sample(sample: Sample) -> int:
    """Returns the tokens of one processed sample: its ``input_ids``, or if padded, those that ``attention_mask`` marks.

    Raises ConfigError if the sample has no ``input_ids``.

    >>> measure_sample({"input_ids": [5, 6, 7]})
    3
    """
    ids = _field(sample, "input_ids")
    if ids is None:
        fields = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(
            f"a sample has no 'input_ids' to measure (it has {fields}); pass `length_of`, for example "
            "len, or dynagroup.collated_length(collate_fn) if `collate_fn` makes the tokens"
        )
    shape = getattr(ids, "shape", None)
    length = int(shape[-1]) if shape else len(ids)
    mask = _field(sample, "attention_mask")
    if mask is None or not length:
        return length
    if getattr(mask, "ndim", 1) > 1:
        mask = mask[0]
    if getattr(mask, "is_cpu", False) and not mask.is_floating_point():
        mask = mask.numpy()  # its values are read in a tenth of the time
    if mask[0] and mask[-1]:
        return length
    warn_user(
        "samples are padded already (lengths are read from attention_mask); pad in collate_fn to save memory"
    )
    return int(sum(mask))


@dataclass
class RefinementCollator:
    """A ``collate_fn`` that measures samples, cuts them by *true* lengths into batches that fit, and collates each.

    A plain ``DataLoader`` passes the samples of one batch, and gets a :class:`RefinedWindow` to iterate over. To get
    dataset indices and not indices into the batch, wrap the dataset in :class:`IndexedDataset`.

    Args:
        collate_fn: the user's function from samples to a batch. None: ``torch.utils.data.default_collate``.
        budget: limit of a batch.
        length_of: function from a sample to its tokens, or to a dict by stream. None: :func:`measure_sample`. If
            ``collate_fn`` changes lengths: ``collated_length(collate_fn)``.
        weigh: loss weight of a batch: "tokens" (predicted labels), "labels", "samples", or a function of the batch.
        oversize: what to do with a sample that does not fit even alone: "alone" (a batch of its own) or "error".
        work: predicted time of a batch.
        pad: padding values, if the budget is a :class:`~dynagroup.ShapeLadder`; see :class:`FillingCollator`.
        kind_of: function from a sample to its label (or ``kinds``: labels by index): a batch has samples of one kind.
        one_kind: "step": in one step all ranks have batches of one kind; "batch": each batch may have another kind.

    The collated batch is compared with the budget. If it is longer than measured and does not fit, its samples are cut by
    their true lengths and collated again, so ``collate_fn`` must not change lists or tensors of a sample in place.

    Raises BudgetError if a sample does not fit even alone, and oversize="error".

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> collate = RefinementCollator(lambda samples: [s["input_ids"] for s in samples], TokenBudget(8), weigh="samples")
    >>> [refined.batch for refined in collate([{"input_ids": [1]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [3, 4]}])]
    [[[1, 2, 3, 4]], [[3, 4], [1]]]
    """

    collate_fn: Callable[[list[Sample]], Any] | None
    budget: Budget
    length_of: LengthOf | None = None
    _: KW_ONLY
    weigh: Weigh = "tokens"
    oversize: Oversize = "alone"
    work: Work = field(default_factory=check_work)
    pad: Pad | None = None
    kind_of: Callable[[Sample], Hashable] | None = None
    kinds: Kinds | None = None
    one_kind: OneKind = "step"

    def __post_init__(self) -> None:
        check_collating(self.collate_fn, self.pad)
        check_function("length_of", self.length_of, "from a sample to its tokens")
        check_function("kind_of", self.kind_of, "from a sample to its label")
        self.has_kinds = self.kind_of is not None or self.kinds is not None
        if self.kinds is not None and self.kind_of is not None:
            raise ConfigError("`kinds` and `kind_of` both label the samples; pass only one of them")
        check_choice("one_kind", self.one_kind, ("step", "batch"))
        if self.one_kind == "batch" and not self.has_kinds:
            raise ConfigError(
                "`one_kind` ('batch') needs a label for each sample; pass `kind_of` or `kinds`"
            )
        check_choice("oversize", self.oversize, ("alone", "error"))
        self.work = check_work(self.work)
        self._weight_of = weigher(self.weigh)
        self.filling = FillingCollator(self.collate_fn, self.budget.ladder, self.pad)
        self._warned_wide = False
        self._warned_rows = False

    @sendable(lambda: "making batches failed")
    def __call__(self, window: WindowSamples | Sequence[Any]) -> RefinedWindow:
        if not isinstance(window, WindowSamples):
            window = WindowSamples(Request.of(range(len(window))), list(window))
        return RefinedWindow(window.request.number, self._refine(window), window.place)

    def split_for_ranks(self, refined: Refined, num_parts: int) -> list[Refined]:
        """Splits a batch into batches that fit as well, to give all ranks the same number of steps."""
        assert refined.samples is not None
        bounds = np.linspace(0, len(refined), num_parts + 1).astype(int)
        request = Request(np.asarray(refined.positions), indices=refined.indices, keep=num_parts)
        measured = _Measured(
            request,
            refined.samples,
            refined.lengths,
            labels=[refined.label] * len(refined),
            kinds=np.zeros(len(refined), np.int64),
        )
        groups = [refined.group] * num_parts
        parts = self._collate_all(_neighbours(np.diff(bounds)), groups, measured)
        if len(parts) > num_parts:  # ranks have agreed on the number of batches
            raise BudgetError(
                f"a part of the batch of dataset indices {shorten(refined.indices)} does not fit, but the "
                "whole batch does; correct the budget's `fits` (see assert_budget_law), or let the random "
                "numbers of `collate_fn` depend on the sample alone"
            )
        return parts

    def measure(self, samples: Sequence[Sample], indices: Sequence[int]) -> Streams:
        """Returns the true lengths of these samples: stream -> int32 (N,)."""
        length_of = self.length_of or measure_sample
        measured: list[int | Mapping[str, int]] = []
        with sendable(
            lambda: f"length_of failed on sample {indices[len(measured)]}", always=True
        ):  # around all samples, because it costs a microsecond or two
            for sample in samples:
                measured.append(length_of(sample))
        if isinstance(measured[0], Mapping):
            columns = by_stream(measured, indices)
        else:
            columns = {TOKENS: measured}
        check_names(columns)
        ladder = self.budget.ladder
        if ladder is not None and len(columns) > 1:
            raise ConfigError(
                f"`shapes` are for one length, but `length_of` returns {[*columns]}; leave `shapes` out"
            )
        return {stream: _whole_numbers(values, indices) for stream, values in columns.items()}

    def labels(self, samples: Sequence[Sample], indices: Sequence[int]) -> list[Label]:
        if self.kinds is not None:
            return [self.kinds.labels[code] for code in self.kinds.codes[indices].tolist()]
        if self.kind_of is None:
            return [None] * len(samples)
        return [
            _label(self.kind_of, sample, index)
            for sample, index in zip(samples, indices, strict=True)
        ]

    def _refine(self, window: WindowSamples) -> list[Refined]:
        request = window.request
        if not window.samples:
            return []
        lengths = self.measure(window.samples, request.indices)
        labels = self.labels(window.samples, request.indices)
        kinds = np.zeros(len(labels), np.int64)
        if self.has_kinds:
            kinds = np.array([number_of(label) for label in labels])
        measured = _Measured(request, window.samples, lengths, labels=labels, kinds=kinds)
        if request.groups is not None:
            batches, groups = self._divide(_neighbours(np.asarray(request.groups)), measured)
            return self._collate_all(batches, groups, measured)
        if request.pool is None:
            batches = self._cut(np.arange(len(labels)), measured)
            return self._collate_all(batches, range(len(batches)), measured)
        refined: list[Refined] = []
        updates = deal_updates(request.pool, tokens_of(lengths, self.budget))
        for number, update in enumerate(updates):
            if len(update):
                batches = self._cut(update, measured)
                collated = self._collate_all(batches, range(len(batches)), measured)
                refined += [replace(batch, update=number) for batch in collated]
        return refined

    def _divide(self, planned: Batches, measured: "_Measured") -> tuple[Batches, list[int]]:
        """Returns batches: planned ones that still fit, others cut anew; and the number of each one's planned batch."""
        fits = self.budget.fits(shapes_of(planned, measured.lengths)).tolist()
        parts: list[Batches] = []
        numbers: list[int] = []
        for number, members in enumerate(planned):
            kinds = measured.kinds[members]
            is_of_one_kind = bool((kinds == kinds[0]).all())
            part = Batches.of([members])
            if len(members) > 1 and not (fits[number] and is_of_one_kind):
                part = self._cut(members, measured)
            parts.append(part)
            numbers += [number] * len(part)
        return Batches.concatenate(parts), numbers

    def _cut(self, members: IntArray, measured: "_Measured") -> Batches:
        """Cuts these samples (their places in the window) into batches that fit and have one kind."""
        parts = cut_kinds(
            measured.lengths_of(members),
            measured.kinds[members],
            CutRules(self.budget, self.work),
            num_ranks=1,
            together=False,
        )
        return Batches.concatenate(parts).map(members)

    def _collate_all(
        self, batches: Batches, groups: Sequence[int], measured: "_Measured"
    ) -> list[Refined]:
        """Collates batches, and compares them with the budget. Those that do not fit are cut again by their true lengths."""
        largest_first = np.argsort(-batches.sizes, kind="stable")
        kept = set(largest_first[: measured.request.keep].tolist())
        indices = [measured.indices_of(members) for members in batches]
        collated: list[Any] = []
        collate_fn = self.collate_fn or default_collate
        for number, members in enumerate(batches):
            samples = _copied(measured.samples_of(members), deep=number in kept)
            collated.append(called("collate_fn", collate_fn, samples, of=indices[number]))
        true = self._true_lengths(collated, batches, indices, measured.lengths)
        corrected = replace(measured, lengths=true)
        shapes = shapes_of(batches, true)
        memory = predicted_memory(self.budget, shapes)
        facts = _BatchFacts(
            groups=groups,
            indices=indices,
            fits=self.budget.fits(shapes).tolist(),
            padded=padded_tokens(shapes, self.budget).tolist(),
            real=real_tokens(shapes, self.budget).tolist(),
            work=self.work.of_batches(batches, true, self.budget).tolist(),
            memory=[None] * len(batches) if memory is None else memory.tolist(),
        )
        refined: list[Refined] = []
        for number, members in enumerate(batches):
            batch = collated[number]
            collated[number] = None  # frees memory of batches that are cut again
            if facts.fits[number] or len(members) == 1:
                result = self._refined(number, members, batch, facts, corrected)
                if number in kept:
                    result = replace(result, samples=measured.samples_of(members))
                refined.append(result)
                continue
            parts = self._cut(members, corrected)
            refined += self._collate_all(parts, [groups[number]] * len(parts), measured)
        return refined

    def _refined(
        self,
        number: int,
        members: IntArray,
        batch: Any,
        facts: "_BatchFacts",
        measured: "_Measured",
    ) -> Refined:
        indices = facts.indices[number]
        lengths = measured.lengths_of(members)
        is_oversize = not facts.fits[number]
        if is_oversize and self.oversize == "error":
            raise BudgetError(
                f"sample {indices[0]} ({units_of(lengths, 0)}) does not fit even alone; truncate it, "
                "filter it out, raise the budget, or pass oversize='alone'"
            )
        weight = called("weigh", self._weight_of, batch, len(indices), of=indices)
        if self.budget.ladder is not None:
            batch = self.filling.fill(batch, len(indices))
        label = measured.labels[members[0]]
        is_agreed = self.has_kinds and self.one_kind == "step"
        return Refined(
            batch,
            indices,
            positions=tuple(measured.request.positions[members].tolist()),
            lengths=lengths,
            weight=weight,
            padded=facts.padded[number],
            work=facts.work[number],
            real=facts.real[number],
            memory=facts.memory[number],
            group=facts.groups[number],
            oversize=is_oversize,
            label=label,
            kind=number_of(label) if is_agreed else 0,
        )

    def _true_lengths(
        self,
        collated: Sequence[Any],
        batches: Batches,
        indices: Sequence[list[int]],
        measured: Streams,
    ) -> Streams:
        """Returns the measured lengths, longer where a collated batch is longer than its samples were measured to be.
        Warns once of such a batch, and once of one that lacks rows."""
        expected = shapes_of(batches, measured)
        packed = is_packed(self.budget, measured)
        streams = padded_streams(self.budget, measured)
        sizes = batches.sizes.tolist()
        true = {name: values.copy() for name, values in measured.items()}
        for name in streams:
            shapes = [collated_shape(batch, name, streams) for batch in collated]
            has_rows = name == primary(measured) and not packed
            if has_rows:
                self._compare_rows(collated, shapes, indices, expected.total[name])
            planned = expected.total[name] if packed else expected.longest[name]
            tokens = [
                collated_tokens(shape, size, packed=packed)
                for shape, size in zip(shapes, sizes, strict=True)
            ]
            most = round_up(planned, self.budget.pad_to_multiple_of)
            for number in np.flatnonzero(np.array(tokens) > most).tolist():
                members = batches[number]
                lengths = measured[name][members]
                if has_rows:
                    lengths = _marked_lengths(collated[number], lengths)
                true[name][members] = stretched(lengths, tokens[number], packed=packed)
                width = f"{tokens[number]} {name}"
                self._warn_of_width(width, int(planned[number]), indices[number], packed)
        return true

    def _compare_rows(
        self,
        collated: Sequence[Any],
        shapes: Sequence[tuple[int, ...] | None],
        indices: Sequence[list[int]],
        num_tokens: IntArray,
    ) -> None:
        """Warns once of a padded batch that lacks rows of some samples, or has more of some than of others."""
        if self._warned_rows:
            return
        for number, shape in enumerate(shapes):
            if shape is None or len(shape) != 2:
                continue
            num_samples = len(indices[number])
            if has_rows_of_all(collated[number], shape, num_samples, num_tokens[number]):
                continue
            self._warned_rows = True
            warn_user(
                f"`collate_fn` made {shape[0]} rows of the {num_samples} samples "
                f"{shorten(indices[number])}: it left out or added some. If that is on purpose, "
                "weigh='samples' is wrong: pass `weigh`, a function of a batch"
            )
            return

    def _warn_of_width(
        self, width: str, planned: int, indices: Sequence[int], packed: bool
    ) -> None:
        if self._warned_wide:
            return
        self._warned_wide = True
        form = "in total" if packed else "per sample"
        whose = "measured as" if packed else "whose longest sample was measured as"
        warn_user(
            f"`collate_fn` made a batch of {width} {form} from dataset indices {shorten(indices)}, {whose} "
            f"{planned}. Batches that do not fit are cut and collated again, which takes time; pass "
            "length_of=collated_length(collate_fn), or give the budget the `pad_to_multiple_of` of "
            "`collate_fn`"
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The samples of a window, and what was measured of them."""

    request: Request
    samples: list[Sample]
    lengths: Streams
    labels: Sequence[Label]
    kinds: IntArray  # numbers of the labels

    def indices_of(self, members: IntArray) -> list[int]:
        return [self.request.indices[place] for place in members.tolist()]

    def samples_of(self, members: IntArray) -> list[Sample]:
        return [self.samples[place] for place in members.tolist()]

    def lengths_of(self, members: IntArray) -> Streams:
        return {name: values[members] for name, values in self.lengths.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchFacts:
    """What is known of each batch of a window: one entry per batch."""

    groups: Sequence[int]  # numbers of the planned batches
    indices: Sequence[list[int]]
    fits: list[bool]
    padded: list[int]
    real: list[int]
    work: list[float]
    memory: list[float] | list[None]  # shares of the limit; None: not predicted


def _label(kind_of: Callable[[Sample], Hashable], sample: Sample, index: int) -> Label:
    label = called("kind_of", kind_of, sample, of=index)
    with explained(
        f"`kind_of` must return a hashable label, but returned {label!r:.80} for sample {index}",
        way_out="; return a text, or a tuple",
    ):
        number_of(label)
    return label


def collated_length(collate_fn: Callable[[list[Sample]], Any]) -> Callable[[Any], int]:
    """Returns a ``length_of``: the tokens of the batch that ``collate_fn`` makes of a copy of one sample alone. For collate
    functions that tokenize, or that run a processor. Every sample is then collated twice.

    >>> length_of = collated_length(lambda samples: {"input_ids": np.ones((1, 2 + len(samples[0])))})
    >>> length_of("text")
    6
    """
    check_function("collate_fn", collate_fn, "from samples to a batch")
    return partial(_collated_length, collate_fn)


def _collated_length(collate_fn: Callable[[list[Sample]], Any], sample: Sample) -> int:
    batch = collate_fn(_copied([sample], deep=True))
    tokens = total_of(batch, TOKENS)
    if tokens is None:
        raise ConfigError(
            "`collated_length` needs a `collate_fn` that returns `input_ids`, as an array of one row for one "
            f"sample, but it returned {batch!r:.200}; pass another `length_of`"
        )
    return tokens


def stretched(lengths: NDArray[Any], tokens: int, *, packed: bool) -> IntArray:
    """Returns lengths in the same proportion, of which the longest (``packed``: the sum) is ``tokens``.

    >>> stretched(np.array([4, 2, 1]), 9, packed=False).tolist(), stretched(np.array([4, 4]), 9, packed=True).tolist()
    ([9, 5, 3], [5, 4])
    """
    known = np.maximum(lengths, 1).astype(np.int64)
    if not packed:
        return -(-known * tokens // known.max())
    shares = known * tokens // known.sum()
    shares[0] += tokens - shares.sum()
    return shares


def _marked_lengths(batch: Any, lengths: NDArray[Any]) -> NDArray[Any]:
    """Returns the tokens of each row that a batch's ``attention_mask`` marks; without such a mask, ``lengths``."""
    mask = _field(batch, "attention_mask")
    if mask is None or np.ndim(mask) != 2 or len(mask) != len(lengths):
        return lengths
    return np.asarray(mask).sum(axis=1)


def _field(holder: Any, name: str) -> Any:
    try:
        return holder[name]
    except (TypeError, KeyError, IndexError):
        return None


def _copied(samples: list[Sample], *, deep: bool) -> list[Sample]:
    """Returns copies of samples that are collated twice, as ``collate_fn`` may change them; or these if they cannot be
    copied. ``deep=False`` copies only their fields, which costs little."""
    try:
        return copy.deepcopy(samples) if deep else [copy.copy(sample) for sample in samples]
    except Exception:
        return samples


def _whole_numbers(values: list[Any], indices: Sequence[int]) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
    except ValueError:  # values of unequal shape
        array = np.empty(0)
    is_whole = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_whole or array.min(initial=0) < 0 or array.max(initial=0) > LONGEST:
        raise ConfigError(
            f"`length_of` must return whole numbers from 0 to {LONGEST}, but returned "
            f"{shorten(values)} for the samples {shorten(indices)}"
        )
    return array.astype(np.int32)


def _neighbours(sizes: IntArray) -> Batches:
    return Batches(np.arange(sizes.sum()), offsets_of(sizes))
