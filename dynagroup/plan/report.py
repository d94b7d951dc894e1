"""Reports a plan as a table, and compares several ways to form batches from the same samples. Runs nothing."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dynagroup.budget.base import UNLIMITED, AdditiveCap, AllOf, Budget, is_packed
from dynagroup.budget.tokens import TokenBudget
from dynagroup.lengths import as_streams
from dynagroup.plan.batches import Batches, maxima_of, oversize_of
from dynagroup.plan.cost import Work, check_work
from dynagroup.plan.epoch import epoch_order
from dynagroup.plan.plan import BatchPlan
from dynagroup.plan.planner import PlanConfig, Planner
from dynagroup.shapes import BatchShape, IntArray, Streams, primary
from dynagroup.validation import check_int

MOST_KINDS = 8  # largest number of kinds that a report lists
MEGA_BATCHES = 50  # number of batches that transformers' `group_by_length` sorts together


def report_of(plan: BatchPlan, batch_size: int | None) -> str:
    ranks = f"{plan.world_size} rank" + "s" * (plan.world_size > 1)
    layout = "packed" if is_packed(plan.budget, plan.lengths) else "padded"
    head = f"epoch {plan.epoch}: {plan.statistics['num_samples']:,} samples for {ranks}, {layout} layout"
    return "\n".join([head, format_table(["", ""], list(_rows(plan, batch_size)))[1:]])


def _rows(plan: BatchPlan, batch_size: int | None) -> Iterator[tuple[str, str]]:
    stats, sizes = plan.statistics, plan.batches.sizes
    yield "steps, updates", f"{stats['num_steps']:,}, {stats['num_updates']:,}"
    yield "tokens, real", f"{stats['real_tokens']:,}"
    yield "tokens, with padding", f"{stats['padded_tokens']:,}"
    yield "padding", f"{stats['padding']:.1%}"
    yield "predicted time, in tokens of one rank", f"{round(stats['predicted_time']):,}"
    if not is_packed(plan.budget, plan.lengths) and len(plan.batches):
        way, size, most = shuffled_way(plan, batch_size)
        unfit = "" if size <= most else "; the longest would not fit"
        yield (
            f"(shuffled batches of {size} instead{unfit})",
            f"{way.padding:.1%} padding, {way.plan.num_steps:,} steps",
        )
        yield (
            f"(predicted time against batches of {size})",
            f"{plan.predicted_time / max(way.plan.predicted_time, 1e-9):.1%}",
        )
    for name, values in plan.padded_lengths.items():
        of = f" in {name!r}" if len(plan.padded_lengths) > 1 else ""
        yield (
            f"sample length{of}, median / 99 % / longest",
            _quantiles(values[plan.batches.order], (0.5, 0.99, 1.0)),
        )
    yield "batch size, smallest / median / largest", _quantiles(sizes, (0.0, 0.5, 1.0))
    yield (
        "tokens a batch, with padding, smallest / median / largest",
        _quantiles(plan.padded, (0.0, 0.5, 1.0)),
    )
    yield "row imbalance (1: ranks never wait)", f"{stats['row_imbalance']:.3f}"
    for name in plan.lengths if len(plan.lengths) > 1 else ():
        yield (
            f"largest sum of {name!r} over its mean, middle row",
            f"{stats[f'imbalance_{name}']:.3f}",
        )
    whole = (
        plan.budget if isinstance(plan.budget, AllOf) else AllOf((plan.budget,))
    )  # also a ladder
    for part in whole.parts if len(plan.batches) else ():
        predicted: Any = getattr(part, "predicted", None)
        if (
            predicted is not None
        ):  # for shapes that are padded as far as any part of the budget requires
            peak = float(predicted(whole.seen_by(part, plan.shapes)).max())
            yield "predicted peak memory, share of the limit", f"{peak:.1%}"
    if len(labels := plan.sample_kinds.labels) > 1:
        of = Counter(chain.from_iterable(set(kinds) for kinds in plan.kinds)).most_common()
        rarer = f", {len(of) - MOST_KINDS} more" * (len(of) > MOST_KINDS)
        yield (
            f"steps of each of {len(labels)} kinds",
            ", ".join(f"{k}: {n:,}" for k, n in of[:MOST_KINDS]) + rarer,
        )
    yield "samples that do not fit even alone", f"{stats['num_oversize']:,}"
    yield "samples repeated, left out", f"{stats['num_repeated']:,}, {stats['num_dropped']:,}"


def _quantiles(values: NDArray[np.integer], at: Sequence[float]) -> str:
    return " / ".join(f"{round(q):,}" for q in np.quantile(values, at)) if len(values) else "-"


@dataclass(frozen=True)
class Way:
    """One way to form an epoch's batches: its name and its plan."""

    name: str
    plan: BatchPlan = field(repr=False)

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return float(self.plan.statistics["padding"])

    @property
    def waiting(self) -> float:
        """Share of the ranks' time in which they wait for the slowest rank of a step."""
        return max(0.0, 1.0 - 1.0 / self.plan.statistics["row_imbalance"])

    @property
    def largest_batch(self) -> int:
        """Tokens of the largest batch, with padding, which must fit in memory."""
        return int(self.plan.padded.max(initial=0))

    @property
    def mixed_steps(self) -> int:
        """Number of steps whose batches, over all ranks, have several kinds."""
        table, batches, codes = (
            self.plan.table,
            list(self.plan.batches),
            self.plan.sample_kinds.codes,
        )
        return sum(
            len(np.unique(codes[np.concatenate([batches[n] for n in row])])) > 1 for row in table
        )

    def figures(self, today: float) -> dict[str, Any]:
        """Returns this way's numbers for the table; ``today`` is the predicted time of the way to compare with."""
        time, found = (
            self.plan.predicted_time,
            {"steps": self.plan.num_steps, "padding": self.padding, "waiting": self.waiting},
        )
        found |= {"largest_batch_tokens": self.largest_batch, "predicted_time": time}
        return {**found, "share_of_time": time / max(today, 1e-9), "mixed_steps": self.mixed_steps}


