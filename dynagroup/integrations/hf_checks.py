"""What does not go with batches that fit under a Trainer: refused, or warned of, with the way out."""

from __future__ import annotations

import warnings
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.errors import ConfigError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.trl import refuse_coupled

__all__ = ["refuse_unsupported", "warn_of_layout"]

PADDING = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification")
OWN_BATCHES = "every rank loads its own batches; set it to False"


def refuse_unsupported(trainer: Any, config: DynagroupConfig) -> None:
    """Combinations that would lose samples or weigh them wrongly.

    Raises:
        ConfigError: names the setting and what to do instead.
    """
    refuse_coupled(trainer)
    args, accelerator = trainer.args, trainer.accelerator
    shards = accelerator.dataloader_config
    model_parallel = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    averaged = args.average_tokens_across_devices or args.world_size == 1
    wrong = [
        (args.auto_find_batch_size, "auto_find_batch_size=True", "the budget keeps batches within memory"),
        (shards.dispatch_batches, "dispatch_batches=True", OWN_BATCHES),
        (shards.split_batches, "split_batches=True", OWN_BATCHES),
        (
            not args.dataloader_in_order,
            "dataloader_in_order=False",
            "updates need their batches in order; leave it True",
        ),
        (
            plugin is not None and plugin.zero_stage == 3 and config.mode == "online",
            "DeepSpeed ZeRO-3 with mode='online'",
            "its parameters are gathered in step on all ranks; use mode='offline'",
        ),
        (args.n_gpu > 1, "nn.DataParallel", "launch one process a device, with torchrun or accelerate launch"),
        (
            str(args.train_sampling_strategy) == "batch_rebalance",
            "train_sampling_strategy='batch_rebalance'",
            "it forms batches itself, by cost and without a limit; leave it 'random': dynagroup's batches fit the budget and "
            "are balanced over ranks as well",
        ),
        (
            not averaged,
            "average_tokens_across_devices=False",
            "ranks hold batches of different size, so tokens must be counted over all of them",
        ),
        (
            model_parallel > 1 and config.world is None,
            f"tensor, context or sequence parallelism ({model_parallel} ranks share a sample)",
            "pass DynagroupConfig(world=DistributedWorld(mesh.get_group('dp'))) with the mesh's data-parallel group",
        ),
    ]
    for is_set, what, instead in wrong:
        if is_set:
            raise ConfigError(f"{what} does not go with dynagroup: {instead}")


def warn_of_layout(collator: Any, budget: Budget, *, packing: bool = False) -> None:
    """Where nothing is to be gained (``packing`` of TRL), or collator and budget are of different layouts."""
    if packing:
        warnings.warn(
            "with packing=True TRL has already joined samples into blocks of max_length tokens: there is nothing left for "
            "batches that fit to gain. Leave dynagroup out; or set packing=False, padding_free=True, max_length=None and give it "
            "TokenBudget(max_tokens, layout='packed'): no sample is cut, and updates keep their samples",
            stacklevel=3,
        )
        return
    kinds = {c.__name__ for c in type(collator).__mro__}
    flat = "DataCollatorWithFlattening" in kinds or bool(getattr(collator, "padding_free", False))
    if flat and budget.layout == "padded":
        warnings.warn(
            f"{type(collator).__name__} lays samples end to end, but the budget counts padding that is not there, so batches "
            "stay smaller than they could be: give it layout='packed', e.g. TokenBudget(max_tokens, layout='packed')",
            stacklevel=3,
        )
    padded = bool(kinds & set(PADDING)) or getattr(collator, "padding_free", None) is False
    if padded and budget.layout == "packed":
        warnings.warn(
            f"{type(collator).__name__} pads samples to their longest, but the budget has layout='packed' and counts no padding: "
            "batches may be larger than it allows; use the padded layout, or a collator such as DataCollatorWithFlattening",
            stacklevel=3,
        )
