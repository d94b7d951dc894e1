"""Training of a causal language model: the same samples an update, the same memory, different batches; runs take turns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build, config_of, lora
from benchmarks.methods import METHODS, Job, updates_of
from benchmarks.record import spread
from dynagroup.plan.work import Work

__all__ = ["large", "run"]

LENGTHS = Path(__file__).parents[1] / "lengths"
PER_UPDATE = 128
TOKENS = {"0.5B": 32768, "1.5B": 16384}
LONGEST = 4096
CHATS = "azure_llm_conv_2023"
SLICE_S = 4.0
"""Seconds of a method's turn; the turns go round until the case's time is used."""


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 0.5B model, full: lengths of CV 0.3, 1.0 and of a file of conversations."""
    yield from _cases(machine, [("0.5B", "CV 1.0", False), ("0.5B", "CV 0.3", False), ("0.5B", CHATS, False)])


def large(machine: Machine) -> Iterator[dict[str, Any]]:
    """The 1.5B model, full and with LoRA, and lengths of program files."""
    yield from _cases(machine, [("1.5B", "CV 1.0", True), ("1.5B", "CV 1.3", False), ("0.5B", "python_files", False)])


def _cases(machine: Machine, cases: list[tuple[str, str, bool]]) -> Iterator[dict[str, Any]]:
    """Figures so far after every round of turns, so that a part that is cut off keeps what it has."""
    figures: dict[str, Any] = {}
    for number, (size, lengths, with_lora) in enumerate(cases):
        seconds = (machine.left_s() - 20) / (len(cases) - number)
        name = f"{size}{' LoRA' if with_lora else ''}, {lengths}"
        if seconds < 25 and not machine.dry:
            figures[name] = {"left out": "no time"}
            continue
        if with_lora and find_spec("peft") is None:
            figures[name] = {"left out": "peft is not installed"}
            continue
        for figures[name] in _rounds(machine, size, lengths, with_lora, seconds):
            yield figures
        if machine.dry:
            break
    yield figures


def _lengths(name: str, machine: Machine) -> np.ndarray:
    longest, count = (32, 200) if machine.dry else (LONGEST, 20_000)
    if name.startswith("CV"):
        cv = float(name.removeprefix("CV "))
        sigma = np.sqrt(np.log(1 + cv**2))
        drawn = np.random.default_rng(0).lognormal(np.log(longest / 8) - sigma**2 / 2, sigma, count)
    else:
        drawn = np.random.default_rng(0).permutation(np.load(LENGTHS / f"{name}.npz")["tokens"])[:count]
        drawn = drawn / 128 if machine.dry else drawn
    return np.clip(drawn, 4, longest).astype(np.int32)


def _rounds(machine: Machine, size: str, name: str, with_lora: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """Every method has a turn a round; a turn is not begun that could outlast the case, or the part."""
    work = Work.of(config_of(size, dry=machine.dry))
    tokens = 128 if machine.dry else TOKENS[size]
    job = Job(_lengths(name, machine), 16 if machine.dry else PER_UPDATE, tokens, work=work)
    runs = {method: Run(method, job, machine, size, with_lora) for method in METHODS if METHODS[method].available}
    failed: dict[str, str] = {}
    end, longest, rounds = machine.left_s() - seconds, 5 * SLICE_S, 0
    while runs and (not rounds or (not machine.dry and machine.left_s() - len(runs) * longest > end)):
        for method, one in list(runs.items()):
            left = machine.left_s()
            if left < 30 + longest and not machine.dry:
                break
            try:
                one.turn(0.0 if machine.dry else SLICE_S)
            except Exception as error:  # one method's failure is written down, and costs no other its place
                failed[method] = f"{type(error).__name__}: {error}"[:500]
                del runs[method]
                machine.free()
            longest = max(longest, left - machine.left_s())
        rounds += 1
        yield {
            "tokens_a_batch": tokens, "fixed_batch": job.fixed, "samples_per_update": job.per_update, "rounds": rounds,
            "work": {"per_step": work.per_step, "crossover": work.crossover},
            "methods": {method: one.figures() for method, one in runs.items() if one.turns}, "failed": failed,
        }  # fmt: skip
        if machine.left_s() < 30 + longest and not machine.dry:
            return


class Run:
    """One method's training. All methods share nothing but the device; each has its own model, made anew at each turn."""

    def __init__(self, method: str, job: Job, machine: Machine, size: str, with_lora: bool) -> None:
        self.method, self.job, self.machine, self.size, self.with_lora = METHODS[method], job, machine, size, with_lora
        self.updates = updates_of(method, job)
        self.turns: list[tuple[float, int, int, int]] = []
        self.samples = self.padded = self.real = self.batches = self.peak = 0

    def turn(self, seconds: float) -> None:
        machine = self.machine
        model = build(self.size, machine, attention="varlen" if self.method.packed else "sdpa")
        model = lora(model) if self.with_lora else model
        machine.free()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=not machine.dry)
        self._update(model, optimizer)  # warms up kernels and the allocator; not counted
        taken, samples, real, updates = 0.0, 0, 0, 0
        while taken < seconds or not updates:
            before = self.samples, self.real
            taken += machine.seconds(partial(self._update, model, optimizer))
            samples, real, updates = samples + self.samples - before[0], real + self.real - before[1], updates + 1
        self.turns.append((taken, samples, real, updates))
        self.peak = max(self.peak, machine.peak_bytes())
        del model, optimizer, trained
        machine.free()

    def _update(self, model: Any, optimizer: Any) -> None:
        update = next(self.updates)
        total = sum(int(self.job.lengths[i]) - 1 for batch in update for i in batch)
        for batch in update:
            inputs, labels = self._inputs(batch)
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
