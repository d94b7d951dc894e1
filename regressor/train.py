"""Trains and judges the pretrained regressor: ``python -m regressor.train``.

Reads ``data/simulated.parquet``, judges every family by a regressor that saw neither it nor a few others, and trains on
all of them for the artifact. The same data gives the same artifact, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import time
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.memory.closed_form import CONSTANTS, ClosedForm
from dynagroup.memory.features import features
from dynagroup.memory.fitting import TrainingRows, train_booster
from dynagroup.memory.regressor import PRETRAINED, MemoryRegressor, describe
from dynagroup.memory.workload import Workload
from regressor.calibrate import calibrate
from regressor.judge import Judge
from regressor.rows import Group, Pairs, draw, load_groups

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results" / "regressor.json"


@dataclass(frozen=True)
class Recipe:
    """Everything that was chosen. Chosen by leave-one-architecture-out figures."""

    pairs: int = 120
    sharp: tuple[tuple[str, Any], ...] = (
        ("rounds", 80),
        ("max_depth", 3),
        ("regularisation", 500.0),
        ("learning_rate", 0.05),
    )
    bound: float = 0.2
    """Largest correction of the closed form, in log ratio."""
    careful: tuple[tuple[str, Any], ...] = (("rounds", 80), ("max_depth", 3), ("regularisation", 50.0), ("learning_rate", 0.2),
                                            ("quantile", 0.96))  # fmt: skip
    masks: int = 1
    calibration_rounds: int = 15
    folds: int = 4


def pairs_of(group: Group, size: int) -> Pairs:
    return draw(group, np.random.default_rng(zlib.crc32(group.key.encode())), size)


def sharp_rows(pairs: Pairs, constants: dict[str, float]) -> TrainingRows:
    form = ClosedForm.of(pairs.group.workload, constants)
    return TrainingRows(features(pairs.candidate, pairs.baseline, pairs.group.workload, form), np.log(pairs.ratio))


def masked(workload: Workload, rng: np.random.Generator) -> Workload:
    """The workload as a user who says little would give it: half the time nothing at all."""
    keep = 0.0 if rng.random() < 0.5 else rng.uniform(0.1, 0.9)
    known = {f.name: getattr(workload, f.name) for f in fields(workload) if rng.random() < keep}
    if "dtype" not in known:
        known.pop("autocast", None)
    if "num_heads" not in known:
        known.pop("num_kv_heads", None)
    return Workload(**known)


def careful_rows(pairs: Pairs, constants: dict[str, float], masks: int) -> list[TrainingRows]:
    rng = np.random.default_rng(zlib.crc32(pairs.group.key.encode()) + 1)
    found = []
    for _ in range(masks):
        workload = masked(pairs.group.workload, rng)
        form = ClosedForm.of(workload, constants)
        found.append(TrainingRows(features(pairs.candidate, pairs.baseline, workload, form), np.log(pairs.ratio)))
    return found


def train(groups: list[Group], recipe: Recipe, start: dict[str, float], rounds: int) -> MemoryRegressor:
    """A regressor from these workloads."""
    constants = calibrate(groups[:: max(1, len(groups) // 150)], start=start, rounds=rounds)
    pairs = [pairs_of(g, recipe.pairs) for g in groups]
    sharp = [sharp_rows(p, constants) for p in pairs]
    careful = [rows for p in pairs for rows in careful_rows(p, constants, recipe.masks)]
    boosters = {
        "sharp": train_booster(sharp, **dict(recipe.sharp)),
        "careful": train_booster(careful, **dict(recipe.careful)),
    }
    return MemoryRegressor(boosters, {**describe(sharp + careful, constants), "bound": recipe.bound})


def leave_families_out(groups: list[Group], recipe: Recipe, judge: Judge, constants: dict[str, float]) -> None:
    """Judge every family by a regressor trained without it (and a few others), closed-form constants included."""
    families = sorted({g.family for g in groups})
    for fold in range(recipe.folds):
        held_out = set(families[fold :: recipe.folds])
        began = time.monotonic()
        regressor = train([g for g in groups if g.family not in held_out], recipe, constants, rounds=2)
        for group in (g for g in groups if g.family in held_out):
            judge.add(group, regressor)
        print(f"without {', '.join(sorted(held_out))}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "simulated.parquet")
    parser.add_argument("--artifact", type=Path, default=PRETRAINED)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-evaluation", action="store_true", help="only train and write the artifact")
    parser.add_argument("--pairs", type=int, default=50, help="rows a workload to judge by")
    parser.add_argument("--choices", type=int, default=6, help="batches to grow a workload to judge by")
    arguments = parser.parse_args()
    recipe = Recipe()
    groups = load_groups(arguments.data)
    constants = calibrate(groups[:: max(1, len(groups) // 150)], start=CONSTANTS, rounds=recipe.calibration_rounds)
    print("constants:", constants)
    regressor = train(groups, recipe, constants, rounds=3)
    source = hashlib.sha256(arguments.data.read_bytes()).hexdigest()
    about = {
        "recipe": {f.name: getattr(recipe, f.name) for f in fields(recipe)},
        "data_sha256": source,
        "workloads": len(groups),
    }
    arguments.artifact.parent.mkdir(parents=True, exist_ok=True)
    MemoryRegressor(regressor.boosters, {**regressor.card, **json.loads(json.dumps(about))}).save(arguments.artifact)
    if arguments.no_evaluation:
        return
    judge = Judge(arguments.pairs, arguments.choices)
    leave_families_out(groups, recipe, judge, constants)
    hardware = {
        "hardware": "2-core AMD EPYC, CPU",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    result = {**about, **hardware, "versions": regressor.card["versions"], **judge.summary()}
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    arguments.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(judge.summary()["overall"], indent=1))


if __name__ == "__main__":
    main()
