"""Real out-of-memory errors on a GPU: recovery, equality of results, and what is left in memory.

The process's share of the device is lowered with ``torch.cuda.set_per_process_memory_fraction`` until the batch fails. Without a
GPU (``--dry``) the same checks run against a stand-in that counts tokens in one layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.machine import Machine
from dynagroup.oom import LearningBudget, OomSafeBackward, generate_with_oom_retry, run_with_oom_retry

__all__ = ["figures", "run"]

VOCAB = 8192


class Limited:
    """A limit on memory: the real one of a CUDA process, or a stand-in."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.dry, self.device = machine, not machine.is_gpu, machine.device
        self._limit = float("inf")

    def watch(self, model: Any) -> None:
        if self.dry:
            model.model.layers[1].register_forward_pre_hook(self._claim, with_kwargs=True)

    def _claim(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[0] * hidden.shape[1] > self._limit:
            raise torch.OutOfMemoryError("CUDA out of memory (stand-in)")

    def limit_to(self, tokens: float, used_bytes: int) -> None:
        """Leave memory for about so many tokens' worth of the peak that ``used_bytes`` was."""
        self._limit = tokens
        if not self.dry:
            self.machine.free()
            torch.cuda.set_per_process_memory_fraction(min(1.0, used_bytes / self.machine.total_bytes), self.device)

    def lift(self) -> None:
        self._limit = float("inf")
        if not self.dry:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def peak_of(self, run: Callable[[], Any]) -> tuple[Any, int, int]:
        """(what it returns, bytes allocated before, peak bytes)"""
        self.machine.free()
        before = 0 if self.dry else torch.cuda.memory_allocated(self.device)
        return run(), before, self.machine.peak_bytes()


def num_steps(dry: bool) -> int:
    return 2 if dry else 10


def llama(device: torch.device, dtype: torch.dtype, dry: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width, vocabulary = (32, 64) if dry else (1024, VOCAB)
    sizes: Any = {
        "hidden_size": width,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "intermediate_size": 2 * width,
    }
    config = LlamaConfig(vocab_size=vocabulary, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    return LlamaForCausalLM(config).to(device=device, dtype=dtype)


def batch_of(seed: int, device: torch.device, num_samples: int, longest: int, *, left: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 4, longest + 1, (num_samples,), generator=generator)
    lengths[0] = longest
    columns = torch.arange(longest)[None]
    mask = (columns >= longest - lengths[:, None] if left else columns < lengths[:, None]).long()
    ids = torch.randint(3, 64 if device.type == "cpu" else VOCAB, mask.shape, generator=generator) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: value.to(device) for name, value in batch.items()}


def check_generation(device: Limited, dry: bool) -> dict[str, Any]:
    model = llama(device.device, torch.float32, dry).eval()
    device.watch(model)
    batch = batch_of(0, device.device, *((8, 16) if dry else (64, 1024)), left=True)
    del batch["labels"]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    whole, before, peak = device.peak_of(lambda: model.generate(**batch, **options))
    device.limit_to(40, before + int(0.6 * (peak - before)))
    learned = LearningBudget()
    start = time.perf_counter()
    got = generate_with_oom_retry(model, batch, learned=learned, **options)
    seconds = time.perf_counter() - start
    device.lift()
    return {
        "num_splits": got.num_splits, "tokens_equal": float((got.sequences == whole).float().mean()),
        "out_of_memory_errors": learned.report.num_ooms, "seconds": seconds, "peak_bytes_unsplit": peak,
    }  # fmt: skip


def check_forward_leaves_nothing(device: Limited, dry: bool) -> dict[str, Any]:
    model = llama(device.device, torch.float32, dry).eval()
    device.watch(model)
    batch = batch_of(1, device.device, *((8, 16) if dry else (64, 1024)))
    del batch["labels"]
    forward = lambda part: model(**part).logits[:, 0].float().cpu()  # noqa: E731
    with torch.no_grad():
        whole, before, peak = device.peak_of(lambda: forward(batch))
        device.limit_to(40, before + int(0.6 * (peak - before)))
        (parts, after, _) = device.peak_of(lambda: run_with_oom_retry(forward, batch))
    device.lift()
    left_over = 0 if dry else torch.cuda.memory_allocated(device.device) - after
    difference = float((torch.cat(parts) - whole).abs().max())
    return {"num_parts": len(parts), "largest_difference": difference, "bytes_left_over": left_over}


def train(device: Limited, dry: bool, limit: Callable[[], None]) -> tuple[torch.Tensor, int]:
    model = llama(device.device, torch.float32, dry).train()
    device.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = OomSafeBackward(model)

    def loss(batch: dict[str, Any]) -> torch.Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), ignore_index=-100
        )

    limit()
    for step in range(num_steps(dry)):
        for k in range(2):
            batch = batch_of(10 * step + k, device.device, *((8, 16) if dry else (16, 1024)))
            backward(loss, batch, loss_scale=0.5, ends_update=k == 1)
        optimizer.step()
        optimizer.zero_grad()
    device.lift()
    parameters = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
    return parameters, backward.learned.report.num_ooms


def check_training(device: Limited, dry: bool) -> dict[str, Any]:
    (whole, _), before, peak = device.peak_of(lambda: train(device, dry, lambda: None))
    start = time.perf_counter()
    parts, num_ooms = train(device, dry, lambda: device.limit_to(40, before + int(0.75 * (peak - before))))
    return {
        "steps": num_steps(dry), "out_of_memory_errors": num_ooms, "largest_difference": float((parts - whole).abs().max()),
        "moved_by": float(whole.abs().max()), "seconds": time.perf_counter() - start,
    }  # fmt: skip


CHECKS = {"generation": check_generation, "forward": check_forward_leaves_nothing, "training": check_training}


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Generation, forward and training under a limit that makes them fail; a check that breaks is written down."""
    torch.backends.cuda.matmul.allow_tf32 = False
    device, found = Limited(machine), {}
    for name, check in CHECKS.items():
        try:
            found[name] = check(device, device.dry)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        device.lift()
        yield found
    prove(found)  # a failure is the part's; what was found stays


def prove(found: dict[str, Any]) -> None:
    """Raises where a check did not hold."""
    assert not [values["error"] for values in found.values() if "error" in values]
    assert found["generation"]["num_splits"] > 0, "the limit was too generous: nothing failed"
    assert found["generation"]["tokens_equal"] > 0.99
    assert found["forward"]["num_parts"] > 1
    assert found["forward"]["largest_difference"] < 1e-3
    assert found["forward"]["bytes_left_over"] <= 0
    assert found["training"]["out_of_memory_errors"] > 0
    assert found["training"]["largest_difference"] < 1e-4


def figures(machine: Machine) -> dict[str, Any]:
    """All checks; raises where one does not hold."""
    *_, found = run(machine)
    return found
