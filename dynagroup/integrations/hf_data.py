"""Reads a Trainer's data for a loader: order and lengths of samples, updates as items, and saved states."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler

from dynagroup.budget.base import is_packed
from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.lengths import as_streams
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.phases import Mode
from dynagroup.online.datasets import is_stream
from dynagroup.plan.compare import compare
from dynagroup.plan.cost import Work
from dynagroup.shapes import TARGET, TOKENS, IntArray, round_up
from dynagroup.text.measure import IDS, count_ids, measure_lengths, row_lengths
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import Step, width_of
from dynagroup.validation import explained

KEPT = "collate_fn num_workers persistent_workers prefetch_factor multiprocessing_context worker_init_fn timeout"
STATES, SHUFFLES = (
    "dynagroup.json",
    ("RandomSampler", "SeedableRandomSampler", "LengthGroupedSampler"),
)
PAIRS, PROMPT = (
    (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")),
    "prompt_ids",
)
"""Columns of preference data in TRL and LLaMA-Factory. A batch has both answers as rows, padded to the longest; in
TRL's DPO each answer comes after the prompt."""


class UpdateItems:
    """A loader whose items are updates (lists of steps), because a Trainer counts items. Callbacks get it as well."""

    def __init__(self, loader: StepLoader[Any]) -> None:
        self.loader, self.dataset = loader, loader.dataset
        self.set_epoch, self.set_samples_per_update = (
            loader.set_epoch,
            loader.set_samples_per_update,
        )

    def __len__(self) -> int:
        """Returns the number of updates in the epoch."""
        try:
            return self.loader.num_updates
        except (
            ConfigError
        ) as error:  # Python's protocol: an object without a length raises TypeError
            raise TypeError(str(error)) from error

    def __iter__(self) -> Iterator[list[Step[Any]]]:
        return self.loader.updates()


def host_order(loader: Any) -> Any:
    """Returns the sampler of indices inside a Trainer's loader, which accelerate may have wrapped several times."""
    batch_sampler = loader.batch_sampler
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    if (
        type(batch_sampler) is not BatchSampler
    ):  # a subclass may choose other samples than its `sampler`
        raise ConfigError(
            f"batches must come from torch's BatchSampler, not {type(batch_sampler)}; use _get_train_sampler"
        )
    return batch_sampler.sampler


def loader_kwargs(loader: Any) -> dict[str, Any]:
    """Returns the settings that dynagroup's DataLoader takes from the Trainer's."""
    kept = {name: getattr(loader, name) for name in KEPT.split()}
    return {**kept, "pin_memory": bool(loader.pin_memory) and torch.cuda.is_available()}


def work_of(trainer: Any) -> Work:
    """Returns the predicted time of this Trainer's steps: ``plan["work"]``, else from its model's config and device."""
    own = trainer.dynagroup.plan.get("work")
    return (
        own if isinstance(own, Work) else Work.of_known(trainer.model, device=trainer.args.device)
    )


def memory_of(trainer: Any, mode: Mode) -> MemoryRegressor:
    """Returns a memory model for this Trainer's model, as the Trainer runs it."""
    args = trainer.args
    lower = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    how = {
        "autocast": lower,
        "gradient_checkpointing": args.gradient_checkpointing and mode == "train",
    }
    return MemoryRegressor.of_model(
        trainer.model, mode, **{name: value for name, value in how.items() if value}
    )


def write_states(folder: str, world: World, state: Mapping[str, Any]) -> None:
    """Writes the states of all ranks into a checkpoint; all ranks must call it, and the first rank writes."""
    states = dict(gather_object([(world.rank, state)]))
    if world.rank == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, STATES).write_text(
            json.dumps([states[rank] for rank in sorted(states)]), encoding="utf-8"
        )


def read_states(folder: str) -> list[Any]:
    """Reads the states of all ranks from a checkpoint, in order of ranks; none if the file does not exist. All ranks
    must call it, because only one node's disk may have the file. If a rank cannot read it, all raise StateError."""
    path, own = Path(folder, STATES), None  # None if damaged
    is_there = path.exists()
    with suppress(OSError, ValueError, RecursionError):
        own = json.loads(path.read_text(encoding="utf-8")) if is_there else []
    found = gather_object([own if isinstance(own, list) and bool(own) == is_there else None])
    if None in found:
        raise StateError(f"{path} is damaged; resume from an earlier checkpoint")
    return next((states for states in found if states), [])


