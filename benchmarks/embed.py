"""Embedding a set of texts on the CPU: fixed batches, sentence-transformers' sorting, ours; the model has MiniLM's sizes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.methods import Update
from benchmarks.record import spread
from dynagroup import LengthAwareBatchSampler, TokenBudget

__all__ = ["embed"]

SAMPLES, FIXED, LONGEST = 256, 32, 256


def embed(repeats: int = 3, samples: int = SAMPLES) -> dict[str, Any]:
    """CPU seconds of one pass over all texts, each method in turn, as a multiple of sentence-transformers' order."""
    torch.set_num_threads(1)
    drawn = np.random.default_rng(0).lognormal(np.log(40), 0.83, samples)
    lengths = np.clip(drawn, 4, LONGEST).astype(np.int32)
    characters = (lengths * np.random.default_rng(1).normal(4.2, 0.4, samples)).astype(int)
    model = _model()
    ways = {
        "fixed, as they come": _in_fixed(np.arange(samples)),
        "sentence-transformers (sorted by characters)": _in_fixed(np.argsort(-characters, kind="stable")),
        "sorted by tokens": _in_fixed(np.argsort(-lengths, kind="stable")),
        "dynagroup": list(LengthAwareBatchSampler(lengths, TokenBudget(FIXED * LONGEST), rank=0, world_size=1)),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    _pass(model, ways["dynagroup"][-1:], lengths)
    for _ in range(repeats):
        for name, batches in ways.items():
            taken[name].append(_pass(model, batches, lengths))
    base = taken["sentence-transformers (sorted by characters)"]
    return {
        "samples": samples, "cv": float(lengths.std() / lengths.mean()), "model": "BERT, 6 layers of 384",
        "methods": {
            name: {
                "cpu_s": spread(found), "over_sentence_transformers": spread([a / b for a, b in zip(found, base, strict=True)]),
                "batches": len(ways[name]),
                "padding": 1 - int(lengths.sum()) / sum(len(b) * int(lengths[b].max()) for b in ways[name]),
            }
            for name, found in taken.items()
        },
    }  # fmt: skip


def _in_fixed(order: np.ndarray) -> Update:
    return [order[k : k + FIXED].tolist() for k in range(0, len(order), FIXED)]


def _model() -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    return BertModel(config, add_pooling_layer=False).eval()


@torch.no_grad()
def _pass(model: Any, batches: Update, lengths: np.ndarray) -> float:
    began = time.process_time()
    for batch in batches:
        mask = torch.from_numpy(np.arange(int(lengths[batch].max()))[None] < lengths[batch][:, None])
        model(input_ids=mask * 7, attention_mask=mask.long()).last_hidden_state.mean(1)
    return time.process_time() - began
