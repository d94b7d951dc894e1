"""Training of a causal language model: the same samples an update, the same memory, different batches; runs take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build, config_of, lora
from benchmarks.methods import METHODS, RECOMPUTE, Job, Method, updates_of
from benchmarks.record import spread
from dynagroup.device import is_out_of_memory
from dynagroup.memory import what_fits
from dynagroup.memory.trace.build import checkpoint_layers
from dynagroup.oom import RecomputeWhereNeeded
from dynagroup.plan.work import Work

__all__ = ["Case", "large", "run", "tokens_that_fit"]

LENGTHS = Path(__file__).parents[1] / "lengths"
PER_UPDATE = 64
LONGEST = 4096
CHATS = "azure_llm_conv_2023"
HEADROOM = 0.8
"""Share of the device that a batch may be predicted to take: what is compared are batches, not how near they come to its end."""
SLICE_S = 3.0
"""Seconds of a method's turn; the turns go round until the case's time is used."""
LONG = {name: METHODS[name] for name in ("fixed", "dynagroup", "dynagroup, packed")}
LONG["dynagroup, recompute"] = RECOMPUTE


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
    plain = [Case("0.5B", name) for name in ("CV 1.0", "CV 0.3", CHATS)]
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


def _lengths(name: str, longest: int, machine: Machine) -> np.ndarray:
    count = 200 if machine.dry else 20_000
    if name.startswith("CV"):
        cv = float(name.removeprefix("CV "))
        sigma = np.sqrt(np.log(1 + cv**2))
        drawn = np.random.default_rng(0).lognormal(np.log(longest / 8) - sigma**2 / 2, sigma, count)
        drawn[:8] = longest  # whatever is drawn, a fixed batch must hold the longest
    else:
        drawn = np.random.default_rng(0).permutation(np.load(LENGTHS / f"{name}.npz")["tokens"])[:count]
        drawn = drawn / 128 if machine.dry else drawn
    return np.clip(drawn, 4, longest).astype(np.int32)


def tokens_that_fit(machine: Machine, size: str, *, recomputed: bool) -> int:
    """Tokens of a batch, as traced: no device has been asked yet."""
    if machine.dry:
        return 256 if recomputed else 64
    key = size, recomputed
    if key not in _traced:
        how = {"dtype": "bfloat16", "gradient_checkpointing": recomputed, "headroom": HEADROOM}
        _traced[key] = what_fits(config_of(size, dry=False), machine.total_bytes, lengths=[LONGEST], **how).max_tokens
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
        return Job(_lengths(case.lengths, longest, machine), per_update, longest, plain_tokens=plain, work=work)
    longest = 32 if machine.dry else min(LONGEST, max(plain // step, 1) * step)
    return Job(_lengths(case.lengths, longest, machine), per_update, max(plain // longest, 1) * longest, work=work)


def _job_that_fits(machine: Machine, case: Case) -> Job:
    """Tries the hardest batch twice, and takes less where the device has less than was traced."""
    for share in (1.0, 0.75, 0.5):
        job = _job(machine, case, share)
        trial, failed = Run("fixed", METHODS["fixed"], job, machine, case), False
        hardest = np.argsort(-job.lengths, kind="stable")[: job.fixed].tolist()
        trial.updates = iter(lambda hardest=hardest: [hardest, hardest], None)
        try:
            trial.turn(0.0)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failed = True
        machine.free()  # outside the except block: its traceback kept the model alive
        if not failed:
            return job
    raise RuntimeError(f"not even half of what was traced fits: {job.tokens} tokens")


def _rounds(machine: Machine, case: Case, seconds: float) -> Iterator[dict[str, Any]]:
    """Every method has a turn a round; a turn is not begun that could outlast the case, or the part."""
    left, rounds = machine.left_s(), 0
    job = _job_that_fits(machine, case)
    end, longest = left - seconds, max(5 * SLICE_S, left - machine.left_s())
    runs = {name: Run(name, method, job, machine, case) for name, method in case.methods.items()}
    failed: dict[str, str] = {}
    while runs and (not rounds or (not machine.dry and machine.left_s() - len(runs) * longest > end)):
        for name, one in list(runs.items()):
            left = machine.left_s()
            if left < 30 + longest and not machine.dry:
                break
            try:
                one.turn(0.0 if machine.dry else SLICE_S)
            except Exception as error:  # one method's failure is written down, and costs no other its place
                failed[name] = f"{type(error).__name__}: {error}"[:500]
            machine.free()  # outside the except block: its traceback kept the method's model alive
            longest = max(longest, left - machine.left_s())
            runs = {other: one for other, one in runs.items() if other not in failed}
            yield _figures(job, rounds + 1, runs, failed)
        rounds += 1
        if machine.left_s() < 30 + longest and not machine.dry:
            return


def _figures(job: Job, rounds: int, runs: dict[str, Run], failed: dict[str, str]) -> dict[str, Any]:
    return {
        "tokens_a_batch": job.tokens, "without_checkpointing": job.plain_tokens, "longest": int(job.lengths.max()),
        "fixed_batch": job.fixed, "samples_per_update": job.per_update, "rounds": rounds,
        "work": {"per_step": job.work.per_step, "crossover": job.work.crossover},
        "methods": {name: one.figures() for name, one in runs.items() if one.turns}, "failed": dict(failed),
    }  # fmt: skip


class Run:
    """One method's training. All methods share nothing but the device; each has its own model, made anew at each turn."""

    def __init__(self, name: str, method: Method, job: Job, machine: Machine, case: Case) -> None:
        self.method, self.job, self.machine, self.case = method, job, machine, case
        self.updates = updates_of(name, job, method)
        self.turns: list[tuple[float, int, int, int]] = []
        self.samples = self.padded = self.real = self.batches = self.recomputed = self.peak = 0

    def turn(self, seconds: float) -> None:
        machine = self.machine
        model = build(self.case.size, machine, attention="varlen" if self.method.packed else "sdpa")
        model = lora(model) if self.case.lora else model
        decide = self._switch(model)
        machine.free()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=not machine.dry)
        step = partial(self._update, model, optimizer, decide)
        step()  # warms up kernels and the allocator; not counted
        taken, samples, real, updates = 0.0, 0, 0, 0
        while taken < seconds or not updates:
            before = self.samples, self.real
            taken += machine.seconds(step)
            samples, real, updates = samples + self.samples - before[0], real + self.real - before[1], updates + 1
        self.turns.append((taken, samples, real, updates))
        self.peak = max(self.peak, machine.peak_bytes())

    def _switch(self, model: Any) -> Callable[[Any], bool]:
        """What decides before each batch whether it is recomputed."""
        if self.method.recompute:
            return RecomputeWhereNeeded(model, self.job.recompute)
        if self.case.long:
            checkpoint_layers(model)
        return lambda inputs: self.case.long

    def _update(self, model: Any, optimizer: Any, decide: Callable[[Any], bool]) -> None:
        update = next(self.updates)
        total = sum(int(self.job.lengths[i]) - 1 for batch in update for i in batch)
        for batch in update:
            inputs, labels = self._inputs(batch)
            self.recomputed += decide(inputs)
            loss = model(**inputs, labels=labels, use_cache=False, num_items_in_batch=total).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.batches += len(update)
        self.samples += sum(map(len, update))

    def _inputs(self, batch: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        lengths, device = self.job.lengths[batch], self.machine.device
        top = 64 if self.machine.dry else 50_000
        real = int(lengths.sum())
        self.real += real
        if self.method.packed:
            self.padded += real
            return _packed(lengths, top, device)
        width = int(lengths.max())
        if self.method.few_shapes:
            width = self.job.ladder.shape_for(width)[1]
        self.padded += len(batch) * width
        mask = torch.arange(width, device=device)[None] < torch.as_tensor(lengths, device=device)[:, None]
        ids = torch.randint(3, top, mask.shape, device=device) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        return inputs, ids.masked_fill(~mask, -100)

    def figures(self) -> dict[str, Any]:
        return {
            "samples_per_s": spread([samples / taken for taken, samples, _, _ in self.turns]),
            "real_tokens_per_s": spread([real / taken for taken, _, real, _ in self.turns]),
            "padding": 1 - self.real / max(self.padded, 1),
            "batches": self.batches,
            "batches_recomputed": self.recomputed,
            "updates": sum(turn[3] for turn in self.turns),
            "peak_bytes": self.peak,
            "same_updates": self.method.same_updates,
        }


def _packed(lengths: np.ndarray, top: int, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    borders = torch.as_tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32, device=device)
    ids = torch.randint(3, top, (1, int(lengths.sum())), device=device)
    labels = ids.clone()
    labels[0, borders[:-1].long()] = -100
    positions = torch.as_tensor(np.concatenate([np.arange(n) for n in lengths]), device=device)[None]
    longest = int(lengths.max())
    return {
        "input_ids": ids, "position_ids": positions, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders,
        "max_length_q": longest, "max_length_k": longest,
    }, labels  # fmt: skip
