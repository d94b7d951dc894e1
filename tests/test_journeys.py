"""Costs in counts, as upper bounds: files that a reader opens to follow a journey, exchanges between ranks, and requests to
workers. Seconds vary with the machine, these do not; a change that needs more says so by raising a number here."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dynagroup
from benchmarks.data import collate
from dynagroup import (
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
    embed_dataset,
)
from dynagroup.testing import run_ranks
from dynagroup.update.loader import RequestQueue
from tests.models import TEXTS, small_llama, small_tokenizer
from tests.online.helpers import Tokens, lengths_of

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens are padding")

PACKAGE = Path(dynagroup.__file__).parent
LENGTHS = [3 + (7 * i) % 40 for i in range(64)]
BUDGET = TokenBudget(100)
HOW: dict[str, Any] = {"weigh": "samples", "collate_fn": list}
MANY = lengths_of(960, seed=4)
SIZED = {"samples_per_update": 96}
JOURNEYS: list[tuple[Callable[[], Any], int]] = [
    (lambda: LengthAwareBatchSampler(LENGTHS, BUDGET, shuffle=True), 14),
    (lambda: PlannedDataLoader(LENGTHS, LENGTHS, BUDGET, samples_per_update=16, **HOW), 20),
    (lambda: PlannedDataLoader(LENGTHS, LENGTHS, BUDGET, **HOW), 20),
    (
        lambda: OnlineDataLoader(
            [{"input_ids": [1] * n} for n in LENGTHS], BUDGET, shuffle=True, **HOW
        ),
        22,
    ),
]


def files_of(journey: Callable[[], Any]) -> set[str]:
    """Files of the package in which something is called meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return {
        Path(name).relative_to(PACKAGE).as_posix()
        for name in found
        if Path(name).is_relative_to(PACKAGE)
    }


@pytest.mark.parametrize(("make", "most"), JOURNEYS)
def test_a_first_step_passes_few_files(make: Callable[[], Any], most: int) -> None:
    next(iter(make()))  # what is imported when first needed
    passed = files_of(lambda: next(iter(make())))
    assert len(passed) <= most, sorted(passed)


def test_embedding_to_a_file_passes_few_files(tmp_path: Path) -> None:
    given: Any = (small_llama(), small_tokenizer(), TEXTS)
    embed = lambda name: embed_dataset(  # noqa: E731
        *given, budget=BUDGET, output=tmp_path / name, progress=False
    )
    embed("first.npy")
    passed = files_of(lambda: embed("second.npy"))
    assert len(passed) <= 24, sorted(passed)


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
