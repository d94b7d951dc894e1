"""The demo: one small model, the same updates from fixed batches and from dynagroup, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dynagroup.errors import ConfigError
from dynagroup.plan.work import CPU_PER_STEP, Work
from dynagroup.validation import check_int, check_number

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from dynagroup.demo.training import Run

__all__ = ["DemoConfig", "run_demo"]

HELD_OUT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What the demo trains on, with what, and how much of it."""

    texts: str | None = None
    """File with one text a line; default: docstrings found on this machine."""
    dataset: str | None = None
    """Name of a dataset for ``datasets.load_dataset``."""
    column: str | None = None
    """The dataset's column of texts."""
    split: str = "train"
    """The dataset's split."""
    tokenizer: str | None = None
    """Name or folder of a transformers tokenizer; default: that of ``model``, or one trained on the texts."""
    model: str | None = None
    """Name or folder of a transformers causal language model; default: a small Llama with fresh weights."""
    budget: int = 8192
    """Tokens a batch may have, padding counted, in both runs."""
    device: str | None = None
    """Where to train; default: cuda if there is one, else cpu."""
    max_length: int = 512
    """Tokens that a text is truncated to."""
    samples: int = 4096
    """Texts to train on, if there is time."""
    seconds: float = 45.0
    """Training stops, after the same update in both runs, when it has taken so long."""
    samples_per_update: int = 128
    """Texts in one optimizer update, in both runs."""
    learning_rate: float | None = None
    """Of AdamW; default: 3e-3 for fresh weights, 2e-5 for trained ones."""
    seed: int = 0
    """Of the order of the texts and of the model's fresh weights."""
    picture: str = "dynagroup_demo.png"
    """Where the picture is saved."""
    results: str | None = None
    """Where the figures are saved as JSON; default: nowhere."""

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

    from dynagroup.demo.corpus import load_texts
    from dynagroup.lengths import measure_lengths
    from dynagroup.plan.pictures import picture_path, save_picture

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
    chosen = chosen[: config.samples]
    runs = make_runs(config, lengths, chosen, device)
    _train_both(config, texts, tokenizer, runs, held_out, lengths, device)
    figures = _figures(config, runs, lengths, str(device))
    print("\n" + _table(figures, runs))
    save_picture(_drawn(runs, lengths), config.picture)
    print(f"picture: {config.picture}")
    if config.results:
        Path(config.results).parent.mkdir(parents=True, exist_ok=True)
        Path(config.results).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def _device(name: str | None) -> torch.device:
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word; no such device here
        raise ConfigError(f"`device` must be a device of this machine, such as cpu or cuda, but is {name!r}") from error
    return device


