"""Costs in counts, as upper bounds: exchanges between ranks, and requests to workers. Seconds vary with the machine, these
do not; a change that needs more says so by raising a number here."""

from typing import Any

import pytest

from benchmarks.data import collate
from dynagroup import (
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.testing import run_ranks
from dynagroup.update.loader import RequestQueue
from tests.online.helpers import Tokens, lengths_of

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens are padding")

MANY = lengths_of(960, seed=4)
SIZED = {"samples_per_update": 96}


class Counted:
    """A world that counts what travels through it: exchanges, and bytes given to them."""

    def __init__(self, world: Any) -> None:
        self.rank, self.size, self.sent = world.rank, world.size, [0, 0]
        self.all_max, self.all_sum = self._counting(world.all_max), self._counting(world.all_sum)

    def _counting(self, reduce: Any) -> Any:
        def passed(values: Any, /) -> Any:
            self.sent = [self.sent[0] + 1, self.sent[1] + 8 * len(values)]
            return reduce(values)

        return passed


def online(world: Any = None, **options: Any) -> Any:
    return OnlineDataLoader(
        Tokens(MANY), TokenBudget(256), collate_fn=collate, world=world, window=64, **options
    )


def planned(world: Any = None, **options: Any) -> Any:
    return PlannedDataLoader(
        Tokens(MANY), MANY, TokenBudget(256), collate_fn=collate, world=world, **options
    )


@pytest.mark.parametrize(
    ("make", "ranks", "epochs", "options", "exchanges", "num_bytes"),
    [
        (online, 2, 0, SIZED, 21, 4464),
        (
            online,
            8,
            1,
            SIZED,
            24,
            12_544,
        ),  # lengths of the first epoch are shared before the second
        (online, 2, 0, {}, 5, 1824),
        (online, 8, 1, {}, 6, 8984),
        (
            online,
            2,
            0,
            {**SIZED, "kind_of": lambda sample: "text"},
            23,
            5000,
        ),  # labels are told once
        (planned, 2, 0, SIZED, 11, 360),
        (planned, 8, 1, {}, 9, 96),
    ],
)
def test_exchanges_and_their_bytes(make, ranks, epochs, options, exchanges, num_bytes):
    """Of a rank in an epoch. Ten updates of 96 samples: two exchanges each online, one planned, and one to compare settings.
    Their bytes do not grow with the number of ranks, but for what is learned, which grows with the samples."""

    def run(world: Any) -> list[int]:
        loader = make(counted := Counted(world), **options)
        for _ in range(epochs):
            list(loader)
        before = counted.sent
        list(loader)
        return [now - then for now, then in zip(counted.sent, before, strict=True)]

    found = max(run_ranks(ranks, run))
    assert found[0] <= exchanges
    assert found[1] <= num_bytes


@pytest.mark.parametrize(("options", "requests"), [({"shuffle": True}, (15, 4)), (SIZED, (10, 10))])
def test_requests_to_workers(options, requests, monkeypatch):
    """Each is a message to a process: 960 samples in windows of 64, or updates of 96, and fewer once lengths are known."""
    asked: list[Any] = []
    inner, noted = (
        RequestQueue.__iter__,
        lambda self: (asked.append(request) or request for request in inner(self)),
    )
    monkeypatch.setattr(RequestQueue, "__iter__", noted)
    loader = online(**options)
    for most in requests:
        asked.clear()
        list(loader)
        assert 0 < len(asked) <= most
