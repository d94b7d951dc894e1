"""Simulated against real GPUs: peaks that others published, and 7,352 generation batches that others measured.

Writes ``benchmarks/results/published.json``, from which ``python -m regressor.report`` makes its section. A minute on one core.

    python -m regressor.published
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow.parquet as pq
import torch
import transformers as hf
import xgboost

from dynagroup.memory import (
    Measurement,
    Measurements,
    MemoryRegressor,
    ProfiledMemory,
    TracedMemory,
)
from dynagroup.shapes import BatchShape
from regressor.configs import config_of, run_of

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "published.json"
MIB = 2**20
QUANTILE = 0.98
NUM_FOLDS = 10
HEADROOM = 0.9
NUM_KNOWN = 12  # batches of a run that correct what is said of its others
NUM_KNOWN_FIRST = 4  # of these, the run's first ones
FEWEST_OF_A_RUN = 60
FEWEST_OF_A_SHAPE = 4  # to speak of its upper envelope
LARGE_MIB = 500
TREES = {
    "objective": "reg:quantileerror",
    "quantile_alpha": QUANTILE,
    "max_depth": 3,
    "eta": 0.1,
    "tree_method": "hist",
    "nthread": 1,
    "seed": 0,
}


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Measured batches, an array (rows,) each."""

    num_samples: np.ndarray
    longest: np.ndarray
    peak_mib: np.ndarray
    """Above what was allocated before."""
    position: np.ndarray
    """In its run."""
    run: np.ndarray

    def shape(self, rows: np.ndarray) -> BatchShape:
        return BatchShape.of(self.num_samples[rows], self.longest[rows])

    @property
    def first_of_run(self) -> np.ndarray:
        """The row of the first batch of each batch's run; -1: it is not recorded."""
        rows = np.flatnonzero(self.position == 0)
        first = np.full(self.run.max() + 1, -1)
        first[self.run[rows]] = rows
        return first[self.run]


def read_batches() -> Batches:
    table = pq.read_table(DATA / "nllb600m_generation.parquet")
    files = np.array(table["file"])
    return Batches(
        num_samples=np.array(table["num_samples"]),
        longest=np.array(table["longest"]),
        peak_mib=np.array(table["peak_mib_above_start"]),
        position=np.array(table["pos"]),
        run=np.unique(files, return_inverse=True)[1],
    )


def traced(name: str) -> TracedMemory:
    """The memory of a published model, run as its source ran it.

    LitGPT's GELU is the fused one, not `transformers`' "gelu_new".
    """
    config = config_of("published", name)
    run = run_of("published", name)
    if "lora" in run:
        run["lora"] = peft.LoraConfig(r=8, target_modules=run["lora"])
    return TracedMemory.of(config, "train", **run)


