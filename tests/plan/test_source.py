"""A user's sampler of indices: an epoch has one order, whenever it is asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from dynagroup.errors import ConfigError
from dynagroup.plan.source import OrderSource

COUNT = 20


class Drawing:
    """A sampler that draws from its generator, and is told no epoch."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        drawn = list(range(COUNT))
        self.generator.shuffle(drawn)
        return iter(drawn)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SOURCES: dict[str, Callable[[], Any]] = {
    "torch": lambda: RandomSampler(range(COUNT), generator=seeded()),  # pyright: ignore[reportArgumentType]
    "weighted": lambda: WeightedRandomSampler([1.0] * COUNT, COUNT, generator=seeded()),
    "subset": lambda: SubsetRandomSampler(range(5, COUNT), generator=seeded()),
    "numpy": lambda: Drawing(np.random.default_rng(3)),
    "numpy, of old": lambda: Drawing(np.random.RandomState(3)),  # noqa: NPY002
    "random": lambda: Drawing(random.Random(3)),
}


@pytest.mark.parametrize("kind", SOURCES)
@given(asked=st.lists(st.integers(0, 6), min_size=1, max_size=8))
def test_an_epoch_has_one_order_in_whatever_order_epochs_are_asked_for(kind: str, asked: list[int]) -> None:
    plain = SOURCES[kind]()
    epochs = [list(plain) for _ in range(7)]
    source = OrderSource(SOURCES[kind](), COUNT)
    assert [source.of_epoch(epoch).tolist() for epoch in asked] == [epochs[epoch] for epoch in asked]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("once", [iter(range(3)), (i for i in range(3)), map(int, range(3))])
def test_an_iterator_is_refused_at_once(once: Any) -> None:
    with pytest.raises(ConfigError, match="can be read only once; pass a list or a sampler"):
        OrderSource(once, 3)


def test_what_hides_an_iterator_is_refused_when_it_has_run_dry() -> None:
    class Hiding:
        def __init__(self) -> None:
            self.rows = iter(range(3))

        def __iter__(self) -> Iterator[int]:
            return self.rows

    source = OrderSource(Hiding(), 3)
    assert source.of_epoch(0).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="Hiding gave 3 once and then none; its __iter__ must begin anew"):
        source.of_epoch(1)
    assert OrderSource([], 3).of_epoch(1).tolist() == []
