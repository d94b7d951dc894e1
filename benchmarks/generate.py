"""Generation that runs out of memory: what recovery costs when nothing fails, and when something does.

Without a GPU: an allocator stand-in raises the real error when a batch holds more tokens than a limit.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import spread
from dynagroup.budget.base import Budget
from dynagroup.budget.tokens import TokenBudget
from dynagroup.oom import (
    LearningBudget,
    OomSafeBackward,
    generate_dataset,
    generate_with_oom_retry,
    run_with_oom_retry,
)
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import TOKENS, BatchShape

NUM_TEXTS, NEW_TOKENS, PLANNED_TOKENS = 2000, 32, 800
WORDS = [f"w{i}" for i in range(500)]


def microseconds(run: Callable[[], Any], calls: int = 2000, repeats: int = 9) -> dict[str, float]:
    taken = []
    for _ in range(repeats):
        start = time.process_time()  # one thread: the machine's other work does not count
        for _ in range(calls):
            run()
        taken.append((time.process_time() - start) / calls * 1e6)
    return spread(taken)


def wrapper() -> dict[str, Any]:
    """Microseconds that each wrapper adds to a call that does nothing and fails never."""
    torch.set_num_threads(1)
    batch = {"input_ids": torch.ones(8, 64, dtype=torch.long), "attention_mask": torch.ones(8, 64, dtype=torch.long)}
    model = small_model()
    answer = torch.ones(8, 80, dtype=torch.long)
    model.generate = lambda **_: answer
    weight = torch.nn.Linear(1, 1)
    loss = lambda _: weight.weight.sum()  # noqa: E731
    safe = OomSafeBackward(weight, weigh="samples")
    figures = {
        "run_with_oom_retry": microseconds(lambda: run_with_oom_retry(len, batch)),
        "generate_with_oom_retry": microseconds(lambda: generate_with_oom_retry(model, batch, max_new_tokens=16)),
        "plain backward": microseconds(lambda: loss(batch).backward()),
        "OomSafeBackward": microseconds(lambda: safe(loss, batch)),
    }
    return {"unit": "microseconds a call", **figures}


def small_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=504, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)).eval()


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *WORDS]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def texts_of(count: int) -> list[str]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(3.2, 0.6, count), 2, 200).astype(int)
    return [" ".join(random.choice(WORDS, size=n)) for n in lengths]


class Device:
    """Fails a step of generation whose cache would hold more than ``limit`` tokens."""

    def __init__(self, model: Any) -> None:
        self.limit = float("inf")
        self.failures: list[tuple[int, int]] = []
        model.model.register_forward_pre_hook(self._claim, with_kwargs=True)

    def _claim(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        rows, columns = kwargs["input_ids"].shape
        shape = (rows, columns + kwargs["past_key_values"].get_seq_length())
        if shape[0] * shape[1] > self.limit:
            self.failures.append(shape)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {shape}")


class Known(Budget):
    """A run that knew the limit: prompts and new tokens together."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * (shape.longest[TOKENS] + NEW_TOKENS) <= self._limit


def generation(repeats: int = 3) -> dict[str, Any]:
    """A run in which 5 % of the planned batches do not fit, against one that was planned with the limit."""
    torch.set_num_threads(1)
    model, tokenizer, texts = small_model(), small_tokenizer(), texts_of(NUM_TEXTS)
    lengths = np.array([len(text.split()) for text in texts])
    budget = TokenBudget(PLANNED_TOKENS)
    planned = list(LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1))
    sizes = np.array([len(batch) * (lengths[batch].max() + NEW_TOKENS) for batch in planned])
    device = Device(model)
    limit = float(np.quantile(sizes, 0.95))
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "progress": False}
    generate_dataset(model, tokenizer, texts[:200], budget=budget, **options)  # warm up
    device.limit = limit
    taken: dict[str, list[float]] = {"learned": [], "knew": []}
    elapsed: dict[str, list[float]] = {"learned": [], "knew": []}
    for _ in range(repeats):
        for name, plan in (("learned", budget), ("knew", budget & Known(limit))):
            learned, device.failures = LearningBudget(), []
            start, wall = (
                time.process_time(),
                time.perf_counter(),
            )  # one thread: the machine's other work does not count
            results = generate_dataset(model, tokenizer, texts, budget=plan, learned=learned, **options)
            taken[name].append(time.process_time() - start)
            elapsed[name].append(time.perf_counter() - wall)
            assert len(results) == NUM_TEXTS
            if name == "learned":
                report, failures = learned.report, list(device.failures)
            else:
                assert not device.failures
    ratios = [a / b for a, b in zip(taken["learned"], taken["knew"], strict=True)]
    return {
        "texts": NUM_TEXTS, "new_tokens": NEW_TOKENS, "planned_batches": len(planned),
        "planned_batches_that_do_not_fit": float((sizes > limit).mean()), "limit_tokens": limit,
        "out_of_memory_errors": report.num_ooms, "seconds_wasted": report.wasted_s,
        "same_shape_failed_twice_in_a_row": any(a == b for a, b in zip(failures, failures[1:], strict=False)),
        "cpu_seconds": {name: spread(values) for name, values in taken.items()}, "ratio": spread(ratios),
        "wall_seconds": {name: spread(values) for name, values in elapsed.items()},
    }  # fmt: skip


