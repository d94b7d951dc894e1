"""Pictures of plans, for people: readable without colour, units on the axes. Matplotlib's global state is left alone.

Every ``draw_*`` takes ``ax=``, an axes of your own figure, and returns the axes it drew on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.errors import ConfigError
from dynagroup.plan.batches import Batches, shapes_of
from dynagroup.plan.fixed import FixedBatches
from dynagroup.shapes import TOKENS, IntArray, Streams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dynagroup.plan.compare import Comparison
    from dynagroup.plan.plan import BatchPlan

__all__ = [
    "draw_batch_sizes",
    "draw_coverage",
    "draw_lengths",
    "draw_memory",
    "draw_padding",
    "draw_work",
    "new_figure",
    "picture_path",
    "plot_comparison",
    "plot_plan",
    "save_picture",
]

REAL, PADDING, LINE = "#2f5d8a", "#f3c9ae", "#333333"
STYLES = ("-", "--", "-.", ":", (0, (1, 1)), (0, (6, 1, 1, 1, 1, 1)))  # lines are told apart by dashes, not by colour
SAMPLES_SHOWN = 2000  # more are thinner than a pixel of a page
STEPS_SHOWN = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches; made without pyplot, so that nothing global changes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        return _picture_type()(figsize=(width, height), layout="constrained")
    except ImportError as error:
        raise ConfigError("pictures need matplotlib; install dynagroup[viz]") from error


def picture_path(path: str | Path) -> Path:
    """Where a picture can be saved: asked before hours of work, not after them.

    Raises:
        ConfigError: no picture has such an ending, or matplotlib is not installed.
    """
    kinds = sorted(new_figure(1, 1).canvas.get_supported_filetypes())
    target = Path(path)
    if target.suffix[1:].lower() not in kinds:
        raise ConfigError(f"{str(path)!r} cannot be a picture; end it in one of {', '.join(f'.{k}' for k in kinds)}")
    return target


def save_picture(figure: Figure, path: str | Path) -> None:
    """Save a figure as the ending says; its folder is made."""
    target = picture_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


@cache
def _picture_type() -> type[Figure]:
    """A Figure that a notebook shows by itself: matplotlib's own does so only once pyplot was imported."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            file = BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture


def _axes(ax: Axes | None) -> Axes:
    return new_figure(6, 3.6).subplots() if ax is None else ax


def plot_plan(plan: BatchPlan) -> Figure:
    """A plan on one page: lengths, padding before and after, batch sizes by length, work of the ranks, coverage.

    Where a budget predicts memory, its picture takes the place of the lengths.
    """
    figure = new_figure(13, 7)
    places = figure.subplots(2, 3)
    streams, fixed = plan.padded_lengths, FixedBatches.of(plan)
    if any(_predicts(part) for part in _parts(plan.budget)) and len(plan.batches):
        draw_memory(plan, ax=places[0, 0])
    else:
        draw_lengths(_sample_tokens(streams), ax=places[0, 0])
    _draw_batches(fixed.batches, streams, places[0, 1])
    places[0, 1].set_title(f"before: shuffled, fixed {fixed.size}: {fixed.padding:.0%} padding")
    _draw_batches(plan.batches, streams, places[0, 2])
    places[0, 2].set_title(f"after: {plan.statistics['padding']:.0%} padding, {plan.num_steps:,} steps")
    top = max(places[0, 1].get_ylim()[1], places[0, 2].get_ylim()[1])
    places[0, 1].set_ylim(0, top)
    places[0, 2].set_ylim(0, top)
    _draw_sizes(plan, places[1, 0])
    draw_work(plan.padded[plan.table], unit="tokens, with padding", ax=places[1, 1])
    draw_coverage(plan, ax=places[1, 2])
    return figure


def _sample_tokens(lengths: Streams) -> IntArray:
    """Tokens of each sample in all of these streams."""
    return np.sum([values.astype(np.int64) for values in lengths.values()], axis=0)


def _draw_batches(batches: Batches, lengths: Streams, ax: Axes) -> Axes:
    tokens = _sample_tokens(lengths)
    widths = np.sum(list(shapes_of(batches, lengths).longest.values()), axis=0).tolist()
    return draw_padding([tokens[batch] for batch in batches], widths=widths, ax=ax)


def draw_lengths(lengths: NDArray[np.integer], *, ax: Axes | None = None) -> Axes:
    """How long the samples are: a histogram, with the median and the longest marked."""
    axes = _axes(ax)
    axes.hist(lengths, bins=60, color=REAL)
    if len(lengths):
        for value, style, name in ((np.median(lengths), "--", "median"), (lengths.max(), ":", "longest")):
            axes.axvline(float(value), color=LINE, linestyle=style, label=f"{name}: {int(value):,}")
        axes.legend(loc="upper right")
    axes.set(title="lengths", xlabel="tokens of a sample", ylabel="samples")
    return axes


