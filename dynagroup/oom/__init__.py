"""Recovers from out-of-memory errors: splits the batch, runs its parts, and learns the limit."""

from dynagroup.budget.learning import LearningBudget, OomReport
from dynagroup.device import is_out_of_memory
from dynagroup.oom.generate import Generated, generate_with_oom_retry
from dynagroup.oom.retry import run_with_oom_retry
from dynagroup.oom.take import BatchSplitter, Splitter
from dynagroup.oom.train import BackwardResult, OomSafeBackward

__all__ = [
    "BackwardResult",
    "BatchSplitter",
    "Generated",
    "LearningBudget",
    "OomReport",
    "OomSafeBackward",
    "Splitter",
    "generate_with_oom_retry",
    "is_out_of_memory",
    "run_with_oom_retry",
]
