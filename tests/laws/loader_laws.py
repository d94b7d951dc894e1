"""What training needs from a loader, as one assertion."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Literal

from dynagroup.distributed import World
from dynagroup.testing import assert_conserves, run_ranks
from dynagroup.update.loader import StepLoader
from dynagroup.update.step import Step

Updates = list[list[Step[Any]]]  # of one rank in one epoch


def flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def used_indices(step: Step[Any]) -> Sequence[int]:
    return () if step.idle else step.indices


def as_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def assert_resumes_exactly(
    make: Callable[[World], Any],
    *,
    world_size: int = 1,
    resume_world_size: int | None = None,
    steps: Iterable[int] | None = None,
    indices_of: Callable[[Any], Iterable[int]] = list,
    make_anew: Callable[[World], Any] | None = None,
) -> None:
    """Asserts that a stopped epoch, resumed from its saved state, gives exactly the batches that remained.

    A resume on another number of ranks must give exactly the samples that remained, together. ``make_anew``: makes the
    loader that takes a state, where ``make`` gives one that has run before.
    """
    if make_anew is None:
        make_anew = make
    size_after = world_size if resume_world_size is None else resume_world_size
    is_same_size = size_after == world_size

    def batches_of(loader: Any) -> list[list[int]]:
        return [list(indices_of(item)) for item in loader]

    def saved(world: World) -> list[Any]:
        """The state before each step, and after the last one, of a run that saves as it trains."""
        loader = make(world)
        states = [as_json(loader.state_dict())]
        for _ in loader:
            states.append(as_json(loader.state_dict()))
        return states

    def stopped(world: World, stop: int) -> Any:
        loader = make(world)
        deque(islice(iter(loader), stop), maxlen=0)
        return as_json(loader.state_dict())

    def resumed(world: World, states: list[Any]) -> list[list[int]]:
        loader = make_anew(world)
        loader.load_state_dict(states[world.rank] if is_same_size else states)
        return batches_of(loader)

    whole = run_ranks(world_size, lambda world: batches_of(make(world)))
    saved_by_ranks = run_ranks(world_size, saved)
    middle = len(whole[0]) // 2
    states = run_ranks(world_size, lambda world: stopped(world, middle))
    message = f"a loop that was left after {middle} steps has another state than one that goes on"
    assert states == [states_of_rank[middle] for states_of_rank in saved_by_ranks], message
    for stop in range(len(whole[0])) if steps is None else steps:
        states = [states_of_rank[stop] for states_of_rank in saved_by_ranks]
        rest = run_ranks(size_after, lambda world, states=states: resumed(world, states))
        remained = [batches[stop:] for batches in whole]
        if is_same_size:
            message = f"resumed after {stop} steps, the epoch gives other batches than unstopped"
            assert rest == remained, message
        else:
            assert_conserves(flat(rest), flat(flat(remained)))


def assert_loader_laws(
    make: Callable[[World], StepLoader[Any]],
    num_samples: int | None = None,
    *,
    world_size: int = 2,
    resume_world_size: int | None = None,
    epochs: int = 2,
    resume_at: Iterable[int] | None = (0, 1, 3),
    kinds: Sequence[Any] | None = None,
    one_kind: Literal["step", "batch"] = "step",
) -> None:
    """Asserts what training needs from a loader; run it on your dataset with your collate function.

    Every sample comes once per epoch. All ranks take the same number of steps and end updates at the same steps. The
    samples and weights of an update's batches add up to the update's totals (``step.samples.total``), and their loss
    scales to the number of ranks. A stopped run resumes with exactly the samples that remained.

    Args:
        make: function from a ``World`` to a new loader for one rank, with the same data and settings in every call.
        num_samples: int, expected samples of an epoch. None: the loader's ``num_samples``.
        world_size, resume_world_size: int, number of ranks before and after a stop, see :func:`assert_resumes_exactly`.
        epochs: int, number of epochs to check.
        resume_at: numbers of steps after which to stop. None: after every step of an epoch.
        kinds: the kind of each sample: a step's batches, idle ones too, have one; with ``one_kind="batch"`` each batch.
    """

    def run(world: World) -> tuple[int | None, list[Updates]]:
        loader = make(world)
        return loader.num_samples, [list(loader.updates()) for _ in range(epochs)]

    by_rank = run_ranks(world_size, run)
    expected = by_rank[0][0] if num_samples is None else num_samples
    for epoch in range(epochs):
        ranks = [updates_of_epochs[epoch] for _, updates_of_epochs in by_rank]
        _assert_equal_steps(ranks, epoch)
        for update_of_ranks in zip(*ranks, strict=True):
            _assert_update_adds_up(flat(update_of_ranks), world_size)
            if kinds is not None:
                _assert_kinds(update_of_ranks, kinds, one_kind)
        if expected is not None:
            steps = flat(flat(ranks))
            assert_conserves([used_indices(step) for step in steps], range(expected))
    first_epoch = by_rank[0][1][0]
    num_steps = len(flat(first_epoch))
    stops = None
    if resume_at is not None:
        stops = [stop for stop in resume_at if stop < num_steps]
        if not stops:
            return
    assert_resumes_exactly(
        make,
        world_size=world_size,
        resume_world_size=resume_world_size,
        steps=stops,
        indices_of=used_indices,
    )


def _assert_equal_steps(ranks: Sequence[Updates], epoch: int) -> None:
    num_steps = [[len(update) for update in updates] for updates in ranks]
    message = f"ranks take unequal steps in epoch {epoch}: {num_steps}"
    assert all(of_rank == num_steps[0] for of_rank in num_steps), message


def _assert_kinds(
    update_of_ranks: Sequence[list[Step[Any]]], kinds: Sequence[Any], one_kind: str
) -> None:
    for row in zip(*update_of_ranks, strict=True):
        of_samples = [{kinds[index] for index in step.indices} for step in row]
        of_steps = [{step.kind} for step in row]
        message = f"a step's samples have the kinds {of_samples}, but `step.kind` is {of_steps}"
        assert of_samples == of_steps, message
        if one_kind == "step":
            message = f"a step needs one kind, but its batches have {of_samples}"
            assert len(set.union(*of_samples)) == 1, message


def _assert_update_adds_up(steps: Sequence[Step[Any]], world_size: int) -> None:
    num_samples = sum(len(used_indices(step)) for step in steps)
    weight = math.fsum(step.weight.local for step in steps)
    for step in steps:
        message = f"an update has {num_samples} samples, but says {step.samples.total}"
        assert step.samples.total == num_samples, message
        message = f"batches weigh {weight}, not {step.weight.total}"
        assert math.isclose(step.weight.total, weight, rel_tol=1e-9), message
        if step.idle:
            assert step.loss_scale == 0.0, "`loss_scale` of an idle step must be 0"
        scale = step.weight.local * world_size / weight if weight else 0.0
        message = f"`loss_scale` {step.loss_scale} is not {scale}"
        assert math.isclose(step.loss_scale, scale, rel_tol=1e-9), message
