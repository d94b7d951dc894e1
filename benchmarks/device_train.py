"""Training on a GPU: models of real sizes on random tokens, every way to form batches in turn.

A case is a model, the lengths of its samples and the samples of an update. All methods hold at most the same tokens in a batch:
what a trace says that the device can hold. Each method's model is made anew at each turn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np

from benchmarks.data import lengths_of, lognormal
from benchmarks.machine import SIZES, Machine, base_size, config_of, noted
from benchmarks.methods import METHODS, Job, Method
from benchmarks.train import PER_UPDATE, Run, about_job
from dynagroup import MemoryBudget, Work

LONGEST = 4096
"""Most tokens of a sample."""
HEADROOM = 0.8
"""Share of a GPU that a batch may be predicted to take."""
SLICE_S = 3.0
"""Seconds of a method's turn; turns go round until the time is used."""
COMPARED = (
    "fixed",
    "sorted inside the update",
    "transformers batch_rebalance",
    "TRL padding-free",
    "transformers group_by_length",
    "TRL packing (bfd)",
    "dynabatch",
    "dynagroup",
    "dynagroup, packed",
    "dynagroup, grouping 50",
    "dynagroup, free updates",
)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        size: of the model, a name of ``SIZES``; with " LoRA" behind it, adapters of rank 16 are trained.
        lengths: "CV 1.0": drawn ones; or the name of a file.
        per_update: samples of an update. A batch holds at least so many of the longest samples if these are 8 or fewer:
            then there is no accumulation with fixed batches.
    """

    size: str
    lengths: str
    per_update: int = PER_UPDATE

    def __str__(self) -> str:
        return f"{self.size}, {self.lengths}, updates of {self.per_update}"


def medium(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 0.5B model, updates of 64 samples."""
    return compared(machine, [Case("0.5B", "CV 1.0"), Case("0.5B", "azure_llm_conv_2023")])


def small_updates(machine: Machine) -> Iterator[dict[str, Any]]:
    """The commonest settings: batches of 8 without accumulation, all weights or LoRA."""
    cases = [Case("0.5B", "CV 1.0", per_update=8), Case("1.5B LoRA", "CV 1.0", per_update=8)]
    return compared(machine, cases)


def large(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 1.5B model; and lengths of program files."""
    return compared(machine, [Case("1.5B", "CV 1.0"), Case("0.5B", "python_files")])


def compared(machine: Machine, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Figures so far after every turn, so that a part that is cut off keeps what it has."""
    figures: dict[str, Any] = {}
    machine.warm_up()
    for number, case in enumerate(cases):
        left = machine.left_s()
        seconds_of_case = (left - 20) / (len(cases) - number)
        failed: dict[str, Any] = {}
        figures[str(case)] = {"failed": {str(case): "no time"}}
        with noted(failed, str(case)):
            for so_far in _rounds(machine, case, end=left - seconds_of_case):
                figures[str(case)] = so_far
                yield figures
        if failed:
            figures[str(case)]["failed"] = failed
        machine.free()
        yield figures


@cache
def tokens_that_fit(size: str, num_bytes: int) -> int:
    """Tokens of a batch, as traced: no device has been asked yet."""
    config = config_of(size)
    budget = MemoryBudget.from_model(config, num_bytes, dtype="bfloat16", headroom=HEADROOM)
    return budget.max_tokens(LONGEST)


def job_of(machine: Machine, case: Case, share: float = 1.0) -> Job:
    """The case's lengths, and so much of what was traced to fit."""
    work = Work.of(config_of(case.size, dry=machine.dry))
    if machine.dry:
        tokens = int(share * 64)
        lengths = lengths_of_case(case.lengths, 200, 32)
        per_update = min(case.per_update, 16)
        return Job(lengths, per_update, max(tokens // 32, 1) * 32, work=work)
    tokens = int(share * tokens_that_fit(case.size, machine.total_bytes))
    samples = case.per_update if case.per_update <= 8 else 1
    longest = min(LONGEST, max(tokens // samples // 512, 1) * 512)
    fixed = max(tokens // longest, 1)
    lengths = lengths_of_case(case.lengths, 5_000, longest)
    return Job(lengths, case.per_update, fixed * longest, work=work)


def lengths_of_case(kind: str, count: int, longest: int) -> np.ndarray:
    """Drawn lengths ("CV 1.0"), or those of a file."""
    if not kind.startswith("CV"):
        return lengths_of(kind, count).clip(4, longest)
    cv = float(kind[3:])
    lengths = lognormal(count, mean=longest / 8, cv=cv, shortest=4, longest=longest)
    lengths[:8] = longest  # whatever is drawn, a fixed batch must hold the longest
    return lengths


def run_of(
    name: str, job: Job, machine: Machine, case: Case, *, method: Method | None = None
) -> Run:
    """A method's training of the case's model on random ids."""
    vocabulary = SIZES["dry" if machine.dry else base_size(case.size)][-1]
    text = np.random.default_rng(0).integers(3, vocabulary, 1 << 20)

    def ids(sample: int, length: int) -> np.ndarray:
        start = (7919 * sample) % (len(text) - length)
        return text[start : start + length]

    return Run(name, job, machine, case.size, ids, method=method)


def job_that_fits(machine: Machine, case: Case) -> Job:
    """Tries the hardest batch twice, and takes less where the device has less than was traced."""
    for share in (1.0, 0.75, 0.5):
        job = job_of(machine, case, share)
        longest_first = np.argsort(-job.lengths, kind="stable")
        hardest = longest_first[: job.fixed].tolist()
        trial = run_of("fixed", job, machine, case)
        trial.updates = repeat([hardest, hardest])
        fits = machine.fits(trial.turn)
        del trial  # and its model
        machine.free()
        if fits:
            return job
    raise RuntimeError(f"not even half of what was traced fits: {job.tokens} tokens")


def _rounds(machine: Machine, case: Case, end: float) -> Iterator[dict[str, Any]]:
    """Every method has a turn a round; none is begun that could outlast the case, which ends when so many seconds are left."""
    left = machine.left_s()
    job = job_that_fits(machine, case)
    longest = max(5 * SLICE_S, left - machine.left_s())
    available = [name for name in COMPARED if METHODS[name].available]
    runs = {name: run_of(name, job, machine, case) for name in available}
    failed: dict[str, str] = {}
    number = 0
    while runs:
        number += 1
        for name in list(runs):
            if not machine.has(30 + longest):
                return
            longest = max(longest, turn_of(machine, runs, name, failed))
            methods = {way: run.figures() for way, run in runs.items() if run.timed}
            yield {**about_job(job), "rounds": number, "methods": methods, "failed": dict(failed)}
        is_last = machine.left_s() - len(runs) * longest <= end
        if machine.dry or is_last:
            return


def turn_of(machine: Machine, runs: dict[str, Run], name: str, failed: dict[str, str]) -> float:
    """Seconds of a method's turn; one that fails has no more turns."""
    left = machine.left_s()
    with noted(failed, name):
        runs[name].turn(seconds=0.0 if machine.dry else SLICE_S)
    if name in failed:
        del runs[name]
    machine.free()  # outside the block: the error's traceback kept the method's model alive
    return left - machine.left_s()
