"""Stratified updates of an online loader: each rank's worker deals its part of a pool of updates by true lengths."""

import json
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from dynagroup import OnlineDataLoader, TokenBudget, Work
from dynagroup.errors import ConfigError
from dynagroup.online.messages import Pool
from dynagroup.online.pools import deal_updates
from dynagroup.plan.strata import spread_at_random
from dynagroup.testing import run_ranks
from tests.online.helpers import Tokens, collate, legs, lengths_of, make_loader, used
from tests.torchrun import on_ranks

LENGTHS = lengths_of(120, seed=3)
GROUPED: dict[str, Any] = {"samples_per_update": 12, "grouping": 4, "shuffle": True}


def sizes_of(steps_by_rank: Any) -> list[int]:
    """The samples of each update."""
    sizes = [0]
    for row in zip(*steps_by_rank, strict=True):
        sizes[-1] += sum(0 if step.idle else len(step.indices) for step in row)
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
    assert (abs(counts / num_pools - share) < 4.5 * error).all()


@pytest.mark.parametrize(("num_ranks", "share_size"), [(1, 8), (8, 1), (4, 2), (4, 16)])
@pytest.mark.parametrize("cv", [0.3, 1.2])
def test_the_tokens_of_an_update_vary_no_more_than_those_of_random_updates(
    num_ranks: int, share_size: int, cv: float
) -> None:
    """Of all ranks together, over 100 pools of 10 updates."""
    rng = np.random.default_rng(1)
    sigma = np.sqrt(np.log(1 + cv**2))
    spread: list[float] = []
    at_random: list[float] = []
    for number in range(100):
        tokens = rng.lognormal(5, sigma, (num_ranks, 10 * share_size)).astype(np.int64)
        sums = np.zeros(10)
        for rank, of_rank in enumerate(tokens):
            update_size = num_ranks * share_size
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
        loader = make_loader(world, LENGTHS, num_workers=num_workers, **GROUPED)
        return [list(loader) for _ in range(2)]

    by_rank = run_ranks(ranks, run)
    for epoch in range(2):
        steps = [epochs[epoch] for epochs in by_rank]
        assert sizes_of(steps) == [12] * 10
        assert sorted(chain.from_iterable(used(s) for own in steps for s in own)) == [*range(120)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_an_epoch_takes_less_time_because_batches_pad_less_or_ranks_wait_less(ranks: int) -> None:
    lengths = lengths_of(2000, seed=1, top=512)
    options = {
        "samples_per_update": 64,
        "shuffle": True,
        "max_tokens": 256,
        "work": Work(per_step=8),
    }

    def run(world: Any, grouping: int | None) -> list[int]:
        loader = make_loader(world, lengths, grouping=grouping, **options)
        return [0 if step.idle else step.batch["input_ids"].numel() for step in loader]

    time = {}
    for grouping in (None, 20):
        tokens = np.array(run_ranks(ranks, lambda world, k=grouping: run(world, k)))
        time[grouping] = (8 + tokens.max(axis=0)).sum()
    assert time[20] < 0.98 * time[None]


@pytest.mark.parametrize(("ranks", "resumed"), [(2, 2), (2, 3), (3, 1)])
def test_a_run_resumes_within_a_pool_also_after_a_change_of_size(ranks: int, resumed: int) -> None:
    """Exactly what remained comes, in updates of the right sizes."""

    def first(world: Any, stop: int) -> Any:
        loader = make_loader(world, LENGTHS, **GROUPED)
        steps = []
        changed_from = 0
        for step in islice(loader, 2 + stop):
            steps.append(step)
            if len(steps) == 2:
                changed_from = loader.set_samples_per_update(8)
        return steps, json.loads(json.dumps(loader.state_dict())), changed_from

    def rest(world: Any, states: list[Any]) -> list[Any]:
        loader = make_loader(world, LENGTHS, **GROUPED)
        loader.load_state_dict(states[world.rank] if ranks == resumed else states)
        return list(loader)

    for stop in (1, 3, 6, 12):
        begun = run_ranks(ranks, lambda world, k=stop: first(world, k))
        states = [state for _, state, _ in begun]
        after = run_ranks(resumed, lambda world, s=states: rest(world, s))
        steps = [own for own, _, _ in begun]
        came = [index for own in (*steps, *after) for step in own for index in used(step)]
        assert sorted(came) == list(range(120))
        changed_from = begun[0][2]
        assert changed_from >= 4, "the rest of a pool keeps its sizes"
        totals = [
            step.samples.total for own in (steps[0], after[0]) for step in own if step.ends_update
        ]
        expected = [12] * changed_from
        while sum(expected) < 120:
            expected.append(min(8, 120 - sum(expected)))
        assert totals == expected


def test_legs_on_any_number_of_ranks_keep_every_sample() -> None:
    plan = [(2, 3), (3, 5), (1, 4), (2, None)]
    rows = legs(lambda world: make_loader(world, LENGTHS, **GROUPED), plan, epochs=2)
    for epoch in range(2):
        came = [index for row in rows[epoch] for step in row for index in used(step)]
        assert sorted(came) == list(range(120))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"grouping": 2}, "`grouping` needs `samples_per_update`"),
        ({"strata": 2, "samples_per_update": 4}, "`strata` needs `grouping`"),
        ({"grouping": 0, "samples_per_update": 4}, "`grouping` must be an int of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_loader(None, LENGTHS, **options)


def grouped() -> Any:
    dist.init_process_group("gloo")
    data = Tokens(LENGTHS)
    how: dict[str, Any] = {"collate_fn": collate, "num_workers": 2, **GROUPED}
    return list(OnlineDataLoader(data, TokenBudget(128), **how))


def test_real_ranks_with_real_workers() -> None:
    steps = on_ranks(2, grouped)
    assert sizes_of(steps) == [12] * 10
    assert sorted(chain.from_iterable(used(s) for own in steps for s in own)) == [*range(120)]
