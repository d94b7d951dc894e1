"""dynagroup forms batches that fit in memory. Importing it is fast: each name is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynagroup.budget.base import AdditiveCap, Budget
    from dynagroup.budget.learning import LearningBudget
    from dynagroup.budget.memory import MemoryBudget
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.errors import AlignmentError, BudgetError, ConfigError, StateError
    from dynagroup.files import measure_files
    from dynagroup.jobs import (
        classify_dataset,
        embed_dataset,
        generate_dataset,
        iter_classify,
        iter_embed,
        iter_generate,
        iter_map,
        iter_score,
        map_batches,
        score_dataset,
    )
    from dynagroup.online.collator import RefinementCollator, collated_length
    from dynagroup.online.loader import OnlineDataLoader
    from dynagroup.oom import OomSafeBackward, generate_with_oom_retry, run_with_oom_retry
    from dynagroup.oom.preflight import preflight
    from dynagroup.plan.batches import friendly_size, multiple_of
    from dynagroup.plan.cost import Price, Work
    from dynagroup.plan.few_shapes import ShapeLadder
    from dynagroup.plan.micro_batches import balanced_partitions, shard_micro_batches
    from dynagroup.plan.mixture import Mixture
    from dynagroup.plan.plan import BatchPlan
    from dynagroup.plan.sampler import LengthAwareBatchSampler
    from dynagroup.text.loader import text_dataloader
    from dynagroup.text.measure import measure_lengths
    from dynagroup.update.loader import StepLoader
    from dynagroup.update.loss_check import check_loss
    from dynagroup.update.loss_weight import Share
    from dynagroup.update.planned import PlannedDataLoader
    from dynagroup.update.schedule import scale_learning_rate
    from dynagroup.update.step import Step, loss_scales

__version__ = "0.1.0"

_NAMES = {
    "errors": "AlignmentError BudgetError ConfigError StateError",
    "files": "measure_files",
    "text.loader": "text_dataloader",
    "text.measure": "measure_lengths",
    "budget.base": "AdditiveCap Budget",
    "budget.learning": "LearningBudget",
    "budget.memory": "MemoryBudget",
    "budget.tokens": "TokenBudget",
    "plan.batches": "friendly_size multiple_of",
    "plan.cost": "Price Work",
    "plan.mixture": "Mixture",
    "plan.micro_batches": "balanced_partitions shard_micro_batches",
    "plan.plan": "BatchPlan",
    "plan.sampler": "LengthAwareBatchSampler",
    "plan.few_shapes": "ShapeLadder",
    "oom.preflight": "preflight",
    "update.loader": "StepLoader",
    "update.loss_weight": "Share",
    "update.planned": "PlannedDataLoader",
    "update.schedule": "scale_learning_rate",
    "update.loss_check": "check_loss",
    "update.step": "Step loss_scales",
    "online.collator": "RefinementCollator collated_length",
    "online.loader": "OnlineDataLoader",
    "oom": "OomSafeBackward generate_with_oom_retry run_with_oom_retry",
    "jobs": "classify_dataset embed_dataset generate_dataset iter_classify iter_embed iter_generate iter_map iter_score "
    "map_batches score_dataset",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_ROOMS = ("integrations", "jobs", "memory", "oom", "testing")
"""Subpackages that ``import dynagroup`` alone makes available, for example as ``dynagroup.memory``."""

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"dynagroup.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'dynagroup' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"dynagroup.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*_HOME, *_ROOMS, "__version__"})
