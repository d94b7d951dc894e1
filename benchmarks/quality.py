"""Quality: held-out loss after the same samples, by how the samples are dealt to updates. Nothing is timed.

A small decoder learns real text, and a small encoder learns a label that goes with the length of a text. All ways start
from the same weights and see each sample once an epoch; the learning rate falls linearly to zero. Fixed updates are
sorted and cut into four batches, which changes no gradient; what they pad in one batch is told beside it.
"""

import ast
import os
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import SIZES, Machine, build
from benchmarks.methods import Job, Update, in_fixed, longest_first, padded_tokens, planned
from benchmarks.train import loss_on, padded, texts_of
from dynagroup import TokenBudget, Work
from dynagroup.plan.cost import CPU_PER_STEP

SEEDS = 5
EPOCHS = 3
HELD_OUT = 1024
POOL = 50
"""Updates that are dealt together."""
STRATA = {"grouping 50, one stratum": 1, "grouping 50, two strata": 2, "grouping 50": None}
WAYS = ("fixed", *STRATA, "free")


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Args:
        size: samples of an update.
        longest: tokens to which texts are cut.
        texts: "docstrings", or "docstrings and code": each a half, code being longer.
        task: "decoder", or "classifier" of a label that goes with length.
    """

    size: int
    longest: int
    samples: int
    texts: str = "docstrings"
    task: str = "decoder"
    rate: float = 1e-3
    optimizer: str = "AdamW"
    clipped: bool = True
    seeds: int = SEEDS
    ways: tuple[str, ...] = WAYS


NO_FREE = tuple(way for way in WAYS if way != "free")
NO_TWO = ("fixed", "grouping 50, one stratum", "grouping 50", "free")
FEW = ("fixed", "grouping 50, one stratum", "grouping 50")
CASES: dict[str, Case] = {
    "updates of 8, CV 0.97": Case(8, 320, 1024),
    "updates of 32, CV 0.97": Case(32, 320, 1024, ways=NO_TWO),
    "updates of 128, CV 0.97": Case(128, 320, 1024, ways=FEW),
    "classifier, updates of 8": Case(8, 256, 1600, task="classifier", rate=5e-4, ways=NO_FREE),
    "updates of 8, CV 0.57": Case(8, 96, 1536, ways=FEW),
    "updates of 32, CV 0.57": Case(32, 96, 1536, ways=FEW),
    "classifier, updates of 32": Case(32, 256, 1600, task="classifier", rate=5e-4, ways=FEW),
    "updates of 8, code beside docstrings": Case(
        8, 320, 1024, texts="docstrings and code", seeds=3, ways=FEW
    ),
    "updates of 10, CV 0.97": Case(10, 320, 1024, seeds=3, ways=FEW),
    "updates of 8, rate 4e-3": Case(8, 320, 1024, rate=4e-3, seeds=3, ways=FEW),
    "updates of 8, SGD": Case(8, 320, 1024, rate=0.3, optimizer="SGD", seeds=3, ways=FEW),
    "updates of 8, not clipped": Case(8, 320, 1024, clipped=False, seeds=3, ways=FEW),
    "updates of 128, CV 0.57": Case(128, 96, 1536, ways=FEW),
}


def run(_machine: Machine) -> Iterator[dict[str, Any]]:
    """Figures so far after every way of every case. Nothing is timed, so trainings run side by side."""
    cases: dict[str, Any] = {}
    figures = {"epochs": EPOCHS, "held_out": HELD_OUT, "pool": POOL, "cases": cases}
    spawn = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        runs = {}
        for name, case in CASES.items():
            for way in case.ways:
                seeds = range(case.seeds)
                runs[name, way] = [pool.submit(trained, name, way, seed) for seed in seeds]
        for (name, way), futures in runs.items():
            of_seeds = [future.result() for future in futures]
            if name not in cases:
                cases[name] = {**asdict(CASES[name]), "found": {}}
            cases[name]["cv"] = of_seeds[0].pop("cv")
            cases[name]["found"][way] = {
                key: [of_seed[key] for of_seed in of_seeds] for key in of_seeds[0]
            }
            yield figures


# Data


@cache
def code() -> list[np.ndarray]:
    """Tokens of functions of the standard library, in an order that mixes modules."""
    from dynagroup.demo import docstrings, train_tokenizer

    tokenizer = train_tokenizer(docstrings(8000)[:4000], vocabulary=SIZES["small"][-1])
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                texts.append(ast.get_source_segment(source, node) or "")
    rows = [np.asarray(ids, np.int64) for ids in tokenizer(texts[:6000])["input_ids"]]
    shuffled = np.random.default_rng(1).permutation(len(rows))
    return [rows[place] for place in shuffled if len(rows[place]) >= 120]


def data_of(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Token ids of all samples, those to train on first; and labels for the classifier: int (N,)."""
    texts = texts_of()
    if case.texts != "docstrings":
        half = (case.samples + HELD_OUT) // 2
        texts = list(chain.from_iterable(zip(texts[:half], code()[:half], strict=False)))
    rows = [ids[: case.longest] for ids in texts]
    counts = np.bincount(np.concatenate(rows))
    common_first = counts.argsort()[::-1]
    marks = set(common_first[60:75].tolist())
    num_marks = [len(marks & set(row.tolist())) for row in rows]
    return rows, (np.array(num_marks) >= 2).astype(np.int64)


# Training