def fixed_batches(order: IntArray, batch_size: int) -> Batches:
    """Returns consecutive batches of one size; the last may be smaller."""
    return Batches(order, np.append(np.arange(0, len(order), batch_size), len(order)))


def fixed_way(name: str, batches: Batches, like: BatchPlan) -> Way:
    """Returns a :class:`Way` of given batches, dealt to a plan's ranks in turn, and padded by a collate function. The
    samples of the last step are divided evenly, and repeated if they are too few, as torch's DistributedSampler does."""
    ranks, none = like.world_size, np.zeros(0, np.int64)
    repeated = none
    num_left = len(batches) % ranks
    if num_left:
        whole = batches.take(np.arange(len(batches) - num_left))
        left = batches.order[len(whole.order) :]
        repeated = np.resize(batches.order, max(ranks - len(left), 0))
        last = np.array_split(np.append(left, repeated), ranks)
        batches = Batches.concatenate([whole, Batches.of(last)])
    table = np.arange(len(batches)).reshape(-1, ranks)
    end_to_end = (
        AdditiveCap(name, UNLIMITED) for name in like.lengths if name not in like.padded_lengths
    )
    budget = AllOf.of(
        TokenBudget(1, pad_to_multiple_of=like.budget.pad_to_multiple_of), *end_to_end
    )
    facts = {"budget": budget, "oversize": none, "repeated": repeated, "dropped": none}
    facts |= {"update_ends": np.ones(len(table), np.bool_), "loss_scale": np.zeros(table.shape)}
    return Way(name, replace(like, batches=batches, table=table, **facts))


def shuffled_way(plan: BatchPlan, batch_size: int | None) -> tuple[Way, int, int]:
    """Returns a plan's samples in shuffled batches of one size, and that size. None: as many of the longest as fit."""
    samples = plan.batches.order
    most = most_of_the_longest(
        {name: values[samples] for name, values in plan.lengths.items()}, plan.budget
    )
    size = max(most, 1) if batch_size is None else check_int("batch_size", batch_size)
    order = np.random.default_rng(0).permutation(np.sort(samples))
    return (
        fixed_way(f"fixed {size}, shuffled", fixed_batches(order, size), plan),
        size,
        max(most, 1),
    )


def most_of_the_longest(lengths: Streams, budget: Budget) -> int:
    """Returns how many samples fit one batch if all have the longest length of each stream, without oversize ones."""
    oversize = oversize_of(lengths, budget, maxima_of(lengths))
    falling = {name: np.sort(np.delete(values, oversize))[::-1] for name, values in lengths.items()}
    unfit = (  # noqa: E731
        lambda size: (  # noqa: E731
            not budget.fits(BatchShape.of_samples({n: v[:size] for n, v in falling.items()}))[0]
        )
    )
    return bisect_left(range(1, len(falling[primary(lengths)]) + 1), True, key=unfit)


@dataclass(frozen=True)
class Comparison:
    """Plans of several ways to form batches from the same samples; all are compared with the first."""

    ways: Sequence[Way]
    lengths: Streams = field(repr=False)
    world_size: int
    batch_size: int
    samples_per_update: int
    budget: Budget

    def figures(self) -> dict[str, Any]:
        """Returns the numbers of :meth:`report` as a dict for JSON."""
        ways = {way.name: way.figures(self.ways[0].plan.predicted_time) for way in self.ways}
        told = {
            name: getattr(self, name) for name in ("world_size", "batch_size", "samples_per_update")
        }
        return {"num_samples": len(self.lengths[primary(self.lengths)]), **told, "ways": ways}

    def report(self) -> str:
        """Returns a table, one row per way: steps, padding, waiting, largest batch, time as a share of the first's."""
        columns = {
            "steps": ("steps", "{:,}"),
            "padding": ("padding", "{:.1%}"),
            "ranks wait": ("waiting", "{:.1%}"),
        }
        columns |= {
            "largest batch": ("largest_batch_tokens", "{:,}"),
            "predicted time": ("share_of_time", "{:.2f}"),
        }
        if len(self.ways[0].plan.sample_kinds.labels) > 1:
            columns["steps that mix kinds"] = ("mixed_steps", "{:,}")
        ways = self.figures()["ways"].items()
        shown = (
            [name, *(form.format(found[key]) for key, form in columns.values())]
            for name, found in ways
        )
        return format_table(["", *columns], list(shown))

    def plot(self) -> Any:
        """Returns a matplotlib figure: the padding of the first way and of two ways of dynagroup, side by side."""
        from dynagroup.plan.plots import plot_ways

        return plot_ways([self.ways[0], self.ways[2], self.ways[4]])


