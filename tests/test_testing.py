"""The laws for users: they hold of our loaders, and are seen to fail of broken ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.testing import assert_loader_laws, run_ranks
from dynagroup.update.loss_weight import Share
from tests.online.helpers import Tokens, collate, lengths_of

LENGTHS = lengths_of(30, seed=1)


def planned(world, cls=PlannedDataLoader):
    return cls(Tokens(LENGTHS), LENGTHS, TokenBudget(96), samples_per_update=8, collate_fn=collate, world=world)


def online(world):
    return OnlineDataLoader(Tokens(LENGTHS), TokenBudget(96), collate_fn=collate, window=8, world=world)


@pytest.mark.parametrize("make", [planned, online])
def test_our_loaders_keep_the_laws(make):
    assert_loader_laws(make, 30)
    assert_loader_laws(make, world_size=1, resume_world_size=3, epochs=1, resume_at=None)


class Loses(PlannedDataLoader):
    def _run(self):
        for step in super()._run():
            yield replace(
                step, indices=list(step.indices)[1:], samples=Share(len(step.indices) - 1, step.samples.total)
            )


class WeighsAlike(PlannedDataLoader):
    def _run(self):
        for step in super()._run():
            yield step if step.idle else replace(step, loss_scale=1.0)


class Uneven(PlannedDataLoader):
    def _run(self):
        steps = list(super()._run())
        yield from steps if self.world.rank else steps[1:]


class Forgets(PlannedDataLoader):
    def load_state_dict(self, state_dict):
        pass


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Loses, "an update of [0-9]+ samples says it has 8"),
        (WeighsAlike, "a loss is scaled by 1.0, not"),
        (Uneven, "ranks take other steps in epoch 0"),
        (Forgets, "after 1 steps the resumed epoch differs"),
    ],
)
def test_broken_loaders_are_found(broken, message):
    with pytest.raises(AssertionError, match=message):
        assert_loader_laws(lambda world: planned(world, broken))


def test_a_rank_that_raises_is_heard_above_those_that_wait_for_it():
    def run(world):
        if world.rank == 1:
            raise KeyError("mine")
        return world.all_sum([1.0])

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, run)