def sample_lengths(trainer: Any, dataset: Any, *, name: str) -> dict[str, IntArray]:
    """Returns the tokens of each sample; for encoder-decoder models also of its labels, as the stream ``target``. They
    come from the length column, else from columns that the collator pads, else each row is counted."""
    columns = getattr(dataset, "column_names", None)
    columns = {*columns} if isinstance(columns, (list, tuple)) else set()
    known = trainer.args.length_column_name
    named = getattr(trainer.processing_class, "model_input_names", None) or IDS
    first = next((name for name in (named[0], *IDS) if name in columns), named[0])
    both = bool(getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False))
    if known in columns:
        streams: Any = {TOKENS: dataset[known][:]}
    elif pair := next((pair for pair in PAIRS if columns.issuperset(pair)), None):
        chosen, rejected = (
            measure_lengths(dataset, column=column).astype(np.int64) for column in pair
        )
        prompt = measure_lengths(dataset, column=PROMPT) if PROMPT in columns else 0
        most = getattr(trainer.args, "max_length", None)
        streams = {
            TOKENS: 2 * np.clip(np.maximum(chosen, rejected) + prompt, None, most or 1 << 30)
        }
    elif first in columns:
        streams = {TOKENS: _real_lengths(trainer, dataset, first)}
    else:
        streams = _row_by_row(trainer, dataset, first, both, name)
    if both and "labels" in columns and len(dataset) and hasattr(dataset[0]["labels"], "__len__"):
        streams[TARGET] = measure_lengths(dataset, column="labels")
    with explained(
        f"the lengths of {name} must be whole numbers", way_out="; multiply by 100 and round up"
    ):
        return {stream: values.astype(np.int64) for stream, values in as_streams(streams).items()}


def with_budget(trainer: Any, config: Any) -> Any:
    """Returns the config with the budget that "auto" stands for, and with the lengths that decide it."""
    if config.budget != "auto":
        return config
    dataset = trainer.train_dataset
    if dataset is None or is_stream(dataset):
        raise ConfigError(
            "`budget='auto'` needs a train_dataset of known lengths; give tokens: TokenBudget(16_384)"
        )
    lengths = config.lengths
    if lengths is None:
        lengths = sample_lengths(trainer, dataset, name="train_dataset")
    multiple = getattr(trainer.data_collator, "pad_to_multiple_of", None) or 1
    greatest = np.array([max(int(of.max(initial=0)), 1) for of in as_streams(lengths).values()])
    longest = int(round_up(greatest, multiple).sum())
    budget = TokenBudget(
        trainer.args.per_device_train_batch_size * longest, pad_to_multiple_of=multiple
    )
    return replace(config, budget=budget, lengths=lengths)


def banner(trainer: Any, loader: StepLoader[Any]) -> list[str]:
    """Returns what exact updates cost beside fixed batches, and what stratified ones would, from at most 4,096 samples.

    No lines: updates are stratified already, are of no set size, or are not padded.
    """
    config = trainer.dynagroup
    if config.updates != "preserved" or config.mode != "offline" or config.grouping is not None:
        return []
    lengths, *_ = loader.examples()
    if is_packed(loader.budget, lengths):
        return []
    found = compare(
        {name: values[:: max(1, len(values) // 4096)] for name, values in lengths.items()},
        trainer.args.per_device_train_batch_size,
        world_size=trainer.args.world_size,  # one rank asks, so nothing here may exchange with others
        accumulation=trainer.accumulation,
        budget=loader.budget,
        work=work_of(trainer),
    )
    fixed, _, exact, stratified = found.ways[:4]
    lines = []
    for name, way in (("exact updates", exact), ("grouping=50", stratified)):
        faster = fixed.plan.predicted_time / way.plan.predicted_time
        lines.append(f"{name}: padding {way.padding:.0%}, predicted {faster:.1f}x of fixed batches")
    lines[0] += f" (their padding: {fixed.padding:.0%})"
    lines[1] += "; the same loss in our measurements"
    return lines


def _real_lengths(trainer: Any, dataset: Any, column: str) -> IntArray:
    """Returns the lengths of rows, without padding that their attention masks show if the collator removes it."""
    real = measure_lengths(dataset, column=column)  # tells of rows that are padded in advance
    widths = row_lengths(dataset, column)
    if np.array_equal(real, widths):
        return real
    place = int(np.argmin(real))
    kept = width_of(trainer.data_collator([dataset[place]]), 1, TOKENS)
    removes_padding = kept is None or kept <= real[place]
    return real if removes_padding else widths


def sample_kinds(dataset: Any, kinds: Any, *, name: str = "train_dataset") -> Any:
    """Returns the labels of the samples, as given or from the named column."""
    if not isinstance(kinds, str):
        return kinds
    with explained(f"`kinds` is {kinds!r}, but {name} has no column of that name"):
        return (
            list(dataset[kinds])
            if hasattr(dataset, "column_names")
            else [row[kinds] for row in dataset]
        )


def _row_by_row(trainer: Any, dataset: Any, column: str, both: bool, name: str) -> Any:
    def lengths_of(row: Any) -> dict[str, int]:
        plain = isinstance(row, (list, np.ndarray, torch.Tensor))
        count = count_ids(row) if plain else len(row[column])
        if count is None:
            raise TypeError("no row of ids")
        target: Any = row.get("labels") if both and not plain else None
        return {TOKENS: count, **({TARGET: len(target)} if hasattr(target, "__len__") else {})}

    try:
        return measure_lengths(
            dataset, length_of=lengths_of, progress=not trainer.args.disable_tqdm
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        has = f"its rows have neither {trainer.args.length_column_name!r} nor {column!r}"
        way_out = "add a length column, or pass DynagroupConfig(lengths=...) for training, e.g. measure_lengths(texts, tokenizer)"
        raise ConfigError(f"cannot read the lengths of {name}: {has}; {way_out}") from error
