"""How large a batch may be: as each way of deciding says, as is simulated, and as a GPU shows.

``picture``: a model of the sizes of Qwen2.5-0.5B trains in bfloat16; the hardest batch is 8 samples of 2,048 tokens. Truth is the
largest batch whose simulated memory is at most the hardest batch's, found by running the simulation on both sides of it.
The regressor keeps a headroom of 0.9 and has seen this family in training; once it knows the workload, once it knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build, config_of
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.device import is_out_of_memory
from dynagroup.memory import MemoryRegressor, Workload, measure, simulate
from dynagroup.memory.trace.model import as_random_model
from dynagroup.plan.report import format_table
from regressor.families import FAMILIES, Sizes
from regressor.measure_gpu import MODELS, DryDevice

__all__ = ["fits", "measured", "picture", "table"]

ROOT = Path(__file__).parent.parent
BATCH_SIZE, LONGEST = 8, 2048
LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048)
CONFIG = config_of("0.5B")


def true_largest(workload: Workload, longest: int, limit: int) -> int:
    """Most samples whose simulated memory is at most ``limit``: bisection, from a bracket around the linear guess."""

    def size(n: int) -> int:
        (row,) = simulate(CONFIG, workload, [(n, longest)])
        assert row.batch_bytes is not None
        return row.batch_bytes

    def fits(n: int) -> bool:
        return size(n) <= limit

    guess = max(1, int(BATCH_SIZE * limit / size(BATCH_SIZE)))
    guess = max(1, int(guess * limit / size(guess)))
    low, high = max(1, int(0.98 * guess) - 1), int(1.02 * guess) + 2
    while not fits(low):
        low = max(1, low // 2)
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def batch_sizes() -> dict[str, list[int]]:
    """Samples a batch may have at each of LENGTHS."""
    workload = Workload.from_model(CONFIG, "train", dtype="bfloat16")
    lengths = np.array(LENGTHS)
    (hardest,) = simulate(CONFIG, workload, [(BATCH_SIZE, LONGEST)])
    assert hardest.batch_bytes is not None
    known = MemoryBudget(BATCH_SIZE, longest=LONGEST, model=MemoryRegressor.pretrained(workload))
    tokens = TokenBudget(BATCH_SIZE * LONGEST)
    answers = {
        "token budget": tokens.largest(lengths),
        "regressor, workload known": known.largest(lengths),
        "regressor, workload unknown": MemoryBudget(BATCH_SIZE, longest=LONGEST).largest(lengths),
    }
    return {
        "fixed": [BATCH_SIZE] * len(LENGTHS),
        **{name: [int(n) for n in found] for name, found in answers.items() if found is not None},
        "truth (simulated)": [true_largest(workload, length, hardest.batch_bytes) for length in LENGTHS],
    }


def draw(sizes: dict[str, list[int]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    looks: dict[str, dict[str, Any]] = {
        "fixed": {"color": "#888888", "linestyle": ":"},
        "token budget": {"color": "#d08a4e", "linestyle": "--"},
        "regressor, workload known": {"color": "#3b6ea5", "marker": "o", "markersize": 4},
        "regressor, workload unknown": {"color": "#9db8d2", "marker": "o", "markersize": 4},
        "truth (simulated)": {"color": "#222222", "linewidth": 1},
    }
    for name, found in sizes.items():
        axes.loglog(LENGTHS, found, label=name, **looks[name])
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="tokens of the longest sample", ylabel="samples in the batch")
    axes.set_title(
        f"As much memory as {BATCH_SIZE} samples of {LONGEST} tokens (0.5B model, training, bfloat16)", size=10
    )
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def picture() -> dict[str, Any]:
    """The figures, and the picture drawn of them."""
    torch.set_num_threads(1)
    sizes = batch_sizes()
    draw(sizes, ROOT / "docs" / "images" / "batch_sizes.png")
    return {"lengths": LENGTHS, "samples": sizes}


# Peaks: simulated and measured


TRAIN = ((1, 128), (32, 128), (4, 1024), (16, 1024), (1, 8192), (1, 32768))
OTHER = ((1, 128), (64, 128), (16, 1024), (4, 8192), (1, 32768))
POSITIONS = 32768 + 64


def measured(machine: Machine) -> Iterator[dict[str, Any]]:
    """Simulated peaks held against the device's: nine models, training with and without checkpointing, generation, forward.

    Yields the figures so far, after every workload.
    """
    figures: dict[str, Any] = {"rows": [], "left_out": [], "failed": {}}
    for name in MODELS:
        for label, workload, shapes in _workloads(name, machine):
            case = f"{name}, {label}"
            if machine.left_s() < 45:
                figures["left_out"].append(case)
                continue
            try:
                figures["rows"] += _measured_rows(case, name, workload, shapes, machine)
            except Exception as error:  # one case's failure is written down, and costs no other its place
                figures["failed"][case] = f"{type(error).__name__}: {error}"[:500]
            machine.free()
            yield figures
        if machine.dry:
            break
    yield figures


def _config(name: str, machine: Machine) -> Any:
    family = FAMILIES[name]
    sizes = family.known
    if machine.dry:
        sizes = Sizes(hidden=32, layers=1, heads=2, kv_heads=1 if family.grouped else 2, ffn=64, vocabulary=128)
    config = family.build(sizes)
    for field in ("max_position_embeddings", "n_positions"):
        if hasattr(config, field):
            setattr(config, field, POSITIONS)
    return config


def _workloads(name: str, machine: Machine) -> Iterator[tuple[str, Workload, Any]]:
    config, kind = _config(name, machine), FAMILIES[name].kind
    known: dict[str, Any] = {"dtype": "float32" if machine.dry else "bfloat16", "attention": "sdpa", "trace": False}
    small = ((1, 16), (2, 16))
    train = Workload.from_model(config, "train", **known)
    yield "train", train, small if machine.dry else TRAIN
    yield "train, checkpointing", replace(train, gradient_checkpointing=True), small if machine.dry else TRAIN
    if kind == "encoder":
        yield "forward", Workload.from_model(config, "forward", **known), small if machine.dry else OTHER
    else:
        new = 2 if machine.dry else 32
        yield (
            "generate",
            Workload.from_model(config, "generate", max_new_tokens=new, **known),
            small if machine.dry else OTHER,
        )


def _measured_rows(case: str, name: str, workload: Workload, shapes: Any, machine: Machine) -> list[dict[str, Any]]:
    config = _config(name, machine)
    model = as_random_model(config, workload, machine.device)
    found = measure(model, workload, shapes, device=DryDevice() if machine.dry else None)
    del model
    expected = simulate(config, workload, shapes)
    return [
        {
            "case": case, "num_samples": real.num_samples, "longest": dict(real.longest), "oom": real.oom,
            "measured_bytes": real.peak_bytes, "reserved_bytes": real.reserved_bytes, "simulated_bytes": fake.peak_bytes,
            "error": None if real.peak_bytes is None or fake.peak_bytes is None else fake.peak_bytes / real.peak_bytes - 1,
        }
        for real, fake in zip(found.rows, expected.rows, strict=True)
    ]  # fmt: skip


# Largest batches: predicted and found


CASES = (("0.5B", 512), ("0.5B", 4096), ("0.5B", 128), ("1.5B", 1024), ("0.5B", 8192), ("1.5B", 4096))
LIMIT_BYTES = 64 << 30


def fits(machine: Machine) -> Iterator[dict[str, Any]]:
    """The largest batch that a device takes, found by bisection, against the one that is predicted without it.

    Training steps with AdamW in bfloat16, under a limit of 64 GiB; yields the figures so far, after every case.
    """
    figures: dict[str, Any] = {"limit_bytes": _limit(machine), "rows": []}
    machine.warm_up()
    for size, longest in CASES[:1] if machine.dry else CASES:
        if machine.left_s() < 80 and not machine.dry:
            figures["rows"].append({"model": size, "longest": longest, "left out": "no time"})
            continue
        try:
            row = _row(machine, size, 8 if machine.dry else longest)
        except Exception as error:  # written down; the other cases go on
            row = {"model": size, "longest": longest, "error": f"{type(error).__name__}: {error}"[:500]}
        machine.free()
        figures["rows"].append(row)
        yield figures
    yield figures


def _limit(machine: Machine) -> int:
    return (8 << 20) if machine.dry else min(LIMIT_BYTES, int(0.9 * machine.total_bytes))


def _row(machine: Machine, size: str, longest: int) -> dict[str, Any]:
    limit = _limit(machine)
    config = config_of(size, dry=machine.dry)
    dtype = "float32" if machine.dry else "bfloat16"
    budget = MemoryBudget.from_model(config, memory=limit, mode="train", dtype=dtype, headroom=1.0)
    found = budget.largest(np.asarray([longest]))
    assert found is not None
    predicted = int(found[0])
    true = predicted if machine.dry else _largest(machine, size, longest, limit, max(predicted, 1))
    return {"model": size, "longest": longest, "predicted": predicted, "true": true, "share": predicted / max(true, 1)}


def _largest(machine: Machine, size: str, longest: int, limit: int, guess: int) -> int:
    torch.cuda.set_per_process_memory_fraction(limit / machine.total_bytes)
    model = build(size, machine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    _fits(model, optimizer, 1, min(longest, 128))  # gradients and optimizer state are there from now on
    low, high = 0, 0
    number = guess
    while high - low != 1 and machine.left_s() > 15:  # doubling, then halving the gap: about ten steps
        if _fits(model, optimizer, number, longest):
            low = number
        else:
            high = number
        number = (low + high) // 2 if high else max(low + 1, round(low * 1.1))
    return low


def _fits(model: Any, optimizer: Any, number: int, longest: int) -> bool:
    failed = False
    try:
        _step(model, optimizer, number, longest)
        torch.cuda.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        failed = True
    if failed:  # outside the except block: its traceback kept the batch's tensors alive
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return not failed


def _step(model: Any, optimizer: Any, number: int, longest: int) -> None:
    """The second of two batches of an update: gradients are there when it runs, as in any accumulation."""
    ids = torch.randint(3, model.config.vocab_size, (number, longest), device=model.device)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0 if number > 1 else 1
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


def table(figures: dict[str, Any]) -> str:
    """Peaks by case, or largest batches."""
    if "limit_bytes" in figures:
        found = [row for row in figures["rows"] if "true" in row]
        lines = [
            [f"{row['model']}, {row['longest']} tokens", str(row["predicted"]), str(row["true"]), f"{row['share']:.0%}"]
            for row in found
        ]
        return format_table(["largest batch", "predicted", "true", "share"], lines)
    if "samples" in figures:
        lines = [[name, *map(str, sizes)] for name, sizes in figures["samples"].items()]
        return format_table(["samples of", *map(str, figures["lengths"])], lines)
    cases: dict[str, list[float]] = {}
    for row in figures["rows"]:
        if row["error"] is not None:
            cases.setdefault(row["case"], []).append(row["error"])
    lines = [[case, str(len(e)), f"{min(e):+.2%}", f"{max(e):+.2%}"] for case, e in cases.items()]
    left = ", ".join([*figures["left_out"], *figures["failed"]]) or "none"
    return format_table(["simulated over measured", "shapes", "least", "most"], lines) + f"\nleft out or failed: {left}"
