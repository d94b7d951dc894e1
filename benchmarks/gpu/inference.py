"""Generation and embedding of a dataset: fixed batches, sorted ones, dynabatch's, ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build
from benchmarks.methods import Update
from benchmarks.record import spread
from dynagroup import LengthAwareBatchSampler, MemoryBudget, TokenBudget

__all__ = ["embed", "generate"]

NEW_TOKENS = 64


def generate(machine: Machine) -> Iterator[dict[str, Any]]:
    """Greedy decoding of 64 tokens with the 0.5B model."""
    yield from _run(machine, "generate", 2 if machine.dry else NEW_TOKENS, 1024, 1024)


def embed(machine: Machine) -> Iterator[dict[str, Any]]:
    """One forward pass over every text; the last hidden states are averaged."""
    yield from _run(machine, "forward", 0, 2048, 4096)


def _run(machine: Machine, mode: str, new_tokens: int, longest: int, count: int) -> Iterator[dict[str, Any]]:
    longest = 16 if machine.dry else longest
    lengths = _lengths(24 if machine.dry else count, longest)
    model = build("0.5B", machine, train=False)
    figures: dict[str, Any] = {"new_tokens": new_tokens, "samples": len(lengths), "methods": {}, "failed": {}}
    methods = _methods(lengths, 4 if machine.dry else 64, machine, mode, new_tokens)
    machine.warm_up()
    slowest = 45.0
    for name, batches in methods.items():
        left = machine.left_s()
        if left < 15 + slowest and not machine.dry:
            figures["failed"][name] = "left out: no time"
            continue
        try:
            figures["methods"][name] = _figures(model, batches(), lengths, new_tokens, machine)
        except Exception as error:  # written down; the others go on
            figures["failed"][name] = f"{type(error).__name__}: {error}"[:500]
        slowest = max(slowest, left - machine.left_s())
        yield figures
    yield figures


def _lengths(count: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(1).lognormal(np.log(longest / 8), 0.83, count)
    drawn[: max(1, count // 500)] = longest
    return np.clip(drawn, 4, longest).astype(np.int32)


def _methods(
    lengths: np.ndarray, fixed: int, machine: Machine, mode: str, new_tokens: int
) -> dict[str, Callable[[], Update]]:
    order = np.random.default_rng(0).permutation(len(lengths))
    falling = np.argsort(-lengths, kind="stable")
    in_fixed = lambda by: [by[k : k + fixed].tolist() for k in range(0, len(by), fixed)]  # noqa: E731
    return {
        "fixed": lambda: in_fixed(order),
        "sorted, fixed": lambda: in_fixed(falling),
        "dynabatch": lambda: _dynabatch(lengths, fixed),
        "dynagroup, tokens": lambda: list(
            LengthAwareBatchSampler(
                lengths + new_tokens, TokenBudget(fixed * int(lengths.max() + new_tokens)), rank=0, world_size=1
            )
        ),
        "dynagroup, memory": lambda: list(
            LengthAwareBatchSampler(lengths, _memory_budget(fixed, machine, mode, new_tokens), rank=0, world_size=1)
        ),
    }


def _memory_budget(fixed: int, machine: Machine, mode: str, new_tokens: int) -> MemoryBudget:
    from benchmarks.gpu.models import config_of

    options: dict[str, Any] = {"max_new_tokens": new_tokens} if mode == "generate" else {}
    dtype = "float32" if machine.dry else "bfloat16"
    memory = machine.total_bytes
    return MemoryBudget.from_model(config_of("0.5B", dry=machine.dry), memory=memory, mode=mode, dtype=dtype, **options)


def _dynabatch(lengths: np.ndarray, fixed: int) -> Update:
    from dynabatch.sampler import DynaBatchSampler

    words, characters = (lengths * 0.75).astype(int).tolist(), (lengths * 4).tolist()
    return [
        list(map(int, batch)) for batch in DynaBatchSampler(lengths.tolist(), words, characters, fixed, threshold=0.9)
    ]


def _figures(model: Any, batches: Update, lengths: np.ndarray, new_tokens: int, machine: Machine) -> dict[str, Any]:
    machine.free()
    covered = sorted(index for batch in batches for index in batch)
    assert covered == list(range(len(lengths))), "a method lost or repeated samples"
    taken: list[float] = []
    for batch in batches:
        width = int(lengths[batch].max())
        counts = torch.as_tensor(lengths[batch], device=machine.device)
        mask = torch.arange(width, device=machine.device)[None] >= width - counts[:, None]
        ids = torch.randint(3, model.config.vocab_size, mask.shape, device=machine.device) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}

        def work(inputs: dict[str, Any] = inputs) -> None:
            with torch.no_grad():
                if new_tokens:
                    model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
                else:
                    model.model(**inputs).last_hidden_state.mean(1).cpu()

        if not taken:
            work()
        taken.append(machine.seconds(work))
    total = sum(taken)
    padded = sum(len(b) * int(lengths[b].max()) for b in batches)
    return {
        "samples_per_s": len(lengths) / total, "batches": len(batches), "padding": 1 - int(lengths.sum()) / padded,
        "peak_bytes": machine.peak_bytes(), "seconds_a_batch": spread(taken),
    }  # fmt: skip
