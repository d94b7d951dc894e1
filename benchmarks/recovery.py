"""Running out of memory: what recovery costs when nothing fails and when something does, and whether results stay the same.

On the CPU a stand-in raises the real error when a batch holds more tokens than a limit. On a GPU the process's share of the
device is lowered until the batch fails.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data import lognormal, word_tokenizer
from benchmarks.machine import Machine, build, on_ranks, paired
from benchmarks.methods import planned
from benchmarks.record import spread
from dynagroup import (
    Budget,
    LearningBudget,
    OomSafeBackward,
    TokenBudget,
    generate_dataset,
    generate_with_oom_retry,
    run_with_oom_retry,
)
from dynagroup.shapes import BatchShape
from dynagroup.testing import Allocator

NUM_TEXTS = 2000
NEW_TOKENS = 32
PLANNED_TOKENS = 800
WORDS = 500


class Known(Budget):
    """A run that knew the limit: prompts and new tokens together."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def fits(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * (shape.longest["tokens"] + NEW_TOKENS) <= self._limit


def texts_to_write() -> tuple[list[str], list[int], float]:
    """Texts, what each planned batch takes, and a limit that 5 % of them do not meet."""
    lengths = lognormal(NUM_TEXTS, mean=29.0, cv=0.66, shortest=2, longest=200)
    texts = [" ".join([f"w{i % WORDS}"] * int(n)) for i, n in enumerate(lengths)]
    batches = planned(lengths, TokenBudget(PLANNED_TOKENS)).batches
    sizes = [len(batch) * (int(lengths[batch].max()) + NEW_TOKENS) for batch in batches]
    return texts, sizes, float(np.quantile(sizes, 0.95))


def asked_of_a_model(budget: Budget) -> dict[str, int]:
    """What a run that was planned so asks of a model that only counts, whatever else the machine does."""
    texts, _, limit = texts_to_write()
    allocator = Allocator(limit)
    asked = {"forward_passes": 0, "tokens": 0}

    def generate(**batch: Any) -> torch.Tensor:
        rows, columns = batch["input_ids"].shape
        for step in range(NEW_TOKENS):
            allocator.claim(rows * (columns + step))
            asked["forward_passes"] += 1
            asked["tokens"] += rows if step else rows * columns
        return torch.nn.functional.pad(batch["input_ids"], (0, NEW_TOKENS), value=5)

    model = build("small").eval()
    model.generate = generate
    generate_dataset(
        model,
        word_tokenizer(WORDS),
        texts,
        budget=budget,
        max_new_tokens=NEW_TOKENS,
        progress=False,
        learned=LearningBudget(),
    )
    return {**asked, "failures": len(allocator.failures)}


def work(_machine: Machine) -> dict[str, Any]:
    """Texts of which 5 % of the planned batches do not fit, against a run that was planned with the limit."""
    _, sizes, limit = texts_to_write()
    budget = TokenBudget(PLANNED_TOKENS)
    learned = asked_of_a_model(budget)
    knew = asked_of_a_model(budget & Known(limit))
    does_not_fit = np.array(sizes) > limit
    return {
        "texts": NUM_TEXTS,
        "new_tokens": NEW_TOKENS,
        "planned_batches": len(sizes),
        "batches_that_do_not_fit": float(does_not_fit.mean()),
        "learned": learned,
        "knew": knew,
        "ratio": {key: learned[key] / knew[key] for key in ("forward_passes", "tokens")},
    }


def update(_machine: Machine, repeats: int = 36) -> dict[str, Any]:
    """Seconds on the wall that forward, backward and exchange of an update take, the plain way and ours, on one process and on
    two gloo ranks beside DDP; of one batch, where DDP's exchange overlaps with all of the backward pass, and of four."""
    figures = {}
    for ranks in (1, 2):
        for batches, times in on_ranks(ranks, _updates, repeats).items():
            figures[f"{batches} x 512 tokens, {ranks} process(es)"] = {
                "seconds": spread(times["safe"]),
                "ratio": paired(times["safe"], times["plain"]),
            }
    num_parameters = sum(parameter.numel() for parameter in build("5M").parameters())
    return {"parameters": num_parameters, "updates": figures}


