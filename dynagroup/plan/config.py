"""How an epoch is cut into batches, as one value."""

from __future__ import annotations

from dataclasses import dataclass

from dynagroup.errors import ConfigError
from dynagroup.plan.batches import RoundBatch
from dynagroup.plan.cost import DEFAULT_WORK, Work, check_work
from dynagroup.plan.oversize import Oversize, check_oversize
from dynagroup.plan.padded import OBJECTIVES, Objective
from dynagroup.plan.ranks import Uneven
from dynagroup.validation import check_choice, check_flag, check_function, check_int

__all__ = ["PlanConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How an epoch is cut into batches. Knows no ranks, lengths or budget."""

    shuffle: bool = False
    """Draw windows in a random order and shuffle the steps inside each."""
    window: int | None = None
    """Samples sorted together. None: all of them, or with ``shuffle`` a hundred batches or so."""
    seed: int = 0
    hardest_first: int = 1
    """Steps with the longest samples that lead an epoch, so that running out of memory shows at once."""
    round_batch: RoundBatch | None = None
    """Batch sizes are chosen among this function's values, before the fit check."""
    samples_per_update: int | None = None
    """Every update consists of exactly so many samples over all ranks, drawn as fixed batches would draw them."""
    work: Work = DEFAULT_WORK
    """Predicted time of a batch, which cutting makes least and row mates share."""
    objective: Objective = "time"
    """What cutting makes least: "time", or with "fewest" the number of batches."""
    oversize: Oversize = "alone"
    """A sample that does not fit even alone: "alone", "error" or "drop"."""
    uneven: Uneven = "repeat"
    """Where halving cannot fill the last row: "repeat" the smallest samples, or "drop" the row's samples."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shuffle", check_flag("shuffle", self.shuffle))
        for name in ("window", "samples_per_update"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_int(name, getattr(self, name), where=" (or None)"))
        for name in ("seed", "hardest_first"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), least=0))
        if self.window is not None and self.samples_per_update is not None:
            raise ConfigError(
                "`window` and `samples_per_update` exclude each other: an update's samples are the window"
            )
        check_oversize(self.oversize)
        check_choice("uneven", self.uneven, ("repeat", "drop"))
        check_choice("objective", self.objective, OBJECTIVES)
        object.__setattr__(self, "work", check_work(self.work))
        if self.round_batch is not None:
            check_function("round_batch", self.round_batch, "from int to int")
