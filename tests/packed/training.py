"""Training on packed and on fixed batches, importable from spawned ranks."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening, LlamaForCausalLM

from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.integrations.varlen import use_varlen_attention
from tests import models
from tests.integrations import toys
from tests.integrations.jobs import parameters, trainer

FLAT = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
BUDGET = TokenBudget(90, layout="packed")
SAMPLES, LEARNING_RATE = 16, 0.05


def llama(attention: str) -> Any:
    torch.manual_seed(0)
    chosen = "eager" if attention == "varlen" else attention
    config = models.llama(vocab=toys.VOCAB, inner=24, pad_token_id=0, attn_implementation=chosen)
    config.use_cache = False  # with a cache transformers masks nothing between packed samples
    model = LlamaForCausalLM(config).double()
    return use_varlen_attention(model) if attention == "varlen" else model


def summed_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over next-token labels in float64; transformers' own casts logits to float32."""
    labels = batch["labels"]
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    return toys.float64_causal_loss(outputs, labels, 1)


def fixed(order: list[list[int]], attention: str) -> tuple[torch.Tensor, list[float]]:
    """One process, padded batches: each update the mean over all its label tokens."""
    model, rows = llama(attention), toys.samples("causal", 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for update in order:
        batch = toys.collate([rows[i] for i in update])
        loss = summed_loss(model, batch) / (batch["labels"][:, 1:] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return parameters(model), losses


def loader_of(kind: str, rows: list[dict[str, Any]]) -> Any:
    if kind == "planned":
        lengths = toys.lengths(rows)
        return PlannedDataLoader(rows, lengths, BUDGET, samples_per_update=SAMPLES, collate_fn=FLAT)
    return OnlineDataLoader(rows, BUDGET, samples_per_update=SAMPLES, shuffle=True, collate_fn=FLAT)


def packed(kind: str, attention: str) -> tuple[torch.Tensor, list[float], list[list[int]], float]:
    """A plain loop over packed steps: parameters, losses, which samples made up each update, padding as counted."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model, rows = llama(attention), toys.samples("causal", 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = loader_of(kind, rows)
    losses, updates = [], []
    for update in loader.updates():
        optimizer.zero_grad()
        total, seen = torch.zeros((), dtype=torch.float64), torch.zeros(len(rows))
        for step in update:
            assert step.batch["input_ids"].shape[0] == 1
            assert step.batch["input_ids"].numel() <= BUDGET.max_tokens
            if step.weight.local:
                loss = summed_loss(model, step.batch) / step.weight.local * step.loss_scale / size
                loss.backward()
                total += loss.detach()
                seen[step.indices] += 1
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if size > 1:
                dist.all_reduce(parameter.grad)
        for value in (total, seen) if size > 1 else ():
            dist.all_reduce(value)
        optimizer.step()
        losses.append(total.item())
        updates.append(seen.nonzero().flatten().tolist())
        assert seen.sum() == len(updates[-1])
    return parameters(model), losses, updates, loader.stats.padding


def trained(folder: Any, fits: bool) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The Trainer with fixed padded batches, or with packed ones of dynagroup."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        how = {"exact_loss": True, "max_steps": 8, "model": llama("sdpa"), "config": {"budget": BUDGET}}
        run = trainer("causal", folder, fits=fits, **how)
        if fits:
            run.data_collator = FLAT
        run.train()
    return parameters(run.model), run.state.log_history


def trained_both(folder: Any) -> list[Any]:
    return [trained(f"{folder}/{fits}", fits) for fits in (False, True)]
