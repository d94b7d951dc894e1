"""Costs in counts, as upper bounds: exchanges between ranks, and requests to workers.

Seconds vary with the machine, these do not. A change that needs more raises a number here.
"""

from typing import Any

import pytest

from benchmarks.data import collate
from dynagroup import OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.testing import run_ranks
from dynagroup.update.loader import RequestQueue
from tests.online.helpers import Tokens, lengths_of

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens are padding")

MANY = lengths_of(960, seed=4)
SIZED = {"samples_per_update": 96}
LABELLED = {**SIZED, "kind_of": lambda sample: "text"}


class CountingWorld:
    """A world that counts its exchanges, and the bytes given to them."""

    def __init__(self, world: Any) -> None:
        self.rank = world.rank
        self.size = world.size
        self.num_exchanges = 0
        self.num_bytes = 0
        self.all_max = self._counting(world.all_max)
        self.all_sum = self._counting(world.all_sum)
        self._world = world

    def exchange(self, vectors: Any, /) -> Any:
        self.num_exchanges += 1
        self.num_bytes += 8 * sum(map(len, vectors))
        return self._world.exchange(vectors)

    def _counting(self, reduce: Any) -> Any:
        def counted(values: Any, /) -> Any:
            self.num_exchanges += 1
            self.num_bytes += 8 * len(values)
            return reduce(values)

        return counted


def online(world: Any = None, **options: Any) -> Any:
    budget = TokenBudget(256)
    return OnlineDataLoader(
        Tokens(MANY), budget, collate_fn=collate, world=world, window=64, **options
    )


def planned(world: Any = None, **options: Any) -> Any:
    budget = TokenBudget(256)
    return PlannedDataLoader(Tokens(MANY), MANY, budget, collate_fn=collate, world=world, **options)


# Loader, ranks, epochs before the one that is counted, options, exchanges, bytes.
COSTS = [
    (online, 2, 0, SIZED, 21, 4464),
    (online, 8, 1, SIZED, 24, 12_544),  # the first epoch's lengths are shared before the second
    (online, 2, 0, {}, 5, 1824),
    (online, 8, 1, {}, 6, 8984),
    (online, 2, 0, LABELLED, 23, 5000),  # labels are sent once
    (planned, 2, 0, SIZED, 17, 5700),
    (planned, 8, 1, {}, 11, 5200),
]


@pytest.mark.parametrize(("make", "ranks", "epochs", "options", "exchanges", "num_bytes"), COSTS)
def test_exchanges_and_their_bytes(make, ranks, epochs, options, exchanges, num_bytes):
    """Of a rank in an epoch of ten updates of 96 samples.

    An update takes two exchanges online and one if it is planned; one more compares the settings
    (online two: with `grouping` and `strata` they no longer fit the first). Each time that ranks plan
    further updates together, three exchanges send each rank the indices of its batches.
    Bytes do not grow with the number of ranks, but what is learned grows with the samples.
    """

    def run(world: Any) -> tuple[int, int]:
        counting = CountingWorld(world)
        loader = make(counting, **options)
        for _ in range(epochs):
            list(loader)
        num_exchanges_before = counting.num_exchanges
        num_bytes_before = counting.num_bytes
        list(loader)
        num_exchanges = counting.num_exchanges - num_exchanges_before
        return num_exchanges, counting.num_bytes - num_bytes_before

    num_exchanges, exchanged_bytes = max(run_ranks(ranks, run))
    assert num_exchanges <= exchanges
    assert exchanged_bytes <= num_bytes


@pytest.mark.parametrize(("options", "limits"), [({"shuffle": True}, (15, 4)), (SIZED, (10, 10))])
def test_requests_to_workers(options, limits, monkeypatch):
    """Each is a message to a process: 960 samples in windows of 64, or updates of 96.

    They are fewer once lengths are known.
    """
    requests: list[Any] = []
    requests_of = RequestQueue.__iter__

    def noted(queue):
        for request in requests_of(queue):
            requests.append(request)
            yield request

    monkeypatch.setattr(RequestQueue, "__iter__", noted)
    loader = online(**options)
    for limit in limits:
        requests.clear()
        list(loader)
        assert 0 < len(requests) <= limit
