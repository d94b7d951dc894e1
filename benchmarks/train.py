"""End to end on the CPU: a small language model on real text cut to prescribed lengths, every way to form batches in turn.

All methods start from the same weights, hold at most the same tokens in a batch, and are timed by the process's CPU seconds,
update by update in turn, so that other work on the machine does not count. Held-out loss is taken after equal samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.methods import METHODS, Job, updates_of
from dynagroup.plan.work import Work

__all__ = ["run", "table"]

CVS = (0.3, 0.8, 1.3)
LONGEST, MEAN = 256, 40
PER_UPDATE, FIXED = 64, 8
SAMPLES, HELD_OUT = 2000, 128
WARM_UP = 1
IGNORED = -100


def run(*, updates: int = 6, cvs: Sequence[float] = CVS) -> dict[str, Any]:
    """Figures of every method at every variation of lengths."""
    torch.set_num_threads(1)
    text = _text()
    return {f"CV {cv}": _case(text, cv, updates) for cv in cvs}


def table(figures: dict[str, Any]) -> str:
    """One line a method and variation."""
    from dynagroup.plan.report import format_table

    lines = []
    for case, found in figures.items():
        base = found["methods"]["fixed"]["samples_per_s"]["median"]
        for name, one in found["methods"].items():
            low, high = (q / base for q in one["samples_per_s"]["quartiles"])
            lines.append(
                [
                    f"{case}, {name}", f"{one['samples_per_s']['median'] / base:.2f}x", f"{low:.2f}-{high:.2f}",
                    f"{one['padding']:.1%}", f"{one['batches_per_update']:.1f}", f"{one['held_out_loss']:.4f}",
                    "yes" if one["same_updates"] else "no",
                ]
            )  # fmt: skip
    head = ["", "samples/s over fixed", "quartiles", "padding", "batches an update", "held-out loss", "same updates"]
    return format_table(head, lines)


def overall(timed: list[tuple[int, float]]) -> dict[str, Any]:
    """All samples over all seconds, since updates may differ in size; quartiles are of updates drawn anew (bootstrap).

    >>> overall([(10, 1.0), (10, 1.0)])
    {'median': 10.0, 'quartiles': [10.0, 10.0], 'repeats': 2}
    """
    counts, seconds = np.array(timed, np.float64).T
    drawn = np.random.default_rng(0).integers(0, len(counts), (2000, len(counts)))
    low, high = np.quantile(counts[drawn].sum(1) / seconds[drawn].sum(1), [0.25, 0.75])
    rate = counts.sum() / seconds.sum()
    return {"median": float(rate), "quartiles": [float(low), float(high)], "repeats": len(counts)}


def _text() -> np.ndarray:
    from dynagroup.demo.corpus import docstrings, train_tokenizer

    texts = docstrings(8000)
    tokenizer = train_tokenizer(texts[:4000])
    return np.concatenate([np.asarray(ids, np.int64) for ids in tokenizer(texts)["input_ids"]])


def _case(text: np.ndarray, cv: float, updates: int) -> dict[str, Any]:
    sigma = np.sqrt(np.log(1 + cv**2))
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, SAMPLES), 4, LONGEST).astype(np.int32)
    lengths[0] = LONGEST
    starts = rng.integers(0, len(text) - LONGEST, SAMPLES + HELD_OUT)
    work = _measured_work()
    job = Job(lengths, PER_UPDATE, FIXED * LONGEST, work=work)
    held_out = [text[s : s + LONGEST // 2] for s in starts[SAMPLES:]]
    runs = {name: _Run(name, job, text, starts) for name, method in METHODS.items() if method.available}
    for _ in range(updates):
        for one in runs.values():  # a free-running method may need more or fewer of its updates for as many samples
            one.train_until(one.samples + PER_UPDATE)
    return {
        "tokens_a_batch": job.tokens, "fixed_batch": job.fixed, "samples_per_update": PER_UPDATE, "updates": updates,
        "cv": float(lengths.std() / lengths.mean()), "per_step": work.per_step, "crossover": min(work.crossover, 1e9),
        "methods": {name: one.figures(held_out) for name, one in runs.items()},
    }  # fmt: skip


def _measured_work() -> Work:
    """What the recipe says: time a dozen shapes, fit. Medians of five, CPU seconds."""
    model = _model(packed=False)
    rows = []
    for n, longest in ((1, 16), (1, 64), (1, 256), (4, 16), (4, 64), (4, 256), (16, 16), (16, 64), (32, 16), (32, 64)):
        ids = torch.randint(3, 1536, (n, longest))
        taken = []
        for _ in range(6):
            began = time.process_time()
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
            taken.append(time.process_time() - began)
        rows.append((n, longest, float(np.median(taken[1:]))))
    return Work.fit(rows)


def _model(packed: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1536, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=LONGEST, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if packed:
        from dynagroup.integrations.varlen import use_varlen_attention

        use_varlen_attention(model)
    return model


class _Run:
    """One method's training."""

    def __init__(self, name: str, job: Job, text: np.ndarray, starts: np.ndarray) -> None:
        self.method, self.job, self.text, self.starts = METHODS[name], job, text, starts
        self.updates = updates_of(name, job)
        self.model = _model(self.method.packed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.timed: list[tuple[int, int, float]] = []
        self.samples = self.real = self.padded = self.batches = self.done = 0

    def train_until(self, samples: int) -> None:
        while self.samples < samples:
            update = next(self.updates)  # forming batches is not what is timed here: see the planning benchmark
            before, began = self.real, time.process_time()
            count = self._update(update)
            self.timed.append((count, self.real - before, time.process_time() - began))

    def _update(self, update: list[list[int]]) -> int:
        lengths = self.job.lengths
        total = int(sum(lengths[i] - 1 for batch in update for i in batch))
        for batch in update:
            inputs, labels = self._packed(batch) if self.method.packed else self._padded(batch)
            self.model(**inputs, labels=labels, num_items_in_batch=total).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        count = sum(map(len, update))
        self.samples, self.batches, self.done = self.samples + count, self.batches + len(update), self.done + 1
        return count

    def _ids(self, index: int) -> np.ndarray:
        return self.text[self.starts[index] :][: self.job.lengths[index]]

    def _padded(self, batch: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        lengths, width = self.job.lengths[batch], int(self.job.lengths[batch].max())
        if self.method.few_shapes:
            width = self.job.ladder.shape_for(width)[1]
        ids, mask = np.zeros((len(lengths), width), np.int64), np.arange(width)[None] < lengths[:, None]
        ids[mask] = np.concatenate([self._ids(i) for i in batch])
        self.real, self.padded = self.real + int(lengths.sum()), self.padded + ids.size
        labels = torch.from_numpy(np.where(mask, ids, IGNORED))
        return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask.astype(np.int64))}, labels

    def _packed(self, batch: list[int]) -> tuple[dict[str, Any], torch.Tensor]:
        from transformers import DataCollatorWithFlattening

        made = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
            [{"input_ids": self._ids(i).tolist()} for i in batch]
        )
        self.real, self.padded = self.real + made["input_ids"].numel(), self.padded + made["input_ids"].numel()
        return made, made.pop("labels")

    @torch.no_grad()
    def figures(self, held_out: list[np.ndarray]) -> dict[str, Any]:
        """Speeds leave out the first updates, which fill caches."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.from_numpy(np.stack(held_out))
        loss = float(np.mean([float(self.model(input_ids=part, labels=part).loss) for part in ids.split(16)]))
        return {
            "samples_per_s": overall([(count, seconds) for count, _, seconds in self.timed[WARM_UP:]]),
            "real_tokens_per_s": overall([(real, seconds) for _, real, seconds in self.timed[WARM_UP:]])["median"],
            "padding": 1 - self.real / max(self.padded, 1),
            "batches_per_update": self.batches / max(self.done, 1),
            "samples": self.samples,
            "held_out_loss": loss,
            "same_updates": self.method.same_updates,
        }
