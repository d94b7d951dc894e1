"""What keeps a plan from saving more: an update or a window too small to sort, a budget that never binds, a dear step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynagroup.shapes import BatchShape

if TYPE_CHECKING:
    from dynagroup.plan.plan import BatchPlan

__all__ = ["FEW_BATCHES", "MUCH_PADDING", "advice", "dear_steps"]

MUCH_PADDING = 0.15
"""Share of padding from which on it is worth a sentence."""
FEW_BATCHES = 20
"""Of a window; with fewer of them its samples are too few to sort well."""
TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def advice(plan: BatchPlan) -> str | None:
    """One sentence with its figure and the way out; None where little is left to save."""
    stats = plan.statistics
    padding, updates, samples = float(stats["padding"]), int(stats["num_updates"]), int(stats["num_samples"])
    if padding <= MUCH_PADDING or plan.budget.layout == "packed" or stats["num_batches"] < 2:
        return None
    said, size = f"{padding:.0%} of the tokens are padding", samples / int(stats["num_batches"])
    if plan.window is not None and plan.window < min(FEW_BATCHES * size, samples):
        why = (
            f"a window of {plan.window:,} samples is {plan.window / size:.0f} batches, too few to sort; raise `window`"
        )
    elif plan.window is None and stats["num_steps"] < 1.5 * updates:
        each = "one batch" if stats["num_steps"] == updates else f"{stats['num_steps'] / updates:.1f} batches"
        why = (
            f"an update of {samples / updates:,.0f} samples is {each} a rank, too few to sort; take more samples an update "
            "(gradient accumulation), or free updates"
        )
    else:
        why = dear_steps(size)
    times = _times_larger(plan)
    unused = f"; {times} times as many samples would fit every batch: a larger budget changes nothing" if times else ""
    return f"{said}: {why}{unused}"


def dear_steps(size: float) -> str:
    """What is said where batches, of so many samples, are not smaller because steps have a price."""
    return (
        f"batches have {size:,.0f} samples, because more and smaller ones are predicted to take longer; if steps are cheap with "
        "you, say so: work=Work(per_step=...), or work=loader.stats.work of an earlier run"
    )


def _times_larger(plan: BatchPlan) -> int:
    """How many times as many samples like its own would fit even the fullest batch; 0 where not twice as many do."""
    shapes = plan.shapes
    found = 0
    for times in TIMES:
        total = {name: values * times for name, values in shapes.total.items()}
        if not plan.budget.fits(BatchShape(shapes.num_samples * times, shapes.longest, total)).all():
            break
        found = times
    return found
