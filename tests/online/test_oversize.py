from __future__ import annotations

import pytest

from dynagroup import OnlineDataLoader, TokenBudget


def test_samples_that_do_not_fit_are_counted_and_warned_of_once() -> None:
    data = [{"input_ids": [1] * n} for n in (300, 4, 400)]
    loader = OnlineDataLoader(data, TokenBudget(64), collate_fn=list, weigh="samples")
    with pytest.warns(UserWarning, match="does not fit the budget even alone") as caught:
        emitted = sorted(tuple(step.indices) for step in loader)
    assert emitted == [(0,), (1,), (2,)]
    assert len(caught) == 1
    assert loader.stats.oversize == 2
