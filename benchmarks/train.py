"""Training end to end: the same model, samples and memory, every way to form batches in turn, on the CPU or on a GPU.

All methods start from the same weights and hold at most the same tokens in a batch. On the CPU a small model learns real text
cut to prescribed lengths, timed by the process's CPU seconds; held-out loss is taken after equal samples. On a GPU models of
real sizes run on random tokens, each method's model made anew at each turn. Forming batches is not timed: see ``plan speed``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build, config_of, lora
from benchmarks.methods import METHODS, Job, Method, updates_of
from benchmarks.predicted import lengths_of
from dynagroup.device import is_out_of_memory
from dynagroup.plan.cost import Work

__all__ = ["Case", "large", "objective", "rivals", "run", "table", "tokens_that_fit"]

PER_UPDATE, IGNORED = 64, -100
CVS, SHORT, MEAN, FIXED, SAMPLES, HELD_OUT, UPDATES = (0.3, 0.8, 1.3), 256, 40, 8, 2000, 128, 6
LONGEST = 4096
HEADROOM = 0.8
"""Share of a GPU that a batch may be predicted to take: what is compared are batches, not how near they come to its end."""
SLICE_S = 3.0
"""Seconds of a method's turn on a GPU; the turns go round until the case's time is used."""
LONG = {name: METHODS[name] for name in ("fixed", "dynagroup", "dynagroup, packed")}
Ids = Callable[[int, int], np.ndarray]
"""(sample, its length) -> token ids."""


def lognormal(mean: float, cv: float, count: int) -> np.ndarray:
    sigma = np.sqrt(np.log(1 + cv**2))
    return np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)


def overall(timed: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """All samples over all seconds, since updates may differ in size; quartiles are of updates drawn anew (bootstrap).

    >>> overall([(10, 1.0), (10, 1.0)])
    {'median': 10.0, 'quartiles': [10.0, 10.0], 'repeats': 2}
    """
    counts, seconds = np.array(timed, np.float64).T
    drawn = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    low, high = np.quantile(counts[drawn].sum(1) / seconds[drawn].sum(1), [0.25, 0.75])
    rate = counts.sum() / seconds.sum()
    return {"median": float(rate), "quartiles": [float(low), float(high)], "repeats": len(counts)}


@dataclass
class Run:
    """One method's training.

    Args:
        size: of the model, see ``machine.SIZES``.
        checkpoint: every batch is recomputed.
    """

    name: str
    method: Method
    job: Job
    machine: Machine
    size: str
    ids: Ids
    lora: bool = False
    checkpoint: bool = False
    timed: list[tuple[int, int, float]] = field(default_factory=list)
    """(samples, real tokens, seconds) of each update but a model's first, which fills caches."""

    def __post_init__(self) -> None:
        self.updates = updates_of(self.name, self.job, self.method)
        self.model: Any = None
        self.samples = self.padded = self.real = self.batches = self.done = self.peak = 0

    def turn(self, *, seconds: float = 0.0, samples: int = 0) -> None:
        """At least one update; until so many seconds are taken and so many samples trained on."""
        if self.model is None:
            self._begin()
            self._update()
        count, taken, began = self.samples, 0.0, True
        while began or taken < seconds or self.samples < count + samples:
            self.timed.append(self._update())
            began, taken = False, taken + self.timed[-1][2]
        self.peak = max(self.peak, self.machine.peak_bytes())
        if self.machine.is_gpu:  # the methods share nothing but the device
            self.model = self.optimizer = None

    def _begin(self) -> None:
        from dynagroup.memory.trace.model import checkpoint_layers

        model = build(self.size, self.machine, attention="varlen" if self.method.packed else "sdpa")
        self.model = lora(model) if self.lora else model
        if self.checkpoint:
            checkpoint_layers(self.model)
        self.machine.free()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        rate = 1e-6 if self.machine.is_gpu else 1e-3
        self.optimizer: Any = torch.optim.AdamW(trained, lr=rate, fused=self.machine.is_gpu)

    def _update(self) -> tuple[int, int, float]:
        update, before = next(self.updates), self.real
        total = int(sum(self.job.lengths[i] - 1 for batch in update for i in batch))
        inputs = [self.inputs(batch) for batch in update]
        taken = self.machine.seconds(partial(self._train, inputs, total))
        count = sum(map(len, update))
        self.samples, self.batches, self.done = self.samples + count, self.batches + len(update), self.done + 1
        return count, self.real - before, taken

    def _train(self, inputs: list[dict[str, Any]], total: int) -> None:
        for batch in inputs:
            self.model(**batch, use_cache=False, num_items_in_batch=total).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def inputs(self, batch: list[int]) -> dict[str, Any]:
        rows = [self.ids(i, int(self.job.lengths[i])) for i in batch]
        made = self._packed(rows) if self.method.packed else self._padded(rows)
        self.real, self.padded = self.real + sum(map(len, rows)), self.padded + made["input_ids"].numel()
        return {k: v.to(self.machine.device) if isinstance(v, torch.Tensor) else v for k, v in made.items()}

    def _padded(self, rows: list[np.ndarray]) -> dict[str, torch.Tensor]:
        lengths = np.array([len(row) for row in rows])
        width = int(lengths.max())
        if self.method.few_shapes:
            width = self.job.ladder.shape_for(width)[1]
        ids, mask = np.zeros((len(rows), width), np.int64), np.arange(width)[None] < lengths[:, None]
        ids[mask] = np.concatenate(rows)
        made = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "labels": np.where(mask, ids, IGNORED)}
        return {name: torch.from_numpy(values) for name, values in made.items()}

    def _packed(self, rows: list[np.ndarray]) -> dict[str, Any]:
        from transformers import DataCollatorWithFlattening

        return DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": row.tolist()} for row in rows])

    def figures(self) -> dict[str, Any]:
        return {
            "samples_per_s": overall([(count, seconds) for count, _, seconds in self.timed]),
            "real_tokens_per_s": overall([(real, seconds) for _, real, seconds in self.timed])["median"],
            "padding": 1 - self.real / max(self.padded, 1),
            "batches_per_update": self.batches / max(self.done, 1),
            "batches": self.batches,
            "samples": self.samples,
            "peak_bytes": self.peak,
            "same_updates": self.method.same_updates,
        }