def draw_padding(
    batches: Sequence[NDArray[np.integer]], *, widths: Sequence[int] | None = None, ax: Axes | None = None
) -> Axes:
    """Batches side by side: a column a sample, its tokens dark and its padding light and hatched.

    Args:
        batches: tokens of the samples, batch by batch. They are taken evenly from the whole run where there are too
            many to show.
        widths: tokens that each batch's samples are padded to; default: the longest.
    """
    axes = _axes(ax)
    axes.set(xlabel="samples, batch after batch", ylabel="tokens")
    longest = [int(batch.max(initial=0)) for batch in batches] if widths is None else widths
    chosen = _evenly([(batch, width) for batch, width in zip(batches, longest, strict=True) if len(batch)])
    if not chosen:
        return axes
    real = np.concatenate([np.sort(batch)[::-1] for batch, _ in chosen])
    padded = np.concatenate([np.full(len(batch), width) for batch, width in chosen])
    edges = np.arange(len(real) + 1)
    axes.stairs(
        padded, edges, fill=True, facecolor=PADDING, edgecolor="#c98a5e", hatch="////", linewidth=0, label="padding"
    )
    axes.stairs(real, edges, fill=True, color=REAL, label="tokens")
    axes.set(xlim=(0, len(real)), ylim=(0, None))
    axes.legend(loc="upper right", framealpha=0.9)
    return axes


