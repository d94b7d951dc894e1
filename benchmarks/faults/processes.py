"""Real ranks, each a process of its own on gloo: killed, or told to end, and resumed by others."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.case import Case, epoch_of
from benchmarks.faults.data import Seen
from dynagroup.errors import AlignmentError
from dynagroup.testing import run_ranks

__all__ = ["forked", "on_processes", "rank_killed", "terminated_and_resumed"]

PATIENCE_S = 500.0
KILLED = f"exit code {-signal.SIGKILL}"


def forked(number: int, function: Callable[[int, Path], Any], folder: Path) -> list[Any]:
    """What ``function(rank, folder)`` returns on so many processes forked from this one, by way of JSON.

    ``"Error: text"`` for one that raised, ``"exit code"`` for one that was killed, ``"hang"`` for one that does not end.
    Forked, since a fresh interpreter would take seconds to import torch; they leave without any tearing down.
    """
    gc.collect()  # loaders of earlier cases, whose workers are no children of a fork
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run, args=(function, rank, folder)) for rank in range(number)]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [_report(process, folder / f"report-{rank}.json") for rank, process in enumerate(processes)]


def _run(function: Callable[[int, Path], Any], rank: int, folder: Path) -> None:
    sys.unraisablehook = lambda _: None  # loaders of the parent say at their end that these are not their workers
    try:
        report = function(rank, folder)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        report = f"{type(error).__name__}: {error}"[:2000]
        if not isinstance(error, (AlignmentError, OSError)):
            traceback.print_exc(file=sys.stderr)
    part = folder / f"report-{rank}.part"
    part.write_text(json.dumps(report), encoding="utf-8")
    part.replace(folder / f"report-{rank}.json")
    os._exit(0)


def _report(process: Any, path: Path) -> Any:
    if process.exitcode is None:
        process.kill()
        process.join()
        return "hang"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else f"exit code {process.exitcode}"


def on_processes(ranks: int, function: Callable[[Any, Path], Any], folder: Path) -> list[Any]:
    """:func:`forked`, with ``function(world, folder)`` on ranks of one gloo group."""

    def run(rank: int, folder: Path) -> Any:
        import torch.distributed as dist

        from dynagroup.distributed import DistributedWorld

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # this process's own; the name of a machine may lead nowhere
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        return function(DistributedWorld(), folder)

    return forked(ranks, run, folder)


class Checkpoints:
    """After every update each rank saves its state, and which samples it has seen; as files, which outlive it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    def save(self, rank: int, update: int, state: Any, seen: list[int]) -> None:
        part = self.folder / f"part-{rank}"
        part.write_text(json.dumps({"state": state, "seen": seen}), encoding="utf-8")
        part.replace(self.folder / f"{update}-{rank}.checkpoint")

    def newest(self) -> list[dict[str, Any]]:
        """Every rank's part of the newest checkpoint that all of them finished; empty if there is none."""
        found = Counter(int(path.name.split("-")[0]) for path in self.folder.glob("*.checkpoint"))
        whole = [update for update, count in found.items() if count == self.ranks]
        if not whole:
            return []
        names = [self.folder / f"{max(whole)}-{rank}.checkpoint" for rank in range(self.ranks)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in names]


def _resumed(case: Case, saved: list[dict[str, Any]]) -> list[str]:
    """Other ranks go on where the checkpoint is: what it has not seen comes once, or the next epoch whole."""
    ranks = case.other_ranks()
    states = [part["state"] for part in saved]

    def rest(world: Any) -> list[Seen]:
        loader = case.loader(world)
        if states:
            loader.load_state_dict(states)
        return epoch_of(loader)

    remaining = case.everything() - Counter(i for part in saved for i in part["seen"])
    return case.judged(run_ranks(ranks, rest), remaining or case.everything())


def rank_killed(case: Case) -> list[str]:
    """A rank is killed at a random step. The others raise AlignmentError (or had no more to exchange); other ranks resume."""
    case.ranks = max(2, case.ranks)
    steps = len(run_ranks(case.ranks, lambda world: epoch_of(case.loader(world)))[0])
    stop, victim = case.rng.randint(1, steps), case.rng.randrange(case.ranks)

    def run(world: Any, folder: Path) -> Any:
        kept, loader, seen, updates = Checkpoints(folder, case.ranks), case.loader(world), [], 0
        number = 0
        for number, step in enumerate(loader, start=1):
            seen += Seen.of(step).samples
            if world.rank == victim and number == stop:
                os.kill(os.getpid(), signal.SIGKILL)
            if step.ends_update:
                updates += 1
                kept.save(world.rank, updates, loader.state_dict(), seen)
        return {"steps": number}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reports = on_processes(case.ranks, run, folder)
        wrong = [] if reports[victim] == KILLED else [f"the rank to be killed ended with {reports[victim]}"]
        for rank, report in enumerate(reports):
            fine = report == {"steps": steps} or (isinstance(report, str) and report.startswith("AlignmentError"))
            if rank != victim and not fine:
                wrong.append(f"rank {rank} ended with {report}")
        return wrong + _resumed(case, Checkpoints(folder, case.ranks).newest())


def terminated_and_resumed(case: Case) -> list[str]:
    """Ranks get SIGTERM at steps of their own, agree at the end of an update to stop, save, and others resume."""
    steps = len(run_ranks(case.ranks, lambda world: epoch_of(case.loader(world)))[0])
    notices = [case.rng.randint(1, steps) for _ in range(case.ranks)]

    def run(world: Any, folder: Path) -> Any:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        loader, seen, number = case.loader(world), [], 0
        for number, step in enumerate(loader, start=1):
            seen += Seen.of(step).samples
            if number == notices[world.rank]:
                os.kill(os.getpid(), signal.SIGTERM)
            if step.ends_update and world.all_max([len(told)])[0]:
                break
        Checkpoints(folder, case.ranks).save(world.rank, 0, loader.state_dict(), seen)
        return {"stopped": number}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reports = on_processes(case.ranks, run, folder)
        if not all(isinstance(report, dict) and report == reports[0] for report in reports):
            return [f"ranks ended with {reports}"]
        return _resumed(case, Checkpoints(folder, case.ranks).newest())
