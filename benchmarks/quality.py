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
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.data import collate
from benchmarks.machine import SIZES, Machine, build
from benchmarks.methods import Job, Update, in_fixed, longest_first, padded_tokens, planned
from dynagroup import TokenBudget, Work
from dynagroup.plan.cost import CPU_PER_STEP
from dynagroup.update.filling import FillingCollator

SEEDS, EPOCHS, HELD_OUT, POOL = 5, 3, 1024, 50
WAYS: dict[str, dict[str, Any] | None] = {
    "fixed": None,
    "grouping 50, one stratum": {"strata": 1},
    "grouping 50, two strata": {"strata": 2},
    "grouping 50": {},
    "free": {"free": True},
}


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
    ways: tuple[str, ...] = tuple(WAYS)


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
        8, 320, 1024, "docstrings and code", seeds=3, ways=FEW
    ),
    "updates of 10, CV 0.97": Case(10, 320, 1024, seeds=3, ways=FEW),
    "updates of 8, rate 4e-3": Case(8, 320, 1024, rate=4e-3, seeds=3, ways=FEW),
    "updates of 8, SGD": Case(8, 320, 1024, rate=0.3, optimizer="SGD", seeds=3, ways=FEW),
    "updates of 8, not clipped": Case(8, 320, 1024, clipped=False, seeds=3, ways=FEW),
    "updates of 128, CV 0.57": Case(128, 96, 1536, ways=FEW),
}


def run(_machine: Machine) -> Iterator[dict[str, Any]]:
    """Figures so far after every way of every case. Nothing is timed, so trainings run side by side."""
    found: dict[str, Any] = {"epochs": EPOCHS, "held_out": HELD_OUT, "pool": POOL, "cases": {}}
    spawn = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool:
        runs = {
            (name, way): [pool.submit(trained, name, way, seed) for seed in range(case.seeds)]
            for name, case in CASES.items()
            for way in case.ways
        }
        for (name, way), futures in runs.items():
            figures = [future.result() for future in futures]
            case = found["cases"].setdefault(name, {**asdict(CASES[name]), "found": {}})
            case["cv"] = figures[0].pop("cv")
            case["found"][way] = {key: [one[key] for one in figures] for key in figures[0]}
            yield found


# Data


@cache
def docstrings() -> list[np.ndarray]:
    from benchmarks.train import texts_of

    return texts_of()


@cache
def code() -> list[np.ndarray]:
    """Tokens of functions of the standard library, in an order that mixes modules."""
    from dynagroup.demo import docstrings as read
    from dynagroup.demo import train_tokenizer

    tokenizer = train_tokenizer(read(8000)[:4000], vocabulary=SIZES["small"][-1])
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="ignore")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                texts.append(ast.get_source_segment(source, node) or "")
    rows = [np.asarray(ids, np.int64) for ids in tokenizer(texts[:6000])["input_ids"]]
    shuffled = np.random.default_rng(1).permutation(len(rows))
    return [rows[number] for number in shuffled if len(rows[number]) >= 120]


def data_of(case: Case) -> tuple[list[np.ndarray], np.ndarray]:
    """Token ids of all samples, those to train on first; and labels for the classifier: int (N,)."""
    if case.texts == "docstrings":
        rows = [ids[: case.longest] for ids in docstrings()]
    else:
        half = (case.samples + HELD_OUT) // 2
        pairs = zip(docstrings()[:half], code()[:half], strict=False)
        rows = [ids[: case.longest] for pair in pairs for ids in pair]
    counts = np.bincount(np.concatenate(rows))
    marks = set(counts.argsort()[::-1][60:75].tolist())
    targets = np.array([int(len(marks & set(row.tolist())) >= 2) for row in rows])
    return rows, targets


# Training


