"""The rules by which windows are cut: settings that all functions of a cut share."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynagroup.budget.base import Budget, is_packed
from dynagroup.plan.batches import Batches, RoundBatch
from dynagroup.plan.cost import DEFAULT_WORK, Work
from dynagroup.shapes import Streams


@dataclass(frozen=True)
class CutRules:
    """How windows are cut: what fits, how long a batch takes, and which batch sizes are allowed.

    Args:
        budget: decides which batches fit, and whether they are padded or packed.
        work: predicted time of a batch.
        round_batch: rounds the sizes of padded batches; None: all sizes are allowed.
    """

    budget: Budget
    work: Work = DEFAULT_WORK
    round_batch: RoundBatch | None = None

    def packs(self, lengths: Streams) -> bool:
        """Returns whether samples are packed; else batches are padded."""
        return is_packed(self.budget, lengths)

    def work_of(self, batches: Batches, lengths: Streams) -> NDArray[np.float64]:
        """Returns the predicted time of each batch, without its fixed cost: float64 (B,)."""
        return self.work.of_batches(batches, lengths, self.budget)

    def work_of_samples(self, lengths: Streams) -> NDArray[np.float64]:
        """Returns the predicted time of each sample alone, without its fixed cost: float64 (N,)."""
        names = self.work.priced(self.budget, lengths)
        return self.work.of_lengths({name: lengths[name] for name in names})

    def time_of_steps(self, batches: Batches, lengths: Streams, num_ranks: int) -> float:
        """Returns the predicted time of batches, given step after step; the last step may lack some."""
        work = self.work_of(batches, lengths)
        num_missing = -len(work) % num_ranks
        by_step = np.append(work, np.zeros(num_missing)).reshape(-1, num_ranks)
        return self.work.of_rows(by_step)
