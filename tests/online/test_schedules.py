"""Schedules of samples per update in the online loader: the updates that the offline one makes, whatever is prefetched.

Resuming is in the table of laws.
"""

from __future__ import annotations

from typing import Any

import pytest

from dynagroup import AlignmentError, ConfigError, TokenBudget
from dynagroup.testing import run_ranks
from dynagroup.update.planned import PlannedDataLoader
from dynagroup.update.schedule import linear_ramp
from tests.online.helpers import Tokens, collate, lengths_of, make_loader, used

LENGTHS = lengths_of(90, seed=4)
RAMP = linear_ramp(5, 23, num_updates=7)
WORKERS = {"num_workers": 2, "prefetch_factor": 2}


def offline(num_epochs: int = 2, **options: Any) -> Any:
    """The samples of each update of each epoch."""
    loader = PlannedDataLoader(Tokens(LENGTHS), LENGTHS, TokenBudget(128), collate_fn=collate, seed=3, **options)
    return [
        [sorted(i for step in update for i in step.indices) for update in loader.updates()] for _ in range(num_epochs)
    ]


def online(world: Any, **options: Any) -> Any:
    return make_loader(world, LENGTHS, shuffle=True, seed=3, **options)


def updates_of(loader: Any) -> list[list[int]]:
    return [[i for step in update for i in used(step)] for update in loader.updates()]


def together(by_rank: Any) -> list[list[int]]:
    return [sorted(i for part in parts for i in part) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "workers"), [(1, WORKERS), (2, {}), (3, {})])
def test_the_offline_loader_makes_the_same_updates(size: int, workers: Any, drop_last: bool) -> None:
    options: dict[str, Any] = {"samples_per_update": RAMP, "drop_last": drop_last}

    def run(world: Any) -> Any:
        loader, epochs = online(world, **options, **workers), []
        for _ in range(3):
            announced = loader.num_updates
            epochs.append(updates_of(loader))
            assert announced == len(epochs[-1])
        return epochs

    by_rank = run_ranks(size, run)
    found = [together([epochs[number] for epochs in by_rank]) for number in range(3)]
    assert found == offline(3, **options)
    sizes = [len(update) for epoch in found for update in epoch]
    assert sizes[:5] == [5, 7, 10, 12, 15]
    assert sum(sizes) < 270 if drop_last else sum(sizes) == 270
    assert sizes[8:11] == [23, 23, 23], "the schedule counts over the whole run"


def test_ranks_with_other_schedules_are_told() -> None:
    def follows(world: Any) -> Any:
        return updates_of(online(world, samples_per_update=lambda update, current: 4 + world.rank))

    with pytest.raises(AlignmentError, match=r"ranks differ in .*sizes of updates"):
        run_ranks(2, follows)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="`samples_per_update` must be an int of at least 1.* at update 0"):
        next(iter(online(None, samples_per_update=lambda update, current: 0)))
    with pytest.raises(ConfigError, match="this one is free-running"):
        online(None).set_samples_per_update(4)