def _tokenizer(config: DemoConfig, texts: Sequence[str]) -> Any:
    from dynagroup.demo.corpus import train_tokenizer
    from dynagroup.tokenizer import named_tokenizer

    name = config.tokenizer or config.model
    if name is None:
        return train_tokenizer(texts)
    tokenizer = named_tokenizer(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def make_runs(
    config: DemoConfig, lengths: NDArray[np.int32], chosen: NDArray[np.int64], device: torch.device
) -> list[Run]:
    """The same samples in the same updates, divided into fixed batches and into batches that fill the budget."""
    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.demo.training import Run
    from dynagroup.plan.sampler import LengthAwareBatchSampler

    per_update = min(config.samples_per_update, len(chosen))
    batch_size = config.budget // int(lengths[chosen].max())
    if batch_size < 1:
        raise ConfigError(f"`budget` ({config.budget}) must hold the longest text ({lengths[chosen].max()} tokens)")
    fixed = [_slices(update, batch_size) for update in _slices(chosen.tolist(), per_update)]
    sampler = LengthAwareBatchSampler(
        lengths,
        TokenBudget(config.budget),
        order=chosen,
        samples_per_update=per_update,
        work=Work(per_step=CPU_PER_STEP) if device.type == "cpu" and config.model is None else None,
        rank=0,
        world_size=1,
    )
    ends = (np.flatnonzero(sampler.plan.update_ends) + 1).tolist()
    batches = list(sampler)
    cut = [batches[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [Run(f"fixed batches of {batch_size}", fixed), Run("dynagroup", cut)]


def _slices(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _train_both(
    config: DemoConfig,
    texts: list[str],
    tokenizer: Any,
    runs: Sequence[Run],
    held_out: NDArray[np.int64],
    lengths: NDArray[np.int32],
    device: torch.device,
) -> None:
    from tqdm.auto import tqdm

    from dynagroup.budget.tokens import TokenBudget
    from dynagroup.demo.training import TimeLimit, held_out_loss, train
    from dynagroup.text import TokenizingCollator, text_dataloader

    collate = TokenizingCollator(tokenizer, config.max_length, 1, labels=True)
    evaluation = text_dataloader(
        [texts[i] for i in held_out],
        tokenizer,
        TokenBudget(config.budget),
        max_length=config.max_length,
        labels=True,
        lengths=lengths[held_out],
        rank=0,
        world_size=1,
    )
    limit = TimeLimit(config.seconds if device.type == "cpu" else config.seconds / 2)
    after = partial(held_out_loss, loader=evaluation, device=device)
    rate = config.learning_rate or (3e-3 if config.model is None else 2e-5)
    trainings = [
        train(run, texts, collate, _model_maker(config, tokenizer), device, rate, limit, after) for run in runs
    ]
    # On a CPU the runs take turns, so that other work on the machine slows both alike. A device's memory may hold
    # only one model, so there they follow one another.
    steps = (_ for turn in zip_longest(*trainings) for _ in turn) if device.type == "cpu" else chain(*trainings)
    with tqdm(total=sum(len(run.updates) for run in runs), desc="training", unit=" updates", disable=None) as bar:
        for _ in steps:
            bar.update()
        bar.total = bar.n  # time may have ended it before


def _model_maker(config: DemoConfig, tokenizer: Any) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(config.seed)
        if config.model is not None:
            return _named_model(config.model)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=config.max_length,
                bos_token_id=None,
                eos_token_id=None,
            )
        )

    return make


def _named_model(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no causal language model found for {name!r}; give its name, or a folder with its weights"
        ) from error


def _figures(config: DemoConfig, runs: Sequence[Run], lengths: NDArray[np.int32], device: str) -> dict[str, Any]:
    import torch

    from dynagroup.plan.report import environment

    fixed, ours = (np.asarray(run.seconds) for run in runs)
    return {
        **environment("transformers"),
        "device": device,
        "clock": "CPU" if device == "cpu" else "wall",
        "threads": torch.get_num_threads(),
        "budget": config.budget,
        "max_length": config.max_length,
        "samples_per_update": config.samples_per_update,
        "seed": config.seed,
        "runs": {run.name: _run_figures(run, lengths) for run in runs},
        "speedup": float(np.median(fixed / ours)),
        "speedup_quartiles": [float(q) for q in np.quantile(fixed / ours, (0.25, 0.75))],
    }


def _run_figures(run: Run, lengths: NDArray[np.int32]) -> dict[str, float]:
    num_samples = sum(map(len, run.batches))
    real = int(sum(int(lengths[batch].sum()) for batch in run.batches))
    padded = run.padded_tokens(lengths)
    return {
        "samples": num_samples,
        "samples_per_s": num_samples / run.total_s,
        "real_tokens_per_s": real / run.total_s,
        "padding": 1.0 - real / int(padded.sum()),
        "largest_batch_tokens": int(padded.max()),
        "steps": len(run.batches),
        "updates": len(run.updates),
        "seconds": run.total_s,
        "held_out_loss": run.loss,
        "peak_bytes": run.peak_bytes,
    }


def _table(figures: dict[str, Any], runs: Sequence[Run]) -> str:
    from dynagroup.plan.report import format_table

    header = [
        "",
        "samples/s",
        "real tokens/s",
        "padding",
        "largest batch",
        "steps",
        "updates",
        figures["clock"] + " s",
        "held-out loss",
    ]
    on_gpu = any(run.peak_bytes for run in runs)
    rows = []
    for name, found in figures["runs"].items():
        row = [f"{found['samples_per_s']:,.0f}", f"{found['real_tokens_per_s']:,.0f}", f"{found['padding']:.1%}"]
        row += [f"{found[key]:,}" for key in ("largest_batch_tokens", "steps", "updates")]
        row += [f"{found['seconds']:.1f}", f"{found['held_out_loss']:.4f}"]
        rows.append([name, *row, *([f"{found['peak_bytes'] / 2**30:.2f}"] if on_gpu else [])])
    low, high = figures["speedup_quartiles"]
    return (
        format_table([*header, *(["peak GiB"] if on_gpu else [])], rows)
        + f"\n\ndynagroup: {figures['speedup']:.2f}x samples/s in the median update (middle half: {low:.2f}x to {high:.2f}x), "
        "the same samples in every update"
    )


def _drawn(runs: Sequence[Run], lengths: NDArray[np.int32]) -> Figure:
    """The first update of both runs: the same samples, so that the eye can compare them."""
    from dynagroup.plan.pictures import draw_padding, new_figure

    figure = new_figure(12, 3.8)
    for axes, run in zip(figure.subplots(1, len(runs), sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        found = _run_figures(run, lengths)
        axes.set(xlabel="samples of the first update, batch after batch")
        title = f"{run.name}: {found['padding']:.0%} padding, {found['steps']:,} steps, {found['seconds']:.0f} s in all"
        axes.set_title(title, fontsize=10)
    return figure
