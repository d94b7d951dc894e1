"""Faults of loops and data, on ranks that are threads: early breaks, broken items, slow ranks, lies, restarts."""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import islice
from typing import Any

from benchmarks.faults.case import Case, epoch_of
from benchmarks.faults.data import Numbered, Seen
from benchmarks.faults.oracle import judged, wrong_gradients
from dynagroup.testing import run_ranks

__all__ = [
    "breaks_and_iterates_again",
    "item_raises",
    "lengths_lie",
    "nothing_happens",
    "slow_rank",
    "stop_and_resume_alike",
    "stop_and_resume_elsewhere",
    "worker_killed",
    "workers_and_resume",
]


def nothing_happens(case: Case) -> list[str]:
    """Three epochs."""

    def three(world: Any) -> list[list[Seen]]:
        loader = case.loader(world)
        return [epoch_of(loader) for _ in range(3)]

    epochs = zip(*run_ranks(case.ranks, three), strict=True)
    return [fault for ranks in epochs for fault in case.judged(ranks)]


def breaks_and_iterates_again(case: Case) -> list[str]:
    """The loop is left early on all ranks; the next iteration is a whole epoch."""
    stop = case.rng.randint(1, 4)

    def again(world: Any) -> list[Seen]:
        loader = case.loader(world)
        for _ in islice(loader, stop):
            pass
        return epoch_of(loader)

    return case.judged(run_ranks(case.ranks, again))


def item_raises(case: Case) -> list[str]:
    """The user's error reaches every rank; a loader of sound data then goes on."""
    broken = case.rng.randrange(len(case.lengths))
    data = Numbered(case.lengths, broken=broken)
    try:
        run_ranks(case.ranks, lambda world: epoch_of(case.loader(world, data)))
    except Exception as error:  # noqa: BLE001 - any, as long as it tells
        if f"{broken}" not in str(error):
            return [f"the error does not name the broken record: {error!r}"]
        return case.judged(run_ranks(case.ranks, lambda world: epoch_of(case.loader(world))))
    return ["a broken record went unnoticed"]


def slow_rank(case: Case) -> list[str]:
    """One rank takes its time."""
    slow = case.rng.randrange(case.ranks)

    def run(world: Any) -> list[Seen]:
        steps = []
        for step in case.loader(world):
            steps.append(Seen.of(step))
            if world.rank == slow:
                time.sleep(0.001)
        return steps

    return case.judged(run_ranks(case.ranks, run))


def lengths_lie(case: Case) -> list[str]:
    """Lengths (or hints) are wrong by up to ten times: every sample still comes once, weighed by the truth."""
    told = [max(1, int(n * case.rng.choice([0.1, 1, 10]))) for n in case.lengths]
    if case.online:  # it measures what it is told about, so its batches keep to their budget all the same
        case.options["length_hint"] = told
        return case.judged(run_ranks(case.ranks, lambda world: epoch_of(case.loader(world))))
    ranks = run_ranks(case.ranks, lambda world: epoch_of(case.loader(world, lengths=told)))
    return judged(case.lengths, ranks, case.everything())


def stop_and_resume_alike(case: Case) -> list[str]:
    return _stop_and_resume(case, ranks_after=case.ranks)


def stop_and_resume_elsewhere(case: Case) -> list[str]:
    return _stop_and_resume(case, ranks_after=case.other_ranks())


def _stop_and_resume(case: Case, *, ranks_after: int) -> list[str]:
    """An epoch stopped after a random step, saved as JSON, and continued on so many ranks by fresh loaders."""
    alike = ranks_after == case.ranks
    whole = run_ranks(case.ranks, lambda world: epoch_of(case.loader(world)))
    stop = case.rng.randint(0, len(whole[0]))
    if not alike and stop < len(whole[0]):
        while stop and not whole[0][stop - 1].ends:
            stop -= 1  # the gradient of an update that two numbers of ranks share is nobody's to judge

    def first_half(world: Any) -> tuple[list[Seen], Any]:
        loader = case.loader(world)
        steps = [Seen.of(step) for step in islice(loader, stop)] if stop else []
        return steps, json.loads(json.dumps(loader.state_dict()))

    begun = run_ranks(case.ranks, first_half)
    states = [state for _, state in begun]

    def second_half(world: Any) -> list[Seen]:
        loader = case.loader(world)
        loader.load_state_dict(states[world.rank] if alike else states)
        return epoch_of(loader)

    rest = run_ranks(ranks_after, second_half)
    if stop == len(whole[0]):  # the epoch was used up: the next one comes
        return case.judged(rest)
    done = Counter(i for steps, _ in begun for step in steps for i in step.samples)
    left = case.judged(rest, case.everything() - done)
    if not alike:
        return left
    both = [a + b for (a, _), b in zip(begun, rest, strict=True)]  # the update that was cut in two is judged as one
    return wrong_gradients(case.lengths, both) + [fault for fault in left if "gradient" not in fault]


def worker_killed(case: Case) -> list[str]:
    """A worker process dies: an error on every rank, and no hang."""
    case.ranks = 1
    data = Numbered(case.lengths, deadly=case.rng.randrange(len(case.lengths)))
    try:
        epoch_of(case.loader(None, data, num_workers=1))
    except RuntimeError as error:
        return [] if "worker" in str(error).lower() else [f"the error does not speak of a worker: {error}"]
    return ["a killed worker went unnoticed"]


def workers_and_resume(case: Case) -> list[str]:
    """Real worker processes that prefetch; what was prefetched and not used comes again."""
    case.ranks = 1
    stop = case.rng.randint(1, 4)
    loader = case.loader(None, num_workers=2)
    begun = [Seen.of(step) for step in islice(loader, stop)]
    state = json.loads(json.dumps(loader.state_dict()))
    after = case.loader(None, num_workers=2)
    after.load_state_dict(state)
    rest = epoch_of(after)
    done = Counter(i for step in begun for i in step.samples)
    expected = case.everything() - done or case.everything()
    return [fault for fault in case.judged([rest], expected) if "gradient" not in fault]
