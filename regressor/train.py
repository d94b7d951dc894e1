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
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xgboost

from dynagroup.memory.formula import closed_form
from dynagroup.memory.measurements import Measurements
from dynagroup.memory.phases import MONOMIALS
from dynagroup.memory.regressor import (
    LIKE,
    NEAR,
    PRETRAINED,
    Features,
    MemoryRegressor,
    TreeSettings,
    describe,
    features,
    train_booster,
)
from dynagroup.memory.regressor import pairs_of as measured_pairs
from regressor import report
from regressor.calibrate import calibrate
from regressor.judge import Judge
from regressor.rows import Group, Pairs, draw, load_groups, load_measured

HERE = Path(__file__).parent
RESULTS = report.RESULTS
CALIBRATED = 200  # about so many workloads decide the closed form's constants


@dataclass(frozen=True)
class Recipe:
    """Everything that was chosen. Chosen by leave-one-architecture-out figures."""

    pairs: int = 120
    trees: TreeSettings = TreeSettings(
        rounds=200, max_depth=2, regularisation=1.0, learning_rate=0.1, quantile=0.98
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


def features_of(pairs: Pairs, constants: Mapping[str, float]) -> Features:
    workload = pairs.group.workload
    form = closed_form(workload, constants)
    inputs = features(pairs.candidate, pairs.baseline, workload, form)
    return replace(inputs, log_ratio=np.log(pairs.ratio))


def measured_features(table: Measurements, constants: Mapping[str, float]) -> Features:
    return measured_pairs(table, closed_form(table.workload, constants))


def member(group: Group) -> dict[str, Any]:
    """One traced model, as the card of a regressor holds it: phases without their zeros."""
    phases = []
    for row in group.phases:
        terms = zip(MONOMIALS, row, strict=True)
        phases.append({name: round(float(value), 1) for name, value in terms if value})
    known = {name: getattr(group.workload, name) for name in (*LIKE, *NEAR, "fixed_tokens")}
    return {"workload": known, "two_streams": group.two_streams, "phases": phases}


def train(
    groups: Sequence[Group],
    recipe: Recipe,
    measured: Sequence[Measurements] = (),
    constants: Mapping[str, float] | None = None,
) -> MemoryRegressor:
    """A regressor from these workloads, and what was measured.

    Args:
        constants: the closed form's; None: fitted, starting from those in the source, which takes most of the time.
    """
    if constants is None:
        some = groups[:: max(1, len(groups) // CALIBRATED)]
        constants = calibrate(some, rounds=recipe.calibration_rounds)
    parts = [features_of(pairs_of(group, recipe.pairs), constants) for group in groups]
    parts += [measured_features(table, constants) for table in measured]
    booster = train_booster(parts, recipe.trees)
    num_members = min(recipe.plausible, len(groups))
    places = np.linspace(0, len(groups) - 1, num_members).astype(int)
    card = describe(parts, constants)
    card["lift"] = recipe.lift
    card["quantile"] = recipe.quantile
    card["plausible"] = [member(groups[place]) for place in places]
    return MemoryRegressor.of(booster, card)


def judge_fold(
    groups: Sequence[Group], recipe: Recipe, fold: int, pairs: int, choices: int
) -> Judge:
    """Judge every fourth family by a regressor trained without them, closed-form constants included."""
    families = sorted({group.family for group in groups})
    held_out = families[fold :: recipe.folds]
    began = time.monotonic()
    regressor = train([group for group in groups if group.family not in held_out], recipe)
    judge = Judge(pairs, choices)
    for group in groups:
        if group.family in held_out:
            judge.add(group, regressor)
    seconds = time.monotonic() - began
    print(f"without {', '.join(held_out)}: {seconds:.0f} s", flush=True)
    return judge


def evaluate(groups: Sequence[Group], recipe: Recipe, pairs: int, choices: int) -> dict[str, Any]:
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


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=HERE / "data" / "simulated.parquet")
    add(
        "--measured",
        type=Path,
        default=HERE / "data" / "measured.parquet",
        help="of measure_gpu, if any",
    )
    add("--artifact", type=Path, default=PRETRAINED)
    add("--results", type=Path, default=RESULTS)
    add("--no-evaluation", action="store_true", help="only train and write the artifact")
    add("--only-evaluation", action="store_true", help="only judge, and leave the artifact alone")
    add("--pairs", type=int, default=40, help="rows a workload to judge by")
    add("--choices", type=int, default=6, help="batches to grow a workload to judge by")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    recipe = Recipe()
    groups = load_groups(arguments.data)
    measured = load_measured(arguments.measured) if arguments.measured.exists() else []
    about = {
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "data_sha256": hashlib.sha256(arguments.data.read_bytes()).hexdigest(),
        "workloads": len(groups),
        "measured_workloads": len(measured),
    }
    if not arguments.only_evaluation:
        regressor = train(groups, recipe, measured)
        print("constants:", regressor.card["constants"])
        arguments.artifact.parent.mkdir(parents=True, exist_ok=True)
        described = MemoryRegressor(regressor.trees, {**regressor.card, **about})
        described.save(arguments.artifact)
    if arguments.no_evaluation:
        return
    result = {**about, **evaluate(groups, recipe, arguments.pairs, arguments.choices)}
    text = json.dumps(result, indent=1) + "\n"
    arguments.results.write_text(text, encoding="utf-8")
    if arguments.results == RESULTS:
        report.main()
    shown = {name: result[name] for name in ("overall", "counted", "simulated_directly")}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
