"""Pictures of plans, for people: readable without colour, units on the axes. Matplotlib's global state is left alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REAL, PADDING, LINE = "#2f5d8a", "#f3c9ae", "#333333"
HATCHED: dict[str, Any] = {"facecolor": PADDING, "edgecolor": "#c98a5e", "hatch": "////"}
SAMPLES_SHOWN = 2000  # more are thinner than a pixel of a page


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, inches; made without pyplot, so that nothing global changes. ConfigError: matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib; install dynagroup[viz]") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    vars(figure)["_repr_png_"] = partial(_png, figure)  # for notebooks; matplotlib shows its own only with pyplot
    return figure


def _png(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def save_picture(figure: Figure, path: str | Path) -> None:
    """Save a figure as the ending says; its folder is made. ConfigError: no picture has such an ending."""
    kinds, target = sorted(figure.canvas.get_supported_filetypes()), Path(path)
    if target.suffix[1:].lower() not in kinds:
        raise ConfigError(f"{str(path)!r} cannot be a picture; end it in one of {', '.join(f'.{k}' for k in kinds)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def plot_ways(ways: Sequence[Any]) -> Figure:
    """Padding of each :class:`~dynagroup.plan.report.Way` to batch the same samples, side by side."""
    figure = new_figure(5 * len(ways), 4)
    for ax, way in zip(figure.subplots(1, len(ways), sharey=True, squeeze=False)[0], ways, strict=True):
        plan = way.plan
        tokens, widths = np.zeros(len(plan.lengths["tokens"]), np.int64), np.zeros(len(plan.batches), np.int64)
        for name, lengths in plan.padded_lengths.items():
            tokens, widths = tokens + lengths, widths + plan.shapes.longest[name]
        draw_padding([tokens[batch] for batch in plan.batches], widths=widths.tolist(), ax=ax)
        ax.set_title(f"{way.name}: {way.padding:.0%} padding, {plan.num_steps:,} steps", fontsize=10)
    return figure


def draw_padding(
    batches: Sequence[NDArray[np.integer]], *, widths: Sequence[int] | None = None, ax: Axes | None = None
) -> Axes:
    """Batches side by side: a column a sample, its tokens dark and its padding light and hatched.

    Args:
        batches: tokens of the samples, batch by batch. They are taken evenly from the whole run where there are too
            many to show.
        widths: tokens that each batch's samples are padded to; default: the longest.
        ax: of a figure of your own; default: a new one.
    """
    axes = new_figure(6, 3.6).subplots() if ax is None else ax
    axes.set(xlabel="samples, batch after batch", ylabel="tokens")
    longest = [int(batch.max(initial=0)) for batch in batches] if widths is None else widths
    filled = [(batch, width) for batch, width in zip(batches, longest, strict=True) if len(batch)]
    if not filled:
        return axes
    number = max(1, min(len(filled), len(filled) * SAMPLES_SHOWN // sum(len(batch) for batch, _ in filled)))
    chosen = [filled[i] for i in np.linspace(0, len(filled) - 1, number).astype(int)]
    real = np.concatenate([np.sort(batch)[::-1] for batch, _ in chosen])
    padded = np.concatenate([np.full(len(batch), width) for batch, width in chosen])
    edges = np.arange(len(real) + 1)
    axes.stairs(padded, edges, fill=True, linewidth=0, label="padding", **HATCHED)
    axes.stairs(real, edges, fill=True, color=REAL, label="tokens")
    axes.set(xlim=(0, len(real)), ylim=(0, None))
    axes.legend(loc="upper right", framealpha=0.9)
    return axes
