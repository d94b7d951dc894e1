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


def assert_resumes_exactly(
    make: Callable[[World], Any],
    *,
    world_size: int = 1,
    resume_world_size: int | None = None,
    steps: Iterable[int] | None = None,
    indices_of: Callable[[Any], Iterable[int]] = list,
) -> None:
    """Asserts that a stopped epoch, resumed from its saved state, gives exactly the batches that remained.

    A resume on another number of ranks must give exactly the samples that remained, together.
    """
    after = resume_world_size or world_size
    whole = run_ranks(world_size, lambda world: [list(indices_of(item)) for item in make(world)])

    def stopped(world: World, stop: int) -> Any:
        loader = make(world)
        deque(islice(iter(loader), stop), maxlen=0)
        return json.loads(json.dumps(loader.state_dict()))

    def resumed(world: World, states: list[Any]) -> list[list[int]]:
        loader = make(world)
        loader.load_state_dict(states[world.rank] if after == world_size else states)
        return [list(indices_of(item)) for item in loader]

    for stop in range(len(whole[0])) if steps is None else steps:
        states = run_ranks(world_size, lambda world, stop=stop: stopped(world, stop))
        rest = run_ranks(after, lambda world, states=states: resumed(world, states))
        remained = [batches[stop:] for batches in whole]
        if after == world_size:
            assert rest == remained, (
                f"resumed after {stop} steps, the epoch gives other batches than without a stop"
            )
        else:
            assert_conserves(
                chain.from_iterable(rest), chain.from_iterable(chain.from_iterable(remained))
            )


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

    def run(world: World) -> tuple[int | None, list[list[list[Step[Any]]]]]:
        loader = make(world)
        return loader.num_samples, [list(loader.updates()) for _ in range(epochs)]

    by_rank = run_ranks(world_size, run)
    expected = by_rank[0][0] if num_samples is None else num_samples
    for epoch in range(epochs):
        ranks = [found[epoch] for _, found in by_rank]
        lengths = [[len(update) for update in updates] for updates in ranks]
        assert all(found == lengths[0] for found in lengths), (
            f"ranks take unequal steps in epoch {epoch}: {lengths}"
        )
        for parts in zip(*ranks, strict=True):
            _assert_update_adds_up([step for steps in parts for step in steps], world_size)
            for row in zip(*parts, strict=True) if kinds is not None else ():
                _assert_one_kind(row, kinds or (), one_kind)
        if expected is not None:
            steps = chain.from_iterable(chain.from_iterable(ranks))
            assert_conserves([step.indices for step in steps if not step.idle], range(expected))
    stops = (
        None if resume_at is None else [k for k in resume_at if k < sum(map(len, by_rank[0][1][0]))]
    )
    worlds = {"world_size": world_size, "resume_world_size": resume_world_size}
    assert_resumes_exactly(
        make, **worlds, steps=stops, indices_of=lambda step: () if step.idle else step.indices
    )


def _assert_one_kind(row: Sequence[Step[Any]], kinds: Sequence[Any], one_kind: str) -> None:
    found = [{kinds[index] for index in step.indices} for step in row]
    said = [{step.kind} for step in row]
    assert found == said, (
        f"the samples of a step's batches have the kinds {found}, but `step.kind` is {said}"
    )
    assert one_kind == "batch" or len(set.union(*found)) == 1, (
        f"a step needs one kind, but its batches have {found}"
    )


def _assert_update_adds_up(steps: Sequence[Step[Any]], world_size: int) -> None:
    samples = sum(0 if step.idle else len(step.indices) for step in steps)
    weight = math.fsum(step.weight.local for step in steps)
    for step in steps:
        assert step.samples.total == samples, (
            f"an update has {samples} samples, but says {step.samples.total}"
        )
        assert math.isclose(step.weight.total, weight, rel_tol=1e-9), (
            f"batches weigh {weight}, not {step.weight.total}"
        )
        assert not step.idle or step.loss_scale == 0.0, "`loss_scale` of an idle step must be 0"
        scale = step.weight.local * world_size / weight if weight else 0.0
        assert math.isclose(step.loss_scale, scale, rel_tol=1e-9), (
            f"`loss_scale` {step.loss_scale} is not {scale}"
        )
