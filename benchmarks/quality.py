"""Whether free-running updates train as well as those of equal size: the same data, model, epochs and schedule."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dynagroup import TokenBudget, measure_lengths, text_dataloader
from dynagroup.demo import load_texts, train_tokenizer
from dynagroup.text import TokenizingCollator
from dynagroup.update.loss_weight import count_label_tokens
from dynagroup.update.planned import PlannedDataLoader

LONGEST, BUDGET, HELD_OUT = 96, 2048, 1024


def model_of(vocab: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LONGEST, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def train(loader: PlannedDataLoader[Any], vocab: int, seed: int, epochs: int) -> tuple[LlamaForCausalLM, int]:
    """AdamW with a learning rate that falls linearly to zero over the samples, as Trainer's does over its steps."""
    model = model_of(vocab, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    updates, seen, whole = 0, 0, epochs * len(loader.dataset)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - seen / whole)
            for step in update:
                (model(**step.batch).loss * step.loss_scale).backward()
                seen += step.samples.local
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return model, updates


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, loader: Any) -> float:
    total, tokens = 0.0, 0
    for batch in loader:
        count = count_label_tokens(batch)
        total, tokens = total + float(model(**batch).loss) * count, tokens + count
    return total / tokens


def quality(samples: int = 2048, epochs: int = 3, seeds: int = 3) -> dict[str, Any]:
    """Held-out loss after training with updates of equal size, and with free-running ones."""
    torch.set_num_threads(1)
    texts = load_texts()
    order = np.random.default_rng(0).permutation(len(texts))[: samples + HELD_OUT]
    train_texts, held_out = [texts[i] for i in order[HELD_OUT:]], [texts[i] for i in order[:HELD_OUT]]
    tokenizer = train_tokenizer(train_texts)
    lengths = np.minimum(measure_lengths(train_texts, tokenizer), LONGEST)
    collate = TokenizingCollator(tokenizer, LONGEST, 1, labels=True)
    evaluation = text_dataloader(held_out, tokenizer, TokenBudget(BUDGET), max_length=LONGEST, labels=True)

    def loader(seed: int, size: int | None) -> PlannedDataLoader[Any]:
        return PlannedDataLoader(
            train_texts, lengths, TokenBudget(BUDGET), samples_per_update=size, seed=seed, collate_fn=collate,
            weigh=count_label_tokens,
        )  # fmt: skip

    size = round(samples / loader(0, None).num_updates)  # fixed updates of as many samples as a free one has on average
    losses: dict[str, list[float]] = {"fixed": [], "free": []}
    counts = {}
    for seed in range(seeds):
        for name, wanted in (("fixed", size), ("free", None)):
            model, counts[name] = train(loader(seed, wanted), len(tokenizer), seed, epochs)
            losses[name].append(held_out_loss(model.eval(), evaluation))
            print(seed, name, counts[name], losses[name][-1], flush=True)
    differences = [free - fixed for free, fixed in zip(losses["free"], losses["fixed"], strict=True)]
    return {
        "setup": {
            "model": "Llama, 2 layers of 64",
            "samples": samples,
            "epochs": epochs,
            "held_out": HELD_OUT,
            "budget": BUDGET,
            "longest": LONGEST,
            "learning_rate": "3e-3, falling linearly to zero over the samples",
        },  # fmt: skip
        "updates": counts,
        "samples_per_fixed_update": size,
        "held_out_loss": losses,
        "mean": {name: statistics.mean(values) for name, values in losses.items()},
        "spread_of_seeds": {name: max(values) - min(values) for name, values in losses.items()},
        "mean_difference": statistics.mean(differences),
    }
