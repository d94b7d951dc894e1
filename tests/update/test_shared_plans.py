"""Ranks share the work of planning: the same batches as if each planned alone, with fewer windows planned by each."""

from typing import Any

import numpy as np
import pytest

from dynagroup import AlignmentError, PlannedDataLoader, TokenBudget
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.planner import Planner
from dynagroup.testing import ThreadWorld, run_ranks
from dynagroup.update.shared_plans import columns_in, columns_of, exchange_columns

LENGTHS = np.random.default_rng(0).integers(1, 60, 1500).astype(np.int32)
PACKED = TokenBudget(400, layout="packed")
WAYS: dict[str, dict[str, Any]] = {
    "free": {"window": 128},
    "free, several steps an update": {"window": 128, "accumulation": 3},
    "packed": {"budget": PACKED, "window": 256},
    "kinds": {"kinds": np.arange(1500) % 7 == 0, "window": 64},
    "exact updates": {"samples_per_update": 64},
    "packed updates": {"samples_per_update": 64, "budget": PACKED},
    "stratified updates": {"samples_per_update": 64, "grouping": 4},
    "growing updates": {"samples_per_update": lambda update, current: 16 + 4 * update},
}


def loader_of(world: Any = None, **settings: Any) -> PlannedDataLoader[Any]:
    settings = {"budget": TokenBudget(400), "weigh": "samples", "seed": 3, **settings}
    return PlannedDataLoader(range(1500), LENGTHS, world=world, **settings)


def batches_of(loader: PlannedDataLoader[Any]) -> list[tuple[list[int], bool]]:
    """Returns the indices of each step, and whether it is idle."""
    return [(list(step.indices), step.idle) for step in loader]


def planned_alone(loader: PlannedDataLoader[Any], rank: int) -> list[tuple[list[int], bool]]:
    """Returns the same of a rank in the plan that every rank can make by itself."""
    plan = loader.plan_of(0)
    batches = [plan.batches[number].tolist() for number in plan.table[:, rank]]
    is_idle = plan.loss_scale[:, rank] == 0
    return list(zip(batches, is_idle.tolist(), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_shared_plans_are_those_that_each_rank_makes_alone(way: str) -> None:
    def run(world: ThreadWorld) -> None:
        loader = loader_of(world, **WAYS[way])
        alone = planned_alone(loader, world.rank)
        assert batches_of(loader) == alone

    run_ranks(3, run)


def test_samples_that_fill_no_step_go_on_to_a_window_that_was_planned_without_them() -> None:
    lengths = np.full(1501, 40, np.int32)  # each is a batch, and the first window has 115

    def run(world: ThreadWorld) -> None:
        loader = PlannedDataLoader(
            range(1501), lengths, TokenBudget(60), window=64, weigh="samples", world=world
        )
        alone = planned_alone(loader, world.rank)
        assert batches_of(loader) == alone

    run_ranks(3, run)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_resumes_in_what_was_planned_together(way: str) -> None:
    def run(world: ThreadWorld) -> None:
        whole = batches_of(loader_of(world, **WAYS[way]))
        begun = loader_of(world, **WAYS[way])
        steps = iter(begun)
        for _ in range(7):
            next(steps)
        resumed = loader_of(world, **WAYS[way])
        resumed.load_state_dict(begun.state_dict())
        assert batches_of(resumed) == whole[7:]

    run_ranks(2, run)


def test_a_run_resumes_on_fewer_ranks() -> None:
    def begin(world: ThreadWorld) -> tuple[list[int], dict[str, Any]]:
        loader = loader_of(world, window=128)
        steps = iter(loader)
        used = [index for _ in range(5) for index in next(steps).indices]
        return used, loader.state_dict()

    def go_on(world: ThreadWorld) -> list[int]:
        loader = loader_of(world, window=128)
        loader.load_state_dict(state)
        return [index for step in loader if not step.idle for index in step.indices]

    begun = run_ranks(4, begin)
    state = begun[0][1]
    used = [index for indices, _ in begun for index in indices]
    rest = [index for indices in run_ranks(2, go_on) for index in indices]
    assert sorted(used + rest) == list(range(1500))


@pytest.mark.parametrize("way", ["free", "exact updates"])
def test_each_rank_plans_its_part(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []  # samples of each plan that a rank shares
    columns = exchange_columns

    def counted(world: ThreadWorld, parts: Any, plans: Any) -> Any:
        planned.extend(stop - start for _, start, stop in parts)
        return columns(world, parts, plans)

    monkeypatch.setattr("dynagroup.update.shared_plans.exchange_columns", counted)
    run_ranks(4, lambda world: batches_of(loader_of(world, **WAYS[way])))
    # All ranks together plan the epoch once, but for a last part that nobody can share.
    assert 1500 - 256 <= sum(planned) <= 1500


def test_windows_of_kinds_are_sorted_once_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    windows = Planner.windows

    def counted(planner: Planner, cursor: Any, drawn: Any = None) -> Any:
        calls.append(cursor.epoch)
        return windows(planner, cursor, drawn)

    monkeypatch.setattr(Planner, "windows", counted)
    run_ranks(2, lambda world: batches_of(loader_of(world, **WAYS["kinds"])))
    assert calls == [0, 0]  # once on each rank


@pytest.fixture
def planner() -> Planner:
    return Planner.of(LENGTHS, TokenBudget(400), PlanConfig(shuffle=True, window=64))


def test_a_column_passes_through_a_vector(planner: Planner) -> None:
    plan = next(planner.steps_from(planner.start_of(0, 2), 2))
    columns = columns_of(plan, [1, 0])
    vectors = [column.as_vector((number, 8, 72)) for number, column in enumerate(columns)]
    (first_part, first), (second_part, second) = columns_in(np.concatenate(vectors))
    assert first_part == (0, 8, 72)
    assert second_part == (1, 8, 72)
    for column, rank in ((first, 1), (second, 0)):
        batches = [plan.batches[number].tolist() for number in plan.table[:, rank]]
        assert [batch.tolist() for batch in column.batches] == batches
        assert column.end(plan.start, 2, None) == plan.end


def test_a_damaged_message_ends_the_run(planner: Planner) -> None:
    class Damaging(ThreadWorld):
        def exchange(self, vectors: Any, /) -> Any:
            received = super().exchange(vectors)
            received[0][-1] += 1
            return received

    def run(world: ThreadWorld) -> None:
        world.__class__ = Damaging
        plans = list(planner.steps_from(planner.start_of(0, 2), 2))[:1]
        exchange_columns(world, [(0, 0, 64)], plans)

    with pytest.raises(AlignmentError, match="arrived damaged: their checksum differs"):
        run_ranks(2, run)
