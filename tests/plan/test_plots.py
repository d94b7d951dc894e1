"""Pictures show the plan's own figures, on axes of one's own if wanted, and leave pyplot alone."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan import plots
from dynagroup.plan.sampler import LengthAwareBatchSampler

LENGTHS = np.random.default_rng(0).integers(1, 200, 300)


def plan(lengths=LENGTHS, budget=None, world_size=2, **options):
    budget = budget or TokenBudget(2000)
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=world_size, **options).plan


def pixels(axes):
    """What is drawn, as an array of grey: a picture that says nothing without colour says nothing here."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(axes.figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].mean(axis=2)


def test_a_plot_has_its_pictures_with_units_and_leaves_pyplot_alone():
    before = "matplotlib.pyplot" in sys.modules
    made = plan()
    figure = made.plot()
    titles = [axes.get_title() for axes in figure.axes]
    assert len(titles) == 5
    assert titles[0] == "lengths"
    assert titles[1].startswith("before: fixed ")
    assert titles[2] == f"after: {made.statistics['padding']:.0%} padding, {made.num_steps} steps"
    assert figure.axes[1].get_ylim() == figure.axes[2].get_ylim()
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_memory_budget_shows_its_memory_against_the_limit():
    figure = plan(budget=MemoryBudget(8, model=PaddedTokens(), headroom=0.9)).plot()
    assert figure.axes[5].get_title() == "predicted memory"
    points, *lines = figure.axes[5].get_lines()
    assert [line.get_ydata()[0] for line in lines] == [100, 90]
    assert 50 < max(points.get_ydata()) <= 100


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_an_empty_plan_can_be_drawn(tmp_path, layout):
    plan([], TokenBudget(20, layout=layout), 1).plot().savefig(tmp_path / "x.png")


@pytest.mark.filterwarnings("ignore")
def test_packed_plans_and_single_samples_can_be_drawn(tmp_path):
    plan(budget=TokenBudget(2000, layout="packed")).plot().savefig(tmp_path / "x.png")
    plan([5], world_size=1).plot().savefig(tmp_path / "y.png")
    plan([0, 0, 0], world_size=1).plot().savefig(tmp_path / "z.png")


def test_a_long_run_is_drawn_with_few_samples():
    axes = plots.draw_padding([np.arange(1, 11)] * 5000)
    assert axes.get_xlim()[1] <= 2000


def test_every_picture_accepts_axes():
    made, axes = plan(), plots.new_figure(8, 8).subplots(1, 3).ravel()
    drawn = [
        plots.draw_lengths(LENGTHS, ax=axes[0]),
        plots.draw_padding([LENGTHS[:9]], ax=axes[1]),
        plots.draw_work(made.padded[made.table], ax=axes[2]),
    ]
    assert all(a is b for a, b in zip(drawn, axes, strict=True))


def test_padding_is_seen_without_colour():
    short, long = np.full(5, 50), np.full(5, 100)
    full, padded = plots.draw_padding([long]), plots.draw_padding([np.append(short, 100)])
    assert abs(pixels(full).mean() - pixels(padded).mean()) > 5


def test_work_says_how_much_ranks_wait():
    axes = plots.draw_work(np.array([[1.0, 3.0], [2.0, 2.0]]))
    assert axes.get_title() == "work of 2 ranks: 20.0% waiting"


def test_a_notebook_shows_a_picture_without_pyplot():
    assert plan().plot()._repr_png_().startswith(b"\x89PNG")
