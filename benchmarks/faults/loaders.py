"""Faults of loops and data, on ranks that are threads: early breaks, broken items, lies, restarts."""

import json
from itertools import chain
from typing import Any

from benchmarks.data import Numbered
from benchmarks.faults.case import Case, seen, seen_in
from benchmarks.faults.oracle import Seen, judged, wrong_gradients
from dynagroup.testing import run_ranks


def breaks_and_iterates_again(case: Case) -> list[str]:
    """After a whole epoch a loop is left early on all ranks; the next iteration is a whole epoch."""
    stop = case.rng.randint(1, 4)

    def three(world: Any) -> list[list[Seen]]:
        loader = case.loader(world)
        return [seen(loader, most) for most in (None, stop, None)]

    first, _, third = zip(*run_ranks(case.ranks, three), strict=True)
    return case.judged(first) + case.judged(third)


def item_raises(case: Case) -> list[str]:
    """The user's error reaches every rank; a loader of sound data then goes on."""
    broken = case.rng.randrange(len(case.lengths))
    try:
        case.epoch(Numbered(case.lengths, broken=broken))
    except Exception as error:
        if f"{broken}" not in str(error):
            return [f"the error does not name the broken record: {error!r}"]
        return case.judged(case.epoch())
    return ["a broken record went unnoticed"]


def lengths_lie(case: Case) -> list[str]:
    """Lengths (or hints) are wrong by up to ten times: every sample still comes once, weighed by the truth."""
    wrong_lengths = []
    for length in case.lengths:
        factor = case.rng.choice([0.1, 1, 10])
        wrong_lengths.append(max(1, int(length * factor)))
    if case.online:  # it measures the samples, so its batches keep to their budget all the same
        return case.judged(case.epoch(length_hint=wrong_lengths))
    return judged(case.lengths, case.epoch(lengths=wrong_lengths), case.everything)


def stop_and_resume(case: Case, ranks_after: int | None = None) -> list[str]:
    """An epoch stopped after a random step, saved as JSON, and continued on so many ranks by fresh loaders."""
    if ranks_after is None:
        ranks_after = case.ranks
    alike = ranks_after == case.ranks
    steps = case.epoch()[0]
    stop = case.rng.randint(0, len(steps))
    if not alike and stop < len(steps):
        # the gradient of an update that two numbers of ranks share is nobody's to judge
        while stop and not steps[stop - 1].ends:
            stop -= 1

    def first_half(world: Any) -> tuple[list[Seen], Any]:
        loader = case.loader(world)
        return seen(loader, stop), json.loads(json.dumps(loader.state_dict()))

    begun, states = zip(*run_ranks(case.ranks, first_half), strict=True)

    def second_half(world: Any) -> list[Seen]:
        loader = case.loader(world)
        loader.load_state_dict(states[world.rank] if alike else list(states))
        return seen(loader)

    rest = run_ranks(ranks_after, second_half)
    if stop == len(steps):  # the epoch was used up: the next one comes
        return case.judged(rest)
    wrong = case.judged(rest, case.everything - seen_in(chain.from_iterable(begun)))
    if not alike:
        return wrong
    # the update that was cut in two is judged as one
    whole = [before + after for before, after in zip(begun, rest, strict=True)]
    return wrong_gradients(case.lengths, whole) + _but_gradients(wrong)


def _but_gradients(wrong: list[str]) -> list[str]:
    return [fault for fault in wrong if "gradient" not in fault]


def worker_killed(case: Case) -> list[str]:
    """A worker process dies: an error on every rank, and no hang."""
    data = Numbered(case.lengths, deadly=case.rng.randrange(len(case.lengths)))
    try:
        seen(case.loader(None, data, num_workers=1))
    except (EOFError, OSError):  # torch was reading what the worker was sending
        return []
    except RuntimeError as error:
        if "worker" not in str(error).lower():
            return [f"the error does not speak of a worker: {error}"]
        return []
    return ["a killed worker went unnoticed"]


def workers_and_resume(case: Case) -> list[str]:
    """Real worker processes that prefetch; what was prefetched and not used comes again."""
    loader = case.loader(None, num_workers=2)
    after = case.loader(None, num_workers=2)
    begun = seen(loader, case.rng.randint(1, 4))
    state = json.dumps(loader.state_dict())
    after.load_state_dict(json.loads(state))
    remaining = case.everything - seen_in(begun)
    expected = remaining if remaining else case.everything
    return _but_gradients(case.judged([seen(after)], expected))


FAULTS = {
    "early break, iterated again": breaks_and_iterates_again,
    "item raises": item_raises,
    "lengths lie by ten times": lengths_lie,
    "stop and resume": stop_and_resume,
    "stop and resume on other ranks": lambda case: stop_and_resume(case, case.other_ranks()),
}
RARE = {"worker killed": worker_killed, "workers prefetch, stop and resume": workers_and_resume}
"""They start processes, so a campaign has fewer of them."""
