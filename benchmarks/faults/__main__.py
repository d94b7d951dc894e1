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
    found: list[str] = ["hang"]

    def run() -> None:
        try:
            with warnings.catch_warnings(), tempfile.TemporaryDirectory() as name:
                warnings.simplefilter("ignore")
                case.folder = Path(name)
                found[:] = FAULTS[case.fault](case)
        except Exception as error:
            asked = "samples_per_update" in str(error) or "at least the number of ranks" in str(
                error
            )
            refused = asked and isinstance(error, (ConfigError, BudgetError))
            found[:] = [] if refused else [f"{type(error).__name__}: {error}"[:500]]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    return found


def draws() -> Iterator[tuple[int, str]]:
    """Seeds with their faults, each fault in turn; the rare ones every fourth round."""
    return enumerate(
        fault for turn in count() for fault in FAULTS if fault not in RARE or turn % 4 == 0
    )


def campaign(cases: int, first: int) -> dict[str, Any]:
    """Counts by fault, and the seeds of what was found."""
    counts: Counter[str] = Counter()
    findings: dict[int, list[str]] = {}
    for seed, fault in islice(draws(), first, first + cases):
        counts[fault] += 1
        if wrong := run_case(Case(seed, fault)):
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
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # recovering is loud, and here it is all there is
    gc.freeze()  # recovering collects garbage, too: of the case, not of all that was imported
    began = time.monotonic()
    found = campaign(given.cases, given.first) if given.seed is None else campaign(1, given.seed)
    print(json.dumps({**found, "findings": len(found["findings"])}, indent=1))
    if given.save:
        print(
            save(RESULTS, "faults", {**found, "minutes": round((time.monotonic() - began) / 60, 1)})
        )
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