def work() -> dict[str, Any]:
    """The same two runs with a model that only counts: what they ask of it, whatever else the machine does."""
    model, tokenizer, texts = small_model(), small_tokenizer(), texts_of(NUM_TEXTS)
    lengths = np.array([len(text.split()) for text in texts])
    budget = TokenBudget(PLANNED_TOKENS)
    planned = list(LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1))
    limit = float(np.quantile([len(batch) * (lengths[batch].max() + NEW_TOKENS) for batch in planned], 0.95))
    counts: dict[str, dict[str, int]] = {}
    for name, plan in (("learned", budget), ("knew", budget & Known(limit))):
        count = counts[name] = {"forward_passes": 0, "tokens": 0}

        def generate(count: dict[str, int] = count, **batch: Any) -> torch.Tensor:
            rows, columns = batch["input_ids"].shape
            for step in range(NEW_TOKENS):
                if rows * (columns + step) > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                count["forward_passes"] += 1
                count["tokens"] += rows if step else rows * columns
            return torch.nn.functional.pad(batch["input_ids"], (0, NEW_TOKENS), value=5)

        model.generate = generate
        options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "progress": False}
        generate_dataset(model, tokenizer, texts, budget=plan, learned=LearningBudget(), **options)
    ratio = {key: counts["learned"][key] / counts["knew"][key] for key in counts["knew"]}
    return {"texts": NUM_TEXTS, "new_tokens": NEW_TOKENS, **counts, "ratio": ratio}


def update(repeats: int = 36) -> dict[str, Any]:
    """Seconds that forward, backward and exchange of an update take on two gloo ranks of one machine, DDP's way and ours.

    A Llama of 5 million parameters; of one batch, where DDP's exchange overlaps with all of the backward pass, and of four.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_update_rank, (folder, repeats), nprocs=2, join=True)
        taken = torch.load(Path(folder) / "0.pt", weights_only=False)
    figures = {}
    for batches, seconds in taken.items():
        ratios = [a / b for a, b in zip(seconds["OomSafeBackward"], seconds["DDP"], strict=True)]
        figures[batches] = {"seconds": {name: spread(s) for name, s in seconds.items()}, "ratio": spread(ratios)}
    return {"ranks": 2, "parameters": sum(p.numel() for p in _llama().parameters()), "batches_an_update": figures}


def _update_rank(rank: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=120), 2, rank)
    plain, guarded = (DistributedDataParallel(_llama()) for _ in range(2))
    safe = OomSafeBackward(guarded, weigh="samples")
    ids = torch.randint(3, 2048, (4, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def by_ddp(ends_update: bool) -> None:
        with nullcontext() if ends_update else plain.no_sync():
            plain(**batch).loss.backward()

    def safely(ends_update: bool) -> None:
        safe(lambda part: guarded(**part).loss, batch, ends_update=ends_update)

    ways = {"DDP": by_ddp, "OomSafeBackward": safely}
    taken = {batches: {name: [] for name in ways} for batches in (1, 4)}
    for batches, name in [(b, n) for _ in range(repeats) for b in taken for n in ways]:
        plain.zero_grad()
        guarded.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        for k in range(batches):
            ways[name](k == batches - 1)
        taken[batches][name].append(time.perf_counter() - start)
    kept = {batches: {name: values[2:] for name, values in seconds.items()} for batches, seconds in taken.items()}
    torch.save(kept, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4, "intermediate_size": 1024}
    return LlamaForCausalLM(LlamaConfig(vocab_size=2048, **sizes))
