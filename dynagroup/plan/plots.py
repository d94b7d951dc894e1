"""Pictures of plans, for people: readable without colour, units on the axes. Matplotlib's global state is left alone.

Every ``draw_*`` takes ``ax=``, an axes of your own figure, and returns the axes it drew on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import largest_of
from dynagroup.errors import ConfigError
from dynagroup.plan.plan import BatchPlan
from dynagroup.shapes import IntArray, Streams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_lengths", "draw_padding", "draw_work", "new_figure", "picture_path", "save_picture"]

REAL, PADDING, LINE = "#2f5d8a", "#f3c9ae", "#333333"
HATCHED: dict[str, Any] = {"facecolor": PADDING, "edgecolor": "#c98a5e", "hatch": "////"}
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


def plot_plan(plan: BatchPlan, before: Any) -> Figure:
    """A plan on one page: lengths, padding before and after, batch sizes by length, work of the ranks.

    ``before``: the :class:`~dynagroup.plan.report.Way` of the same samples in shuffled batches of a fixed size.
    """
    figure = new_figure(13, 7)
    (first, *padding), (sizes, work, nothing) = figure.subplots(2, 3)
    nothing.remove()
    draw_lengths(_sample_tokens(plan.padded_lengths), ax=first)
    _draw_batches(before.plan, padding[0]).set_title(f"before: {before.name}: {before.padding:.0%} padding")
    title = f"after: {plan.statistics['padding']:.0%} padding, {plan.num_steps:,} steps"
    _draw_batches(plan, padding[1]).set_title(title)
    for ax in padding:
        ax.set_ylim(0, max(ax.get_ylim()[1] for ax in padding))
    _draw_sizes(plan, sizes)
    draw_work(plan.padded[plan.table], unit="tokens, with padding", ax=work)
    return figure


def plot_ways(ways: Sequence[Any]) -> Figure:
    """Padding as it is, in the same updates and in free ones, side by side; and predicted times."""
    figure = new_figure(13, 7)
    *above, times = figure.subplots(2, 2).ravel()
    for ax, way in zip(above, (ways[0], *ways[2:4]), strict=True):
        _draw_batches(way.plan, ax)
        ax.set_title(f"{way.name}: {way.padding:.0%} padding, {way.num_steps:,} steps", fontsize=10)
        ax.set_ylim(0, None)
    names = [way.name for way in ways][::-1]
    shares = [100 * way.time / max(ways[0].time, 1e-9) for way in ways][::-1]
    bars = times.barh(names, shares, color=[REAL if "dynagroup" in name else PADDING for name in names], edgecolor=LINE)
    times.bar_label(bars, labels=[f"{share:.0f}" for share in shares], padding=3)
    times.set(xlabel=f"predicted time, % of {ways[0].name}", xlim=(0, 115))
    return figure


def _sample_tokens(lengths: Streams) -> IntArray:
    """Tokens of each sample in all of these streams."""
    return np.sum([values.astype(np.int64) for values in lengths.values()], axis=0)


def _longest(plan: BatchPlan) -> IntArray:
    """Tokens of each batch's longest sample, of all padded streams."""
    return np.sum([plan.shapes.longest[name] for name in plan.padded_lengths], axis=0)


def _draw_batches(plan: BatchPlan, ax: Axes) -> Axes:
    tokens = _sample_tokens(plan.padded_lengths)
    return draw_padding([tokens[batch] for batch in plan.batches], widths=_longest(plan).tolist(), ax=ax)


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
    filled = [(batch, width) for batch, width in zip(batches, longest, strict=True) if len(batch)]
    if not filled:
        return axes
    total = sum(len(batch) for batch, _ in filled)
    number = max(1, min(len(filled), len(filled) * SAMPLES_SHOWN // total))
    chosen = [filled[i] for i in np.linspace(0, len(filled) - 1, number).astype(int)]
    real = np.concatenate([np.sort(batch)[::-1] for batch, _ in chosen])
    padded = np.concatenate([np.full(len(batch), width) for batch, width in chosen])
    edges = np.arange(len(real) + 1)
    axes.stairs(padded, edges, fill=True, linewidth=0, label="padding", **HATCHED)
    axes.stairs(real, edges, fill=True, color=REAL, label="tokens")
    axes.set(xlim=(0, len(real)), ylim=(0, None))
    axes.legend(loc="upper right", framealpha=0.9)
    return axes


def draw_work(rank_work: NDArray[np.generic], *, unit: str = "linear tokens", ax: Axes | None = None) -> Axes:
    """How much each rank has to do in each step: the band from the least to the most laden rank, and their mean.

    A narrow band means that no rank waits for another.

    Args:
        rank_work: (num_steps, world_size), 0 where a rank has nothing to do. unit: what it is counted in.
    """
    axes = _axes(ax)
    work = np.asarray(rank_work, np.float64)
    axes.set(xlabel="step", ylabel=f"work of a rank, {unit}")
    if not work.size:
        return axes
    at = np.unique(np.linspace(0, len(work) - 1, min(len(work), STEPS_SHOWN)).astype(int))
    shown = work[at]
    waiting = 1.0 - work.mean() / max(work.max(axis=1).mean(), 1e-9)
    axes.fill_between(at, shown.min(axis=1), shown.max(axis=1), label="least to most", **HATCHED)
    axes.plot(at, shown.mean(axis=1), color=LINE, linewidth=1, label="mean")
    ranks = work.shape[1]
    axes.set_title(f"work of {ranks} ranks: {waiting:.1%} waiting" if ranks > 1 else "work of a step")
    axes.legend(loc="lower right")
    axes.set_ylim(0, None)
    return axes


def _draw_sizes(plan: BatchPlan, axes: Axes) -> None:
    """The sizes that the plan's batches have, under what the budget would allow by the tokens of the longest sample."""
    axes.set(title="batch size by length", xlabel="tokens of the longest sample", ylabel="samples in a batch")
    if not len(plan.batches):
        return
    longest = _longest(plan)
    axes.plot(longest, plan.batches.sizes, "o", color=REAL, markersize=3, alpha=0.6, label="batches of the plan")
    lengths = np.unique(np.geomspace(max(longest.min(), 1), max(longest.max(), 1), 160).astype(np.int64))
    most = largest_of(plan.budget, lengths) if len(plan.lengths) == 1 else None
    if most is not None:
        axes.plot(lengths, np.where(most > 0, most, np.nan), color=LINE, label="budget")
    axes.set(xscale="log", yscale="log")
    axes.legend()
