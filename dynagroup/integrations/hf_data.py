"""Reads a Trainer's data for a loader: order and lengths of samples, updates as items, and saved states."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.utils.data import BatchSampler, DataLoader

from dynagroup.budget.tokens import TokenBudget
from dynagroup.distributed import World
from dynagroup.errors import ConfigError, StateError
from dynagroup.integrations.config import DynagroupConfig, HostTrainer
from dynagroup.lengths import as_streams
from dynagroup.memory import MemoryRegressor
from dynagroup.memory.phases import Mode
from dynagroup.online.datasets import is_stream
from dynagroup.plan.cost import Work
from dynagroup.shapes import TARGET, TOKENS, IntArray, round_up
from dynagroup.text.measure import IDS, count_ids, is_hf_dataset, measure_lengths, row_lengths
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import Step, width_of
from dynagroup.validation import explained

STATES = "dynagroup.json"
PAIRS = (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))
PROMPT = "prompt_ids"
"""Columns of preference data in TRL and LLaMA-Factory. A batch has both answers as rows, padded to the longest; in
TRL's DPO each answer comes after the prompt."""

Dataset: TypeAlias = Any  # the user's
Labels: TypeAlias = Any  # of samples: a column's name, or one of each
Batch: TypeAlias = Any  # what the user's collate function makes


class UpdateItems:
    """A loader whose items are updates (lists of steps), because a Trainer counts items. Callbacks get it as well."""

    def __init__(self, loader: StepLoader[Batch]) -> None:
        self.loader = loader
        self.dataset = loader.dataset
        self.set_epoch = loader.set_epoch
        self.set_samples_per_update = loader.set_samples_per_update

    def __len__(self) -> int:
        """Returns the number of updates in the epoch."""
        try:
            return self.loader.num_updates
        except ConfigError as error:  # by Python's protocol, what has no length raises TypeError
            raise TypeError(str(error)) from error

    def __iter__(self) -> Iterator[list[Step[Batch]]]:
        return self.loader.updates()


def host_order(loader: DataLoader[Any]) -> Any:
    """Returns the sampler of indices inside a Trainer's loader, which accelerate may have wrapped several times."""
    batch_sampler: Any = innermost(loader)
    # a subclass may choose other samples than its `sampler`
    if type(batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"batches must come from torch's BatchSampler, not {type(batch_sampler)}; use _get_train_sampler"
        )
    return batch_sampler.sampler


def innermost(loader: Any) -> Any:
    """Returns the batch sampler of a loader, which accelerate may have wrapped."""
    while hasattr(loader, "batch_sampler"):
        loader = loader.batch_sampler
    return loader


def work_of(trainer: HostTrainer) -> Work:
    """Returns the predicted time of this Trainer's steps: ``plan["work"]``, else from its model's config and device."""
    work = trainer.dynagroup.plan.get("work")
    if isinstance(work, Work):
        return work
    return Work.of_known(trainer.model, device=trainer.args.device)


def memory_of(trainer: HostTrainer, mode: Mode) -> MemoryRegressor:
    """Returns a memory model for this Trainer's model, as the Trainer runs it."""
    args = trainer.args
    autocast = None
    if args.bf16:
        autocast = "bfloat16"
    elif args.fp16:
        autocast = "float16"
    checkpoints = mode == "train" and args.gradient_checkpointing
    return MemoryRegressor.of_model(
        trainer.model,
        mode,
        autocast=autocast,
        gradient_checkpointing=True if checkpoints else None,
    )


def write_states(folder: str, world: World, state: Mapping[str, object]) -> None:
    """Writes the states of all ranks into a checkpoint; all ranks must call it, and the first rank writes."""
    states = dict(gather_object([(world.rank, state)]))
    if world.rank == 0:
        path = Path(folder, STATES)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([states[rank] for rank in sorted(states)])
        path.write_text(text, encoding="utf-8")


def read_states(folder: str) -> list[Any]:
    """Reads the states of all ranks from a checkpoint, in order of ranks; none if the file does not exist. All ranks
    must call it, because only one node's disk may have the file. If a rank cannot read it, all raise StateError."""
    path = Path(folder, STATES)
    states_of_ranks = gather_object([_read_list(path)])
    if None in states_of_ranks:
        raise StateError(f"{path} is damaged; resume from an earlier checkpoint")
    for states in states_of_ranks:
        if states:
            return states
    return []


def _read_list(path: Path) -> list[Any] | None:
    """Returns the states in a file; an empty list without a file; None if the file is damaged."""
    if not path.exists():
        return []
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return states if isinstance(states, list) and states else None


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """What tells the lengths of a dataset's samples."""

    names: set[str]
    ids: str  # the column of token ids
    lengths: str
    has_target: bool  # whether the model decodes labels, whose lengths count as well


