"""How large a batch may be: as each way of deciding says, as is simulated, and as a GPU shows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build, config_of
from benchmarks.record import table
from dynagroup import MemoryBudget, TokenBudget
from dynagroup.device import is_out_of_memory
from dynagroup.memory import MemoryRegressor, Workload, measure, simulate
from dynagroup.memory.trace.model import as_random_model
from regressor.families import FAMILIES
from regressor.measure_gpu import DRY, MODELS, DryDevice

__all__ = ["fits", "measured", "picture", "shown"]

ROOT = Path(__file__).parent.parent
BATCH_SIZE, LONGEST = 8, 2048
LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048)


def picture() -> dict[str, Any]:
    """A model of the sizes of Qwen2.5-0.5B trains in bfloat16; the hardest batch is 8 samples of 2,048 tokens.

    Truth is the largest batch whose simulated memory is at most the hardest batch's. The regressor keeps a headroom of 0.9 and
    has seen this family in training; once it knows the workload, once it knows nothing.
    """
    config, lengths = config_of("0.5B"), np.array(LENGTHS)
    workload = Workload.from_model(config, "train", dtype="bfloat16")

    def size(num_samples: int, longest: int) -> int:
        (row,) = simulate(config, workload, [(num_samples, longest)])
        return row.batch_bytes or 0

    limit, tokens = size(BATCH_SIZE, LONGEST), TokenBudget(BATCH_SIZE * LONGEST)
    known = MemoryBudget(BATCH_SIZE, longest=LONGEST, model=MemoryRegressor.pretrained(workload))
    answers = {
        "token budget": tokens.largest(lengths),
        "regressor, workload known": known.largest(lengths),
        "regressor, workload unknown": MemoryBudget(BATCH_SIZE, longest=LONGEST).largest(lengths),
    }
    sizes = {
        "fixed": [BATCH_SIZE] * len(LENGTHS),
        **{name: [int(n) for n in found] for name, found in answers.items() if found is not None},
        "truth (simulated)": [
            # the simulation's memory grows with samples, at least half as fast as tokens do
            bisect_right(range(1, 2 * BATCH_SIZE * LONGEST // length + 1), limit, key=lambda n, x=length: size(n, x))
            for length in LENGTHS
        ],
    }
    draw(sizes, ROOT / "docs" / "images" / "batch_sizes.png")
    return {"lengths": LENGTHS, "samples": sizes}


def draw(sizes: dict[str, list[int]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    looks = {"fixed": ":", "token budget": "--", "regressor, workload known": "o-", "regressor, workload unknown": "s-"}
    for name, found in sizes.items():
        axes.loglog(LENGTHS, found, looks.get(name, "k-"), label=name, markersize=4)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="tokens of the longest sample", ylabel="samples in the batch")
    axes.set_title(
        f"As much memory as {BATCH_SIZE} samples of {LONGEST} tokens (0.5B model, training, bfloat16)", size=10
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# On a GPU. Peaks: simulated and measured


TRAIN = ((1, 128), (32, 128), (4, 1024), (16, 1024), (1, 8192), (1, 32768))
OTHER = ((1, 128), (64, 128), (16, 1024), (4, 8192), (1, 32768))


def measured(machine: Machine) -> Iterator[dict[str, Any]]:
    """Simulated peaks held against the device's: nine models, training with and without checkpointing, generation, forward.

    Yields the figures so far, after every workload.
    """
    figures: dict[str, Any] = {"rows": [], "left_out": [], "failed": {}}
    for name in MODELS[:1] if machine.dry else MODELS:
        config = _config(name, machine)
        for label, workload, shapes in _workloads(name, config, machine):
            case = f"{name}, {label}"
            if not machine.has(45):
                figures["left_out"].append(case)
                continue
            try:
                figures["rows"] += _rows(case, config, workload, shapes, machine)
            except Exception as error:  # one case's failure is written down, and costs no other its place
                figures["failed"][case] = f"{type(error).__name__}: {error}"[:500]
            machine.free()
            yield figures
    yield figures


def _config(name: str, machine: Machine) -> Any:
    family = FAMILIES[name]
    config = family.build(DRY.sizes if machine.dry and DRY.sizes else family.known)
    for field in ("max_position_embeddings", "n_positions"):
        if hasattr(config, field):
            setattr(config, field, 32768 + 64)
    return config


def _workloads(name: str, config: Any, machine: Machine) -> Iterator[tuple[str, Workload, Any]]:
    known: dict[str, Any] = {"dtype": "float32" if machine.dry else "bfloat16", "attention": "sdpa", "trace": False}
    shapes, others = (DRY.train, DRY.other) if machine.dry else (TRAIN, OTHER)
    train = Workload.from_model(config, "train", **known)
    yield "train", train, shapes
    yield "train, checkpointing", replace(train, gradient_checkpointing=True), shapes
    if FAMILIES[name].kind == "encoder":
        yield "forward", Workload.from_model(config, "forward", **known), others
    else:
        new_tokens = 2 if machine.dry else 32
        yield "generate", Workload.from_model(config, "generate", max_new_tokens=new_tokens, **known), others


def _rows(case: str, config: Any, workload: Workload, shapes: Any, machine: Machine) -> list[dict[str, Any]]:
    model = as_random_model(config, workload, machine.device)
    found = measure(model, workload, shapes, device=DryDevice() if machine.dry else None)
    del model
    return [
        {
            "case": case, "num_samples": real.num_samples, "longest": dict(real.longest), "oom": real.oom,
            "measured_bytes": real.peak_bytes, "reserved_bytes": real.reserved_bytes, "simulated_bytes": fake.peak_bytes,
            "error": None if real.peak_bytes is None or fake.peak_bytes is None else fake.peak_bytes / real.peak_bytes - 1,
        }
        for real, fake in zip(found.rows, simulate(config, workload, shapes).rows, strict=True)
    ]  # fmt: skip


# Largest batches: predicted and found


CASES = (("0.5B", 512), ("0.5B", 4096), ("0.5B", 128), ("1.5B", 1024), ("0.5B", 8192), ("1.5B", 4096))
LIMIT_BYTES = 64 << 30


def fits(machine: Machine) -> Iterator[dict[str, Any]]:
    """The largest batch that a device takes, found by bisection, against the one that is predicted without it.

    Training steps with AdamW in bfloat16, under a limit of 64 GiB; yields the figures so far, after every case.
    """
    limit = (8 << 20) if machine.dry else min(LIMIT_BYTES, int(0.9 * machine.total_bytes))
    figures: dict[str, Any] = {"limit_bytes": limit, "rows": []}
    machine.warm_up()
    for size, longest in CASES[:1] if machine.dry else CASES:
        row: dict[str, Any] = {"model": size, "longest": longest}
        if machine.has(80):
            try:
                row |= _largest(machine, size, 8 if machine.dry else longest, limit)
            except Exception as error:  # written down; the other cases go on
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            machine.free()
        else:
            row["left out"] = "no time"
        figures["rows"].append(row)
        yield figures


def _largest(machine: Machine, size: str, longest: int, limit: int) -> dict[str, Any]:
    dtype, config = "float32" if machine.dry else "bfloat16", config_of(size, dry=machine.dry)
    budget = MemoryBudget.from_model(config, memory=limit, mode="train", dtype=dtype, headroom=1.0)
    found = budget.largest(np.asarray([longest]))
    assert found is not None
    predicted = true = int(found[0])
    if not machine.dry:
        machine.limit(limit)
        model = build(size, machine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        _fits(model, optimizer, 1, min(longest, 128))  # gradients and optimizer state are there from now on
        true = _last_true(lambda n: _fits(model, optimizer, n, longest), max(predicted, 1), lambda: machine.has(15))
    return {"predicted": predicted, "true": true, "share": predicted / max(true, 1)}


def _last_true(holds: Callable[[int], bool], guess: int, goes_on: Callable[[], bool]) -> int:
    """Growing by a tenth, then halving the gap: about ten steps.

    >>> _last_true(lambda n: n <= 37, 30, lambda: True), _last_true(lambda n: n <= 37, 60, lambda: True)
    (37, 37)
    """
    low, high, number = 0, 0, guess
    while high - low != 1 and goes_on():
        low, high = (number, high) if holds(number) else (low, number)
        number = (low + high) // 2 if high else max(low + 1, round(low * 1.1))
    return low


def _fits(model: Any, optimizer: Any, number: int, longest: int) -> bool:
    """The second of two batches of an update: gradients are there when it runs, as in any accumulation."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    failed = False
    try:
        ids = torch.randint(3, model.config.vocab_size, (number, longest), device=model.device)
        mask = torch.ones_like(ids)
        mask[0, 0] = 0 if number > 1 else 1
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    if failed:  # outside the except block: its traceback kept the batch's tensors alive
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return not failed


def shown(figures: dict[str, Any]) -> list[str]:
    """Peaks by case, or largest batches."""
    if "limit_bytes" in figures:
        columns = {"model": "{model}", "tokens": "{longest}", "predicted": "{predicted}", "true": "{true}"}
        return table(figures["rows"], {**columns, "share": "{share:.0%}"})
    cases: dict[str, list[float]] = {}
    for row in figures["rows"]:
        if row["error"] is not None:
            cases.setdefault(row["case"], []).append(row["error"])
    rows = [{"case": case, "shapes": len(e), "least": min(e), "most": max(e)} for case, e in cases.items()]
    columns = {
        "simulated over measured": "{case}",
        "shapes": "{shapes}",
        "least": "{least:+.2%}",
        "most": "{most:+.2%}",
    }
    left = ", ".join([*figures["left_out"], *figures["failed"]]) or "none"
    return [*table(rows, columns), "", f"left out or failed: {left}"]
