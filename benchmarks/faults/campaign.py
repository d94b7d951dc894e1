"""The campaign: which faults there are, each case's verdict, counts by fault."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from benchmarks.faults import disks, loaders, memory, processes, states
from benchmarks.faults.case import Case
from dynagroup.errors import BudgetError, ConfigError

__all__ = ["FAULTS", "RARE", "campaign", "draws", "run_case"]

HANG_S = 600.0

FAULTS: dict[str, Callable[[Case], list[str]]] = {
    "none": loaders.nothing_happens,
    "early break, iterated again": loaders.breaks_and_iterates_again,
    "item raises": loaders.item_raises,
    "slow rank": loaders.slow_rank,
    "lengths lie by ten times": loaders.lengths_lie,
    "stop and resume": loaders.stop_and_resume_alike,
    "stop and resume on other ranks": loaders.stop_and_resume_elsewhere,
    "state damaged": states.damaged_state,
    "state of another run": states.foreign_state,
    "out-of-memory storm in calls": memory.storm_in_calls,
    "out-of-memory storm in training": memory.storm_in_training,
    "disk full": disks.disk_full,
    "killed while writing results": disks.killed_while_writing,
    "journal cut or damaged": disks.journal_damaged,
    "worker killed": loaders.worker_killed,
    "workers prefetch, stop and resume": loaders.workers_and_resume,
    "rank killed, others resume": processes.rank_killed,
    "SIGTERM, other ranks resume": processes.terminated_and_resumed,
    "out-of-memory storm on DDP ranks": memory.storm_on_ranks,
}
RARE = (
    "worker killed",
    "workers prefetch, stop and resume",
    "rank killed, others resume",
    "SIGTERM, other ranks resume",
    "out-of-memory storm on DDP ranks",
)
"""They start several processes, so a campaign has fewer of them."""


def run_case(case: Case) -> list[str]:
    """What the case found wrong; a hang is a finding, too."""
    found: list[list[str]] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(FAULTS[case.fault](case))
        except (ConfigError, BudgetError) as error:
            asked = "samples_per_update" in str(error) or "at least the number of ranks" in str(error)
            found.append([] if asked else [f"{type(error).__name__}: {error}"])
        except Exception as error:  # noqa: BLE001 - that is the finding
            found.append([f"{type(error).__name__}: {error}"[:500]])

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    return found[0] if found else ["hang"]


def campaign(cases: int, first: int, show: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts by fault, and the seeds of what was found."""
    counts: Counter[str] = Counter()
    findings: dict[int, list[str]] = {}
    for seed, fault in islice(draws(first), cases):
        wrong = run_case(Case(seed, fault))
        counts[fault] += 1
        if wrong:
            findings[seed] = [fault, *wrong]
            show(f"seed {seed}, {fault}: {'; '.join(wrong)}")
    by_fault = {fault: counts[fault] for fault in FAULTS if counts[fault]}
    return {"cases": cases, "first_seed": first, "by_fault": by_fault, "findings": findings}


def draws(first: int) -> Iterator[tuple[int, str]]:
    """Seeds with their faults, each fault in turn; the rare ones every fourth round."""
    seed, turn = first, 0
    while True:
        for fault in FAULTS:
            if fault not in RARE or turn % 4 == 0:
                yield seed, fault
                seed += 1
        turn += 1
