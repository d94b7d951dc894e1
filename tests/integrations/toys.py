"""Tiny models and data for the adapters' tests, and training runs that are compared; importable from spawned ranks."""

import warnings
from collections import defaultdict
from typing import Any

import numpy as np
import torch
import transformers as hf
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from dynagroup import TokenBudget
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer
from tests import models

VOCAB = 64


def causal_lm():
    torch.manual_seed(0)
    config = models.gpt2(vocab=VOCAB, n_positions=128, pad_token_id=0, attn_implementation="eager")
    return hf.GPT2LMHeadModel(config).double()


def with_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    return model


def seq2seq():
    torch.manual_seed(0)
    return hf.T5ForConditionalGeneration(models.t5(vocab=VOCAB, layers=1)).double()


def classifier():
    torch.manual_seed(0)
    config = models.bert(
        vocab=VOCAB,
        layers=1,
        max_position_embeddings=128,
        num_labels=3,
        attn_implementation="eager",
    )
    return hf.BertForSequenceClassification(config).double()


def doubling(first: int, *milestones: int) -> Any:
    """A schedule: twice as many samples from each of these updates on."""
    return lambda update, current: first << sum(update >= milestone for milestone in milestones)


def samples(kind: str, count: int = 64, seed: int = 0) -> list[dict]:
    rng, rows = np.random.default_rng(seed), []
    for length in np.clip(rng.lognormal(2.3, 0.7, count), 3, 60).astype(int):
        ids = rng.integers(1, VOCAB, length).tolist()
        labels = [-100] * (length // 4) + ids[length // 4 :]
        if kind == "classifier":
            labels = int(rng.integers(3))
        elif kind == "seq2seq":
            labels = rng.integers(1, VOCAB, max(2, length // 2)).tolist()
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from samples("causal", 40)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    whole = pad_sequence(ids, batch_first=True)
    targets = (
        pad_sequence(labels, batch_first=True, padding_value=-100)
        if labels[0].ndim
        else torch.stack(labels)
    )
    return {"input_ids": whole, "attention_mask": (whole != 0).long(), "labels": targets}


def collate_noisily(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Processing that draws random numbers, as masking and augmentation do."""
    batch = collate(rows)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.2, -100)
    return batch


def collate_seq2seq(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch, first = collate(rows), torch.zeros(len(rows), 1, dtype=torch.long)
    return {
        **batch,
        "decoder_input_ids": torch.cat([first, batch["labels"][:, :-1].clamp(min=0)], dim=1),
    }


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Of the words w4 to w63."""
    return models.word_tokenizer(
        [f"w{i}" for i in range(4, VOCAB)], "<pad>", "<s>", "</s>", "<unk>"
    )


def lengths(rows: list[dict]) -> list[int]:
    return [len(r["input_ids"]) for r in rows]


def float64_seq2seq_loss(outputs, labels, num_items_in_batch=None):
    """The library's losses cast logits to float32; this one does not."""
    logits = outputs.logits.reshape(-1, outputs.logits.size(-1))
    total = torch.nn.functional.cross_entropy(
        logits, labels.reshape(-1), ignore_index=-100, reduction="sum"
    )
    return total / num_items_in_batch


def float64_causal_loss(outputs, labels, num_items_in_batch=None):
    return float64_seq2seq_loss(
        type(outputs)(logits=outputs.logits[:, :-1]), labels[:, 1:], num_items_in_batch
    )


MODELS = {"causal": causal_lm, "seq2seq": seq2seq, "classifier": classifier}
LOSSES = {"causal": float64_causal_loss, "seq2seq": float64_seq2seq_loss}
DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "max_steps": 20,
    "learning_rate": 1e-2,
    "logging_steps": 5,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
}


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def arguments(folder: Any, **changes: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**DEFAULTS, **changes})


def trainer(
    kind: str,
    folder: Any,
    *,
    fits: bool,
    exact_loss=False,
    count=96,
    config: Any = None,
    **changes: Any,
):
    """A Trainer of fixed batches, or (``fits``) of batches that fit, otherwise the same."""
    rows, names = samples(kind, count), ("callbacks", "compute_metrics", "eval_dataset", "model")
    given = {name: changes.pop(name) for name in names if name in changes}
    model = given.pop("model", None) or MODELS[kind]()
    if not exact_loss and kind != "causal":
        model.accepts_loss_kwargs = (
            False  # what a user must know with fixed batches, see transformers#47688
        )
    common = {"args": arguments(folder, **changes), "train_dataset": rows, **given}
    common["data_collator"] = collate_seq2seq if kind == "seq2seq" else collate
    common["compute_loss_func"] = LOSSES[kind] if exact_loss else None
    if not fits:
        return Trainer(model, **common)
    settings = {"budget": TokenBudget(160), "lengths": lengths(rows), **(config or {})}
    return DynagroupTrainer(model, dynagroup=DynagroupConfig(**settings), **common)


def trained_on(run: Trainer, rows: list[dict[str, Any]]) -> dict[int, list[int]]:
    """Indices of the samples that this rank's model learns from in each update, filled while ``run`` trains."""
    index_of = {tuple(row["input_ids"]): i for i, row in enumerate(rows)}
    seen: dict[int, list[int]] = defaultdict(list)

    def note(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and next(module.children()).training:  # not in the split test
            seen[run.state.global_step] += [
                index_of[tuple(ids[ids != 0].tolist())] for ids in kwargs["input_ids"]
            ]

    run.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def train(
    kind: str, folder: Any, fits: bool, changes: dict[str, Any]
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, in a process that is not pytest's
        run = trainer(kind, folder, fits=fits, **changes)
        run.train()
    return parameters(run.model), run.state.log_history


def train_both(kind: str, folder: Any, changes: dict[str, Any]) -> list[Any]:
    return [train(kind, f"{folder}/{fits}", fits, dict(changes)) for fits in (False, True)]
