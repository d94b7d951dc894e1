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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.faults.case import Case, seen
from benchmarks.faults.oracle import Seen
from dynagroup import AlignmentError
from dynagroup.testing import run_ranks

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
    _write(folder / f"report-{rank}.json", report)
    os._exit(0)


def _write(path: Path, value: Any) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


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


def _interrupted(case: Case, notices: Mapping[int, int], number_of_signal: int, folder: Path) -> list[Any]:
    """Every rank's report of an epoch in which each of these ranks gets the signal at its step.

    After every update all save their states and which samples they have seen, as files, which outlive them. Ranks that were
    told to end agree to stop at the end of an update.
    """

    def run(world: Any, folder: Path) -> Any:
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: told.append(1))
        loader, samples, updates, number = case.loader(world), [], 0, 0
        for number, step in enumerate(loader, start=1):
            samples += Seen.of(step).samples
            if number == notices.get(world.rank):
                os.kill(os.getpid(), number_of_signal)
            if step.ends_update:
                updates += 1
                saved = {"state": loader.state_dict(), "seen": samples}
                _write(folder / f"{updates}-{world.rank}.checkpoint", saved)
                if number_of_signal == signal.SIGTERM and world.all_max([len(told)])[0]:
                    break
        return {"steps": number}

    return on_processes(case.ranks, run, folder)


def _resumed(case: Case, folder: Path) -> list[str]:
    """Other ranks go on from the newest checkpoint that all finished: what it has not seen comes once, or a whole epoch."""
    updates = Counter(int(path.name.split("-")[0]) for path in folder.glob("*.checkpoint"))
    newest = max((update for update, count in updates.items() if count == case.ranks), default=0)
    saved = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{newest}-*.checkpoint"))]

    def rest(world: Any) -> list[Seen]:
        loader = case.loader(world)
        if saved:
            loader.load_state_dict([part["state"] for part in saved])
        return seen(loader)

    remaining = case.everything - Counter(i for part in saved for i in part["seen"])
    return case.judged(run_ranks(case.other_ranks(), rest), remaining or case.everything)


def rank_killed(case: Case) -> list[str]:
    """A rank is killed at a random step. The others raise AlignmentError (or had no more to exchange); other ranks resume."""
    case.ranks = max(2, case.ranks)
    steps = len(case.epoch()[0])
    stop, victim = case.rng.randint(1, steps), case.rng.randrange(case.ranks)
    with tempfile.TemporaryDirectory() as name:
        reports = _interrupted(case, {victim: stop}, signal.SIGKILL, Path(name))
        wrong = [] if reports[victim] == KILLED else [f"the rank to be killed ended with {reports[victim]}"]
        for rank, report in enumerate(reports):
            fine = report == {"steps": steps} or (isinstance(report, str) and report.startswith("AlignmentError"))
            if rank != victim and not fine:
                wrong.append(f"rank {rank} ended with {report}")
        return wrong + _resumed(case, Path(name))


def terminated_and_resumed(case: Case) -> list[str]:
    """Ranks get SIGTERM at steps of their own, agree at the end of an update to stop, and others resume."""
    steps = len(case.epoch()[0])
    notices = {rank: case.rng.randint(1, steps) for rank in range(case.ranks)}
    with tempfile.TemporaryDirectory() as name:
        reports = _interrupted(case, notices, signal.SIGTERM, Path(name))
        if not all(isinstance(report, dict) and report == reports[0] for report in reports):
            return [f"ranks ended with {reports}"]
        return _resumed(case, Path(name))


RARE = {"rank killed, others resume": rank_killed, "SIGTERM, other ranks resume": terminated_and_resumed}
