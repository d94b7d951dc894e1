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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from dynagroup.memory.formula import ClosedForm
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import MONOMIALS
from dynagroup.memory.regressor import (
    LIKE,
    NEAR,
    PRETRAINED,
    Features,
    MemoryRegressor,
    describe,
    features,
    train_booster,
)
from dynagroup.memory.regressor import pairs_of as measured_pairs
from dynagroup.memory.workload import Workload
from regressor import report
from regressor.calibrate import calibrate
from regressor.judge import Judge
from regressor.rows import Group, Pairs, draw, load_groups, load_measured

HERE = Path(__file__).parent
RESULTS = report.RESULTS


@dataclass(frozen=True)
class Recipe:
    """Everything that was chosen. Chosen by leave-one-architecture-out figures."""

    pairs: int = 120
    sharp: tuple[tuple[str, Any], ...] = (
        ("rounds", 200),
        ("max_depth", 2),
        ("regularisation", 1.0),
        ("learning_rate", 0.1),
        ("quantile", 0.98),
    )
    """Trees that say by how much the closed form may fall short: the quantile that true ratios stay below."""
    lift: tuple[float, float] = (0.0, 0.4)
    """Least and largest correction of the closed form, in log ratio."""
    plausible: int = 320
    """Traced models that an unknown workload may be like."""
    quantile: float = 0.98
    """Of what they would need."""
    calibration_rounds: int = 15
    folds: int = 4


def pairs_of(group: Group, size: int) -> Pairs:
    return draw(group, np.random.default_rng(zlib.crc32(group.key.encode())), size)


def sharp_rows(pairs: Pairs, constants: dict[str, float]) -> Features:
    form = ClosedForm.of(pairs.group.workload, constants)
    found = features(pairs.candidate, pairs.baseline, pairs.group.workload, form)
    return replace(found, log_ratio=np.log(pairs.ratio))


def member(
    workload: Workload, two_streams: bool, phases: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """One traced model, as the card of a regressor holds it: phases without their zeros."""
    known = {name: getattr(workload, name) for name in (*LIKE, *NEAR, "fixed_tokens")}
    rows = [
        {name: round(float(v), 1) for name, v in zip(MONOMIALS, row, strict=True) if v}
        for row in phases
    ]
    return {"workload": known, "two_streams": two_streams, "phases": rows}


def train(
    groups: list[Group],
    recipe: Recipe,
    measured: Sequence[Measurements] = (),
    constants: dict[str, float] | None = None,
) -> MemoryRegressor:
    """A regressor from these workloads, and what was measured.

    Args:
        constants: the closed form's; None: fitted, starting from those in the source, which takes most of the time.
    """
    if constants is None:
        constants = calibrate(
            groups[:: max(1, len(groups) // 200)], rounds=recipe.calibration_rounds
        )
    pairs = [pairs_of(g, recipe.pairs) for g in groups]
    sharp = [sharp_rows(p, constants) for p in pairs]
    sharp += [measured_pairs(table, ClosedForm.of(table.workload, constants)) for table in measured]
    booster = train_booster(sharp, **dict(recipe.sharp))
    places = np.linspace(0, len(groups) - 1, min(recipe.plausible, len(groups))).astype(int)
    plausible = [
        member(groups[p].workload, groups[p].two_streams, groups[p].phases) for p in places
    ]
    chosen = {"lift": recipe.lift, "quantile": recipe.quantile, "plausible": plausible}
    return MemoryRegressor.of(booster, {**describe(sharp, constants), **chosen})


def judge_fold(groups: list[Group], recipe: Recipe, fold: int, pairs: int, choices: int) -> Judge:
    """Judge every fourth family by a regressor trained without them, closed-form constants included."""
    held_out = set(sorted({g.family for g in groups})[fold :: recipe.folds])
    began = time.monotonic()
    judge = Judge(pairs, choices)
    regressor = train([g for g in groups if g.family not in held_out], recipe)
    for group in [g for g in groups if g.family in held_out]:
        judge.add(group, regressor)
    print(f"without {', '.join(sorted(held_out))}: {time.monotonic() - began:.0f} s", flush=True)
    return judge


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=HERE / "data" / "simulated.parquet")
    parser.add_argument(
        "--measured",
        type=Path,
        default=HERE / "data" / "measured.parquet",
        help="of measure_gpu, if any",
    )
    parser.add_argument("--artifact", type=Path, default=PRETRAINED)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--no-evaluation", action="store_true", help="only train and write the artifact"
    )
    parser.add_argument(
        "--only-evaluation", action="store_true", help="only judge, and leave the artifact alone"
    )
    parser.add_argument("--pairs", type=int, default=50, help="rows a workload to judge by")
    parser.add_argument(
        "--choices", type=int, default=6, help="batches to grow a workload to judge by"
    )
    return parser.parse_args()


def evaluate(groups: list[Group], recipe: Recipe, pairs: int, choices: int) -> dict[str, Any]:
    """Figures of all folds, and of what they were made on."""
    judge = Judge(pairs, choices)
    case = partial(judge_fold, groups, recipe, pairs=pairs, choices=choices)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for part in pool.map(case, range(recipe.folds)):
            judge.rows += part.rows
            judge.direct += part.direct
            judge.never += part.never
    return {
        "hardware": "2-core AMD EPYC, CPU",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"xgboost": xgboost.__version__, "numpy": np.__version__},
        **judge.summary(),
    }


def main() -> None:
    arguments, recipe = options(), Recipe()
    groups = load_groups(arguments.data)
    measured = load_measured(arguments.measured) if arguments.measured.exists() else []
    about = {
        "recipe": {f.name: getattr(recipe, f.name) for f in fields(recipe)},
        "data_sha256": hashlib.sha256(arguments.data.read_bytes()).hexdigest(),
        "workloads": len(groups),
        "measured_workloads": len(measured),
    }
    if not arguments.only_evaluation:
        regressor = train(groups, recipe, measured)
        print("constants:", regressor.card["constants"])
        arguments.artifact.parent.mkdir(parents=True, exist_ok=True)
        MemoryRegressor(regressor.trees, {**regressor.card, **json.loads(json.dumps(about))}).save(
            arguments.artifact
        )
    if arguments.no_evaluation:
        return
    result = {**about, **evaluate(groups, recipe, arguments.pairs, arguments.choices)}
    arguments.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.results == RESULTS:
        report.main()
    print(
        json.dumps({k: result[k] for k in ("overall", "counted", "simulated_directly")}, indent=1)
    )


if __name__ == "__main__":
    main()
