"""Loaders of packed batches: what the table of laws does not ask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from tests.online.helpers import Tokens
from tests.plan.test_packed import uneven, window_of


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
    assert not uneven([list(row) for row in rows], tokens, cap, few=True)
