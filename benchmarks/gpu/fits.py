"""The largest batch that a device takes, found by bisection, against the one that is predicted without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build, config_of
from dynagroup import MemoryBudget
from dynagroup.device import is_out_of_memory

__all__ = ["run"]

CASES = (("0.5B", 512), ("0.5B", 4096), ("0.5B", 128), ("1.5B", 1024), ("0.5B", 8192), ("1.5B", 4096))
LIMIT_BYTES = 64 << 30


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Training steps with AdamW in bfloat16, under a limit of 64 GiB; yields the figures so far, after every case."""
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