def updates_of(case: Case, way: str, seed: int, epoch: int, lengths: np.ndarray) -> list[Update]:
    """An epoch's updates, each a list of batches of sample numbers."""
    order = Job(lengths, case.size, 0, seed).order(epoch)
    if way == "fixed":
        quarter = -(-case.size // 4)
        return [_sorted(update, quarter, lengths) for update in in_fixed(order, case.size)]
    longest = int(lengths.max())
    work = Work(per_step=CPU_PER_STEP)
    if way == "free":
        budget = TokenBudget(max(round(case.size * float(lengths.mean())), longest))
        plan = planned(lengths, budget, epoch=epoch, shuffle=True, seed=seed, work=work)
        return plan.rows
    plan = planned(
        lengths,
        TokenBudget(case.size * longest),
        epoch=epoch,
        order=order,
        seed=seed,
        samples_per_update=case.size,
        grouping=POOL,
        strata=STRATA[way],
        work=work,
    )
    updates: list[Update] = [[]]
    for row, ends in zip(plan.rows, plan.update_ends.tolist(), strict=True):
        updates[-1].append(row[0])
        if ends:
            updates.append([])
    return updates[:-1]


def _sorted(update: list[int], size: int, lengths: np.ndarray) -> Update:
    """Sorted and cut, which changes no gradient, and takes a third of the time."""
    return in_fixed(longest_first(update, lengths), size)


@dataclass
class Updates:
    """What the updates of a training held."""

    batches: int = 0
    samples: int = 0
    padded_tokens: int = 0
    padded_in_one_batch: int = 0
    tokens: list[int] = field(default_factory=list)
    """Of each update."""

    def add(self, update: Update, lengths: np.ndarray) -> None:
        samples = list(chain.from_iterable(update))
        self.batches += len(update)
        self.samples += len(samples)
        self.padded_tokens += padded_tokens(update, lengths)
        self.padded_in_one_batch += padded_tokens([samples], lengths)
        self.tokens.append(int(lengths[samples].sum()))

    def figures(self) -> dict[str, float]:
        return {
            "padding": 1 - sum(self.tokens) / self.padded_tokens,
            "padding_in_one_batch": 1 - sum(self.tokens) / self.padded_in_one_batch,
            "batches_an_update": self.batches / len(self.tokens),
            "tokens_cv": float(np.std(self.tokens) / np.mean(self.tokens)),
            "samples_an_update": self.samples / len(self.tokens),
        }


def trained(name: str, way: str, seed: int) -> dict[str, float]:
    """Trains once; returns held-out loss (and accuracy), padding, and how updates were made up."""
    torch.set_num_threads(1)
    case = CASES[name]
    rows, targets = data_of(case)
    task = DecoderTask(rows) if case.task == "decoder" else ClassifierTask(rows, targets)
    model = task.model(seed)
    optimizer_class = getattr(torch.optim, case.optimizer)
    optimizer = optimizer_class(model.parameters(), lr=case.rate, fused=True)
    lengths = np.array([len(row) for row in rows[: case.samples]], np.int32)
    updates = Updates()
    for epoch in range(EPOCHS):
        for update in updates_of(case, way, seed, epoch, lengths):
            rate = case.rate * (1 - updates.samples / (EPOCHS * case.samples))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for loss in task.losses(model, update):
                loss.backward()
            if case.clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            updates.add(update, lengths)
    return {
        **task.held_out(model, case.samples),
        **updates.figures(),
        "cv": float(lengths.std() / lengths.mean()),
    }


class DecoderTask:
    """Predicts the next token."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows

    def model(self, seed: int) -> Any:
        return build("small", seed=seed)

    def losses(self, model: Callable[..., Any], update: Update) -> Iterator[torch.Tensor]:
        samples = chain.from_iterable(update)
        num_predicted = sum(len(self.rows[index]) - 1 for index in samples)
        for batch in update:
            inputs = padded([self.rows[index] for index in batch])
            yield model(**inputs, use_cache=False, num_items_in_batch=num_predicted).loss

    def held_out(self, model: Any, start: int) -> dict[str, float]:
        return {"held_out_loss": loss_on(model, self.rows[start : start + HELD_OUT])}


class ClassifierTask:
    """Predicts a label that goes with length: whether a text has at least two of some common tokens."""

    def __init__(self, rows: list[np.ndarray], targets: np.ndarray) -> None:
        self.rows = rows
        self.targets = targets

    def model(self, seed: int) -> Any:
        from transformers import BertConfig, BertForSequenceClassification

        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=SIZES["small"][-1],
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=512,
        )
        return BertForSequenceClassification(config).train()

    def _outputs(self, model: Any, batch: list[int]) -> Any:
        inputs = padded([self.rows[index] for index in batch])
        inputs["labels"] = torch.from_numpy(self.targets[batch])
        return model(**inputs)

    def losses(self, model: Any, update: Update) -> Iterator[torch.Tensor]:
        num_samples = sum(map(len, update))
        for batch in update:
            yield self._outputs(model, batch).loss * len(batch) / num_samples

    @torch.no_grad()
    def held_out(self, model: Any, start: int) -> dict[str, float]:
        model.eval()
        samples = range(start, start + HELD_OUT)
        by_length = sorted(samples, key=lambda index: len(self.rows[index]))
        loss = 0.0
        num_right = 0
        for batch in in_fixed(by_length, 32):
            outputs = self._outputs(model, batch)
            loss += float(outputs.loss) * len(batch)
            guessed = outputs.logits.argmax(1).numpy()
            num_right += int((guessed == self.targets[batch]).sum())
        return {"held_out_loss": loss / HELD_OUT, "accuracy": num_right / HELD_OUT}
