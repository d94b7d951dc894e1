"""Training end to end: the same model, samples and memory, every way to form batches in turn.

All methods start from the same weights and hold at most the same tokens in a batch. On the CPU a small model learns real text,
and held-out loss is taken after equal samples; on a GPU see :mod:`benchmarks.device_train`. Forming batches is not timed: see
``plan speed``.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count, product
from typing import Any

import numpy as np
import torch

from benchmarks.data import collate, lengths_of, lognormal, sample_of
from benchmarks.machine import SIZES, Machine, build, paired
from benchmarks.methods import METHODS, Job, Setting, Update, in_fixed
from benchmarks.price import measured_work
from benchmarks.record import spread
from dynagroup import Work
from dynagroup.update.filling import FillingCollator

PER_UPDATE = 64
FIXED = 8
"""Samples of a fixed batch on the CPU."""
SAMPLES = 2048
SHORT = 256
MEAN = 40
"""Most and mean tokens of a sample on the CPU."""
HELD_OUT = 128
UPDATES = 20
TUNED = 4
"""Updates by which a method's fastest setting is found."""


@dataclass(frozen=True)
class Timed:
    """What an update trained on, and how long it took."""

    samples: int
    real_tokens: int
    seconds: float


@dataclass
class Counts:
    """Of all updates of a run so far."""

    samples: int = 0
    updates: int = 0
    batches: int = 0
    real_tokens: int = 0
    padded_tokens: int = 0


def overall(amounts: Sequence[int], seconds: Sequence[float]) -> dict[str, Any]:
    """What all updates did over all their seconds, since updates may differ in size; quartiles are of updates drawn anew
    (bootstrap)."""
    num_updates = len(amounts)
    done = np.array(amounts, np.float64)
    taken = np.array(seconds, np.float64)
    drawn = np.random.default_rng(0).integers(0, num_updates, (2000, num_updates))
    rates = done[drawn].sum(axis=1) / taken[drawn].sum(axis=1)
    low, high = np.quantile(rates, [0.25, 0.75])
    rate = done.sum() / taken.sum()
    return {"median": float(rate), "quartiles": [float(low), float(high)], "repeats": num_updates}


@dataclass
class Run:
    """One method's training of a model of this size; ``ids`` are those of (sample, its length)."""

    name: str
    job: Job
    machine: Machine
    size: str
    ids: Callable[[int, int], np.ndarray]
    setting: Setting | None = None
    method: Any = None
    """None: the one of this name."""
    timed: list[Timed] = field(default_factory=list)
    """Each update but a model's first, which fills caches."""
    counts: Counts = field(default_factory=Counts)
    samples_of_updates: list[set[int]] = field(default_factory=list)
    peak_bytes: int = 0
    model: Any = None
    optimizer: Any = None

    def __post_init__(self) -> None:
        if self.method is None:
            self.method = METHODS[self.name]
        if self.setting is None:
            self.setting = self.method.tried(self.job)[0]
        epochs = (self.method.updates(self.job, epoch, self.setting) for epoch in count())
        self.updates: Iterator[Update] = chain.from_iterable(epochs)

    def turn(self, *, seconds: float = 0.0, samples: int = 1) -> None:
        """Updates until so many seconds are taken and so many samples trained on."""
        if self.model is None:
            self._begin()
            self.update()
        end = self.counts.samples + samples
        taken = 0.0
        while taken < seconds or self.counts.samples < end:
            timed = self.update()
            self.timed.append(timed)
            taken += timed.seconds
        self.peak_bytes = max(self.peak_bytes, self.machine.peak_bytes())
        if self.machine.is_gpu:  # the methods share nothing but the device
            self.model = None
            self.optimizer = None

    def _begin(self) -> None:
        self.model = build(self.size, self.machine, packed=self.method.packed, seed=self.job.seed)
        self.machine.free()
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained,
            lr=1e-6 if self.machine.is_gpu else 1e-3,
            fused=self.machine.is_gpu,
        )

    def update(self) -> Timed:
        update = next(self.updates)
        samples = list(chain.from_iterable(update))
        real_tokens = int(self.job.lengths[samples].sum())
        inputs = [self.inputs(batch) for batch in update]
        num_predicted = real_tokens - len(samples)
        seconds = self.machine.seconds(partial(self._train, inputs, num_predicted))
        self.samples_of_updates.append(set(samples))
        self.counts.samples += len(samples)
        self.counts.updates += 1
        self.counts.batches += len(update)
        self.counts.real_tokens += real_tokens
        self.counts.padded_tokens += sum(batch["input_ids"].numel() for batch in inputs)
        return Timed(len(samples), real_tokens, seconds)

    def _train(self, inputs: list[dict[str, Any]], num_predicted: int) -> None:
        for batch in inputs:
            outputs = self.model(**batch, use_cache=False, num_items_in_batch=num_predicted)
            outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def inputs(self, batch: list[int]) -> dict[str, Any]:
        rows = [self.ids(sample, int(self.job.lengths[sample])) for sample in batch]
        if self.method.packed:
            inputs = flattened(rows, self.job.totals if self.method.few_shapes else None)
        else:
            inputs = padded(rows, self.job.ladder if self.method.few_shapes else None)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                inputs[name] = value.to(self.machine.device)
        return inputs

    def figures(self) -> dict[str, Any]:
        seconds = [timed.seconds for timed in self.timed]
        samples_per_s = overall([timed.samples for timed in self.timed], seconds)
        tokens_per_s = overall([timed.real_tokens for timed in self.timed], seconds)
        return {
            "samples_per_s": samples_per_s,
            "real_tokens_per_s": tokens_per_s["median"],
            "padding": 1 - self.counts.real_tokens / max(self.counts.padded_tokens, 1),
            "batches_per_update": self.counts.batches / max(self.counts.updates, 1),
            "samples": self.counts.samples,
            "peak_bytes": self.peak_bytes,
            "same_updates": self.method.same_updates,
            "setting": self.setting,
        }