def updates_of(case: Case, way: str, seed: int, epoch: int, lengths: np.ndarray) -> list[Update]:
    """An epoch's updates, each a list of batches of sample numbers."""
    longest = int(lengths.max())
    budget = TokenBudget(case.size * longest)
    work = Work(per_step=CPU_PER_STEP)
    options = WAYS[way]
    order = Job(lengths, case.size, 0, seed).order(epoch)
    if options is None:  # sorted and cut, which changes no gradient, and takes a third of the time
        sorted_updates = (longest_first(update, lengths) for update in in_fixed(order, case.size))
        return [in_fixed(update, -(-case.size // 4)) for update in sorted_updates]
    if "free" in options:
        budget = TokenBudget(max(round(case.size * float(lengths.mean())), longest))
        plan = planned(lengths, budget, epoch=epoch, shuffle=True, seed=seed, work=work)
        return [row for row in plan.rows]
    plan = planned(
        lengths,
        budget,
        epoch=epoch,
        order=order,
        seed=seed,
        samples_per_update=case.size,
        grouping=POOL,
        work=work,
        **options,
    )
    updates: list[Update] = [[]]
    for row, ends in zip(plan.rows, plan.update_ends.tolist(), strict=True):
        updates[-1].append(row[0])
        if ends:
            updates.append([])
    return updates[:-1]


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
    tokens, num_batches, padded, padded_whole, used = [], 0, 0, 0, 0
    for epoch in range(EPOCHS):
        for update in updates_of(case, way, seed, epoch, lengths):
            rate = case.rate * (1 - used / (EPOCHS * case.samples))
            for group in optimizer.param_groups:
                group["lr"] = rate
            for loss in task.losses(model, update):
                loss.backward()
            if case.clipped:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            used += sum(map(len, update))
            num_batches += len(update)
            padded += padded_tokens(update, lengths)
            padded_whole += padded_tokens([[i for batch in update for i in batch]], lengths)
            tokens.append(sum(int(lengths[batch].sum()) for batch in update))
    return {
        **task.held_out(model, case.samples),
        "padding": 1 - sum(tokens) / padded,
        "padding_in_one_batch": 1 - sum(tokens) / padded_whole,
        "batches_an_update": num_batches / len(tokens),
        "tokens_cv": float(np.std(tokens) / np.mean(tokens)),
        "samples_an_update": used / len(tokens),
        "cv": float(lengths.std() / lengths.mean()),
    }


def padded_rows(rows: list[np.ndarray]) -> dict[str, torch.Tensor]:
    from benchmarks.data import sample_of

    return FillingCollator(collate, None)([sample_of(torch.from_numpy(row)) for row in rows])


class DecoderTask:
    """Predicts the next token."""

    def __init__(self, rows: list[np.ndarray]) -> None:
        self.rows = rows

    def model(self, seed: int) -> Any:
        return build("small", seed=seed)

    def losses(self, model: Callable[..., Any], update: Update) -> Iterator[torch.Tensor]:
        predicted = sum(len(self.rows[index]) - 1 for batch in update for index in batch)
        for batch in update:
            inputs = padded_rows([self.rows[index] for index in batch])
            yield model(**inputs, use_cache=False, num_items_in_batch=predicted).loss

    def held_out(self, model: Any, start: int) -> dict[str, float]:
        from benchmarks.train import loss_on

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
        inputs = padded_rows([self.rows[index] for index in batch])
        inputs["labels"] = torch.from_numpy(self.targets[batch])
        return model(**inputs)

    def losses(self, model: Any, update: Update) -> Iterator[torch.Tensor]:
        num_samples = sum(map(len, update))
        for batch in update:
            yield self._outputs(model, batch).loss * len(batch) / num_samples

    @torch.no_grad()
    def held_out(self, model: Any, start: int) -> dict[str, float]:
        model.eval()
        by_length = sorted(range(start, start + HELD_OUT), key=lambda index: len(self.rows[index]))
        loss, right = 0.0, 0
        for batch in in_fixed(by_length, 32):
            outputs = self._outputs(model, batch)
            loss += float(outputs.loss) * len(batch)
            guessed = outputs.logits.argmax(1).numpy()
            right += int((guessed == self.targets[batch]).sum())
        return {"held_out_loss": loss / HELD_OUT, "accuracy": right / HELD_OUT}
