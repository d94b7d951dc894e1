"""Whatever is read back may be damaged: only the project's errors come of it, nothing is half changed, memory stays bounded.

Each thing is saved, damaged in one place at a time, hundreds of times, from seeds, and loaded. Journals and receipts have tests
of their own beside these (``tests/oom/test_journal.py``), and so have trees, command lines and the loaders' forged states.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.faults.data import Numbered, collate
from benchmarks.faults.states import mutated
from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.memory import Measurement, Measurements, MemoryRegressor, Workload
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks

MOST_BYTES = 64 * 2**20
LENGTHS = [1 + (7 * i) % 40 for i in range(60)]


def damaged_json(value: Any, number: int) -> list[Any]:
    return [mutated(random.Random(seed), value) for seed in range(number)]


def damaged_bytes(data: bytes, number: int) -> list[bytes]:
    found = []
    for seed in range(number):
        rng = random.Random(seed)
        place = rng.randrange(len(data))
        found.append(
            rng.choice(
                [
                    data[:place],
                    data[:place] + bytes(len(data) - place),
                    data[:place] + rng.randbytes(rng.randrange(1, 5)) + data[place + rng.randrange(5) :],
                    data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :],
                ]
            )
        )
    return found


def survives(read: Callable[[Any], Any], damaged: list[Any], errors: tuple[type[Exception], ...]) -> int:
    """How many were refused; any error but ``errors`` fails, and so does memory."""
    refused = 0
    tracemalloc.start()
    try:
        for value in damaged:
            try:
                read(value)
            except errors:
                refused += 1
            except Exception as error:  # noqa: BLE001 - that is the finding
                raise AssertionError(f"{value!r:.300} ends in {type(error).__name__}: {error}") from error
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    return refused


def sampler() -> Any:
    return LengthAwareBatchSampler(LENGTHS, TokenBudget(160), shuffle=True, rank=0, world_size=1)


def learning() -> Any:
    return LearningBudget(TokenBudget(160))


def taught() -> Any:
    budget = learning()
    budget.record_oom(BatchShape.of(4, 40))
    return budget


def begun(obj: Any) -> Any:
    next(iter(obj))
    return obj


@pytest.mark.parametrize(("make", "used"), [(sampler, lambda: begun(sampler())), (learning, taught)])
def test_states_of_samplers_and_budgets(make, used):
    state = json.loads(json.dumps(used().state_dict()))
    untouched = json.dumps(make().state_dict())

    def read(damaged: Any) -> None:
        victim = make()
        try:
            victim.load_state_dict(damaged)
        except StateError:
            assert json.dumps(victim.state_dict()) == untouched, "a refused state changed something"
            raise
        json.dumps(victim.state_dict())

    damaged = [value for value in damaged_json(state, 400) if value != state]
    assert survives(read, damaged, (StateError,)) > 300


@pytest.mark.parametrize("online", [False, True])
def test_states_of_all_ranks(online):
    """Three ranks' states, one of them damaged, or one of another moment, loaded by two ranks."""

    def make(world: Any) -> Any:
        if online:
            options = {"window": 8, "samples_per_update": 12, "collate_fn": collate, "world": world}
            return OnlineDataLoader(Numbered(LENGTHS), TokenBudget(160), **options)
        return PlannedDataLoader(
            Numbered(LENGTHS), LENGTHS, TokenBudget(160), collate_fn=collate, samples_per_update=12, world=world
        )

    def states(steps: int) -> list[Any]:
        def run(world: Any) -> Any:
            loader = make(world)
            for _, _step in zip(range(steps), loader, strict=False):
                pass
            return json.loads(json.dumps(loader.state_dict()))

        return run_ranks(3, run)

    now, later = states(2), states(4)
    lists = [[*now[:2], damaged] for damaged in damaged_json(now[2], 60)]
    lists += [[now[0], now[1], later[2]], [now[0], now[0], now[2]], now[:2], [*now, now[2]], [now], [None], []]

    def read(damaged: Any) -> None:
        def run(world: Any) -> None:
            victim, twin = make(world), make(world)
            try:
                victim.load_state_dict(damaged)
            except StateError:
                assert json.dumps(victim.state_dict()) == json.dumps(twin.state_dict())
                raise

        run_ranks(2, run)

    assert survives(read, [value for value in lists if value != now], (StateError,)) > 55


@pytest.fixture(scope="module")
def table():
    rows = [
        Measurement(
            num_samples=n, longest={"tokens": length}, static_bytes=10**6, batch_bytes=10**5 * n * length, oom=False
        )
        for n in (1, 2, 4, 8)
        for length in (16, 64, 256)
    ]
    sizes = Workload(
        num_layers=2, hidden_size=64, num_heads=2, intermediate_size=128, vocabulary_size=100, mode="train"
    )
    return Measurements(tuple(rows), sizes, "simulated", {})


def test_measurements_in_parquet(table, tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    table.to_parquet(path)
    assert Measurements.from_parquet(path).rows == table.rows

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged)
        Measurements.from_parquet(path)

    assert survives(read, damaged_bytes(path.read_bytes(), 400), (ConfigError, StateError)) > 50


def test_the_card_of_a_regressor(table, tmp_path):
    pytest.importorskip("xgboost")
    path = tmp_path / "mine.ubj"
    MemoryRegressor.fit(table, rounds=3).save(path)
    card = path.with_suffix(".json")
    whole = card.read_text(encoding="utf-8")

    def read(damaged: Any) -> None:
        card.write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
        found = MemoryRegressor.load(path)
        found.relative(BatchShape.of([1, 8], 64), BatchShape.of(4, 64))

    known = json.loads(whole)
    damaged = [*(card for card in damaged_json(known, 400) if card != known), *damaged_bytes(whole.encode(), 200)]
    assert survives(read, damaged, (StateError,)) > 550


def test_a_trainers_checkpoint(tmp_path):
    pytest.importorskip("accelerate")
    from dynagroup.integrations.hf_data import read_states, write_states

    loader = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1), state_dict=lambda: {"epoch": 1, "cursor": [1, 2, 3]}
    )
    write_states(str(tmp_path), cast(Any, loader))
    path = tmp_path / "dynagroup.json"

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged)
        read_states(str(tmp_path))

    assert survives(read, damaged_bytes(path.read_bytes(), 200), (StateError,)) > 50
