"""Looking at a step is no epoch: an iteration that is left before its first update was used changes nothing."""

from itertools import islice
from typing import Any

import pytest

from dynagroup import ConfigError, OnlineDataLoader, PlannedDataLoader, TokenBudget
from tests.online.helpers import Stream, Tokens, collate, lengths_of

LENGTHS = lengths_of(23, seed=3, top=30)


def planned(**options: Any) -> PlannedDataLoader[Any]:
    return PlannedDataLoader(
        Tokens(LENGTHS), LENGTHS, TokenBudget(60), collate_fn=collate, shuffle=True, **options
    )


def online(**options: Any) -> OnlineDataLoader:
    return OnlineDataLoader(
        Tokens(LENGTHS), TokenBudget(60), collate_fn=collate, shuffle=True, **options
    )


def stream(**options: Any) -> OnlineDataLoader:
    return OnlineDataLoader(Stream(LENGTHS), TokenBudget(60), collate_fn=collate, **options)


LOADERS = [
    pytest.param(planned, {}, id="planned"),
    pytest.param(planned, {"samples_per_update": 8}, id="planned updates"),
    pytest.param(planned, {"samples_per_update": 8, "grouping": 2}, id="grouped"),
    pytest.param(online, {}, id="online"),
    pytest.param(online, {"samples_per_update": 8}, id="online updates"),
    pytest.param(online, {"window": 7, "num_workers": 2}, id="workers"),
    pytest.param(stream, {"window": 7}, id="stream"),
]


def steps_of(loader: Any) -> list[list[int]]:
    return [list(step.indices) for step in loader]


@pytest.mark.parametrize(("make", "options"), LOADERS)
def test_looking_at_a_step_is_no_epoch(make: Any, options: Any) -> None:
    expected = make(**options)
    epochs = [steps_of(expected), steps_of(expected)]

    loader = make(**options)
    step = next(iter(loader))
    assert loader.epoch == 0
    assert list(step.indices) == epochs[0][0]
    assert [steps_of(loader) for _ in range(loader.epoch, 2)] == epochs


@pytest.mark.parametrize(("make", "options"), LOADERS)
def test_peek_shows_the_next_step_and_changes_nothing(make: Any, options: Any) -> None:
    expected = make(**options)
    epochs = [steps_of(expected), steps_of(expected)]

    loader = make(**options)
    assert list(loader.peek().indices) == epochs[0][0]
    assert steps_of_resumed(make(**options), loader.state_dict()) == epochs[0]
    assert loader.stats.steps == 0
    assert steps_of(loader) == epochs[0]
    assert list(loader.peek().indices) == epochs[1][0]
    assert steps_of(loader) == epochs[1]


@pytest.mark.parametrize(("make", "options"), LOADERS)
def test_a_look_after_a_resume_keeps_the_loaded_point(make: Any, options: Any) -> None:
    expected = make(**options)
    used = []
    for step in expected:
        used.append(step)
        if len(used) > 2 and step.ends_update:
            break
    state = expected.state_dict()
    rest = steps_of_resumed(make(**options), state)

    loader = make(**options)
    loader.load_state_dict(state)
    assert list(loader.peek().indices) == rest[0]
    assert list(next(iter(loader)).indices) == rest[0]
    assert loader.epoch == 0
    assert steps_of(loader) == rest


def steps_of_resumed(loader: Any, state: Any) -> list[list[int]]:
    loader.load_state_dict(state)
    return steps_of(loader)


@pytest.mark.parametrize("make", [planned, online])
def test_a_state_counts_every_yielded_step_even_of_an_iteration_that_was_left(make: Any) -> None:
    loader = make()
    first = next(iter(loader))
    rest = steps_of_resumed(make(), loader.state_dict())
    assert sorted([*first.indices, *sum(rest, [])]) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("make", [planned, online])
def test_a_loop_that_leaves_epochs_early_is_told(make: Any) -> None:
    loader = make()
    assert len(list(islice(loader, 3))) == 3
    with pytest.warns(UserWarning, match=r"epoch 0 was left after 2 updates.*epoch 1"):
        next(iter(loader))
    loader.set_epoch(1)
    assert len(list(islice(loader, 3))) == 3
    loader.set_epoch(2)
    assert len(steps_of(loader)) > 3


def test_peek_while_a_loop_runs_is_refused() -> None:
    loader = planned()
    for _ in loader:
        with pytest.raises(ConfigError, match="while none is running"):
            loader.peek()


@pytest.mark.parametrize("make", [planned, online])
def test_a_loader_says_what_it_is_in_two_lines(make: Any) -> None:
    loader = make(samples_per_update=8)
    next(loader.updates())
    first, second = repr(loader).splitlines()
    assert f"{type(loader).__name__}(23 samples, TokenBudget(max_tokens=60" in first
    assert "updates of 8" in first
    assert second == "  rank 0 of 1, epoch 0, after 1 updates of the run"


@pytest.mark.parametrize("make", [planned, online])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [("sample_per_update", "samples_per_update"), ("num_worker", "num_workers")],
)
def test_a_misspelt_argument_suggests_the_right_one(make: Any, wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"no option `{wrong}`; did you mean `{right}`"):
        make(**{wrong: 2})


def test_a_report_says_how_much_of_the_budget_the_largest_batch_uses() -> None:
    assert "of 60\n" in planned().plan.report()
    roomy = PlannedDataLoader(
        Tokens(LENGTHS), LENGTHS, TokenBudget(100_000), collate_fn=collate, samples_per_update=4
    )
    assert "of 100,000, so the budget decides nothing" in roomy.plan.report()
