"""dynagroup: batches that fit. Importing it is light; names are loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynagroup.budget import AdditiveCap, Budget, MemoryBudget, TokenBudget
    from dynagroup.errors import AlignmentError, BudgetError, ConfigError, StateError
    from dynagroup.lengths import measure_lengths
    from dynagroup.loader import OnlineDataLoader
    from dynagroup.oom import (
        LearningBudget,
        OomSafeBackward,
        classify_dataset,
        embed_dataset,
        generate_dataset,
        generate_with_oom_retry,
        run_with_oom_retry,
    )
    from dynagroup.partition import friendly_size, multiple_of
    from dynagroup.plan import BatchPlan
    from dynagroup.refine import RefinementCollator
    from dynagroup.sampler import LengthAwareBatchSampler
    from dynagroup.schedule import scale_learning_rate
    from dynagroup.shard import shard_micro_batches
    from dynagroup.step import Share, Step
    from dynagroup.text import text_dataloader
    from dynagroup.updates import UpdateLoader

__version__ = "0.1.0"

_HOME = {
    "AdditiveCap": "budget",
    "AlignmentError": "errors",
    "BatchPlan": "plan",
    "Budget": "budget",
    "BudgetError": "errors",
    "ConfigError": "errors",
    "LearningBudget": "oom",
    "LengthAwareBatchSampler": "sampler",
    "MemoryBudget": "budget",
    "OnlineDataLoader": "loader",
    "OomSafeBackward": "oom",
    "RefinementCollator": "refine",
    "Share": "step",
    "StateError": "errors",
    "Step": "step",
    "TokenBudget": "budget",
    "UpdateLoader": "updates",
    "classify_dataset": "oom",
    "embed_dataset": "oom",
    "friendly_size": "partition",
    "generate_dataset": "oom",
    "generate_with_oom_retry": "oom",
    "measure_lengths": "lengths",
    "multiple_of": "partition",
    "run_with_oom_retry": "oom",
    "scale_learning_rate": "schedule",
    "shard_micro_batches": "shard",
    "text_dataloader": "text",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dynagroup' has no attribute {name!r}")
    value = getattr(import_module(f"dynagroup.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
