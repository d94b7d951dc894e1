"""Training end to end: the same model, samples and memory, every way to form batches in turn, on the CPU or on a GPU.

All methods start from the same weights and hold at most the same tokens in a batch. On the CPU a small model learns real text,
and held-out loss is taken after equal samples. On a GPU models of real sizes run on random tokens, each method's model made anew
at each turn. Forming batches is not timed: see ``plan speed``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, count, product, repeat
from typing import Any

import numpy as np
import torch

from benchmarks.data import collate, lengths_of, lognormal, sample_of
from benchmarks.machine import SIZES, Machine, build, config_of, noted, paired
from benchmarks.methods import METHODS, Job, Setting, Update
from benchmarks.price import measured_work
from benchmarks.record import spread
from dynagroup import MemoryBudget, Work
from dynagroup.update.filling import FillingCollator

PER_UPDATE, SHORT, MEAN, FIXED, SAMPLES, HELD_OUT, UPDATES, TUNED = 64, 256, 40, 8, 2048, 128, 20, 4
LONGEST = 4096
HEADROOM, SLICE_S = 0.8, 3.0
"""Share of a GPU that a batch may be predicted to take; seconds of a method's turn, which go round until the time is used."""


def overall(timed: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """All samples over all seconds, since updates may differ in size; quartiles are of updates drawn anew (bootstrap)."""
    counts, seconds = np.array(timed, np.float64).T
    drawn = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    low, high = np.quantile(counts[drawn].sum(1) / seconds[drawn].sum(1), [0.25, 0.75])
    rate = counts.sum() / seconds.sum()
    return {"median": float(rate), "quartiles": [float(low), float(high)], "repeats": len(counts)}


@dataclass
class Run:
    """One method's training of a model of this size; ``ids`` are those of (sample, its length).

    Args:
        falls_over: the learning rate falls linearly to zero over so many samples; 0: it stays.
    """

    name: str
    job: Job
    machine: Machine
    size: str
    ids: Callable[[int, int], np.ndarray]
    falls_over: int = 0
    setting: Setting | None = None
    timed: list[tuple[int, int, float]] = field(default_factory=list)
    """(samples, real tokens, seconds) of each update but a model's first, which fills caches."""

    def __post_init__(self) -> None:
        self.method = METHODS[self.name]
        self.setting = self.method.tried(self.job)[0] if self.setting is None else self.setting
        epochs = (self.method.updates(self.job, epoch, self.setting) for epoch in count())
        self.updates: Iterator[Update] = chain.from_iterable(epochs)
        self.seen: list[set[int]] = []  # the samples of each update
        self.model: Any = None
        self.samples = self.padded = self.real = self.batches = self.done = self.peak = 0

    def turn(self, *, seconds: float = 0.0, samples: int = 1) -> None:
        """Updates until so many seconds are taken and so many samples trained on."""
        if self.model is None:
            self._begin()
            self.update()
        count, taken = self.samples, 0.0
        while taken < seconds or self.samples < count + samples:
            self.timed.append(self.update())
            taken += self.timed[-1][2]
        self.peak = max(self.peak, self.machine.peak_bytes())
        if self.machine.is_gpu:  # the methods share nothing but the device
            self.model = self.optimizer = None

    def _begin(self) -> None:
        self.model = build(self.size, self.machine, packed=self.method.packed, seed=self.job.seed)
        self.machine.free()
        self.rate = 1e-6 if self.machine.is_gpu else 1e-3
        self.optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, fused=self.machine.is_gpu
        )

    def update(self) -> tuple[int, int, float]:
        update, before = next(self.updates), self.real
        total = int(sum(self.job.lengths[i] - 1 for batch in update for i in batch))
        inputs = [self.inputs(batch) for batch in update]
        self.seen.append({i for batch in update for i in batch})
        if self.falls_over:
            self.optimizer.param_groups[0]["lr"] = self.rate * max(
                0.0, 1 - self.samples / self.falls_over
            )
        taken = self.machine.seconds(partial(self._train, inputs, total))
        count = sum(map(len, update))
        self.samples, self.batches, self.done = (
            self.samples + count,
            self.batches + len(update),
            self.done + 1,
        )
        return count, self.real - before, taken

    def _train(self, inputs: list[dict[str, Any]], total: int) -> None:
        for batch in inputs:
            self.model(**batch, use_cache=False, num_items_in_batch=total).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def inputs(self, batch: list[int]) -> dict[str, Any]:
        rows = [self.ids(i, int(self.job.lengths[i])) for i in batch]
        if self.method.packed:
            from transformers import DataCollatorWithFlattening

            flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
            made = flatten([{"input_ids": row.tolist()} for row in rows])
        else:
            made = padded(rows, self.job.ladder if self.method.few_shapes else None)
        self.real, self.padded = (
            self.real + sum(map(len, rows)),
            self.padded + made["input_ids"].numel(),
        )
        return {
            k: v.to(self.machine.device) if isinstance(v, torch.Tensor) else v
            for k, v in made.items()
        }

    def figures(self) -> dict[str, Any]:
        return {
            "samples_per_s": overall([(count, seconds) for count, _, seconds in self.timed]),
            "real_tokens_per_s": overall([(real, seconds) for _, real, seconds in self.timed])[
                "median"
            ],
            "padding": 1 - self.real / max(self.padded, 1),
            "batches_per_update": self.batches / max(self.done, 1),
            "samples": self.samples,
            "peak_bytes": self.peak,
            "same_updates": self.method.same_updates,
            "setting": self.setting,
        }


