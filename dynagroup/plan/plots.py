"""Draws the padding of batches, readable without colour, with units on the axes, without matplotlib's global state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.memory.phases import needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REAL = "#2f5d8a"
PADDING = "#f3c9ae"
HATCH = "#c98a5e"
HEADROOM = 1.2  # room above the batches for the legend
SAMPLES_SHOWN = 2000  # with more samples, each is thinner than a pixel


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Batches that are drawn side by side with others: arguments of :func:`draw_padding`, and a title."""

    title: str
    batches: Sequence[NDArray[np.integer]]
    widths: Sequence[int]
    packed: bool


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure (size in inches) without pyplot's global state. ConfigError: matplotlib is missing."""
    module = needed("matplotlib.figure", "a picture", "viz")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    # Notebooks show an object by this method; figures of pyplot get it from pyplot.
    vars(figure)["_repr_png_"] = partial(_as_png, figure)
    return figure


def _as_png(figure: Figure) -> bytes:
    """Returns a figure as the content of a file."""
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def save_picture(figure: Figure, path: str | Path) -> None:
    """Saves a figure in the format that the suffix names, and makes the folder. ConfigError: unknown suffix."""
    target = Path(path)
    forms = sorted(figure.canvas.get_supported_filetypes())
    if target.suffix[1:].lower() not in forms:
        suffixes = ", ".join(f".{form}" for form in forms)
        raise ConfigError(f"picture {str(path)!r} must end in one of {suffixes}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


def draw_panels(panels: Sequence[Panel]) -> Figure:
    """Draws the padding of several plans of the same samples side by side, on one scale."""
    figure = new_figure(5 * len(panels), 4)
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(row, panels, strict=True):
        draw_padding(panel.batches, widths=panel.widths, ax=axes, packed=panel.packed)
        axes.set_title(panel.title, fontsize=10)
    return figure


def draw_padding(
    batches: Sequence[NDArray[np.integer]],
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
    if widths is None:
        widths = [int(batch.max(initial=0)) for batch in batches]
    shown = shown_batches([len(batch) for batch in batches], SAMPLES_SHOWN)
    if not shown:
        return axes
    real = np.concatenate([np.sort(batches[batch])[::-1] for batch in shown])
    padded = np.concatenate([np.full(len(batches[batch]), widths[batch]) for batch in shown])
    edges = np.arange(len(real) + 1)
    if not packed:
        axes.stairs(
            padded,
            edges,
            fill=True,
            linewidth=0,
            label="padding",
            facecolor=PADDING,
            edgecolor=HATCH,
            hatch="////",
        )
    axes.stairs(real, edges, fill=True, color=REAL, label="tokens")
    height = HEADROOM * padded.max()
    top = max(axes.get_ylim()[1], height)  # the scale may be shared with axes drawn before
    axes.set(xlim=(0, len(real)), ylim=(0, top))
    axes.legend(loc="upper right", ncols=2)
    return axes


def shown_batches(sizes: Sequence[int], num_samples: int) -> list[int]:
    """Returns which evenly spaced batches have about ``num_samples`` samples; of all batches if they have fewer."""
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return []
    share = num_samples / sum(sizes)
    num_shown = int(np.clip(len(filled) * share, 1, len(filled)))
    chosen = np.linspace(0, len(filled) - 1, num_shown).astype(int)
    return filled[chosen].tolist()