# On the CPU


def rivals(*, updates: int = UPDATES, cvs: Sequence[float] = CVS) -> dict[str, Any]:
    """Figures of every method at every variation of lengths."""
    torch.set_num_threads(1)
    text, machine = _text(), Machine()
    return {f"CV {cv}": _texts_case(text, cv, updates, machine) for cv in cvs}


def _text() -> np.ndarray:
    from dynagroup.demo import docstrings, train_tokenizer

    texts = docstrings(8000)
    tokenizer = train_tokenizer(texts[:4000])
    return np.concatenate([np.asarray(ids, np.int64) for ids in tokenizer(texts)["input_ids"]]) % 1536


def _texts_case(text: np.ndarray, cv: float, updates: int, machine: Machine) -> dict[str, Any]:
    lengths = np.clip(lognormal(MEAN, cv, SAMPLES), 4, SHORT).astype(np.int32)
    lengths[0] = SHORT
    starts = np.random.default_rng(1).integers(0, len(text) - SHORT, SAMPLES + HELD_OUT)
    work = measured_work(machine)
    job = Job(lengths, PER_UPDATE, FIXED * SHORT, work=work)
    ids: Ids = lambda i, n: text[starts[i] :][:n]  # noqa: E731
    runs = {name: Run(name, method, job, machine, "small", ids) for name, method in METHODS.items() if method.available}
    for _ in range(updates):
        for one in runs.values():  # a free-running method may need more or fewer of its updates for as many samples
            one.turn(samples=PER_UPDATE)
    held_out = torch.from_numpy(np.stack([text[s : s + SHORT // 2] for s in starts[SAMPLES:]]))
    return {
        **_about(job), "updates": updates, "cv": float(lengths.std() / lengths.mean()),
        "methods": {name: {**one.figures(), "held_out_loss": _loss(one.model, held_out)} for name, one in runs.items()},
    }  # fmt: skip


OBJECTIVES = {
    "fewest": METHODS["dynagroup, fewest batches"],
    "time": METHODS["dynagroup, default work"],
    "time, a step costs 128": METHODS["dynagroup, a CPU's work"],
}


def objective(updates: int = 6) -> dict[str, Any]:
    """The same updates of 128 samples, cut into the fewest batches and for least time, under two budgets."""
    torch.set_num_threads(1)
    text, machine, found = _text(), Machine(), {}
    lengths = np.clip(lognormal(MEAN, 0.8, SAMPLES), 4, SHORT).astype(np.int32)
    ids: Ids = lambda i, n: text[97 * i :][:n]  # noqa: E731
    for budget in (4096, 32_768):
        job = Job(lengths, 2 * PER_UPDATE, budget)
        runs = {name: Run(name, method, job, machine, "small", ids) for name, method in OBJECTIVES.items()}
        for _ in range(updates):
            for one in runs.values():
                one.turn()
        found[f"budget {budget:,}"] = {**_about(job), "methods": {name: one.figures() for name, one in runs.items()}}
    return found


def measured_work(machine: Machine) -> Work:
    """What the recipe says: time a dozen shapes, fit. Medians of five."""
    model, rows = build("small", machine), []
    for n, longest in ((1, 16), (1, 64), (1, 256), (4, 16), (4, 64), (4, 256), (16, 16), (16, 64), (32, 16), (32, 64)):
        ids = torch.randint(3, 1536, (n, longest))
        step = lambda ids=ids: model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()  # noqa: E731
        rows.append((n, longest, float(np.median([machine.seconds(step) for _ in range(6)][1:]))))
    return Work.fit(rows)


@torch.no_grad()
def _loss(model: Any, ids: torch.Tensor) -> float:
    model.set_attn_implementation("sdpa")
    return float(np.mean([float(model(input_ids=part, labels=part).loss) for part in ids.split(16)]))


# On a GPU


@dataclass(frozen=True)
class Case:
    """``long``: the longest samples fit with gradient checkpointing only, so every method but one always checkpoints."""

    size: str
    lengths: str
    lora: bool = False
    long: bool = False

    def __str__(self) -> str:
        return f"{self.size}{' LoRA' if self.lora else ''}, {self.lengths}{', long, checkpointed' if self.long else ''}"

    @property
    def methods(self) -> dict[str, Method]:
        return {name: one for name, one in (LONG if self.long else METHODS).items() if one.available}


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 0.5B model, full: lengths of CV 0.3, 1.0 and of a file of conversations; and long ones."""
    plain = [Case("0.5B", name) for name in ("CV 1.0", "CV 0.3", "azure_llm_conv_2023")]
    yield from _cases(machine, [*plain, Case("0.5B", "CV 1.0", long=True)])


def large(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 1.5B model, full and with LoRA, and long samples; and lengths of program files."""
    plain = [Case("1.5B", "CV 1.0", lora=True), Case("1.5B", "CV 1.3"), Case("0.5B", "python_files")]
    yield from _cases(machine, [*plain, Case("1.5B", "CV 1.0", long=True)])


def _cases(machine: Machine, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Figures so far after every turn, so that a part that is cut off keeps what it has."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, case in enumerate(cases):
        seconds, name = (machine.left_s() - 20) / (len(cases) - number), str(case)
        if machine.dry and number not in (0, len(cases) - 1):
            continue
        if seconds < 25 and not machine.dry:
            figures[name] = {"left out": "no time"}
        elif case.lora and find_spec("peft") is None:
            figures[name] = {"left out": "peft is not installed"}
        else:
            error = None
            try:
                for figures[name] in _rounds(machine, case, seconds):
                    yield figures
            except Exception as found:  # a case's failure is written down, and costs no other its place
                error = f"{type(found).__name__}: {found}"[:500]
            if error is not None:
                figures[name] = {**figures.get(name, {}), "error": error}
                machine.free()
        yield figures


def _lengths(name: str, longest: int, dry: bool) -> np.ndarray:
    count = 200 if dry else 20_000
    if name.startswith("CV"):
        drawn = lognormal(longest / 8, float(name.removeprefix("CV ")), count)
        drawn[:8] = longest  # whatever is drawn, a fixed batch must hold the longest
    else:
        drawn = lengths_of(name, count) / (128 if dry else 1)
    return np.clip(drawn, 4, longest).astype(np.int32)


def tokens_that_fit(machine: Machine, size: str, *, recomputed: bool) -> int:
    """Tokens of a batch, as traced: no device has been asked yet."""
    from dynagroup.memory import what_fits

    if machine.dry:
        return 256 if recomputed else 64
    key = size, recomputed
    if key not in _traced:
        how: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": recomputed, "headroom": HEADROOM}
        _traced[key] = what_fits(config_of(size), machine.total_bytes, lengths=[LONGEST], **how).max_tokens
    return max(_traced[key], 1)


_traced: dict[tuple[str, bool], int] = {}


def _job(machine: Machine, case: Case, share: float) -> Job:
    """The case's lengths, and so much of what was traced to fit."""
    per_update, step = (16, 8) if machine.dry else (PER_UPDATE, 512)
    work = Work.of(config_of(case.size, dry=machine.dry))
    plain = int(share * tokens_that_fit(machine, case.size, recomputed=False))
    if case.long:
        tokens = int(share * tokens_that_fit(machine, case.size, recomputed=True))
        longest = max(tokens // step, 1) * step
        return Job(_lengths(case.lengths, longest, machine.dry), per_update, longest, plain_tokens=plain, work=work)
    longest = 32 if machine.dry else min(LONGEST, max(plain // step, 1) * step)
    return Job(_lengths(case.lengths, longest, machine.dry), per_update, max(plain // longest, 1) * longest, work=work)


def _run(name: str, method: Method, job: Job, machine: Machine, case: Case) -> Run:
    top = 64 if machine.dry else 50_000
    text = np.random.default_rng(0).integers(3, top, 1 << 20)
    ids: Ids = lambda i, n: text[(7919 * i) % (len(text) - n) :][:n]  # noqa: E731
    return Run(name, method, job, machine, case.size, ids, case.lora, case.long)


def job_that_fits(machine: Machine, case: Case) -> Job:
    """Tries the hardest batch twice, and takes less where the device has less than was traced."""
    for share in (1.0, 0.75, 0.5):
        job = _job(machine, case, share)
        trial, failed = _run("fixed", METHODS["fixed"], job, machine, case), False
        hardest = np.argsort(-job.lengths, kind="stable")[: job.fixed].tolist()
        trial.updates = iter(lambda hardest=hardest: [hardest, hardest], None)
        try:
            trial.turn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        del trial  # outside the except block: its traceback kept the model alive
        machine.free()
        if not failed:
            return job
    raise RuntimeError(f"not even half of what was traced fits: {job.tokens} tokens")


def _rounds(machine: Machine, case: Case, seconds: float) -> Iterator[dict[str, Any]]:
    """Every method has a turn a round; a turn is not begun that could outlast the case, or the part."""
    left, rounds = machine.left_s(), 0
    job = job_that_fits(machine, case)
    end, longest = left - seconds, max(5 * SLICE_S, left - machine.left_s())
    runs = {name: _run(name, method, job, machine, case) for name, method in case.methods.items()}
    failed: dict[str, str] = {}
    while runs and (not rounds or (not machine.dry and machine.left_s() - len(runs) * longest > end)):
        for name, one in list(runs.items()):
            left = machine.left_s()
            if left < 30 + longest and not machine.dry:
                break
            try:
                one.turn(seconds=0.0 if machine.dry else SLICE_S)
            except Exception as error:  # one method's failure is written down, and costs no other its place
                failed[name] = f"{type(error).__name__}: {error}"[:500]
            machine.free()  # outside the except block: its traceback kept the method's model alive
            longest = max(longest, left - machine.left_s())
            runs = {other: one for other, one in runs.items() if other not in failed}
            methods = {name: one.figures() for name, one in runs.items() if one.timed}
            yield {**_about(job), "rounds": rounds + 1, "methods": methods, "failed": dict(failed)}
        rounds += 1
        if machine.left_s() < 30 + longest and not machine.dry:
            return


def _about(job: Job) -> dict[str, Any]:
    return {
        "tokens_a_batch": job.tokens, "without_checkpointing": job.plain_tokens, "longest": int(job.lengths.max()),
        "fixed_batch": job.fixed, "samples_per_update": job.per_update, "per_step": job.work.per_step,
        "crossover": min(job.work.crossover, 1e9),
    }  # fmt: skip


def table(figures: dict[str, Any]) -> str:
    """One line a case and method."""
    from dynagroup.plan.report import format_table

    lines = []
    for case, found in figures.items():
        methods = found.get("methods", {})
        base = next(iter(methods.values()))["samples_per_s"]["median"] if methods else float("nan")
        for name, one in methods.items():
            low, high = (q / base for q in one["samples_per_s"]["quartiles"])
            lines.append(
                [
                    f"{case}, {name}", f"{one['samples_per_s']['median'] / base:.2f}x", f"{low:.2f}-{high:.2f}",
                    f"{one['real_tokens_per_s']:,.0f}", f"{one['padding']:.1%}", f"{one['batches_per_update']:.1f}",
                    f"{one['peak_bytes'] / 2**30:.1f}", "yes" if one["same_updates"] else "no",
                ]
            )  # fmt: skip
    head = ["", "samples/s over the first", "quartiles", "real tokens/s", "padding", "batches an update", "peak GiB"]
    return format_table([*head, "same updates"], lines)