def published() -> list[dict[str, Any]]:
    """Each published row with what is simulated for it."""
    memories: dict[str, TracedMemory] = {}
    rows = json.loads((DATA / "published.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        name = row["model"]
        if name not in memories:
            memories[name] = traced(name)
        memory = memories[name]
        shape = BatchShape.of(row["num_samples"], row["longest"])
        simulated_bytes = memory.static_bytes + float(memory.batch_bytes(shape)[0])
        simulated = simulated_bytes / row["unit"]
        row["simulated"] = round(simulated, 2)
        row["error"] = round(simulated / row["peak"] - 1, 4)
    return rows


def generation() -> dict[str, Any]:
    """Measured against simulated batches of NLLB-200-600M's generate(), and whether trees close what gap there is."""
    batches = read_batches()
    config = config_of("generation", "nllb-200-600m")
    memory = TracedMemory.of(config, "generate", dtype="bfloat16", max_new_tokens=200)
    all_rows = np.arange(len(batches.run))
    simulated = memory.batch_bytes(batches.shape(all_rows)) / MIB
    ratio = batches.peak_mib / simulated
    is_above = ratio > 1
    pairs = np.stack([batches.num_samples, batches.longest])
    shapes, shape_of = np.unique(pairs, axis=1, return_inverse=True)
    envelope = _envelope(shape_of.ravel(), ratio, simulated)
    result: dict[str, Any] = {"rows": len(ratio)}
    result["runs"] = int(batches.run.max()) + 1
    result["shapes"] = shapes.shape[1]
    result["ratio_quantiles"] = _quantiles(ratio)
    result["envelope_quantiles"] = _quantiles(envelope)
    result["envelope_shapes"] = len(envelope)
    result["share_above_simulated"] = _mean(is_above)
    result["share_above_simulated_over_500_mib"] = _mean(is_above[simulated > LARGE_MIB])
    result["corrected"] = _corrected(batches, simulated)
    result["own_rows"] = _own_rows(batches, memory)
    return result


def _envelope(shape_of: np.ndarray, ratio: np.ndarray, simulated: np.ndarray) -> np.ndarray:
    """The largest ratio of each large shape that is there often enough."""
    largest = []
    for shape in np.flatnonzero(np.bincount(shape_of) >= FEWEST_OF_A_SHAPE):
        rows = shape_of == shape
        if simulated[rows].max() > LARGE_MIB:
            largest.append(ratio[rows].max())
    return np.array(largest)


def _own_rows(batches: Batches, memory: TracedMemory) -> dict[str, Any]:
    """Each run's own rows: its first four batches and eight others drawn at random correct the prediction of all the rest."""
    rng = np.random.default_rng(0)
    figures: dict[str, list[dict[str, float]]] = {}
    num_runs = 0
    for run in np.unique(batches.run):
        rows = np.flatnonzero(batches.run == run)
        rows = rows[np.argsort(batches.position[rows])]
        if len(rows) < FEWEST_OF_A_RUN or batches.position[rows[0]] != 0:
            continue
        num_runs += 1
        num_drawn = NUM_KNOWN - NUM_KNOWN_FIRST
        drawn = rng.choice(rows[NUM_KNOWN_FIRST:], num_drawn, replace=False)
        known = np.concatenate([rows[:NUM_KNOWN_FIRST], drawn])
        rest = np.setdiff1d(rows, known)
        asked = np.concatenate([rows[:1], rest])
        limit = batches.peak_mib[rows[0]]
        for name, predicted_bytes in _predictions(batches, known, asked, memory).items():
            predicted = predicted_bytes / MIB
            judged = _judged(predicted[1:], batches.peak_mib[rest], predicted[0], limit)
            figures.setdefault(name, []).append(judged)
    means = {}
    for name, all_judged in figures.items():
        means[name] = {key: _mean([judged[key] for judged in all_judged]) for key in all_judged[0]}
    return {"runs": num_runs, "known": NUM_KNOWN, "how": means}


def _predictions(
    batches: Batches, known: np.ndarray, asked: np.ndarray, memory: TracedMemory
) -> dict[str, np.ndarray]:
    """Bytes of the batches asked about, as each way of using a run's known rows says. The first known row is the run's first."""
    measured = []
    for row in known:
        longest = {"tokens": int(batches.longest[row])}
        peak_bytes = int(batches.peak_mib[row] * MIB)
        measured.append(Measurement(int(batches.num_samples[row]), longest, 0, peak_bytes))
    untraced = memory.workload.replace(mode="generate", phases=None)
    table = Measurements(tuple(measured), memory.workload, "measured")
    raised = MemoryRegressor.fit(table)
    card = {**raised.card, "lift": [-5.0, 5.0]}
    both_ways = dataclasses.replace(raised, card=card)
    of_the_rows = MemoryRegressor.fit(Measurements(tuple(measured), untraced, "measured"))
    shape = batches.shape(asked)
    first = batches.shape(known[:1])
    limit = batches.peak_mib[known[0]] * MIB
    line = memory.corrected(table)
    form = ProfiledMemory.fit(table)
    return {
        "traced": memory.batch_bytes(shape),
        "traced, a line above the rows (`measured=`)": line.batch_bytes(shape),
        "traced, raised by trees (`MemoryRegressor.fit`)": limit * raised.relative(shape, first),
        "traced, trees both ways": limit * both_ways.relative(shape, first),
        "form of the rows, trees both ways": limit * of_the_rows.relative(shape, first),
        "form of the rows (`ProfiledMemory.fit`)": form.batch_bytes(shape),
    }


def _judged(
    predicted: np.ndarray, measured: np.ndarray, first: np.ndarray, limit: np.ndarray
) -> dict[str, float]:
    """Of predictions in MiB. ``first``: what is predicted of the run's first batch; ``limit``: what that batch took.

    ``exceeded``: share of batches that took more than predicted; ``slack``: median of predicted / measured; ``accepted``:
    share predicted to take at most 0.9 of their run's first; ``unsafe_of_accepted``: of these, those that took more than it.
    """
    accepted = predicted <= HEADROOM * first
    is_unsafe = (measured > limit)[accepted]
    return {
        "exceeded": float((measured > predicted).mean()),
        "slack": float(np.median(predicted / measured)),
        "accepted": float(accepted.mean()),
        "unsafe_of_accepted": float(is_unsafe.mean()) if len(is_unsafe) else 0.0,
    }


def _corrected(batches: Batches, simulated: np.ndarray) -> list[dict[str, Any]]:
    """Runs held out in ten folds: the simulation, plus or times one number, and times what trees say, all for one quantile."""
    ratio = batches.peak_mib / simulated
    gap = batches.peak_mib - simulated
    factors = np.log(np.stack([batches.num_samples, batches.longest, simulated], axis=1))
    factors = factors.astype(np.float32)
    plus = np.empty_like(simulated)
    times = np.empty_like(simulated)
    times_trees = np.empty_like(simulated)
    for fold in range(NUM_FOLDS):
        out = batches.run % NUM_FOLDS == fold
        plus[out] = simulated[out] + np.quantile(gap[~out], QUANTILE)
        times[out] = simulated[out] * np.quantile(ratio[~out], QUANTILE)
        data = xgboost.QuantileDMatrix(factors[~out], label=np.log(ratio[~out]), nthread=1)
        trees = xgboost.train(TREES, data, num_boost_round=100)
        times_trees[out] = simulated[out] * np.exp(trees.inplace_predict(factors[out]))
    predictions = {
        "simulated": simulated,
        "plus one number": plus,
        "times one number": times,
        "times trees": times_trees,
    }
    first = batches.first_of_run
    limit = np.where(first < 0, np.inf, batches.peak_mib[first])
    rows = []
    for name, predicted in predictions.items():
        predicted_first = np.where(first < 0, np.inf, predicted[first])
        judged = _judged(predicted, batches.peak_mib, predicted_first, limit)
        row: dict[str, Any] = {"how": name}
        for key, value in judged.items():
            row[key] = round(value, 3 if key == "slack" else 4)
        rows.append(row)
    return rows


def _mean(values: Any) -> float:
    return round(float(np.mean(values)), 4)


def _quantiles(values: np.ndarray) -> dict[str, float]:
    shares = (0.05, 0.5, 0.95, 0.99, 1.0)
    return {f"{share:g}": round(float(np.quantile(values, share)), 4) for share in shares}


def main() -> None:
    warnings.simplefilter("ignore")
    about = {
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "xgboost": xgboost.__version__,
        "hardware": "2-core CPU (simulated); measured and published by others on GPUs",
        "date": str(datetime.date.today()),
    }
    result = {"about": about, "published": published(), "generation": generation()}
    text = json.dumps(result, indent=1)
    RESULTS.write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
