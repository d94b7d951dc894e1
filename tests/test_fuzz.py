"""Whatever is read back may be damaged: only the project's errors come of it, nothing is half changed, memory stays bounded.

Each thing is saved, damaged in one place at a time, hundreds of times, from seeds, and loaded. Journals and receipts have tests
of their own (``tests/oom/test_storage.py``), command lines too; loaders' states are also in the table of laws.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dynagroup import LearningBudget, LengthAwareBatchSampler, TokenBudget
from dynagroup.errors import ConfigError, StateError
from dynagroup.memory import Measurement, Measurements, MemoryRegressor, Workload
from dynagroup.shapes import BatchShape

MOST_BYTES = 64 * 2**20
LENGTHS = [1 + (7 * i) % 40 for i in range(60)]
BUDGET = TokenBudget(160)


JUNK: list[Any] = [None, -1, 10**12, 2**80, 1.5, "", "x", [], {}, True, float("nan"), [[]], {"a": 1}]


def mutated(rng: random.Random, value: Any) -> Any:
    """``value`` with one part of it damaged."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place]
        return [*value[:place], mutated(rng, value[place]), *value[place + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.6:
        place = rng.randrange(len(value))
        return value[:place] + rng.choice("Aa0=é") + value[place + 1 :]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7, -1000, 10**9])
    return rng.choice(JUNK)


def damaged_json(value: Any, number: int) -> list[Any]:
    found = (mutated(random.Random(seed), value) for seed in range(number))
    return [damaged for damaged in found if damaged != value]


def damaged_bytes(data: bytes, number: int) -> list[bytes]:
    """Cut off, zeroed from somewhere on, some bytes replaced by others, or a bit flipped."""
    found = []
    for rng in map(random.Random, range(number)):
        place = rng.randrange(len(data))
        before, after = data[:place], data[place + 1 :]
        noise = rng.randbytes(rng.randrange(1, 5)) + after[rng.randrange(5) :]
        flipped = bytes([data[place] ^ (1 << rng.randrange(8))]) + after
        found.append(before + rng.choice([b"", bytes(len(data) - place), noise, flipped]))
    return found


def survives(read: Callable[[Any], Any], damaged: list[Any], *errors: type[Exception]) -> int:
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


def load(victim: Any, damaged: Any) -> None:
    untouched = json.dumps(victim.state_dict())
    try:
        victim.load_state_dict(damaged)
    except StateError:
        assert json.dumps(victim.state_dict()) == untouched, "a refused state changed something"
        raise
    json.dumps(victim.state_dict())


def sampler() -> Any:
    made = LengthAwareBatchSampler(LENGTHS, BUDGET, shuffle=True, rank=0, world_size=1)
    next(iter(made))
    return made


def learning() -> Any:
    budget = LearningBudget(BUDGET)
    budget.record_oom(BatchShape.of(4, 40))
    return budget


@pytest.mark.parametrize("make", [sampler, learning])
def test_states_of_samplers_and_budgets(make):
    state = json.loads(json.dumps(make().state_dict()))
    assert survives(lambda damaged: load(make(), damaged), damaged_json(state, 200), StateError) > 150


@pytest.fixture(scope="module")
def table():
    common = {"static_bytes": 10**6, "oom": False}
    rows = [
        Measurement(num_samples=n, longest={"tokens": length}, batch_bytes=10**5 * n * length, **common)
        for n in (1, 2, 4, 8)
        for length in (16, 64, 256)
    ]
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "vocabulary_size": 100}
    return Measurements(tuple(rows), Workload(**sizes, mode="train"), "simulated", {})


def test_measurements_in_parquet(table, tmp_path):
    path = tmp_path / "rows.parquet"
    table.to_parquet(path)
    assert Measurements.from_parquet(path).rows == table.rows

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged)
        Measurements.from_parquet(path)

    assert survives(read, damaged_bytes(path.read_bytes(), 300), ConfigError, StateError) > 40


def test_the_card_of_a_regressor(table, tmp_path):
    path = tmp_path / "mine.ubj"
    MemoryRegressor.fit(table).save(path)
    card = path.with_suffix(".json")
    whole = card.read_bytes()

    def read(damaged: Any) -> None:
        card.write_bytes(damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode())
        MemoryRegressor.load(path).relative(BatchShape.of([1, 8], 64), BatchShape.of(4, 64))

    damaged = [*damaged_json(json.loads(whole), 200), *damaged_bytes(whole, 100)]
    assert survives(read, damaged, StateError) > 270


def test_a_trainers_checkpoint(tmp_path):
    from dynagroup.integrations.hf_data import read_states, write_states

    state = {"epoch": 1, "cursor": [1, 2, 3]}
    loader: Any = SimpleNamespace(world=SimpleNamespace(rank=0, size=1), state_dict=lambda: state)
    write_states(str(tmp_path), loader)
    path = tmp_path / "dynagroup.json"

    def read(damaged: bytes) -> None:
        path.write_bytes(damaged)
        read_states(str(tmp_path))

    assert survives(read, damaged_bytes(path.read_bytes(), 200), StateError) > 50
