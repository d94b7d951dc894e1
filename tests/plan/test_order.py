from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynagroup.errors import ConfigError
from dynagroup.plan.order import EpochOrder, epoch_order

LITERAL = [[2, 6, 0, 3, 7, 4, 5, 1], [0, 2, 1, 6, 3, 7, 5, 4]]


@given(st.integers(0, 3000), st.integers(0, 2**40), st.integers(0, 50))
def test_is_a_permutation_that_can_be_read_anywhere(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(num_samples))
    assert np.array_equal(
        epoch_order(num_samples, seed=seed, epoch=epoch, start=num_samples // 3), order[num_samples // 3 :]
    )
    assert np.array_equal(EpochOrder(num_samples, seed=seed, epoch=epoch).position_of(order), np.arange(num_samples))


def test_literal_orders_stay_what_they_are() -> None:
    # a change here changes every user's runs: a resumed job would see other batches
    assert epoch_order(8, seed=0, epoch=0).tolist() == LITERAL[0]
    assert epoch_order(8, seed=0, epoch=1).tolist() == LITERAL[1]


def test_every_sample_is_equally_likely_everywhere() -> None:
    counts = np.zeros((6, 6))
    for epoch in range(6000):
        counts[np.arange(6), epoch_order(6, seed=3, epoch=epoch)] += 1
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 60  # 25 degrees of freedom: 99.99th percentile


def test_neighbours_are_unrelated() -> None:
    order = epoch_order(100_000, seed=5, epoch=0)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    means = order.reshape(100, 1000).mean(axis=1)
    assert 0.7 < means.std() / (100_000 / np.sqrt(12 * 1000)) < 1.3


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (0, -1), (True, 0), (0.5, 0)])
def test_refuses_what_is_no_seed(seed: object, epoch: object) -> None:
    with pytest.raises(ConfigError, match="must be an int of at least 0"):
        epoch_order(3, seed=seed, epoch=epoch)  # type: ignore[arg-type]
