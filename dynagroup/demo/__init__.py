"""The demo: one small model, the same updates from fixed batches and from dynagroup, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from dynagroup.budget.tokens import TokenBudget
from dynagroup.demo.corpus import load_texts, train_tokenizer
from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths, named_tokenizer
from dynagroup.plan.cost import CPU_PER_STEP, Work
from dynagroup.plan.plots import draw_padding, new_figure, picture_path, save_picture
from dynagroup.plan.report import environment, format_table
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.text import IGNORED, TokenizingCollator, text_dataloader
from dynagroup.validation import check_int, check_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["DemoConfig", "Run", "TimeLimit", "make_runs", "run_demo", "train"]

HELD_OUT = 256  # texts
Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What the demo trains on, with what, and how much of it: the options of ``dynagroup demo``."""

    texts: str | None = None
    dataset: str | None = None
    column: str | None = None
    split: str = "train"
    tokenizer: str | None = None  # default: that of the model, or one trained on the texts
    model: str | None = None  # default: a small Llama with fresh weights
    budget: int = 8192
    device: str | None = None
    max_length: int = 512
    samples: int = 4096
    seconds: float = 45.0
    samples_per_update: int = 128
    learning_rate: float | None = None  # default: 3e-3 for fresh weights, 2e-5 for trained ones
    seed: int = 0
    picture: str = "dynagroup_demo.png"
    results: str | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "max_length", "samples", "samples_per_update"):
            check_int(name, getattr(self, name))
        check_int("seed", self.seed, least=0, most=2**32 - 1)
        check_number("seconds", self.seconds)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate)


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Run the comparison: prints progress and a table, saves a picture, returns the figures.

    Raises:
        ConfigError: a setting is wrong, or a package of dynagroup[hf,viz] is missing.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()  # the tokenizer's remark that a text is long, which the demo truncates
    picture_path(config.picture)
    device = _device(config.device)
    texts = load_texts(config.texts, config.dataset, config.column, config.split)
    tokenizer = _tokenizer(config, texts)
    full = measure_lengths(texts, tokenizer)
    print(f"{len(texts):,} texts of {full.min():,} to {full.max():,} tokens, median {int(np.median(full)):,}")
    lengths = np.minimum(full, np.int32(config.max_length))
    order = np.random.default_rng(config.seed).permutation(len(texts))
    held_out, chosen = np.split(order, [min(HELD_OUT, len(texts) // 4)])
    runs = make_runs(config, lengths, chosen[: config.samples], device)
    _train_in_turns(config, texts, tokenizer, runs, held_out, device)
    figures = _figures(config, runs, lengths, str(device))
    print("\n" + _table(figures))
    save_picture(_drawn(runs, lengths), config.picture)
    print(f"picture: {config.picture}")
    if config.results:
        Path(config.results).parent.mkdir(parents=True, exist_ok=True)
        Path(config.results).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word; no such device here
        raise ConfigError(f"`device` must be a device of this machine, such as cpu or cuda, but is {name!r}") from error
    return device


def _tokenizer(config: DemoConfig, texts: Sequence[str]) -> Any:
    name = config.tokenizer or config.model
    if name is None:
        return train_tokenizer(texts)
    tokenizer = named_tokenizer(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# Two runs over the same updates


@dataclass
class Run:
    """What is trained on, and what came of it.

    Args:
        name: how the table calls it.
        updates: for each optimizer update its batches, each a list of sample indices; after training, of those made.
        seconds: of each update: loading, forward, backward, step. On a CPU they are seconds of CPU time, which other
            work on the machine does not lengthen.
        loss: mean loss a token on the held-out texts, after the last update.
        peak_bytes: on a CUDA device, the most memory allocated; otherwise 0.
    """

    name: str
    updates: Sequence[Sequence[Sequence[int]]]
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")
    peak_bytes: int = 0

    @property
    def batches(self) -> list[Sequence[int]]:
        return list(chain.from_iterable(self.updates))

    def figures(self, lengths: NDArray[np.int32]) -> dict[str, float]:
        """What the table shows."""
        seconds, num_samples = sum(self.seconds), sum(map(len, self.batches))
        real = sum(int(lengths[batch].sum()) for batch in self.batches)
        padded = [len(batch) * int(lengths[batch].max()) for batch in self.batches]
        return {
            "samples": num_samples,
            "samples_per_s": num_samples / seconds,
            "real_tokens_per_s": real / seconds,
            "padding": 1.0 - real / sum(padded),
            "largest_batch_tokens": max(padded),
            "steps": len(padded),
            "updates": len(self.updates),
            "seconds": seconds,
            "held_out_loss": self.loss,
            "peak_bytes": self.peak_bytes,
        }


def make_runs(
    config: DemoConfig, lengths: NDArray[np.int32], chosen: NDArray[np.int64], device: torch.device
) -> list[Run]:
    """The same samples in the same updates, divided into fixed batches and into batches that fill the budget."""
    per_update = min(config.samples_per_update, len(chosen))
    batch_size = config.budget // int(lengths[chosen].max())
    if batch_size < 1:
        raise ConfigError(f"`budget` ({config.budget}) must hold the longest text ({lengths[chosen].max()} tokens)")
    fixed = [_slices(update, batch_size) for update in _slices(chosen.tolist(), per_update)]
    work = Work(per_step=CPU_PER_STEP) if device.type == "cpu" and config.model is None else None
    options = {"order": chosen, "samples_per_update": per_update, "work": work, "rank": 0, "world_size": 1}
    sampler = LengthAwareBatchSampler(lengths, TokenBudget(config.budget), **options)
    ends = (np.flatnonzero(sampler.plan.update_ends) + 1).tolist()
    batches = list(sampler)
    cut = [batches[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [Run(f"fixed batches of {batch_size}", fixed), Run("dynagroup", cut)]


def _slices(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


class TimeLimit:
    """Says before each update whether there is still time for it; all runs hear the same answers.

    The first update always happens. The clock starts with the first question.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._answers: list[bool] = []
        self._started: float | None = None

    def allows(self, number: int) -> bool:
        """Whether update ``number``, from 0, may start."""
        now = time.perf_counter()
        self._started = now if self._started is None else self._started
        if number == len(self._answers):
            self._answers.append(number == 0 or now - self._started < self._seconds)
        return self._answers[number]


def _train_in_turns(
    config: DemoConfig,
    texts: list[str],
    tokenizer: Any,
    runs: Sequence[Run],
    held_out: NDArray[np.int64],
    device: torch.device,
) -> None:
    options: dict[str, Any] = {"max_length": config.max_length, "labels": True, "rank": 0, "world_size": 1}
    evaluation = text_dataloader([texts[i] for i in held_out], tokenizer, TokenBudget(config.budget), **options)
    collate = TokenizingCollator(tokenizer, config.max_length, 1, labels=True)
    limit = TimeLimit(config.seconds if device.type == "cpu" else config.seconds / 2)
    rate = config.learning_rate or (3e-3 if config.model is None else 2e-5)

    def training(run: Run) -> Iterator[None]:
        after = lambda model: _held_out_loss(model, evaluation, device)  # noqa: E731
        return train(run, texts, collate, lambda: _model(config, tokenizer), device, rate, limit, after)

    # On a CPU the runs take turns, so that other work on the machine slows both alike. A device's memory may hold
    # only one model, so there they follow one another.
    trainings = map(training, runs)
    steps = (_ for turn in zip_longest(*trainings) for _ in turn) if device.type == "cpu" else chain(*trainings)
    with tqdm(total=sum(len(run.updates) for run in runs), desc="training", unit=" updates", disable=None) as bar:
        for _ in steps:
            bar.update()
        bar.total = bar.n  # time may have ended it before


def _model(config: DemoConfig, tokenizer: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(config.seed)
    if config.model is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        own = {"max_position_embeddings": config.max_length, "bos_token_id": None, "eos_token_id": None}
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **own))
    try:
        return AutoModelForCausalLM.from_pretrained(config.model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no causal language model found for {config.model!r}; give its name, or a folder with its weights"
        ) from error


def train(
    run: Run,
    texts: Sequence[str],
    collate: Callable[[Sequence[str]], Tensors],
    make_model: Callable[[], torch.nn.Module],
    device: torch.device,
    learning_rate: float,
    limit: TimeLimit,
    after: Callable[[torch.nn.Module], float],
) -> Iterator[None]:
    """Train a fresh model; yields after every update, so that runs can take turns.

    Each update is one AdamW step on the mean loss over *all its label tokens*, however they are divided into batches.
    """
    model = make_model().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    batches = iter(DataLoader(texts, batch_sampler=run.batches, collate_fn=collate))  # type: ignore[arg-type]
    _warm_up(model, device)
    for number, update in enumerate(run.updates):
        if not limit.allows(number):
            break
        started = _now(device)
        _update(model, optimizer, [next(batches) for _ in update], device)
        run.seconds.append(_now(device) - started)
        yield
    run.updates = run.updates[: len(run.seconds)]
    run.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    run.loss = after(model)


def _update(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Tensors], device: torch.device
) -> None:
    counts = [_num_labels(batch) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        if count:  # a batch without labels has no mean loss, and no gradient
            (_loss(model, batch, device) * (count / sum(counts))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _num_labels(batch: Tensors) -> int:
    return int((batch["labels"][:, 1:] != IGNORED).sum())  # a causal model predicts all but the first token


def _loss(model: torch.nn.Module, batch: Tensors, device: torch.device) -> torch.Tensor:
    return model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss


def _warm_up(model: torch.nn.Module, device: torch.device) -> None:
    """First calls set up threads and kernels; neither run should be charged for it."""
    ids = torch.zeros(2, 8, dtype=torch.int64)
    _loss(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}, device).backward()
    model.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if device.type == "cpu" else time.perf_counter()


@torch.no_grad()
def _held_out_loss(model: torch.nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Mean loss a token over a loader's batches."""
    model.eval()
    counted = [(batch, _num_labels(batch)) for batch in loader]
    total = sum(float(_loss(model, batch, device)) * count for batch, count in counted if count)
    return total / max(sum(count for _, count in counted), 1)


# What is shown


def _figures(config: DemoConfig, runs: Sequence[Run], lengths: NDArray[np.int32], device: str) -> dict[str, Any]:
    fixed, ours = (np.asarray(run.seconds) for run in runs)
    return {
        **environment("transformers"),
        "device": device,
        "clock": "CPU" if device == "cpu" else "wall",
        "threads": torch.get_num_threads(),
        **{name: getattr(config, name) for name in ("budget", "max_length", "samples_per_update", "seed")},
        "runs": {run.name: run.figures(lengths) for run in runs},
        "speedup": float(np.median(fixed / ours)),
        "speedup_quartiles": [float(q) for q in np.quantile(fixed / ours, (0.25, 0.75))],
    }


def _table(figures: dict[str, Any]) -> str:
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "samples/s": lambda run: f"{run['samples_per_s']:,.0f}",
        "real tokens/s": lambda run: f"{run['real_tokens_per_s']:,.0f}",
        "padding": lambda run: f"{run['padding']:.1%}",
        "largest batch": lambda run: f"{run['largest_batch_tokens']:,}",
        "steps": lambda run: f"{run['steps']:,}",
        "updates": lambda run: f"{run['updates']:,}",
        f"{figures['clock']} s": lambda run: f"{run['seconds']:.1f}",
        "held-out loss": lambda run: f"{run['held_out_loss']:.4f}",
    }
    if any(run["peak_bytes"] for run in figures["runs"].values()):
        columns["peak GiB"] = lambda run: f"{run['peak_bytes'] / 2**30:.2f}"
    rows = [[name, *(shown(run) for shown in columns.values())] for name, run in figures["runs"].items()]
    low, high = figures["speedup_quartiles"]
    return (
        format_table(["", *columns], rows)
        + f"\n\ndynagroup: {figures['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x), "
        "the same samples in every update"
    )


def _drawn(runs: Sequence[Run], lengths: NDArray[np.int32]) -> Figure:
    """The first update of both runs: the same samples, so that the eye can compare them."""
    figure = new_figure(12, 3.8)
    for axes, run in zip(figure.subplots(1, len(runs), sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        found = run.figures(lengths)
        axes.set(xlabel="samples of the first update, batch after batch")
        title = f"{run.name}: {found['padding']:.0%} padding, {found['steps']:,} steps, {found['seconds']:.0f} s in all"
        axes.set_title(title, fontsize=10)
    return figure
