"""The laws of loaders on packed batches: the contract's own tests, run again with samples laid end to end."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.online.helpers import Tokens
from tests.plan.test_packed import assert_rows_are_equal_work, window_of
from tests.update import test_contract as contract

pytestmark = contract.pytestmark
LOADERS: dict[str, contract.Make] = {name: partial(make, layout="packed") for name, make in contract.LOADERS.items()}


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest) -> contract.Make:
    return LOADERS[request.param]


@pytest.fixture(params=["ramp", "free"])
def sizes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return contract.SIZES[request.param]


test_steps_by_hand = contract.test_steps_by_hand
test_gradients_are_those_of_one_batch_over_epochs = contract.test_gradients_are_those_of_one_batch_over_epochs
test_updates_are_counted_exactly = contract.test_updates_are_counted_exactly
test_statistics_add_up_subtract_and_merge = contract.test_statistics_add_up_subtract_and_merge


def test_a_change_at_run_time_takes_effect_at_the_update_it_names(make: contract.Make) -> None:
    loader = make(samples_per_update=6)
    updates = loader.updates()
    held = [next(updates)]
    at = loader.set_samples_per_update(9)
    held += list(updates)
    assert [sum(len(step.indices) for step in update) for update in held] == [6] * at + [9] * ((37 - 6 * at) // 9) + [
        (37 - 6 * at) % 9
    ]


def test_padding_is_none_and_said_so(make: contract.Make) -> None:
    loader = make(samples_per_update=12)
    list(loader)
    assert loader.stats.padding == 0.0
    assert loader.stats.real_tokens == loader.stats.padded_tokens == sum(contract.LENGTHS)


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 256}], ids=["free", "updates"])
def test_rows_of_learned_epochs_are_equal_work_on_eight_ranks(options: dict[str, Any]) -> None:
    """Law 9 where lengths were seen in the first epoch. A batch of one long sample and one of many short ones may hold as
    many tokens: they must not change places on one rank alone."""
    tokens, cap = window_of("python_files", 1024), 65_536
    budget = TokenBudget(cap, layout="packed")

    def run(world: Any) -> list[list[np.ndarray]]:
        loader = OnlineDataLoader(
            Tokens(tokens), budget, collate_fn=len, shuffle=True, window=128, weigh="samples", world=world, **options
        )
        return [[np.asarray(step.indices) for step in loader] for _ in range(2)]

    rows = zip(*(epochs[1] for epochs in run_ranks(8, run)), strict=True)
    assert_rows_are_equal_work([list(row) for row in rows], tokens, cap, few=True)