def padded(rows: list[np.ndarray], ladder: Any = None) -> dict[str, Any]:
    """Ids, mask and labels, to the longest row, or filled to one of a ladder's shapes."""
    samples = [sample_of(torch.from_numpy(row)) for row in rows]
    return FillingCollator(collate, ladder)(samples)


def flattened(rows: list[np.ndarray], totals: Any = None) -> dict[str, Any]:
    """One packed row, as transformers makes it, or filled to one of few totals of tokens."""
    samples = [{"input_ids": row.tolist()} for row in rows]
    return FillingCollator(_flattening(), totals)(samples)


@cache
def _flattening() -> Any:
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)


# On the CPU


@cache
def texts_of(count: int = 8000) -> list[np.ndarray]:
    """Tokens of docstrings found on this machine, in an order that mixes packages."""
    from dynagroup.demo import docstrings, train_tokenizer

    texts = docstrings(count)[:count]
    tokenizer = train_tokenizer(texts[:4000], vocabulary=SIZES["small"][-1])
    rows = [np.asarray(ids, np.int64) for ids in tokenizer(texts)["input_ids"]]
    order = np.random.default_rng(0).permutation(len(rows))
    return [rows[place] for place in order if len(rows[place]) >= 4]


def compared(
    machine: Machine, job: Job, names: Sequence[str] = tuple(METHODS), updates: int = UPDATES
) -> dict[str, Run]:
    """Runs of these methods on the CPU, in turns over slices of real text; each with the setting that was fastest over some
    updates of its own. AssertionError: methods that should keep the updates made others."""
    text = np.concatenate(texts_of()[HELD_OUT:])
    starts = np.random.default_rng(1).integers(0, len(text) - SHORT, len(job.lengths))

    def ids(sample: int, length: int) -> np.ndarray:
        start = starts[sample]
        return text[start : start + length]

    start_run = partial(Run, job=job, machine=machine, size="small", ids=ids)
    runs = {}
    for name in names:
        if METHODS[name].available:
            runs[name] = start_run(name, setting=_fastest_setting(name, job, start_run))
    _take_turns(list(runs.values()), updates)
    _check_same_updates(runs.values())
    return runs


def _fastest_setting(name: str, job: Job, start_run: Callable[..., Run]) -> Setting | None:
    tried = [start_run(name, setting=setting) for setting in METHODS[name].tried(job)]
    if len(tried) > 1:
        _take_turns(tried, TUNED)
        tried.sort(key=lambda run: -run.figures()["real_tokens_per_s"])
    return tried[0].setting


def _take_turns(runs: Sequence[Run], updates: int) -> None:
    """A free-running method may need more or fewer of its updates for as many samples."""
    for _, run in product(range(updates), runs):
        run.turn(samples=run.job.per_update)


def _check_same_updates(runs: Iterable[Run]) -> None:
    """Of the methods that should keep the samples of each update."""
    updates = [run.samples_of_updates for run in runs if run.method.same_updates]
    for of_run in updates:
        assert of_run == updates[0][: len(of_run)], "not the same updates"


SETS = (
    "gsm8k",
    "hh_rlhf_harmless_test",
    "azure_llm_conv_2023",
    "t0_mix_50k",
    "python_files",
    "CV 0.8",
    "CV 1.3",
)


