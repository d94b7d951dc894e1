"""Draws pictures of plans, readable without colour, with units on the axes, without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import is_packed
from dynagroup.errors import ConfigError
from dynagroup.memory.phases import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REAL, PADDING, LINE = "#2f5d8a", "#f3c9ae", "#333333"
HATCHED: dict[str, Any] = {"facecolor": PADDING, "edgecolor": "#c98a5e", "hatch": "////"}
HEADROOM, SAMPLES_SHOWN = (
    1.2,
    2000,
)  # room above for the legend; with more samples, each is thinner than a pixel


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure (size in inches) without pyplot's global state. ConfigError: matplotlib is missing."""
    figure = needed("matplotlib.figure", "a picture", "viz").Figure(
        figsize=(width, height), layout="constrained"
    )
    vars(figure)["_repr_png_"] = partial(
        _drawn, figure, "png"
    )  # otherwise notebooks would not show the figure
    return figure


def _drawn(figure: Figure, kind: str) -> bytes:
    file = BytesIO()
    figure.savefig(file, format=kind)
    return file.getvalue()


def save_picture(figure: Figure, path: str | Path) -> None:
    """Saves a figure in the format that the suffix names, and makes the folder. ConfigError: unknown suffix."""
    kinds, target = sorted(figure.canvas.get_supported_filetypes()), Path(path)
    if target.suffix[1:].lower() not in kinds:
        raise ConfigError(
            f"picture {str(path)!r} must end in one of {', '.join(f'.{k}' for k in kinds)}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def page(title: str, text: str, figure: Figure) -> str:
    """Returns a static HTML page with a report and a figure as SVG, in one file without scripts."""
    drawn = _drawn(figure, "svg").decode()
    style = "body{font:15px sans-serif;margin:2em;max-width:75em}pre{font-size:13px}svg{max-width:100%;height:auto}"
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    body = f"<h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n{drawn[drawn.index('<svg') :]}"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def plot_plan(plan: Any) -> Figure:
    """Draws a :class:`~dynagroup.BatchPlan` in four panels: each batch's padding, each step's work on the ranks, each
    batch's memory (or tokens) against the limit, and all shapes."""
    figure = new_figure(12, 8)
    (padding, work), (memory, shapes) = figure.subplots(2, 2)
    draw_plan(plan, padding)
    padding.set_title("padding, batch by batch")
    by_row = plan.work_by_row
    for values, name, line in (
        (by_row.max(axis=1), "most work", "-"),
        (by_row.min(axis=1), "least work", ":"),
    ):
        work.plot(values, line, color=LINE if line == ":" else REAL, label=f"rank with {name}")
    work.set(
        title="predicted work",
        xlabel="step",
        ylabel="work, in linear tokens",
        ymargin=0.2,
        ylim=(0, None),
    )
    work.legend(loc="upper right", ncols=2)
    predicted = getattr(plan.budget, "predicted", None)
    size, limit = plan.padded, getattr(plan.budget, "max_tokens", None)
    told = ("size of each batch", "tokens, with padding")
    if predicted is not None:
        size, limit, told = (
            100 * predicted(plan.shapes),
            100.0,
            ("predicted memory of each batch", "% of the limit"),
        )
    memory.plot(size, ".", color=REAL, markersize=4)
    if limit is not None:
        memory.axhline(limit, color=LINE, linestyle="--", label="limit")
        memory.legend(loc="upper right")
    memory.set(
        title=told[0],
        xlabel="batch",
        ylabel=told[1],
        ylim=(0, HEADROOM * max(limit or 0, size.max(initial=0)) or 1),
    )
    width = np.sum([plan.shapes.longest[name] for name in plan.padded_lengths], axis=0)
    shapes.loglog(width, plan.batches.sizes, "x", base=2, color=REAL, alpha=0.6)
    shapes.set(title="shapes", xlabel="tokens of the longest sample", ylabel="samples")
    for axis in (shapes.xaxis, shapes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    return figure


def draw_plan(plan: Any, ax: Axes) -> None:
    """Draws the padding of each batch of a plan, over all padded streams; packed batches have none."""
    tokens = np.stack([*plan.padded_lengths.values()]).sum(axis=0, dtype=np.int64)
    widths = np.sum([plan.shapes.longest[name] for name in plan.padded_lengths], axis=0)
    batches = [tokens[batch] for batch in plan.batches]
    packed = is_packed(plan.budget, plan.lengths)
    draw_padding(batches, widths=widths.tolist(), ax=ax, packed=packed)


def plot_ways(ways: Sequence[Any]) -> Figure:
    """Draws the padding of several plans of the same samples (:class:`~dynagroup.plan.report.Way`), side by side."""
    figure = new_figure(5 * len(ways), 4)
    for ax, way in zip(
        figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True
    ):
        draw_plan(way.plan, ax)
        ax.set_title(
            f"{way.name}: {way.padding:.0%} padding, {way.plan.num_steps:,} steps", fontsize=10
        )
    return figure


def draw_padding(
    batches: Sequence[NDArray],
    *,
    widths: Sequence[int] | None = None,
    ax: Axes | None = None,
    packed: bool = False,
) -> Axes:
    """Draws batches side by side: one column per sample, its tokens dark, its padding light and hatched.

    Args:
        batches: tokens of the samples of each batch, int (n,). If there are too many, evenly spaced ones are drawn.
        widths: int, tokens to which each batch's samples are padded; None: the longest of the batch.
        ax: matplotlib axes of your own figure; None: new ones.
        packed: True: samples are laid end to end, and nothing is padded.
    """
    axes = new_figure(6, 3.6).subplots() if ax is None else ax
    axes.set(xlabel="samples, batch after batch", ylabel="tokens")
    longest = [int(batch.max(initial=0)) for batch in batches] if widths is None else widths
    filled = [(batch, width) for batch, width in zip(batches, longest, strict=True) if len(batch)]
    if not filled:
        return axes
    number = max(
        1, min(len(filled), len(filled) * SAMPLES_SHOWN // sum(len(batch) for batch, _ in filled))
    )
    chosen = [filled[i] for i in np.linspace(0, len(filled) - 1, number).astype(int)]
    real = np.concatenate([np.sort(batch)[::-1] for batch, _ in chosen])
    padded = np.concatenate([np.full(len(batch), width) for batch, width in chosen])
    edges = np.arange(len(real) + 1)
    if not packed:
        axes.stairs(padded, edges, fill=True, linewidth=0, label="padding", **HATCHED)
    axes.stairs(real, edges, fill=True, color=REAL, label="tokens")
    axes.set(
        xlim=(0, len(real)), ylim=(0, max(axes.get_ylim()[1], HEADROOM * padded.max()))
    )  # axes may be shared
    axes.legend(loc="upper right", ncols=2)
    return axes
