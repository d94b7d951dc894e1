"""The laws for users: ours keep them (``tests/laws``), and they are seen to fail of broken loaders."""

from dataclasses import replace

import pytest

from dynagroup import PlannedDataLoader, TokenBudget
from dynagroup.testing import assert_loader_laws, run_ranks
from dynagroup.update.loss_weight import Share
from tests.online.helpers import Tokens, collate, lengths_of

LENGTHS = lengths_of(30, seed=1)


def loses(step):
    return replace(step, indices=step.indices[1:], samples=Share(len(step.indices) - 1, step.samples.total))


def weighs_alike(step):
    return step if step.idle else replace(step, loss_scale=1.0)


class Broken(PlannedDataLoader):
    changed, uneven, forgets = staticmethod(lambda step: step), False, False

    def _run(self):
        steps = [self.changed(step) for step in super()._run()]
        yield from steps[1:] if self.uneven and not self.world.rank else steps

    def load_state_dict(self, state_dict):
        if not self.forgets:
            super().load_state_dict(state_dict)


@pytest.mark.parametrize(("fault", "message"), [
    ({"changed": staticmethod(loses)}, "an update of [0-9]+ samples says it has 8"),
    ({"changed": staticmethod(weighs_alike)}, "a loss is scaled by 1.0, not"),
    ({"uneven": True}, "ranks take other steps in epoch 0"),
    ({"forgets": True}, "after 1 steps the resumed epoch differs"),
])  # fmt: skip
def test_broken_loaders_are_found(fault, message):
    kind, how = type("Faulty", (Broken,), fault), {"samples_per_update": 8, "collate_fn": collate}
    with pytest.raises(AssertionError, match=message):
        assert_loader_laws(lambda world: kind(Tokens(LENGTHS), LENGTHS, TokenBudget(96), world=world, **how))


def test_a_rank_that_raises_is_heard_above_those_that_wait_for_it():
    def run(world):
        if world.rank == 1:
            raise KeyError("mine")
        return world.all_sum([1.0])

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, run)