def rivals(machine: Machine) -> Iterator[dict[str, Any]]:
    """Every method, over real and drawn lengths scaled to a mean of 40 tokens."""
    figures: dict[str, Any] = {}
    work = measured_work(machine)
    held_out = [ids[:SHORT] for ids in texts_of()[:HELD_OUT]]
    for name in SETS:
        job = small_job(name, PER_UPDATE, work)
        methods = {}
        for way, run in compared(machine, job).items():
            methods[way] = {**run.figures(), "held_out_loss": loss_on(run.model, held_out)}
        figures[name] = {**about_job(job), "updates": UPDATES, "methods": methods}
        yield figures


def small_job(name: str, per_update: int, work: Work) -> Job:
    """Training on a set's lengths; a batch holds 8 of the longest samples."""
    lengths = scaled(name)
    return Job(lengths, per_update, FIXED * int(lengths.max()), work=work)


def scaled(name: str) -> np.ndarray:
    """Lengths of a file, or drawn ones, scaled to a mean of 40 tokens."""
    if name.startswith("CV"):
        drawn = lognormal(SAMPLES, cv=float(name[3:]))
    else:
        drawn = lengths_of(name, SAMPLES)
    lengths = drawn * (MEAN / drawn.mean())
    return lengths.round().clip(4, SHORT).astype(np.int32)


SMALL = (
    "fixed",
    "sorted inside the update",
    "TRL padding-free",
    "transformers group_by_length",
    "TRL packing (bfd)",
    "dynabatch",
    "lhotse DynamicBucketingSampler",
    "dynagroup",
    "dynagroup, packed",
    "dynagroup, grouping 50",
)
SMALL_SAMPLES = 512
"""Samples of each method, after its first update."""


def small(machine: Machine) -> Iterator[dict[str, Any]]:
    """Updates of 8 and of 32 samples, over the lengths of :func:`rivals`."""
    figures: dict[str, Any] = {}
    work = measured_work(machine)
    for size, name in product((8, 32), SETS):
        job = small_job(name, size, work)
        runs = compared(machine, job, names=SMALL, updates=SMALL_SAMPLES // size)
        methods = {way: run.figures() for way, run in runs.items()}
        figures[f"{name}, updates of {size}"] = {**about_job(job), "methods": methods}
        yield figures


BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048)


def packed(machine: Machine) -> Iterator[dict[str, Any]]:
    """Packed batches beside TRL's padding-free ones at their best count, the same updates in turns; and what a token of a
    packed batch takes."""
    figures: dict[str, Any] = {"us_a_token": us_a_token(machine), "sets": {}}
    work = measured_work(machine)
    for name in ("azure_llm_code_2023", *SETS):
        job = small_job(name, PER_UPDATE, work)
        names = ("TRL padding-free", "dynagroup, packed")
        runs = compared(machine, job, names=names, updates=2 * UPDATES)
        seconds = {}
        batches = {}
        for way, run in runs.items():
            seconds[way] = [timed.seconds for timed in run.timed]
            batches[way] = run.counts.batches / run.counts.updates
        figures["sets"][name] = {
            **about_job(job),
            "speed": paired(seconds["TRL padding-free"], seconds["dynagroup, packed"]),
            "batches_per_update": batches,
        }
        yield figures


def us_a_token(machine: Machine, length: int = 32, repeats: int = 9) -> dict[str, Any]:
    """CPU microseconds a token of a forward and backward pass, by tokens of a packed batch."""
    model = build("small", machine, packed=True)
    rows = [ids[:length] for ids in texts_of() if len(ids) >= length]

    def run(num_tokens: int) -> None:
        batch = flattened(rows[: num_tokens // length])
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    ways = {str(num_tokens): partial(run, num_tokens) for num_tokens in BATCH_TOKENS}
    figures = {}
    for num_tokens, seconds in machine.in_turns(ways, repeats).items():
        microseconds = [1e6 * of_turn / int(num_tokens) for of_turn in seconds]
        figures[num_tokens] = spread(microseconds)
    return figures


@torch.no_grad()
def loss_on(model: Any, rows: Sequence[np.ndarray]) -> float:
    """Mean over all predicted tokens."""
    model.set_attn_implementation("sdpa")
    num_predicted = sum(len(row) - 1 for row in rows)
    loss = 0.0
    for part in in_fixed(sorted(rows, key=len), 16):
        outputs = model(**padded(part), num_items_in_batch=num_predicted)
        loss += float(outputs.loss)
    return loss


def about_job(job: Job) -> dict[str, Any]:
    return {
        "tokens_a_batch": job.tokens,
        "longest": int(job.lengths.max()),
        "fixed_batch": job.fixed,
        "samples_per_update": job.per_update,
        "per_step": job.work.per_step,
        "crossover": min(job.work.crossover, 1e9),
        "cv": float(job.lengths.std() / job.lengths.mean()),
    }
