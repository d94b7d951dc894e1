"""Loaders of packed batches, beside the table of laws: sizes change at run time, nothing is padding, rows are equal work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, PlannedDataLoader, StepLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.online.helpers import Tokens, collate_packed, lengths_of
from tests.plan.test_packed import assert_rows_are_equal_work, window_of

LENGTHS = lengths_of(37, seed=2, top=40)
BUDGET = TokenBudget(80, layout="packed")


@pytest.fixture(params=["planned", "online"])
def make(request: pytest.FixtureRequest) -> Any:
    def made(**options: Any) -> StepLoader[Any]:
        options["collate_fn"] = collate_packed
        if request.param == "planned":
            return PlannedDataLoader(Tokens(LENGTHS), LENGTHS, BUDGET, **options)
        return OnlineDataLoader(Tokens(LENGTHS), BUDGET, shuffle=True, **options)

    return made


def test_a_change_at_run_time_takes_effect_at_the_update_it_names(make: Any) -> None:
    loader = make(samples_per_update=6)
    updates = loader.updates()
    held = [next(updates)]
    at = loader.set_samples_per_update(9)
    held += list(updates)
    assert [sum(len(step.indices) for step in update) for update in held] == [6] * at + [9] * ((37 - 6 * at) // 9) + [
        (37 - 6 * at) % 9
    ]


def test_padding_is_none_and_said_so(make: Any) -> None:
    loader = make(samples_per_update=12)
    list(loader)
    assert loader.stats.padding == 0.0
    assert loader.stats.real_tokens == loader.stats.padded_tokens == sum(LENGTHS)


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