def padded(rows: list[np.ndarray], ladder: Any = None) -> dict[str, torch.Tensor]:
    """Ids, mask and labels, to the longest row, or filled to one of a ladder's shapes."""
    return FillingCollator(collate, ladder)([sample_of(torch.from_numpy(row)) for row in rows])


# On the CPU


@cache
def texts_of(count: int = 8000) -> list[np.ndarray]:
    """Tokens of docstrings found on this machine, in an order that mixes packages."""
    from dynagroup.demo import docstrings, train_tokenizer

    texts = docstrings(count)[:count]
    tokenizer = train_tokenizer(texts[:4000], vocabulary=SIZES["small"][-1])
    found = [np.asarray(ids, np.int64) for ids in tokenizer(texts)["input_ids"]]
    return [
        found[i] for i in np.random.default_rng(0).permutation(len(found)) if len(found[i]) >= 4
    ]


def compared(
    machine: Machine, job: Job, names: Sequence[str] = tuple(METHODS), updates: int = UPDATES
) -> dict[str, Run]:
    """Runs of these methods on the CPU, in turns over slices of real text; each with the setting that was fastest over some
    updates of its own. AssertionError: methods that should keep the updates made others."""
    text = np.concatenate(texts_of()[HELD_OUT:])
    starts = np.random.default_rng(1).integers(0, len(text) - SHORT, len(job.lengths))
    start = partial(
        Run, job=job, machine=machine, size="small", ids=lambda i, n: text[starts[i] :][:n]
    )

    def turns(runs: Sequence[Run], updates: int) -> None:
        for one in (one for _ in range(updates) for one in runs):
            one.turn(
                samples=job.per_update
            )  # a free-running method may need more or fewer of its updates for as many

    def best(name: str) -> Setting | None:
        tried = [start(name, setting=setting) for setting in METHODS[name].tried(job)]
        if len(tried) > 1:
            turns(tried, TUNED)
            tried.sort(key=lambda one: -one.figures()["real_tokens_per_s"])
        return tried[0].setting

    runs = {name: start(name, setting=best(name)) for name in names if METHODS[name].available}
    turns(list(runs.values()), updates)
    same = [one.seen for one in runs.values() if one.method.same_updates]
    assert all(seen == same[0][: len(seen)] for seen in same), "not the same updates"
    return runs


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
    """Every method: on the CPU over real and drawn lengths scaled to a mean of 40 tokens, on a GPU the 0.5B model."""
    if machine.is_gpu or machine.dry:
        yield from _cases(machine, ("0.5B, CV 1.0", "0.5B, azure_llm_conv_2023"))
        return
    found, work, held_out = (
        {},
        measured_work(machine),
        [ids[:SHORT] for ids in texts_of()[:HELD_OUT]],
    )
    for name in SETS:
        lengths = scaled(name)
        job = Job(lengths, PER_UPDATE, FIXED * int(lengths.max()), work=work)
        runs = compared(machine, job).items()
        methods = {
            way: {**one.figures(), "held_out_loss": loss_on(one.model, held_out)}
            for way, one in runs
        }
        found[name] = {**_about(job), "updates": UPDATES, "methods": methods}
        yield found


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
    """Updates of 8 and of 32 samples, over the lengths of :func:`rivals`; a batch holds 8 of the longest samples."""
    found: dict[str, Any] = {}
    work = measured_work(machine)
    for size, name in product((8, 32), SETS):
        lengths = scaled(name)
        job = Job(lengths, size, FIXED * int(lengths.max()), work=work)
        runs = compared(machine, job, SMALL, SMALL_SAMPLES // size)
        methods = {way: one.figures() for way, one in runs.items()}
        found[f"{name}, updates of {size}"] = {**_about(job), "methods": methods}
        yield found


BATCH_TOKENS = (64, 128, 256, 512, 1024, 2048)


def packed(machine: Machine) -> Iterator[dict[str, Any]]:
    """Packed batches beside TRL's padding-free ones at their best count, the same updates in turns; and what a token of a
    packed batch takes."""
    figures: dict[str, Any] = {"us_a_token": us_a_token(machine), "sets": {}}
    work = measured_work(machine)
    for name in ("azure_llm_code_2023", *SETS):
        lengths = scaled(name)
        job = Job(lengths, PER_UPDATE, FIXED * int(lengths.max()), work=work)
        runs = compared(machine, job, ("TRL padding-free", "dynagroup, packed"), 2 * UPDATES)
        seconds = {way: [taken for *_, taken in run.timed] for way, run in runs.items()}
        figures["sets"][name] = {
            **_about(job),
            "speed": paired(seconds["TRL padding-free"], seconds["dynagroup, packed"]),
            "batches_per_update": {way: run.batches / run.done for way, run in runs.items()},
        }
        yield figures


def us_a_token(machine: Machine, length: int = 32, repeats: int = 9) -> dict[str, Any]:
    """CPU microseconds a token of a forward and backward pass, by tokens of a packed batch."""
    from transformers import DataCollatorWithFlattening

    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    model = build("small", machine, packed=True)

    rows = [{"input_ids": ids[:length].tolist()} for ids in texts_of() if len(ids) >= length]

    def run(num_tokens: int) -> None:
        batch = flatten(rows[: num_tokens // length])
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    ways = {str(num_tokens): partial(run, num_tokens) for num_tokens in BATCH_TOKENS}
    taken = machine.in_turns(ways, repeats)
    return {name: spread([1e6 * s / int(name) for s in each]) for name, each in taken.items()}


def scaled(name: str) -> np.ndarray:
    """Lengths of a file, or drawn ones, scaled to a mean of 40 tokens."""
    if name.startswith("CV"):
        drawn = lognormal(SAMPLES, cv=float(name[3:]))
    else:
        drawn = lengths_of(name, SAMPLES)
    return (drawn * (MEAN / drawn.mean())).round().clip(4, SHORT).astype(np.int32)


def large(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 1.5B model; and lengths of program files."""
    return _cases(machine, ("1.5B, CV 1.0", "1.5B, CV 1.3", "0.5B, python_files"))


@torch.no_grad()
def loss_on(model: Any, rows: Sequence[np.ndarray]) -> float:
    """Mean over all predicted tokens."""
    model.set_attn_implementation("sdpa")
    total, rows = sum(len(row) - 1 for row in rows), sorted(rows, key=len)
    parts = (padded(list(rows[k : k + 16])) for k in range(0, len(rows), 16))
    return sum(float(model(**part, num_items_in_batch=total).loss) for part in parts)


# On a GPU: a case is a model's size and the lengths of its samples


def _cases(machine: Machine, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Figures so far after every turn, so that a part that is cut off keeps what it has."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, case in enumerate(cases[:1] if machine.dry else cases):
        left = machine.left_s()
        figures[case] = {"failed": {"": "no time"}}
        with noted(failed := {}, ""):
            for so_far in _rounds(machine, case, left - (left - 20) / (len(cases) - number)):
                figures[case] = so_far
                yield figures
        figures[case]["failed"] = failed or figures[case]["failed"]
        machine.free()
        yield figures


@cache
def tokens_that_fit(size: str, num_bytes: int) -> int:
    """Tokens of a batch, as traced: no device has been asked yet."""
    budget = MemoryBudget.from_model(
        config_of(size), num_bytes, dtype="bfloat16", headroom=HEADROOM
    )
    return budget.max_tokens(LONGEST)


def job_of(machine: Machine, case: str, share: float) -> Job:
    """The case's lengths, and so much of what was traced to fit."""
    size, kind = case.split(", ")
    tokens = int(share * (64 if machine.dry else tokens_that_fit(size, machine.total_bytes)))
    longest, count = (
        (32, 200) if machine.dry else (min(LONGEST, max(tokens // 512, 1) * 512), 5_000)
    )
    if kind.startswith("CV"):
        lengths = lognormal(
            count, mean=longest / 8, cv=float(kind[3:]), shortest=4, longest=longest
        )
        lengths[:8] = longest  # whatever is drawn, a fixed batch must hold the longest
    else:
        lengths = lengths_of(kind, count).clip(4, longest)
    work = Work.of(config_of(size, dry=machine.dry))
    return Job(
        lengths, 16 if machine.dry else PER_UPDATE, max(tokens // longest, 1) * longest, work=work
    )


def _run(name: str, job: Job, machine: Machine, case: str) -> Run:
    return Run(name, job, machine, case.split(", ")[0], text_of(machine, case))


def text_of(machine: Machine, case: str) -> Callable[[int, int], np.ndarray]:
    """Random ids of a sample, for a model of the case's size."""
    text = np.random.default_rng(0).integers(
        3, SIZES["dry" if machine.dry else case.split(", ")[0]][-1], 1 << 20
    )
    return lambda i, n: text[(7919 * i) % (len(text) - n) :][:n]


def job_that_fits(machine: Machine, case: str) -> Job:
    """Tries the hardest batch twice, and takes less where the device has less than was traced."""
    for share in (1.0, 0.75, 0.5):
        job = job_of(machine, case, share)
        trial = _run("fixed", job, machine, case)
        trial.updates = repeat(2 * [np.argsort(-job.lengths, kind="stable")[: job.fixed].tolist()])
        fits = machine.fits(trial.turn)
        del trial  # and its model
        machine.free()
        if fits:
            return job
    raise RuntimeError(f"not even half of what was traced fits: {job.tokens} tokens")


def _rounds(machine: Machine, case: str, end: float) -> Iterator[dict[str, Any]]:
    """Every method has a turn a round; none is begun that could outlast the case, which ends when so many seconds are left."""
    left, rounds = machine.left_s(), 0
    job = job_that_fits(machine, case)
    longest = max(5 * SLICE_S, left - machine.left_s())
    runs = {
        name: _run(name, job, machine, case) for name, method in METHODS.items() if method.available
    }
    failed: dict[str, str] = {}
    while runs and (
        not rounds or (not machine.dry and machine.left_s() - len(runs) * longest > end)
    ):
        for name in list(runs):
            if not machine.has(30 + longest):
                return
            left = machine.left_s()
            with noted(failed, name):
                runs[name].turn(seconds=0.0 if machine.dry else SLICE_S)
            if name in failed:
                del runs[name]
            machine.free()  # outside the block: the error's traceback kept the method's model alive
            longest = max(longest, left - machine.left_s())
            methods = {name: one.figures() for name, one in runs.items() if one.timed}
            yield {**_about(job), "rounds": rounds + 1, "methods": methods, "failed": dict(failed)}
        rounds += 1


def _about(job: Job) -> dict[str, Any]:
    return {
        "tokens_a_batch": job.tokens,
        "longest": int(job.lengths.max()),
        "fixed_batch": job.fixed,
        "samples_per_update": job.per_update,
        "per_step": job.work.per_step,
        "crossover": min(job.work.crossover, 1e9),
        "cv": float(job.lengths.std() / job.lengths.mean()),
    }
