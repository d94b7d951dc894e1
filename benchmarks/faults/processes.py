"""Real ranks, each a process of its own on gloo: killed, or told to end, and resumed by others."""

import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from benchmarks.faults.case import Case, seen
from benchmarks.faults.oracle import Seen
from benchmarks.machine import join_group
from dynagroup import AlignmentError
from dynagroup.distributed import DistributedWorld
from dynagroup.testing import run_ranks

PATIENCE_S = 500.0
KILLED = f"exit code {-signal.SIGKILL}"


def forked(number: int, function: Callable[[int], Any]) -> list[Any]:
    """What ``function(rank)`` returns on so many processes forked from this one.

    ``"Error: text"`` for one that raised, ``"exit code"`` for one that was killed, ``"hang"`` for one that does not end.
    Forked, since a fresh interpreter would take seconds to import torch; they leave without any tearing down.
    """
    gc.collect()  # loaders of earlier cases, whose workers are no children of a fork
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + PATIENCE_S
    started = []
    for rank in range(number):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(function, rank, writer))
        process.start()
        started.append((process, reader))
        writer.close()  # so that the end of the process is the end of its pipe
    return [_report(process, reader, end) for process, reader in started]


def _run(function: Callable[[int], Any], rank: int, writer: Any) -> None:
    # loaders of the parent say at their end that these are not their workers
    sys.unraisablehook = _ignored
    try:
        report = function(rank)
    except BaseException as error:
        report = f"{type(error).__name__}: {error}"[:2000]
        if not isinstance(error, (AlignmentError, OSError)):
            traceback.print_exc(file=sys.stderr)
    writer.send(report)
    os._exit(0)


def _ignored(_error: Any) -> None:
    pass


def _report(process: Any, reader: Any, end: float) -> Any:
    if not reader.poll(max(0.0, end - time.monotonic())):
        process.kill()
        return "hang"
    try:
        return reader.recv()
    except EOFError:
        process.join()
        return f"exit code {process.exitcode}"


def on_processes(case: Case, function: Callable[[DistributedWorld], Any]) -> list[Any]:
    """:func:`forked`, on the case's ranks of one gloo group."""

    def run(rank: int) -> Any:
        join_group(rank, case.ranks, case.folder)
        return function(DistributedWorld())

    return forked(case.ranks, run)


def _interrupted(case: Case, notices: Mapping[int, int], number_of_signal: int) -> list[Any]:
    """Every rank's steps of an epoch in which each of these ranks gets the signal at its step.

    After every update all save their states and which samples they have seen, as files, which outlive them. Ranks that were
    told to end agree to stop at the end of an update.
    """

    def run(world: DistributedWorld) -> Any:
        notices_received: list[int] = []
        signal.signal(signal.SIGTERM, lambda *_: notices_received.append(1))
        loader = case.loader(world)
        samples: list[int] = []
        updates = 0
        number = 0
        for number, step in enumerate(loader, start=1):
            samples += Seen.of(step).samples
            if number == notices.get(world.rank):
                os.kill(os.getpid(), number_of_signal)
            if step.ends_update:
                updates += 1
                saved = json.dumps({"state": loader.state_dict(), "seen": samples})
                (case.folder / f"{updates}-{world.rank}.checkpoint").write_text(saved)
                if number_of_signal == signal.SIGTERM:
                    [is_to_stop] = world.all_max([len(notices_received)])
                    if is_to_stop:
                        break
        return number

    return on_processes(case, run)


def _resumed(case: Case) -> list[str]:
    """Other ranks go on from the newest checkpoint that all finished: what it has not seen comes once, or a whole epoch."""
    paths = case.folder.glob("*.checkpoint")
    num_ranks_of = Counter(int(path.name.split("-")[0]) for path in paths)
    whole = [update for update, num_ranks in num_ranks_of.items() if num_ranks == case.ranks]
    newest = max(whole, default=0)
    checkpoints = sorted(case.folder.glob(f"{newest}-*.checkpoint"))
    saved = [json.loads(path.read_text()) for path in checkpoints]

    def rest(world: Any) -> list[Seen]:
        loader = case.loader(world)
        if saved:
            loader.load_state_dict([part["state"] for part in saved])
        return seen(loader)

    used = Counter(chain.from_iterable(part["seen"] for part in saved))
    remaining = case.everything - used
    expected = remaining if remaining else case.everything
    return case.judged(run_ranks(case.other_ranks(), rest), expected)


def rank_killed(case: Case) -> list[str]:
    """A rank is killed at a random step. The others raise AlignmentError (or had no more to exchange); other ranks resume."""
    case.ranks = max(2, case.ranks)
    steps = len(case.epoch()[0])
    stop = case.rng.randint(1, steps)
    victim = case.rng.randrange(case.ranks)
    reports = _interrupted(case, {victim: stop}, signal.SIGKILL)
    wrong = []
    if reports[victim] != KILLED:
        wrong.append(f"the rank to be killed ended with {reports[victim]}")
    for rank, report in enumerate(reports):
        if rank != victim and report != steps and "AlignmentError" not in str(report):
            wrong.append(f"rank {rank} ended with {report}")
    return wrong + _resumed(case)


def terminated_and_resumed(case: Case) -> list[str]:
    """Ranks get SIGTERM at steps of their own, agree at the end of an update to stop, and others resume."""
    steps = len(case.epoch()[0])
    notices = {rank: case.rng.randint(1, steps) for rank in range(case.ranks)}
    reports = _interrupted(case, notices, signal.SIGTERM)
    if not all(isinstance(report, int) and report == reports[0] for report in reports):
        return [f"ranks ended with {reports}"]
    return _resumed(case)


RARE = {
    "rank killed, others resume": rank_killed,
    "SIGTERM, other ranks resume": terminated_and_resumed,
}
