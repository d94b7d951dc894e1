"""The demo: trains a small model twice on the same updates, with fixed batches and with dynagroup's, and compares."""

import ast
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.plan.cost import Work
from dynagroup.plan.plan import format_table
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.text.loader import IGNORED, TokenizingCollator
from dynagroup.text.measure import measure_lengths
from dynagroup.validation import check_int

HELD_OUT = 256  # texts that are only evaluated
FEWEST_UPDATES = 5  # the median of fewer updates would mean little
LARGEST_FILE = 100_000  # bytes; larger files are mostly generated, and take long to parse
Batch: TypeAlias = dict[str, torch.Tensor]
SKIPPED = {"site-packages", "__pycache__", "test", "tests"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Settings of the demo: texts, tokenizer, model and sizes; the same as the options of ``dynagroup demo``."""

    texts: str | None = None
    """Path of a file with one text per line; None: docstrings found on this machine."""
    tokenizer: str | None = None
    """Name or path; None: the model's tokenizer, or one trained on the texts."""
    model: str | None = None  # name or path; None: a small Llama with random weights
    device: str | None = None  # None: cuda if available, else cpu
    budget: int = 8192
    max_length: int = 512
    samples: int = 4096
    samples_per_update: int = 128
    seconds: float = 45.0


@dataclass
class Run:
    """One of the demo's two trainings: the batches of each update (lists of sample indices), the seconds of each update
    (CPU time on a CPU, so that other programs do not count), and the final mean loss per held-out token."""

    name: str
    updates: Sequence[Sequence[Sequence[int]]]
    seconds: list[float] = field(default_factory=list)
    loss: float = float("nan")

    def figures(self, lengths: NDArray[np.int32]) -> dict[str, float]:
        """Returns one column of the table, by row name, counted over the updates that were run."""
        batches = [batch for update in self.updates for batch in update]
        num_samples = sum(len(batch) for batch in batches)
        num_tokens = sum(int(lengths[batch].sum()) for batch in batches)
        padded = [len(batch) * int(lengths[batch].max()) for batch in batches]
        seconds = sum(self.seconds)
        return {
            "samples": num_samples,
            "samples_per_s": num_samples / seconds,
            "real_tokens_per_s": num_tokens / seconds,
            "padding": 1.0 - num_tokens / sum(padded),
            "largest_batch_tokens": max(padded),
            "steps": len(padded),
            "updates": len(self.updates),
            "seconds": seconds,
            "held_out_loss": self.loss,
        }


def run_demo(config: DemoConfig) -> tuple[list[Run], NDArray[np.int32]]:
    """Trains with fixed and with dynagroup's batches, prints a table; returns both runs, and lengths, int32 (N,)."""
    for name in ("budget", "max_length", "samples", "samples_per_update"):
        check_int(name, getattr(config, name))
    texts = _texts(config)
    tokenizer = _tokenizer(config, texts)
    full = measure_lengths(texts, tokenizer)
    print(
        f"{len(texts):,} texts of {full.min():,} to {full.max():,} tokens, median {int(np.median(full)):,}"
    )
    lengths = np.minimum(full, np.int32(config.max_length))
    order = np.random.default_rng(0).permutation(len(texts))
    num_held_out = min(HELD_OUT, len(texts) // 4)
    trained = order[num_held_out:][: config.samples]
    device = torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    runs = make_runs(config, lengths, trained, device)
    held_out = order[:num_held_out].tolist()
    _train(config, runs, held_out, _Setup(texts=texts, tokenizer=tokenizer, device=device))
    print("\n" + _table(runs, lengths, device))
    return runs, lengths


def _texts(config: DemoConfig) -> list[str]:
    if config.texts is None:
        lines = docstrings()
    else:
        lines = Path(config.texts).read_text(encoding="utf-8-sig").split("\n")
    texts = [line for line in lines if line.strip()]
    if len(texts) < 4:
        raise ConfigError(
            f"the demo needs at least 4 texts, but got {len(texts)}; give a larger file as `texts`"
        )
    return texts


def _tokenizer(config: DemoConfig, texts: list[str]) -> Any:
    from transformers import AutoTokenizer

    name = config.tokenizer or config.model
    if name is None:
        return train_tokenizer(texts)
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def docstrings(at_least: int = 12_000) -> list[str]:
    """Returns ``at_least`` or more docstrings of installed packages (or all), the same wherever the same are installed."""
    paths = {}
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(name))
        for path in root.rglob("*.py"):
            paths[path.relative_to(root).as_posix()] = path
    mixed = sorted(paths, key=lambda name: (zlib.crc32(name.encode()), name))
    texts: dict[str, None] = {}  # in order, each once
    for name in tqdm(mixed, desc="reading docstrings", unit=" files", disable=None):
        if len(texts) < at_least and not SKIPPED & set(name.split("/")):
            texts.update(dict.fromkeys(_docstrings_of(paths[name])))
    return list(texts)


def _docstrings_of(path: Path) -> list[str]:
    try:
        source = path.read_bytes()
        if b'"""' not in source or len(source) > LARGEST_FILE:
            return []
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # broken links, and files with deliberate errors
        return []
    docstrings = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstrings.append(ast.get_docstring(node))
    return [text for text in docstrings if text]


def train_tokenizer(texts: Sequence[str], vocabulary: int = 1536) -> Any:
    """Trains a byte-level BPE tokenizer with BOS, EOS and padding tokens; returns a ``PreTrainedTokenizerFast``.

    >>> tokenizer = train_tokenizer(["some text"], vocabulary=300)
    >>> tokenizer.decode(tokenizer("some text")["input_ids"])
    '[BOS]some text[EOS]'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw: Any = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["[PAD]", "[BOS]", "[EOS]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(texts, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )


def make_runs(
    config: DemoConfig, lengths: NDArray[np.int32], chosen: NDArray[np.int64], device: torch.device
) -> list[Run]:
    """Returns two runs with the same samples in the same updates: fixed batches, and batches that fill the budget."""
    per_update = min(config.samples_per_update, len(chosen))
    longest = int(lengths[chosen].max())
    batch_size = config.budget // longest
    if batch_size < 1:
        raise ConfigError(
            f"`budget` ({config.budget}) must be at least the longest text ({longest})"
        )
    fixed = [_slices(update, batch_size) for update in _slices(chosen.tolist(), per_update)]
    plan = LengthAwareBatchSampler(
        lengths,
        TokenBudget(config.budget),
        order=chosen,
        samples_per_update=per_update,
        work=Work.of_known(None, device=device),
        rank=0,
        world_size=1,
    ).plan
    fitting: list[list[list[int]]] = [[]]
    for row, ends_update in zip(plan.rows, plan.update_ends, strict=True):
        fitting[-1].append(row[0])
        if ends_update:
            fitting.append([])
    return [Run(f"fixed batches of {batch_size}", fixed), Run("dynagroup", fitting[:-1])]


def _slices(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


@dataclass(frozen=True, kw_only=True)
class _Setup:
    """What both runs have in common."""

    texts: Sequence[str]
    tokenizer: Any
    device: torch.device


def _train(config: DemoConfig, runs: Sequence[Run], held_out: Sequence[int], setup: _Setup) -> None:
    """Trains both runs in turns, update by update, so that other programs on the machine slow both equally."""
    collate = TokenizingCollator(setup.tokenizer, config.max_length, 1, labels=True)

    def load(indices: Sequence[int]) -> Batch:
        return collate([setup.texts[index] for index in indices])

    trainings = []
    models = []
    for run in runs:
        model = _model(config, setup.tokenizer).to(setup.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5 if config.model else 3e-3)
        models.append(model)
        trainings.append(_updates(run, model, optimizer, load, setup.device))
    begun = time.perf_counter()
    turns = zip(*trainings, strict=True)
    num_updates = len(runs[0].updates)
    for _ in tqdm(turns, total=num_updates, desc="training", unit=" updates", disable=None):
        is_late = time.perf_counter() - begun > config.seconds
        if is_late and len(runs[1].seconds) >= FEWEST_UPDATES:
            break
    size = max(config.budget // config.max_length, 1)
    evaluation = [load(part) for part in _slices(list(held_out), size)]
    for run, model in zip(runs, models, strict=True):
        run.updates = run.updates[: len(run.seconds)]
        with torch.no_grad():
            run.loss = sum(float(loss) for loss in _losses(model.eval(), evaluation, setup.device))


def _updates(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    load: Callable[[Sequence[int]], Batch],
    device: torch.device,
) -> Iterator[None]:
    """Trains one update per iteration, on the mean loss over all the update's label tokens, whatever the batches."""
    # a first call, not timed, starts threads and compiles kernels
    ids = torch.zeros(2, 8, dtype=torch.int64)
    next(_losses(model, [{"input_ids": ids, "labels": ids}], device)).backward()
    for update in run.updates:
        started = _now(device)
        optimizer.zero_grad(set_to_none=True)
        for loss in _losses(model, [load(batch) for batch in update], device):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.seconds.append(_now(device) - started)
        yield


def _model(config: DemoConfig, tokenizer: Any) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if config.model is not None:
        return AutoModelForCausalLM.from_pretrained(config.model)
    torch.manual_seed(0)
    small = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=config.max_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(small)


def _losses(
    model: torch.nn.Module, batches: Sequence[Batch], device: torch.device
) -> Iterator[torch.Tensor]:
    """Yields each batch's part of the mean loss over all label tokens (a causal model does not predict the first)."""
    num_labels = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
    for batch in batches:
        inputs = {name: values.to(device) for name, values in batch.items()}
        yield model(**inputs, num_items_in_batch=max(num_labels, 1)).loss


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.process_time() if device.type == "cpu" else time.perf_counter()


def speedup(runs: Sequence[Run]) -> NDArray[np.float64]:
    """Returns how many times faster the second run is: quartiles over the updates."""
    fixed, ours = (np.array(run.seconds) for run in runs)
    return np.quantile(fixed / ours, (0.25, 0.5, 0.75))


def _table(runs: Sequence[Run], lengths: NDArray[np.int32], device: torch.device) -> str:
    figures = [run.figures(lengths) for run in runs]
    rows = []
    for name in figures[0]:
        rows.append([name.replace("_", " "), *(_shown(of_run[name]) for of_run in figures)])
    clock = "CPU" if device.type == "cpu" else "wall"
    table = format_table([f"(seconds of {clock} time)", *(run.name for run in runs)], rows)
    low, median, high = speedup(runs)
    return (
        f"{table}\n\ndynagroup trains {median:.2f} times as many samples a second (quartiles over the "
        f"updates: {low:.2f} to {high:.2f}), with the same samples in every update"
    )


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.4g}"