def compare(
    lengths: ArrayLike | Mapping[str, ArrayLike],
    batch_size: int,
    *,
    world_size: int = 1,
    accumulation: int = 1,
    budget: Budget | None = None,
    work: Work | None = None,
    kinds: Iterable[Any] | None = None,
) -> Comparison:
    """Forms batches from the same samples in several ways, and predicts the time of each.

    Args:
        lengths: int (N,), tokens of each sample, or a dict by stream.
        batch_size: int, samples per batch on one rank today. accumulation: int, number of such batches per update.
        world_size: int, number of ranks.
        budget: limit of a batch. None: the padded tokens of today's largest possible batch (``batch_size`` x longest).
        work: predicted time of a batch. None: ``Work()``, a small decoder on a fast GPU.
        kinds: label of each sample: dynagroup's steps then have one kind; in other ways, mixed steps are counted.

    >>> found = compare([3, 9, 2, 8, 4, 4], batch_size=2)
    >>> [way.name for way in found.ways][:2]
    ['fixed 2, shuffled', 'group_by_length 2']
    """
    streams = as_streams(lengths)
    for name, value in {
        "batch_size": batch_size,
        "world_size": world_size,
        "accumulation": accumulation,
    }.items():
        check_int(name, value)
    fits = TokenBudget(batch_size * most_units(streams)) if budget is None else budget
    each = batch_size * world_size * accumulation
    modes: dict[str, dict[str, Any]] = {
        f"dynagroup, updates of {each}": {"samples_per_update": each},
        f"dynagroup, grouping={MEGA_BATCHES}": {
            "samples_per_update": each,
            "grouping": MEGA_BATCHES,
        },
        "dynagroup, shuffle=True": {"shuffle": True},
        "dynagroup, sorted": {},
    }
    told: dict[str, Any] = {"work": check_work(work or Work(is_assumed=True))}
    planners = {
        name: Planner.of(streams, fits, PlanConfig(**told, **mode), kinds)
        for name, mode in modes.items()
    }
    if isinstance(fits, TokenBudget) and fits.layout == "padded":
        config, packed = (
            PlanConfig(**told, samples_per_update=each),
            TokenBudget(fits.max_tokens, layout="packed"),
        )
        planners["dynagroup, packed updates"] = Planner.of(streams, packed, config, kinds)
    next(iter(planners.values())).warn_of_oversize()
    ours = [Way(name, planner.plan(0, world_size)) for name, planner in planners.items()]
    shuffled = fixed_batches(
        epoch_order(len(streams[primary(streams)]), seed=0, epoch=0), batch_size
    )
    grouped = grouped_batches(streams[primary(streams)], batch_size, world_size=world_size)
    fixed = {f"fixed {batch_size}, shuffled": shuffled, f"group_by_length {batch_size}": grouped}
    theirs = [fixed_way(name, batches, ours[0].plan) for name, batches in fixed.items()]
    return Comparison([*theirs, *ours], streams, world_size, batch_size, each, fits)


def most_units(lengths: Streams) -> int:
    """Returns the tokens of a sample that has the longest length of every stream, at least 1."""
    return max(sum(int(values.max(initial=0)) for values in lengths.values()), 1)


def grouped_batches(
    lengths: NDArray[np.integer], batch_size: int, *, world_size: int = 1
) -> Batches:
    """Returns batches as ``group_by_length`` forms them: shuffled samples, of which each 50 batches are sorted."""
    order, piece = (
        epoch_order(len(lengths), seed=0, epoch=0),
        MEGA_BATCHES * batch_size * world_size,
    )
    parts = [order[start : start + piece] for start in range(0, len(order), piece)]
    parts = [part[np.argsort(-lengths[part].astype(np.int64), kind="stable")] for part in parts]
    if parts:  # the longest sample of all is first, so that an out-of-memory error comes at once
        hardest = max(range(len(parts)), key=lambda k: int(lengths[parts[k][0]]))
        parts[0][0], parts[hardest][0] = parts[hardest][0], parts[0][0]
    return fixed_batches(np.concatenate([np.zeros(0, np.int64), *parts]), batch_size)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a plain text table, with the first column left-aligned and the others right-aligned."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)
