"""Stratified updates of an online loader: each rank's worker deals its part of a pool of updates by true lengths."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from dynagroup import Work
from dynagroup.errors import ConfigError
from dynagroup.online.messages import Pool
from dynagroup.online.pools import deal_updates
from dynagroup.plan.strata import spread_at_random
from dynagroup.testing import run_ranks
from tests.online.helpers import (
    all_ids,
    as_json,
    ids_of,
    legs,
    lengths_of,
    make_loader,
)

LENGTHS = lengths_of(120, seed=3)
EVERY = list(range(120))


def grouped(world: Any, num_workers: int = 0) -> Any:
    """Pools of four updates of 12 samples."""
    return make_loader(
        world,
        LENGTHS,
        samples_per_update=12,
        grouping=4,
        shuffle=True,
        num_workers=num_workers,
    )


def sizes_of(steps_by_rank: Any) -> list[int]:
    """The samples of each update."""
    sizes = [0]
    for row in zip(*steps_by_rank, strict=True):
        sizes[-1] += len(ids_of(row))
        if row[0].ends_update:
            sizes.append(0)
    return sizes[:-1]


@pytest.mark.parametrize("update_size", [5, 40])
def test_each_sample_is_in_each_update_of_its_pool_equally_often(update_size: int) -> None:
    """Also in the smaller last one, whether ranks draw the same numbers (a whole update) or numbers of their own.

    2,000 pools: the largest of 72 frequencies is within 4.5 standard errors."""
    tokens = np.arange(1, 19)
    share_sizes = (5, 5, 5, 3)
    num_pools = 2000
    counts = np.zeros((18, 4))
    for number in range(num_pools):
        pool = Pool(share_sizes, update_size, strata=None, seeds=(7, 0, number), rank=1)
        for update, places in enumerate(deal_updates(pool, tokens)):
            counts[places, update] += 1
    share = np.array(share_sizes) / 18
    error = np.sqrt(share * (1 - share) / num_pools)
    differences = abs(counts / num_pools - share)
    assert (differences < 4.5 * error).all()


@pytest.mark.parametrize(("num_ranks", "share_size"), [(1, 8), (8, 1), (4, 2), (4, 16)])
@pytest.mark.parametrize("cv", [0.3, 1.2])
def test_the_tokens_of_an_update_vary_no_more_than_those_of_random_updates(
    num_ranks: int, share_size: int, cv: float
) -> None:
    """Of all ranks together, over 100 pools of 10 updates."""
    rng = np.random.default_rng(1)
    sigma = np.sqrt(np.log(1 + cv**2))
    update_size = num_ranks * share_size
    spread: list[float] = []
    at_random: list[float] = []
    for number in range(100):
        tokens = rng.lognormal(5, sigma, (num_ranks, 10 * share_size)).astype(np.int64)
        sums = np.zeros(10)
        for rank, of_rank in enumerate(tokens):
            pool = Pool((share_size,) * 10, update_size, strata=None, seeds=(number,), rank=rank)
            sums += [of_rank[places].sum() for places in deal_updates(pool, of_rank)]
        spread.append(sums.var())
        at_random.append(spread_at_random(tokens.ravel(), 10))
    # Twice the standard error of a mean of 100 variances of 10 numbers.
    assert np.mean(spread) <= 1.1 * np.mean(at_random)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_updates_keep_their_sizes_and_every_sample_comes_once(ranks: int, num_workers: int) -> None:
    def run(world: Any) -> Any:
        loader = grouped(world, num_workers)
        return [list(loader) for _ in range(2)]

    by_rank = run_ranks(ranks, run)
    for steps_by_rank in zip(*by_rank, strict=True):
        assert sizes_of(steps_by_rank) == [12] * 10
        assert all_ids(steps_by_rank) == EVERY


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_epoch_takes_less_time_because_batches_pad_less_or_ranks_wait_less(ranks: int) -> None:
    lengths = lengths_of(2000, seed=1, top=512)

    def tokens_of_steps(world: Any, grouping: int | None) -> list[int]:
        loader = make_loader(
            world,
            lengths,
            grouping=grouping,
            samples_per_update=64,
            shuffle=True,
            max_tokens=256,
            work=Work(per_step=8),
        )
        return [0 if step.idle else step.batch["input_ids"].numel() for step in loader]

    def time_with(grouping: int | None) -> int:
        tokens = np.array(run_ranks(ranks, lambda world: tokens_of_steps(world, grouping)))
        return (8 + tokens.max(axis=0)).sum()

    assert time_with(20) < 0.98 * time_with(None)


@pytest.mark.parametrize("stop", [1, 3, 6, 12])
@pytest.mark.parametrize(("ranks", "resumed"), [(2, 2), (2, 3), (3, 1)])
def test_a_run_resumes_within_a_pool_also_after_a_change_of_size(
    ranks: int, resumed: int, stop: int
) -> None:
    """Exactly what remained comes, in updates of the right sizes."""

    def first(world: Any) -> Any:
        loader = grouped(world)
        steps = iter(loader)
        begun = list(islice(steps, 2))
        changed_from = loader.set_samples_per_update(8)
        begun += islice(steps, stop)
        return begun, as_json(loader.state_dict()), changed_from

    def rest(world: Any, states: list[Any]) -> list[Any]:
        loader = grouped(world)
        loader.load_state_dict(states[world.rank] if ranks == resumed else states)
        return list(loader)

    begun, states, changes = zip(*run_ranks(ranks, first), strict=True)
    after = run_ranks(resumed, lambda world: rest(world, list(states)))
    assert all_ids([*begun, *after]) == EVERY
    changed_from = changes[0]
    assert changed_from >= 4, "the rest of a pool keeps its sizes"
    steps = [*begun[0], *after[0]]
    totals = [step.samples.total for step in steps if step.ends_update]
    expected = [12] * changed_from
    while sum(expected) < 120:
        expected.append(min(8, 120 - sum(expected)))
    assert totals == expected


def test_legs_on_any_number_of_ranks_keep_every_sample() -> None:
    rows_of = legs(grouped, [(2, 3), (3, 5), (1, 4), (2, None)], epochs=2)
    assert all_ids(rows_of[0]) == EVERY
    assert all_ids(rows_of[1]) == EVERY


WRONG = [
    ({"grouping": 2}, "`grouping` needs `samples_per_update`"),
    ({"strata": 2, "samples_per_update": 4}, "`strata` needs `grouping`"),
    ({"grouping": 0, "samples_per_update": 4}, "`grouping` must be an int of at least 1"),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_loader(None, LENGTHS, **options)
