"""Memory on a GPU: peaks, simulated and measured; largest batches, predicted and found."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build, config_of, noted
from benchmarks.record import table
from dynagroup import MemoryBudget
from dynagroup.device import CudaDevice
from dynagroup.memory import Workload, measure, simulate
from dynagroup.memory.trace.model import as_random_model
from regressor.measure_gpu import DRY, MODELS, DryDevice, Plan, rows_of


def measured(machine: Machine) -> Iterator[dict[str, Any]]:
    """Simulated peaks held against the device's: nine models, training, generation or a forward pass; figures after each."""
    figures: dict[str, Any] = {"rows": [], "left_out": [], "failed": {}}
    plan = DRY if machine.dry else Plan()
    device = DryDevice() if machine.dry else CudaDevice()
    for name in MODELS[:1] if machine.dry else MODELS:
        if not machine.has(60):
            figures["left_out"].append(name)
            continue
        with noted(figures["failed"], name):
            figures["rows"] += rows_of(name, plan, device)
        machine.free()
        yield figures
    yield figures


def logits(_machine: Machine) -> dict[str, Any]:
    """Samples of 128 tokens that 80 GB allow in training, with and without the copy of the logits that a loop may hold."""
    figures = {}
    for name, checkpointing in (("plain", False), ("checkpointing", True)):
        num_samples = {}
        for keeps_outputs in (True, False):
            budget = MemoryBudget.from_model(
                config_of("0.5B"),
                "80GB",
                dtype="bf16",
                gradient_checkpointing=checkpointing,
                keeps_outputs=keeps_outputs,
            )
            num_samples[keeps_outputs] = int(budget.most_samples(128)[0])
        figures[name] = {
            "with_copy": num_samples[True],
            "without_copy": num_samples[False],
            "more": num_samples[False] / num_samples[True] - 1,
        }
    return figures


SIZES = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "use_cache": False,
}
DRY_SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
SHAPES = ((4, 512), (8, 512), (16, 512))
"""Samples, and tokens of each."""
GEMMA2 = {"num_attention_heads": 8, "head_dim": 128, "sliding_window": 1024}
GEMMA3 = {"num_attention_heads": 4, "head_dim": 256, "sliding_window": 512}
LLAMA = {"num_attention_heads": 16}
PACKED: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("gemma2", "Gemma2Config", GEMMA2, "eager"),
    ("gemma3", "Gemma3TextConfig", GEMMA3, "sdpa"),
    ("gemma3", "Gemma3TextConfig", GEMMA3, "eager"),
    ("llama", "LlamaConfig", LLAMA, "sdpa"),
    ("llama", "LlamaConfig", LLAMA, "eager"),
)
"""Name, class of the config, sizes, attention."""


def packed(machine: Machine) -> Iterator[dict[str, Any]]:
    """Peaks of training steps with packed samples of 512 tokens: layers that store their scores, and two ways to attend."""
    import transformers as hf

    figures: dict[str, Any] = {"rows": []}
    device = DryDevice() if machine.dry else CudaDevice()
    shapes = [(2, 16)] if machine.dry else list(SHAPES)
    for name, kind, sizes, attention in PACKED:
        sizes_of_model = SIZES | sizes
        if machine.dry:
            sizes_of_model |= DRY_SIZES
        config = getattr(hf, kind)(**sizes_of_model)
        workload = Workload.from_model(
            config, "train", dtype="bfloat16", attention=attention, layout="packed", trace=False
        )
        model = as_random_model(config, workload, device.device)
        real = measure(model, workload, shapes, device=device)
        simulated = simulate(config, workload, shapes)
        del model
        for row, expected in zip(real.rows, simulated.rows, strict=True):
            figures["rows"].append(
                {
                    "model": name,
                    "mode": f"packed, {attention}",
                    "attention": attention,
                    "oom": row.oom,
                    "num_samples": row.num_samples,
                    "longest": row.longest,
                    "batch_bytes": row.batch_bytes,
                    "simulated_batch_bytes": expected.batch_bytes,
                }
            )
        machine.free()
        yield figures


CASES = (
    ("0.5B", 512),
    ("0.5B", 4096),
    ("0.5B", 128),
    ("1.5B", 1024),
    ("0.5B", 8192),
    ("1.5B", 4096),
)
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
            with noted(row, "error"):
                row |= _largest(machine, size, 8 if machine.dry else longest, limit)
            machine.free()
        else:
            row["left out"] = "no time"
        figures["rows"].append(row)
        yield figures


def _largest(machine: Machine, size: str, longest: int, limit: int) -> dict[str, Any]:
    config = config_of(size, dry=machine.dry)
    dtype = "float32" if machine.dry else "bfloat16"
    budget = MemoryBudget.from_model(config, memory=limit, mode="train", dtype=dtype, headroom=1.0)
    predicted = int(np.asarray(budget.largest(np.asarray([longest])))[0])
    true = predicted
    if not machine.dry:
        true = _largest_that_fits(machine, size, longest, limit, guess=max(predicted, 1))
    return {"predicted": predicted, "true": true, "share": predicted / max(true, 1)}


def _largest_that_fits(machine: Machine, size: str, longest: int, limit: int, guess: int) -> int:
    machine.limit(limit)
    model = build(size, machine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    fits = partial(_fits, machine, model, optimizer)
    fits(1, min(longest, 128))  # gradients and optimizer state are there from now on
    return _last_true(partial(fits, longest=longest), guess, lambda: machine.has(15))


def _last_true(holds: Callable[[int], bool], guess: int, goes_on: Callable[[], bool]) -> int:
    """Growing by a tenth, then halving the gap: about ten steps."""
    low = 0
    high = 0  # nothing has failed yet
    number = guess
    while high - low != 1 and goes_on():
        if holds(number):
            low = number
        else:
            high = number
        if high:
            number = (low + high) // 2
        else:
            number = max(low + 1, round(low * 1.1))
    return low


def _fits(machine: Machine, model: Any, optimizer: Any, number: int, longest: int) -> bool:
    """The second of two batches of an update: gradients are there when it runs, as in any accumulation."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        ids = torch.randint(3, model.config.vocab_size, (number, longest), device=model.device)
        mask = torch.ones_like(ids)
        mask[0, 0] = 0 if number > 1 else 1
        model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    fits = machine.fits(step)
    if not fits:
        optimizer.zero_grad(set_to_none=True)
    return fits


def shown(figures: dict[str, Any]) -> list[str]:
    left = [*figures.get("left_out", ()), *figures.get("failed", ())]
    return [*tabled(figures), "", f"left out or failed: {', '.join(left) or 'none'}"]


def tabled(figures: dict[str, Any]) -> list[str]:
    """Peaks by case, or largest batches."""
    if "limit_bytes" in figures:
        head = "| model | tokens | predicted | true | share |"
        template = "{model} | {longest} | {predicted} | {true} | {share:.0%}"
        return table(figures["rows"], head, template)
    cases: dict[str, list[float]] = {}
    for row in figures["rows"]:
        if not row["oom"]:
            error = row["simulated_batch_bytes"] / row["batch_bytes"] - 1
            cases.setdefault(f"{row['model']}, {row['mode']}", []).append(error)
    rows = []
    for case, errors in cases.items():
        row = {"case": case, "shapes": len(errors), "least": min(errors), "most": max(errors)}
        rows.append(row)
    head = "| simulated over measured, without static memory | shapes | least | most |"
    return table(rows, head, "{case} | {shapes} | {least:+.2%} | {most:+.2%}")