def _columns(trainer: HostTrainer, dataset: Dataset) -> _Columns:
    names = set(dataset.column_names) if is_hf_dataset(dataset) else set()
    read = getattr(trainer.processing_class, "model_input_names", None) or IDS
    candidates = [name for name in (read[0], *IDS) if name in names]
    config = getattr(trainer.model, "config", None)
    return _Columns(
        names=names,
        ids=candidates[0] if candidates else read[0],
        lengths=trainer.args.length_column_name,
        has_target=bool(getattr(config, "is_encoder_decoder", False)),
    )


def sample_lengths(trainer: HostTrainer, dataset: Dataset, *, name: str) -> dict[str, IntArray]:
    """Returns the tokens of each sample; for encoder-decoder models also of its labels, as the stream ``target``. They
    come from the length column, else from columns that the collator pads, else each row is counted."""
    columns = _columns(trainer, dataset)
    pairs = [pair for pair in PAIRS if columns.names.issuperset(pair)]
    streams: dict[str, Any]
    if columns.lengths in columns.names:
        streams = {TOKENS: dataset[columns.lengths][:]}
    elif pairs:
        streams = {TOKENS: _pair_lengths(trainer, dataset, pairs[0], columns)}
    elif columns.ids in columns.names:
        streams = {TOKENS: _real_lengths(trainer, dataset, columns.ids)}
    else:
        streams = _row_by_row(trainer, dataset, columns, name)
    if columns.has_target and "labels" in columns.names and len(dataset):
        if hasattr(dataset[0]["labels"], "__len__"):
            streams[TARGET] = measure_lengths(dataset, column="labels")
    with explained(
        f"the lengths of {name} must be whole numbers", way_out="; multiply by 100 and round up"
    ):
        streams = dict(as_streams(streams))
    return {stream: values.astype(np.int64) for stream, values in streams.items()}


def _pair_lengths(
    trainer: HostTrainer, dataset: Dataset, pair: tuple[str, str], columns: _Columns
) -> IntArray:
    """Returns the tokens of both answers of each sample, padded to the longer one, with the prompt before each."""
    chosen = measure_lengths(dataset, column=pair[0]).astype(np.int64)
    rejected = measure_lengths(dataset, column=pair[1]).astype(np.int64)
    longest = np.maximum(chosen, rejected)
    if PROMPT in columns.names:
        longest = longest + measure_lengths(dataset, column=PROMPT)
    max_length = getattr(trainer.args, "max_length", None)
    if max_length:
        longest = np.minimum(longest, max_length)
    return 2 * longest


def _real_lengths(trainer: HostTrainer, dataset: Dataset, column: str) -> IntArray:
    """Returns the lengths of rows without the padding that their attention masks show; or with it, if the collator keeps
    that of the row with the fewest tokens."""
    real = measure_lengths(dataset, column=column)  # tells of rows that are padded in advance
    widths = row_lengths(dataset, column)
    if np.array_equal(real, widths):
        return real
    shortest = int(np.argmin(real))
    width = width_of(trainer.data_collator([dataset[shortest]]), 1, TOKENS)
    keeps_padding = width is not None and width > real[shortest]
    return widths if keeps_padding else real


def _row_by_row(
    trainer: HostTrainer, dataset: Dataset, columns: _Columns, name: str
) -> dict[str, IntArray]:
    def lengths_of(row: Any) -> dict[str, int]:
        if isinstance(row, (list, np.ndarray, torch.Tensor)):
            num_tokens = count_ids(row)
            if num_tokens is None:
                raise TypeError("no row of ids")
            return {TOKENS: num_tokens}
        lengths = {TOKENS: len(row[columns.ids])}
        target: Any = row.get("labels") if columns.has_target else None
        if hasattr(target, "__len__"):
            lengths[TARGET] = len(target)
        return lengths

    try:
        return measure_lengths(
            dataset, length_of=lengths_of, progress=not trainer.args.disable_tqdm
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"cannot read the lengths of {name}: its rows have neither {columns.lengths!r} nor {columns.ids!r}; "
            "add a length column, or pass DynagroupConfig(lengths=...) for training, e.g. "
            "measure_lengths(texts, tokenizer)"
        ) from error


def sample_kinds(dataset: Dataset, kinds: Labels, *, name: str = "train_dataset") -> Labels:
    """Returns the labels of the samples, as given or from the named column."""
    if not isinstance(kinds, str):
        return kinds
    with explained(f"`kinds` is {kinds!r}, but {name} has no column of that name"):
        if is_hf_dataset(dataset):
            return list(dataset[kinds])
        return [row[kinds] for row in dataset]


def with_budget(trainer: HostTrainer, config: DynagroupConfig) -> DynagroupConfig:
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
    longest = [max(int(values.max(initial=0)), 1) for values in as_streams(lengths).values()]
    tokens_of_longest = int(round_up(np.array(longest), multiple).sum())
    max_tokens = trainer.args.per_device_train_batch_size * tokens_of_longest
    budget = TokenBudget(max_tokens, pad_to_multiple_of=multiple)
    return replace(config, budget=budget, lengths=lengths)