def _updates(repeats: int) -> dict[int, dict[str, list[float]]]:
    """Seconds of updates of one batch and of four, the plain way and ours."""
    alone = dist.get_world_size() == 1
    plain = _wrapped(alone)
    guarded = _wrapped(alone)
    safe = OomSafeBackward(guarded, weigh="samples")
    ids = torch.randint(3, 2048, (8, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    def plainly(ends_update: bool) -> None:
        with nullcontext() if ends_update or alone else plain.no_sync():
            plain(**batch).loss.backward()

    def safely(ends_update: bool) -> None:
        safe(lambda part: guarded(**part).loss, batch, ends_update=ends_update)

    ways = {"plain": plainly, "safe": safely}
    times: dict[int, dict[str, list[float]]] = {}
    for number in (1, 4):
        times[number] = {name: [] for name in ways}
    for turn, number, name in product(range(repeats), times, ways):
        plain.zero_grad()
        guarded.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        for place in range(number):
            ways[name](place == number - 1)
        seconds = time.perf_counter() - start
        if turn >= 2:  # the first ones fill caches
            times[number][name].append(seconds)
    return times


def _wrapped(alone: bool) -> Any:
    return build("5M") if alone else DistributedDataParallel(build("5M"))


# On a GPU: recovery, equality of results, and what is left in memory


class Limited:
    """A model, and a limit on memory: the device's for this process, or dry a stand-in that counts tokens in one layer."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.allocator = Allocator(float("inf"))
        self.model = build("oom", machine).float()
        if not machine.is_gpu:
            self.allocator.in_forward(self.model.model.layers[1])

    def limit(self, num_bytes: float) -> None:
        self.allocator.limit = 40
        self.machine.free()
        self.machine.limit(int(num_bytes))

    def unlimited(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """What it returns; and a limit that leaves six tenths of the memory that it took."""
        self.machine.free()
        before = self.machine.held_bytes()
        result = run()
        taken = self.machine.peak_bytes() - before
        return result, before + 0.6 * taken

    def batch(
        self, seed: int, num_samples: int, longest: int, *, left: bool = False
    ) -> dict[str, torch.Tensor]:
        if self.machine.dry:
            num_samples = 8
            longest = 16
        lengths = np.random.default_rng(seed).integers(longest // 4, longest + 1, num_samples)
        lengths[0] = longest
        columns = np.arange(longest)[None]
        mask = columns < lengths[:, None]
        if left:
            mask = mask[:, ::-1].copy()
        vocabulary = self.model.config.vocab_size
        ids = np.random.default_rng(seed).integers(3, vocabulary, mask.shape) * mask
        return {
            "input_ids": torch.from_numpy(ids).to(self.machine.device),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)).to(self.machine.device),
        }


def _generation(machine: Machine) -> dict[str, Any]:
    limited = Limited(machine)
    learned = LearningBudget()
    batch = limited.batch(0, 64, 1024, left=True)
    generate = partial(limited.model.generate, **batch, max_new_tokens=8, do_sample=False)
    whole, limit_bytes = limited.unlimited(generate)
    limited.limit(limit_bytes)
    generated = generate_with_oom_retry(
        limited.model, batch, learned=learned, max_new_tokens=8, do_sample=False
    )
    is_equal = generated.output == whole
    return {
        "num_splits": generated.num_splits,
        "tokens_equal": float(is_equal.float().mean()),
        "out_of_memory_errors": learned.report.num_ooms,
    }


@torch.no_grad()
def _forward(machine: Machine) -> dict[str, Any]:
    limited = Limited(machine)
    batch = limited.batch(1, 64, 1024)

    def forward(part: dict[str, torch.Tensor]) -> torch.Tensor:
        return limited.model(**part).logits[:, 0].float().cpu()

    whole, limit_bytes = limited.unlimited(lambda: forward(batch))
    limited.limit(limit_bytes)
    before = machine.held_bytes()
    parts = list(run_with_oom_retry(forward, batch))
    difference = torch.cat(parts) - whole
    return {
        "num_parts": len(parts),
        "largest_difference": float(difference.abs().max()),
        "bytes_left_over": machine.held_bytes() - before,
    }


def _training(machine: Machine) -> dict[str, Any]:
    machine.free()
    whole, _ = _trained(machine, None)
    parts, num_ooms = _trained(machine, 0.75 * machine.peak_bytes())
    difference = (parts - whole).abs().max()
    return {"out_of_memory_errors": num_ooms, "largest_difference": float(difference)}


def _trained(machine: Machine, limit_bytes: float | None) -> tuple[torch.Tensor, int]:
    """Parameters after updates of two batches, and how often it ran out of memory."""
    limited = Limited(machine)
    optimizer = torch.optim.SGD(limited.model.parameters(), lr=0.1)
    backward = OomSafeBackward(limited.model)
    if limit_bytes is not None:
        limited.limit(limit_bytes)
    for step in range(4 if machine.dry else 20):
        batch = limited.batch(step, 16, 1024)
        is_padding = batch["attention_mask"] == 0
        batch["labels"] = batch["input_ids"].masked_fill(is_padding, -100)
        ends = step % 2 == 1
        backward(lambda part: limited.model(**part).loss, batch, loss_scale=0.5, ends_update=ends)
        if ends:
            optimizer.step()
            optimizer.zero_grad()
    parameters = torch.cat([p.detach().flatten().cpu() for p in limited.model.parameters()])
    return parameters, backward.learned.report.num_ooms


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Generation, forward and training under a limit that makes them fail: one that made nothing fail does not count."""
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: dict[str, Any] = {}
    checks = {"generation": _generation, "forward": _forward, "training": _training}
    for name, check in checks.items():
        figures[name] = check(machine)
        machine.free()
        yield figures
    assert figures["generation"]["num_splits"] > 0, figures
    assert figures["generation"]["tokens_equal"] >= 0.99, figures
    assert figures["forward"]["num_parts"] > 1, figures
    assert figures["forward"]["largest_difference"] <= 1e-3, figures
    assert figures["forward"]["bytes_left_over"] <= 0, figures
    assert figures["training"]["out_of_memory_errors"] > 0, figures
    assert figures["training"]["largest_difference"] < 1e-4, figures
