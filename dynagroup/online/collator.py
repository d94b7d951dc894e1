"""Measures processed samples in the workers, cuts them into batches that fit, and collates. Needs no collectives."""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import default_collate

from dynagroup.budget.base import Budget, is_packed, padded_streams, padded_tokens, real_tokens
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import LONGEST, Kinds, by_stream
from dynagroup.online.messages import Refined, RefinedWindow, Request, WindowSamples, number_of
from dynagroup.plan.batches import Batches, offsets_of, shapes_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.planner import OneKind
from dynagroup.plan.ranks import cut_kinds
from dynagroup.shapes import TOKENS, BatchShape, IntArray, Streams, check_names, units_of
from dynagroup.update.filling import FillingCollator, Pad
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.step import shown, total_of
from dynagroup.validation import (
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


def measure_sample(sample: Any) -> int:
    """Returns the tokens of one processed sample: its ``input_ids``, or if padded, those that ``attention_mask`` marks.

    Raises ConfigError if the sample has no ``input_ids``.

    >>> measure_sample({"input_ids": [5, 6, 7]})
    3
    """
    ids = _ids_of(sample)
    if ids is None:
        found = sorted(sample) if isinstance(sample, Mapping) else type(sample).__name__
        raise ConfigError(
            f"a sample has no 'input_ids' to measure (it has {found}); pass `length_of`, e.g. len"
        )
    shape = getattr(ids, "shape", None)
    length = int(shape[-1]) if shape else len(ids)
    mask = sample.get("attention_mask") if isinstance(sample, Mapping) else None
    if mask is None or not length:
        return length
    mask = mask[0] if getattr(mask, "ndim", 1) > 1 else mask
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
        length_of: function from a sample to its tokens, or to a dict by stream. None: :func:`measure_sample`, or if
            batches become longer than so measured, the length after ``collate_fn`` on each sample alone.
        weigh: loss weight of a batch: "tokens" (predicted labels), "labels", "samples", or a function of the batch.
        oversize: what to do with a sample that does not fit even alone: "alone" (a batch of its own) or "error".
        work: predicted time of a batch.
        pad: padding values, if the budget is a :class:`~dynagroup.ShapeLadder`; see :class:`FillingCollator`.
        kind_of: function from a sample to its label (or ``kinds``: labels by index): a batch has samples of one kind.
        one_kind: "step": in one step all ranks have batches of one kind; "batch": each batch may have another kind.

    Raises BudgetError if a batch is longer than measured and does not fit, or a sample does not and oversize="error".

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> collate = RefinementCollator(lambda samples: [s["input_ids"] for s in samples], TokenBudget(8), weigh="samples")
    >>> [refined.batch for refined in collate([{"input_ids": [1]}, {"input_ids": [1, 2, 3, 4]}, {"input_ids": [3, 4]}])]
    [[[1, 2, 3, 4]], [[3, 4], [1]]]
    """

    collate_fn: Callable[[list[Any]], Any] | None
    budget: Budget
    length_of: LengthOf | None = None
    _: KW_ONLY
    weigh: Weigh = "tokens"
    oversize: Oversize = "alone"
    work: Work = field(default_factory=check_work)
    pad: Pad | None = None
    kind_of: Callable[[Any], Hashable] | None = None
    kinds: Kinds | None = None
    one_kind: OneKind = "step"

    def __post_init__(self) -> None:
        check_collating(self.collate_fn, self.pad)
        check_function("length_of", self.length_of, "from a sample to its tokens")
        check_function("kind_of", self.kind_of, "from a sample to its label")
        self.has_kinds = self.kind_of is not None or self.kinds is not None
        if self.kinds is not None and self.kind_of is not None:
            raise ConfigError("`kinds` and `kind_of` both label the samples; pass only one of them")
        if (
            check_choice("one_kind", self.one_kind, ("step", "batch")) == "batch"
            and not self.has_kinds
        ):
            raise ConfigError(
                "`one_kind` ('batch') needs a label for each sample; pass `kind_of` or `kinds`"
            )
        check_choice("oversize", self.oversize, ("alone", "error"))
        self.work = check_work(self.work)
        self._weight_of = weigher(self.weigh)
        self.filling = FillingCollator(self.collate_fn, self.budget.ladder, self.pad)
        self._warned_wide = self._collates_to_measure = self._ran = False

    @sendable(lambda: "making batches failed")
    def __call__(self, window: WindowSamples | Sequence[Any]) -> RefinedWindow:
        if not isinstance(window, WindowSamples):
            window = WindowSamples(Request.of(range(len(window))), list(window))
        deep, self._ran = not self._ran, True
        refined = self._measured_again(
            lambda chosen: self._refine(replace(window, samples=chosen)), window.samples, deep
        )
        return RefinedWindow(window.request.number, refined, window.place)

    def _measured_again(
        self, make: Callable[[list[Any]], list[Refined]], samples: list[Any], deep: bool
    ) -> list[Refined]:
        """Makes batches of ``samples``; if their lengths were measured wrongly, once more of (``deep``) copies of them."""
        sure = (
            self.length_of is not None or self.collate_fn is None or self._collates_to_measure
        )  # no second time then
        spare = samples if sure else _copied(samples, deep=deep)
        try:
            return make(samples)
        except _WiderThanMeasured as wider:
            self._collates_to_measure = True
            told = "`collate_fn` changes lengths, so each sample is also collated alone to measure it, in about twice the time"
            warn_user(
                f"{wider}: {told}; pass `length_of`, or give the budget the right `pad_to_multiple_of`"
            )
            return make(spare)

    def split_for_ranks(self, refined: Refined, parts: int) -> list[Refined]:
        """Splits a batch into ``parts`` batches that fit as well, to give all ranks the same number of steps."""
        assert refined.samples is not None
        bounds = np.linspace(0, len(refined), parts + 1).astype(int)
        request = Request(np.asarray(refined.positions), indices=refined.indices, keep=parts)
        groups, labels = [refined.group] * parts, [refined.label] * len(refined)

        def make(samples: list[Any]) -> list[Refined]:
            lengths = (
                self.measure(samples, refined.indices)
                if self._collates_to_measure
                else refined.lengths
            )
            window = WindowSamples(request, samples)
            return self._collate_all(_neighbours(np.diff(bounds)), groups, lengths, labels, window)

        return self._measured_again(make, refined.samples, deep=True)

    def measure(self, samples: Sequence[Any], indices: Sequence[int]) -> Streams:
        """Returns the true lengths of these samples: stream -> int32 (N,)."""
        name, length_of = self._measure_by(samples[0])
        measured = [
            _asked(name, length_of, sample, of=index)
            for sample, index in zip(samples, indices, strict=True)
        ]
        columns = (
            by_stream(measured, indices) if isinstance(measured[0], Mapping) else {TOKENS: measured}
        )
        check_names(columns)
        if self.budget.ladder is not None and len(columns) > len(self.budget.ladder.streams):
            raise ConfigError(
                f"`shapes` are for one length, but `length_of` returns {[*columns]}; leave `shapes` out"
            )
        return {stream: _whole_numbers(name, values, indices) for stream, values in columns.items()}

    def _measure_by(self, sample: Any) -> tuple[str, LengthOf]:
        if self.length_of is not None:
            return "length_of", self.length_of
        collate = self.collate_fn
        if collate is None or (not self._collates_to_measure and _ids_of(sample) is not None):
            return "length_of", measure_sample
        return "collate_fn", lambda sample: _collated_length(collate, sample)

    def _refine(self, window: WindowSamples) -> list[Refined]:
        request, samples = window.request, window.samples
        if not samples:
            return []
        lengths, labels = (
            self.measure(samples, request.indices),
            self.labels(samples, request.indices),
        )
        return self._collate_all(*self._divide(lengths, labels, request), lengths, labels, window)

    def labels(self, samples: Sequence[Any], indices: Sequence[int]) -> list[Any]:
        if self.kinds is not None:
            return [self.kinds.labels[code] for code in self.kinds.codes[indices].tolist()]
        if self.kind_of is None:
            return [None] * len(samples)
        return [self._label(sample, index) for sample, index in zip(samples, indices, strict=True)]

    def _label(self, sample: Any, index: int) -> Any:
        label = _asked("kind_of", self.kind_of or number_of, sample, of=index)
        what = (
            f"`kind_of` must return a hashable label, but returned {label!r:.80} for sample {index}"
        )
        with explained(what, way_out="; return a text, or a tuple"):
            number_of(label)
        return label

    def _divide(
        self, lengths: Streams, labels: Sequence[Any], request: Request
    ) -> tuple[Batches, list[int]]:
        """Returns batches: planned ones that still fit, others cut anew; and the number of each one's planned batch."""
        kinds = (
            np.array([number_of(label) for label in labels])
            if self.has_kinds
            else np.zeros(len(labels), np.int64)
        )
        make = partial(cut_kinds, budget=self.budget, num_ranks=1, together=False, work=self.work)
        if request.groups is None:
            batches = Batches.concatenate(make(lengths, kinds))
            return batches, [*range(len(batches))]
        planned = _neighbours(np.asarray(request.groups))
        fits, parts = self.budget.fits(shapes_of(planned, lengths)), []
        for members, fit in zip(planned, fits.tolist(), strict=True):
            own, of_own = (
                kinds[members],
                {name: values[members] for name, values in lengths.items()},
            )
            stays = len(members) == 1 or (fit and (own == own[0]).all())
            made = (
                [Batches.of([members])]
                if stays
                else [part.map(members) for part in make(of_own, own)]
            )
            parts.append(Batches.concatenate(made))
        return Batches.concatenate(parts), [
            number for number, part in enumerate(parts) for _ in part
        ]

    def _collate_all(
        self,
        batches: Batches,
        groups: Sequence[int],
        lengths: Streams,
        labels: Sequence[Any],
        window: WindowSamples,
    ) -> list[Refined]:
        request, samples, shapes = window.request, window.samples, shapes_of(batches, lengths)
        agrees = self.has_kinds and self.one_kind == "step"
        columns = {"group": groups, "oversize": (~self.budget.fits(shapes)).tolist()}
        columns["padded"] = padded_tokens(shapes, self.budget).tolist()
        columns["work"] = self.work.of_batches(batches, lengths, self.budget).tolist()
        columns["real"] = real_tokens(shapes, self.budget).tolist()
        measured_by = shapes.total if is_packed(self.budget, lengths) else shapes.longest
        widths = {name: measured_by[name].tolist() for name in padded_streams(self.budget, lengths)}
        kept, made = set(np.argsort(-batches.sizes, kind="stable")[: request.keep].tolist()), []
        for number, members in enumerate(batches):
            places = members.tolist()
            chosen, indices = [samples[p] for p in places], [request.indices[p] for p in places]
            measured = {name: values[members] for name, values in lengths.items()}
            facts = {name: column[number] for name, column in columns.items()}
            facts["samples"] = _copied(chosen) if number in kept else None
            batch = _asked("collate_fn", self.collate_fn or default_collate, chosen, of=indices)
            if facts["oversize"] and len(indices) > 1:
                wrong = f"the batch of dataset indices {shorten(indices)} must fit, because a larger one does"
                raise BudgetError(f"{wrong}; correct the budget's `fits`, see assert_budget_law")
            if facts["oversize"] and self.oversize == "error":
                way_out = "truncate it, filter it out, raise the budget, or pass oversize='alone'"
                raise BudgetError(
                    f"sample {indices[0]} ({units_of(measured, 0)}) does not fit even alone; {way_out}"
                )
            if not facts["oversize"]:
                self._check_width(
                    batch,
                    indices,
                    measured,
                    {name: width[number] for name, width in widths.items()},
                )
            weight = _asked("weigh", self._weight_of, batch, len(places), of=indices)
            facts |= {"label": labels[places[0]], "kind": agrees * number_of(labels[places[0]])}
            positions = tuple(request.positions[members].tolist())
            batch = batch if self.budget.ladder is None else self.filling.fill(batch, len(places))
            made.append(Refined(batch, indices, positions, measured, weight, **facts))
        return made

    def _check_width(
        self, batch: Any, indices: Sequence[int], lengths: Streams, widths: Mapping[str, int]
    ) -> None:
        """Warns, or raises BudgetError, if a collated batch is longer than its samples were measured to be."""
        packed, multiple = is_packed(self.budget, lengths), self.budget.pad_to_multiple_of
        found = shown(batch, len(indices), [*widths], packed=packed).items()
        wide = {
            name: tokens
            for name, tokens in found
            if tokens > widths[name] + -widths[name] % multiple
        }
        if not wide:
            return
        came = " and ".join(f"{tokens} {name}" for name, tokens in wide.items())
        form, whose = (
            ("in total", "measured as")
            if packed
            else ("per row", "whose longest sample was measured as")
        )
        own = " and ".join(str(widths[name]) for name in wide)
        told = f"`collate_fn` made a batch of {came} {form} from dataset indices {shorten(indices)}, {whose} {own}"
        if self.length_of is None and not self._collates_to_measure:
            raise _WiderThanMeasured(told)
        shape, form = BatchShape.of_samples(lengths), "total" if packed else "longest"
        true = {
            **getattr(shape, form),
            **{name: np.array([tokens]) for name, tokens in wide.items()},
        }
        way_out = (
            "correct `length_of`, or give the budget the collate function's `pad_to_multiple_of`"
        )
        if not self.budget.fits(replace(shape, **{form: true}))[0]:
            raise BudgetError(f"{told}, so the batch does not fit; {way_out}")
        if not self._warned_wide:
            self._warned_wide = True
            warn_user(f"{told}; {way_out}")


class _WiderThanMeasured(Exception):
    """Raised internally when the collate function makes samples longer than they were measured."""


def _ids_of(sample: Any) -> Any:
    try:
        return sample["input_ids"]
    except (TypeError, KeyError, IndexError):
        return None


def _collated_length(collate_fn: Callable[[list[Any]], Any], sample: Any) -> int:
    """Returns the tokens of the batch that the collate function makes of a copy of this one sample."""
    copied = _copied([sample])
    tokens = total_of(collate_fn(copied), TOKENS)
    return measure_sample(copied[0]) if tokens is None else tokens


def _copied(samples: list[Any], *, deep: bool = True) -> list[Any]:
    """Returns copies of samples that are collated twice, as ``collate_fn`` may change them; or these if they cannot be
    copied. ``deep=False`` copies only their fields, which costs little."""
    with suppress(Exception):
        samples = copy.deepcopy(samples) if deep else [*map(copy.copy, samples)]
    return samples


def _asked(name: str, function: Callable[..., Any], *args: Any, of: int | list[int]) -> Any:
    """Calls the user's function; errors name it and its samples."""
    asked = lambda: (  # noqa: E731
        f"the batch of dataset indices {shorten(of)}" if isinstance(of, list) else f"sample {of}"
    )
    with sendable(lambda: f"{name} failed on {asked()}", always=True):
        return function(*args)


def _whole_numbers(name: str, values: list[Any], indices: Sequence[int]) -> NDArray[np.int32]:
    try:
        array = np.asarray(values)
    except ValueError:  # values of unequal shape
        array = np.empty(0)
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or array.min(initial=0) < 0
        or array.max(initial=0) > LONGEST
    ):
        found = f"{shorten(values)} for the samples {shorten(indices)}"
        raise ConfigError(
            f"`{name}` must return whole numbers from 0 to {LONGEST}, but returned {found}"
        )
    return array.astype(np.int32)


def _neighbours(sizes: IntArray) -> Batches:
    return Batches(np.arange(sizes.sum()), offsets_of(sizes))
