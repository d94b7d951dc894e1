"""Training runs that tests compare, importable from spawned ranks."""

import warnings
from collections import defaultdict
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from dynagroup import TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer
from tests.integrations import toys

MODELS = {"causal": toys.causal_lm, "seq2seq": toys.seq2seq, "classifier": toys.classifier}
LOSSES = {"causal": toys.float64_causal_loss, "seq2seq": toys.float64_seq2seq_loss}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 20, "learning_rate": 1e-2,
    "logging_steps": 5, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
    "remove_unused_columns": False, "dataloader_pin_memory": False,
}  # fmt: skip


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**DEFAULTS, **changes})


def trainer(kind: str, folder: Any, *, fits: bool, exact_loss=False, count=96, config: Any = None, **changes: Any):
    """A Trainer of fixed batches, or (``fits``) of batches that fit, otherwise the same."""
    rows, names = toys.samples(kind, count), ("callbacks", "compute_metrics", "eval_dataset", "model")
    given = {name: changes.pop(name) for name in names if name in changes}
    model = given.pop("model", None) or MODELS[kind]()
    if not exact_loss and kind != "causal":
        model.accepts_loss_kwargs = False  # what a user must know with fixed batches, see transformers#47688
    collate, loss = toys.collate_seq2seq if kind == "seq2seq" else toys.collate, LOSSES[kind] if exact_loss else None
    common = {"args": arguments(folder, **changes), "train_dataset": rows, "data_collator": collate, **given}
    common["compute_loss_func"] = loss
    if not fits:
        return Trainer(model, **common)
    settings = {"budget": TokenBudget(160), "lengths": toys.lengths(rows), **(config or {})}
    return DynagroupTrainer(model, dynagroup=DynagroupConfig(**settings), **common)


def trained_on(run: Trainer, rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Indices of the samples that this rank's model learns from in each update, filled while ``run`` trains."""
    index_of = {tuple(row["input_ids"]): i for i, row in enumerate(rows)}
    seen: dict[int, list[int]] = defaultdict(list)

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            seen[run.state.global_step] += [index_of[tuple(ids[ids != 0].tolist())] for ids in kwargs["input_ids"]]

    run.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def train(kind: str, folder: Any, fits: bool, changes: dict[str, Any]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
        run = trainer(kind, folder, fits=fits, **changes)
        run.train()
    return parameters(run.model), run.state.log_history


def train_both(kind: str, folder: Any, changes: dict[str, Any]) -> list[Any]:
    return [train(kind, f"{folder}/{fits}", fits, dict(changes)) for fits in (False, True)]