def _evenly(filled: Sequence[tuple[NDArray[np.integer], int]]) -> list[tuple[NDArray[np.integer], int]]:
    total = sum(len(batch) for batch, _ in filled)
    keep = max(1, min(len(filled), len(filled) * SAMPLES_SHOWN // max(total, 1)))
    return [filled[i] for i in np.linspace(0, len(filled) - 1, keep).astype(int)] if filled else []


def draw_batch_sizes(
    budgets: Mapping[str, Budget], longest: int, *, shortest: int = 16, ax: Axes | None = None
) -> Axes:
    """Most samples that each budget allows in a batch, over the tokens of its longest sample.

    Args:
        budgets: name -> budget. One that only answers for whole shapes (packed, several streams) is left out.
        longest, shortest: tokens, the ends of the axis.
    """
    axes = _axes(ax)
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    lengths = np.unique(np.geomspace(max(1, min(shortest, longest)), max(longest, 1), 160).astype(np.int64))
    for (name, budget), style in zip(budgets.items(), STYLES * len(budgets), strict=False):
        most = budget.bind({TOKENS: np.array([longest], np.int32)}).largest(lengths)
        if most is not None:
            axes.plot(lengths, np.where(most > 0, most, np.nan), color=LINE, linestyle=style, label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the longest sample", ylabel="samples in a batch")
    for axis in (axes.xaxis, axes.yaxis):  # 200, 1,000: no powers of ten, no marks on top of one another
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_locator(NullLocator())
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return axes


def _draw_sizes(plan: BatchPlan, axes: Axes) -> None:
    """The sizes that the plan's batches have, under what the budget would allow."""
    streams, sizes = plan.padded_lengths, plan.batches.sizes
    longest = np.sum([plan.shapes.longest[name] for name in streams], axis=0)
    if len(sizes):
        draw_batch_sizes(
            {} if len(streams) > 1 else {"budget": plan.budget},
            int(longest.max()),
            shortest=int(longest.min()),
            ax=axes,
        )
        axes.plot(longest, sizes, "o", color=REAL, markersize=3, alpha=0.6, label="batches of the plan")
        axes.legend()
    axes.set(title="batch size by length", xlabel="tokens of the longest sample", ylabel="samples in a batch")


def draw_memory(plan: BatchPlan, *, ax: Axes | None = None) -> Axes:
    """Predicted memory of every batch of a plan, as a share of its budget's limit, in the order of the steps.

    Raises:
        ConfigError: no part of the plan's budget predicts memory; a ``TokenBudget`` does not.
    """
    budget = next((part for part in _parts(plan.budget) if _predicts(part)), None)
    if budget is None:
        raise ConfigError(f"no part of {type(plan.budget).__name__} predicts memory; plan with a MemoryBudget")
    axes = _axes(ax)
    shapes = plan.shapes
    at = plan.table.reshape(-1)
    share = np.asarray(budget.predicted(shapes))[at]  # type: ignore[attr-defined]
    axes.plot(np.arange(len(at)) / plan.world_size, 100 * share, ".", color=REAL, markersize=3, label="batches")
    axes.axhline(100, color=LINE, label="limit")
    headroom = getattr(budget, "headroom", 1.0)
    if headroom < 1:
        axes.axhline(100 * headroom, color=LINE, linestyle="--", label=f"headroom {headroom:.0%}")
    axes.set(title="predicted memory", xlabel="step", ylabel="% of the limit", ylim=(0, 110))
    axes.legend(loc="lower right")
    return axes


def _predicts(budget: Budget) -> bool:
    return hasattr(budget, "predicted")


def _parts(budget: Budget) -> tuple[Budget, ...]:
    return getattr(budget, "parts", (budget,))


def draw_work(rank_work: NDArray[np.generic], *, unit: str = "linear tokens", ax: Axes | None = None) -> Axes:
    """How much each rank has to do in each step: the band from the least to the most laden rank, and their mean.

    Args:
        rank_work: (num_steps, world_size), 0 where a rank has nothing to do. unit: what it is counted in.

    A narrow band means that no rank waits for another.
    """
    axes = _axes(ax)
    work = np.asarray(rank_work, np.float64)
    axes.set(xlabel="step", ylabel=f"work of a rank, {unit}")
    if not work.size:
        return axes
    at = np.unique(np.linspace(0, len(work) - 1, min(len(work), STEPS_SHOWN)).astype(int))
    shown = work[at]
    waiting = 1.0 - work.mean() / max(work.max(axis=1).mean(), 1e-9)
    axes.fill_between(
        at,
        shown.min(axis=1),
        shown.max(axis=1),
        facecolor=PADDING,
        edgecolor="#c98a5e",
        hatch="////",
        label="least to most",
    )
    axes.plot(at, shown.mean(axis=1), color=LINE, linewidth=1, label="mean")
    ranks = work.shape[1]
    axes.set_title(f"work of {ranks} ranks: {waiting:.1%} waiting" if ranks > 1 else "work of a step")
    axes.legend(loc="lower right")
    axes.set_ylim(0, None)
    return axes


def draw_coverage(plan: BatchPlan, *, ax: Axes | None = None) -> Axes:
    """Share of the samples seen after each step, for short, middling and long ones apart.

    Lines that stay together mean that every stretch of the epoch holds samples of all lengths.
    """
    axes = _axes(ax)
    axes.set(title="coverage of the epoch", xlabel="step", ylabel="% of the samples seen", ylim=(0, 102))
    tokens, step = _sample_tokens(plan.padded_lengths), _step_of_samples(plan)
    seen = np.flatnonzero(step >= 0)
    if not len(seen):
        return axes
    rank = np.argsort(np.argsort(tokens[seen], kind="stable"), kind="stable") * 3 // len(seen)
    for third, (name, style) in enumerate((("shortest third", ":"), ("middle third", "--"), ("longest third", "-"))):
        counts = np.bincount(step[seen[rank == third]], minlength=plan.num_steps)
        if counts.sum():
            share = 100 * np.append(0, counts.cumsum()) / counts.sum()
            axes.plot(np.arange(plan.num_steps + 1), share, color=LINE, linestyle=style, label=name)
    axes.legend(loc="lower right")
    return axes


def _step_of_samples(plan: BatchPlan) -> IntArray:
    """At which step each sample of the dataset comes; -1: never."""
    step = np.full(len(plan.lengths[TOKENS]), -1, np.int64)
    if plan.num_steps:
        batch_step = np.zeros(len(plan.batches), np.int64)
        batch_step[plan.table.reshape(-1)] = np.repeat(np.arange(plan.num_steps), plan.world_size)
        step[plan.batches.order] = np.repeat(batch_step, plan.batches.sizes)
    return step


def plot_comparison(comparison: Comparison) -> Figure:
    """Padding as it is and as dynagroup makes it, side by side; predicted times; and how evenly ranks are laden."""
    figure = new_figure(13, 7)
    places = figure.subplots(2, 3)
    streams = {name: comparison.lengths[name] for name in padded_streams(comparison.budget, comparison.lengths)}
    shown = [comparison.ways[0], *comparison.ways[2:4]]  # as it is, the same updates, and free updates
    for place, way in zip(places[0], shown, strict=True):
        _draw_batches(way.batches, streams, place)
        place.set_title(f"{way.name}: {way.padding:.0%} padding, {way.num_steps:,} steps", fontsize=10)
        place.set_ylim(0, None)
    _draw_times(comparison, places[1, 0])
    for place, way in zip(places[1, 1:], shown, strict=False):
        draw_work(way.rank_work, ax=place)
        place.set_title(f"{way.name}: {place.get_title()}", fontsize=9)
    return figure


def _draw_times(comparison: Comparison, axes: Axes) -> None:
    names = [way.name for way in comparison.ways][::-1]
    shares = [100 * way.time / max(comparison.ways[0].time, 1e-9) for way in comparison.ways][::-1]
    bars = axes.barh(names, shares, color=[REAL if "dynagroup" in name else PADDING for name in names], edgecolor=LINE)
    axes.bar_label(bars, labels=[f"{share:.0f}" for share in shares], padding=3)
    axes.set(xlabel=f"predicted time, % of {comparison.ways[0].name}", xlim=(0, 115))
