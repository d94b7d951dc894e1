"""What the Hugging Face adapters ask of their host: its order of samples, its lengths, its ranks, its limits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from dynagroup.budget.base import Budget
from dynagroup.distributed import SingleProcess, World, current_world
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.plan.cost import Work
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import mean_items, predicts_next_token

__all__ = [
    "data_parallel_world",
    "host_order",
    "is_stream",
    "loader_kwargs",
    "mean_weight",
    "read_states",
    "refuse_coupled",
    "refuse_unsupported",
    "unsharded",
    "warn_of_layout",
    "work_of",
    "write_state",
]

KEPT = (
    "collate_fn",
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "worker_init_fn",
    "timeout",
)


COUPLED = {
    "KTOTrainer": "its loss compares the samples of a batch with each other; keep TRL's own batches",
    "GRPOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "RLOOTrainer": "it generates its samples by group; divide them with shard_micro_batches",
    "DistillationTrainer": "it makes its batches from what the teacher says; keep TRL's own",
}
"""Trainers of TRL whose losses need the batches that TRL makes."""


def refuse_coupled(trainer: Any) -> None:
    """Losses that depend on which samples share a batch.

    Raises:
        ConfigError: names the Trainer or the loss.
    """
    classes = [c.__name__ for c in type(trainer).__mro__ if c.__module__.startswith("trl.")]
    for name in classes:
        if name in COUPLED:
            raise ConfigError(f"TRL's {name} does not go with dynagroup: {COUPLED[name]}")
    sorting = sorted({"aot", "aot_unpaired"} & set(getattr(trainer, "loss_types", ())))
    if "DPOTrainer" in classes and sorting:
        raise ConfigError(
            f"DPO with loss_type={sorting[0]!r} sorts the pairs of a batch against each other, so it depends on which share "
            "one; choose a loss of single pairs, e.g. 'sigmoid'"
        )


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
        (shards.dispatch_batches, "dispatch_batches=True", "every rank loads its own batches; set it to False"),
        (shards.split_batches, "split_batches=True", "every rank loads its own batches; set it to False"),
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


PADDING = ("DataCollatorWithPadding", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification")


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


def host_order(loader: Any) -> Iterable[int]:
    """The sampler of indices behind a loader, however many times accelerate wrapped it."""
    batch_sampler = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    sampler = getattr(batch_sampler, "sampler", None)
    if sampler is None:
        raise ConfigError(
            "the training DataLoader has no sampler of indices (an IterableDataset, or a batch sampler of its own); "
            "use a map-style dataset"
        )
    return sampler


def loader_kwargs(loader: Any) -> dict[str, Any]:
    """What our DataLoader takes over from the host's."""
    import torch

    kept = {name: getattr(loader, name) for name in KEPT}
    kept["pin_memory"] = bool(loader.pin_memory) and torch.cuda.is_available()
    return kept


def is_stream(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


def unsharded(dataset: Any) -> Any:
    """The stream inside accelerate's sharding wrapper: the online loader shards it itself."""
    from accelerate.data_loader import IterableDatasetShard

    return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset


def write_state(folder: str, loader: StepLoader[Any]) -> None:
    """This rank's place, into a checkpoint. What more ranks have left there goes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    world = loader.world
    Path(folder, f"dynagroup-rank{world.rank}.json").write_text(json.dumps(loader.state_dict()), encoding="utf-8")
    if world.rank == 0:
        for path in Path(folder).glob("dynagroup-rank*.json"):
            if int(path.stem.removeprefix("dynagroup-rank")) >= world.size:
                path.unlink(missing_ok=True)


def read_states(folder: str) -> list[dict[str, Any]]:
    """All ranks' places in a checkpoint, in the order of ranks; none if there are none. Collective: where each node keeps the
    files of its own ranks, they are put together."""
    from accelerate.utils import gather_object

    found = [
        (int(path.stem.removeprefix("dynagroup-rank")), *_read_state(path))
        for path in Path(folder).glob("dynagroup-rank*.json")
    ]
    everywhere = sorted(gather_object(found), key=lambda entry: entry[0])
    for _, _, damage in everywhere:  # on every rank, whoever read it: none may wait for one that raised
        if damage is not None:
            raise StateError(damage)
    return list({rank: state for rank, state, _ in everywhere}.values())


def _read_state(path: Path) -> tuple[Any, str | None]:
    """The state, or what is wrong with the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8")), None
    except (ValueError, RecursionError) as error:
        return None, f"{path} is damaged, it is no JSON ({error}); resume from the checkpoint before it"


def work_of(trainer: Any) -> Work:
    """What a step of this Trainer is predicted to take: ``plan["work"]``, or else what its model's config and device say."""
    own = trainer.dynagroup.plan.get("work")
    return Work.of_known(trainer.model, device=trainer.args.device) if own is None else own


def data_parallel_world(trainer: Any, world: World | None) -> World:
    if world is not None:
        return world
    return current_world() if trainer.args.world_size > 1 else SingleProcess()


def mean_weight(trainer: Any) -> Callable[[Any], float]:
    """What a batch weighs when its loss is a mean: its predicted label tokens, else its samples."""
    shifted = bool(trainer._loss_shifts_labels) or predicts_next_token(trainer.accelerator.unwrap_model(trainer.model))
    return partial(mean_items, shifted=shifted)
