"""Tiny models and data for the adapters' tests."""

from typing import Any

import numpy as np
import torch
import transformers as hf
from torch.nn.utils.rnn import pad_sequence

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
    config = models.bert(vocab=VOCAB, layers=1, max_position_embeddings=128, num_labels=3, attn_implementation="eager")
    return hf.BertForSequenceClassification(config).double()


def doubling(first: int, *milestones: int) -> Any:
    """A schedule: twice as many samples from each of these updates on."""
    return lambda update, current: first << sum(update >= milestone for milestone in milestones)


def samples(kind: str, count: int = 64, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
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
    targets = pad_sequence(labels, batch_first=True, padding_value=-100) if labels[0].ndim else torch.stack(labels)
    return {"input_ids": whole, "attention_mask": (whole != 0).long(), "labels": targets}


def collate_noisily(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Processing that draws random numbers, as masking and augmentation do."""
    batch = collate(rows)
    hide = torch.rand(batch["labels"].shape) < 0.2
    batch["labels"] = batch["labels"].masked_fill(hide, -100)
    return batch


def collate_seq2seq(rows: list[dict]) -> dict[str, torch.Tensor]:
    batch = collate(rows)
    first = torch.zeros(len(rows), 1, dtype=torch.long)
    return {**batch, "decoder_input_ids": torch.cat([first, batch["labels"][:, :-1].clamp(min=0)], dim=1)}


def tokenizer() -> hf.PreTrainedTokenizerFast:
    """Of the words w4 to w63."""
    return models.word_tokenizer([f"w{i}" for i in range(4, VOCAB)], "<pad>", "<s>", "</s>", "<unk>")


def lengths(rows: list[dict]) -> list[int]:
    return [len(r["input_ids"]) for r in rows]


def float64_seq2seq_loss(outputs, labels, num_items_in_batch=None):
    """The library's losses cast logits to float32; this one does not."""
    logits = outputs.logits.reshape(-1, outputs.logits.size(-1))
    total = torch.nn.functional.cross_entropy(logits, labels.reshape(-1), ignore_index=-100, reduction="sum")
    return total / num_items_in_batch


def float64_causal_loss(outputs, labels, num_items_in_batch=None):
    shifted = type(outputs)(logits=outputs.logits[:, :-1])
    return float64_seq2seq_loss(shifted, labels[:, 1:], num_items_in_batch)
