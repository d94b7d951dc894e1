"""``python -m benchmarks.faults [--cases N] [--first SEED] [--seed SEED] [--save]``: see :mod:`benchmarks.faults`."""

import argparse
import gc
import json
import logging
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults import disks, loaders, memory, processes
from benchmarks.faults.case import Case
from benchmarks.record import RESULTS, save
from dynagroup import BudgetError, ConfigError

HANG_S = 600.0
RARE = {**loaders.RARE, **processes.RARE, **memory.RARE}
FAULTS: dict[str, Callable[[Case], list[str]]] = {
    **loaders.FAULTS,
    **memory.FAULTS,
    **disks.FAULTS,
    **RARE,
}


def run_case(case: Case) -> list[str]:
    """What the case found wrong, in a thread of its own: a hang is a finding, too."""
    wrong = ["hang"]

    def run() -> None:
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
                warnings.simplefilter("ignore")
                case.folder = Path(name)
                wrong[:] = FAULTS[case.fault](case)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            wrong[:] = [] if _is_refusal(error) else [message[:500]]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    return wrong


def _is_refusal(error: Exception) -> bool:
    """Whether the library says that the drawn update is too small for the ranks."""
    if not isinstance(error, (ConfigError, BudgetError)):
        return False
    return "samples_per_update" in str(error) or "at least the number of ranks" in str(error)


def draws() -> Iterator[tuple[int, str]]:
    """Seeds with their faults, each fault in turn; the rare ones every fourth round."""
    seed = 0
    for turn in count():
        for fault in FAULTS:
            if fault not in RARE or turn % 4 == 0:
                yield seed, fault
                seed += 1


def campaign(cases: int, first: int) -> dict[str, Any]:
    """Counts by fault, and the seeds of what was found."""
    counts: Counter[str] = Counter()
    findings: dict[int, list[str]] = {}
    for seed, fault in islice(draws(), first, first + cases):
        counts[fault] += 1
        wrong = run_case(Case(seed, fault))
        if wrong:
            findings[seed] = [fault, *wrong]
            print(f"seed {seed}, {fault}: {'; '.join(wrong)}")
    return {"cases": cases, "first_seed": first, "by_fault": dict(counts), "findings": findings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print counts; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        prog="faults", description="Random configurations meet faults."
    )
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--seed", type=int, help="one case, by its seed")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/faults.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # recovering is loud, and here it is all there is
    gc.freeze()  # recovering collects garbage, too: of the case, not of all that was imported
    began = time.monotonic()
    if options.seed is None:
        figures = campaign(options.cases, options.first)
    else:
        figures = campaign(cases=1, first=options.seed)
    num_findings = len(figures["findings"])
    print(json.dumps({**figures, "findings": num_findings}, indent=1))
    if options.save:
        minutes = (time.monotonic() - began) / 60
        print(save(RESULTS, "faults", {**figures, "minutes": round(minutes, 1)}))
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
