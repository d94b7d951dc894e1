"""Stratified updates: what shares an update, and into which batches many updates are cut at once."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, PlannedDataLoader, TokenBudget, Work
from dynagroup.errors import ConfigError
from dynagroup.plan import exact_updates, planner
from dynagroup.plan.epoch import EpochOrder, epoch_order
from dynagroup.plan.strata import (
    StratifiedOrder,
    balanced_strata,
    dealt,
    equal_strata,
    places_by_length,
    scaled_strata,
    spread_at_random,
    spread_of_strata,
)
from dynagroup.plan.update_cuts import cut_updates
from tests.plan.helpers import joined

pytestmark = pytest.mark.filterwarnings("ignore:.*does not fit the budget even alone")
LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 2000).astype(np.int32) + 1
WORK = Work(per_step=64)


def plan_of(lengths, max_tokens, *, ranks=1, epoch=0, **options):
    budget = TokenBudget(max_tokens)
    sampler = LengthAwareBatchSampler(
        lengths, budget, work=WORK, rank=0, world_size=ranks, **options
    )
    return sampler.plan_of(epoch)


def updates_of(plan):
    """The dataset indices of each update, sorted."""
    bounds = np.append(0, 1 + np.flatnonzero(plan.update_ends)).tolist()
    rows = [joined(row) for row in plan.rows]
    return [sorted(joined(rows[start:stop])) for start, stop in pairwise(bounds)]


# What shares an update


@given(
    count=st.integers(0, 60),
    size=st.integers(1, 9),
    pool=st.integers(1, 5),
    strata=st.integers(1, 9),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_pools_keep_their_samples_and_updates_get_a_chunk_of_each_stratum(
    count, size, pool, strata, seed, data
):
    drawn_lengths = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    lengths = np.array(drawn_lengths, np.int32)
    drawn = epoch_order(count, seed=seed, epoch=1)
    epoch = EpochOrder(count, seed=seed, epoch=1)
    order = StratifiedOrder(
        epoch, lengths.take, pool=pool, strata=equal_strata(size, strata), seed=seed, epoch=1
    )
    whole = order[:]
    span = size * pool
    for start in range(0, count, span):
        here = whole[start : start + span]
        assert sorted(here) == sorted(drawn[start : start + span])
        num_updates = len(here) // size
        if not num_updates:
            continue
        updates = here[: num_updates * size].reshape(num_updates, size)
        ranked = -np.sort(-lengths[updates.ravel()])
        num_strata = min(strata, size)
        borders = [size * stratum // num_strata for stratum in range(num_strata + 1)]
        for first, stop in pairwise(borders):
            places = slice(first, stop)
            stratum = ranked[num_updates * first : num_updates * stop]
            chunks = [tuple(row) for row in lengths[updates[:, places]].tolist()]
            wanted = stratum.reshape(num_updates, -1).tolist()
            assert sorted(chunks) == sorted(tuple(chunk) for chunk in wanted)
    bounds = st.tuples(st.integers(0, count), st.integers(0, count))
    start, stop = sorted(data.draw(bounds))
    assert order[start:stop].tolist() == whole[start:stop].tolist()


@given(
    num_updates=st.integers(1, 6),
    size=st.integers(1, 12),
    most_strata=st.integers(1, 14),
    seed=st.integers(0, 3),
)
def test_updates_of_one_size_are_dealt_as_those_of_several(num_updates, size, most_strata, seed):
    num_strata = min(most_strata, size)
    rank_of_update = np.random.default_rng(seed).permutation(num_updates)
    update_of = np.repeat(np.arange(num_updates), size)
    strata = equal_strata(size, num_strata)
    places = places_by_length(update_of, strata, rank_of_update)
    updates = dealt(np.arange(num_updates * size), strata, rank_of_update)
    assert updates.ravel()[places].tolist() == list(range(num_updates * size))


def test_an_update_gets_long_middle_and_short_samples():
    lengths = np.array([10, 11, 20, 21, 30, 31, 40, 41], np.int32)
    order = StratifiedOrder(np.arange(8), lengths.take, pool=2, strata=[2, 2], seed=0)
    dealt = [lengths[order[start : start + 4]].tolist() for start in (0, 4)]
    assert sorted(dealt) == [[31, 30, 21, 20], [41, 40, 11, 10]]


def test_each_sample_is_in_each_update_of_its_pool_equally_often():
    """Also in the smaller last one. 4,000 epochs: the largest of 54 frequencies is within 4.5 standard errors."""
    lengths = np.arange(1, 19, dtype=np.int32)
    size = 5
    epochs = 4000
    counts = np.zeros((18, 4))
    for epoch in range(epochs):
        order = StratifiedOrder(
            np.arange(18), lengths.take, pool=4, strata=[2, 3], seed=7, epoch=epoch
        )
        update_of = np.arange(18) // size
        counts[order[:], update_of] += 1
    share = np.array([5, 5, 5, 3]) / 18
    error = np.sqrt(share * (1 - share) / epochs)
    assert (abs(counts / epochs - share) < 4.5 * error).all()


@pytest.mark.parametrize("size", [2, 3, 8, 10, 32, 128])
@pytest.mark.parametrize("cv", [0.3, 1.0, 1.5])
def test_the_tokens_of_an_update_vary_no_more_than_those_of_random_updates(size, cv):
    sigma = np.sqrt(np.log(1 + cv**2))
    drawn = np.random.default_rng(1).lognormal(5, sigma, 50 * size)
    ranked = -np.sort(-drawn.astype(np.int64))
    strata = balanced_strata(ranked, 50)
    assert sum(strata) == size
    assert max(strata) <= -(-size // min(4, max(size // 2, 1)))
    assert spread_of_strata(ranked, 50, strata) <= spread_at_random(ranked, 50)
    order = StratifiedOrder(np.arange(len(ranked)), ranked.take, pool=50, strata=strata)
    sums = ranked[order[:]].reshape(50, size).sum(axis=1)
    assert sums.var() == pytest.approx(spread_of_strata(ranked, 50, strata))


@pytest.mark.parametrize("counts", [(16, 16), (23, 9), (8, 8, 8, 8), (29, 2, 1)])
def test_so_do_those_of_updates_of_several_sources(counts):
    """Each source has strata of its own, so its part varies no more than a random part of it, and so does the sum."""
    size = sum(counts)
    source_of = np.tile(np.repeat(np.arange(len(counts)), counts), 50)
    lengths = np.random.default_rng(4).lognormal(5 + source_of % 2, 1.0).astype(np.int64) + 1
    at_random = 0.0
    for source in range(len(counts)):
        at_random += spread_at_random(lengths[source_of == source], 50)
    order = StratifiedOrder(
        np.arange(50 * size), lengths.take, pool=50, strata=[size], source_of=source_of
    )
    updates = order[:].reshape(50, size)
    assert lengths[updates].sum(axis=1).var() <= at_random
    assert [np.bincount(source_of[update]).tolist() for update in updates] == [list(counts)] * 50


def test_only_strata_that_vary_much_are_finer():
    """The longest quarter of lengths with a long tail."""
    drawn = np.random.default_rng(1).lognormal(5, 0.8, 50 * 64)
    ranked = -np.sort(-drawn.astype(np.int64))
    assert balanced_strata(ranked, 50) == [8, 8, 16, 16, 16]


@given(strata=st.lists(st.integers(1, 9), min_size=1, max_size=6), share=st.integers(1, 4))
def test_a_part_of_an_update_has_its_strata_in_proportion(strata, share):
    times_share = [share * size for size in strata]
    assert scaled_strata(times_share, sum(strata)) == strata
    assert sum(scaled_strata(strata, share)) == share


def test_one_stratum_varies_more_than_random_updates():
    ranked = -np.sort(-LENGTHS[:400].astype(np.int64))
    assert spread_of_strata(ranked, 50, [8]) > 3 * spread_at_random(ranked, 50)
    assert spread_of_strata(np.array([9, 9, 7, 7]), 2, [2]) == 4.0
    assert spread_at_random(np.array([9, 9, 7, 7]), 2) == pytest.approx(2 * 1.0 * 2 / 3)


def test_small_updates_hardly_pad_and_are_as_many_as_before():
    padding = []
    for grouping in (None, 50):
        loader = PlannedDataLoader(
            range(len(LENGTHS)),
            LENGTHS,
            TokenBudget(8 * int(LENGTHS.max())),
            samples_per_update=8,
            grouping=grouping,
            work=Work(per_step=8),
            collate_fn=list,
            weigh="samples",
        )
        assert [len(update) for update in updates_of(loader.plan)] == [8] * 250
        padding.append(loader.plan.statistics["padding"])
    exact, stratified = padding
    assert stratified < exact / 2


def test_strata_need_grouping():
    with pytest.raises(ConfigError, match="`strata` needs `grouping`"):
        LengthAwareBatchSampler([1, 2], 9, samples_per_update=2, strata=2)


# How updates are cut


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=90),
    size=st.integers(1, 12),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(20, 200),
    grouping=st.none() | st.integers(1, 4),
    multiple=st.sampled_from([1, 8]),
)
@example(lengths=[60] * 9, size=3, ranks=1, max_tokens=20, grouping=2, multiple=1)  # none fits
@example(lengths=[11, 1, 1, 1, 1, 1, 11], size=3, ranks=2, max_tokens=20, grouping=None, multiple=1)
def test_updates_are_cut_into_equal_steps_that_fit(
    lengths, size, ranks, max_tokens, grouping, multiple
):
    size = max(size, ranks)
    budget = TokenBudget(max_tokens, pad_to_multiple_of=multiple)
    plan = LengthAwareBatchSampler(
        lengths,
        budget,
        samples_per_update=size,
        grouping=grouping,
        work=WORK,
        rank=0,
        world_size=ranks,
    ).plan
    used = joined(joined(plan.rows))
    assert sorted(used) == sorted([*range(len(lengths)), *plan.repeated.tolist()])
    sizes = [len(set(update)) for update in updates_of(plan)]
    assert sizes[:-1] == [size] * (plan.num_updates - 1)
    assert sum(sizes) == len(lengths)
    for row in plan.rows:
        assert len(row) == ranks
        for batch in row:
            longest = max(lengths[index] for index in batch)
            padded = len(batch) * -(-longest // multiple) * multiple
            assert padded <= max_tokens or len(batch) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("how", [{"grouping": 7}, {"grouping": 7, "strata": 1}, {}], ids=str)
def test_updates_are_the_same_for_any_number_of_ranks_and_block(ranks, how, monkeypatch):
    """Ranks decide only how an update is divided; the size of a block decides nothing."""
    options = {"samples_per_update": 16, "ranks": ranks, "epoch": 2, **how}
    plan = plan_of(LENGTHS, 2000, **options)
    alone = plan_of(LENGTHS, 2000, **{**options, "ranks": 1})
    assert updates_of(plan) == updates_of(alone)
    monkeypatch.setattr(planner, "BLOCK", 16)
    assert plan_of(LENGTHS, 2000, **options).fingerprint == plan.fingerprint


@pytest.mark.parametrize("size", [256, 1024])
def test_ranks_have_equal_work_unless_one_sample_forces_more(size):
    """Law 9, for 8 ranks: the dearest batch of a step takes at most 2 % more than the mean, and what one sample adds, in 99 %
    of the steps; and over an epoch ranks wait at most 4 % of the predicted time."""
    lengths = np.random.default_rng(3).lognormal(5, 0.5, 40_000).astype(np.int32) + 1
    budget = 16 * int(lengths.max())
    plan = plan_of(lengths, budget, ranks=8, samples_per_update=size, grouping=20)
    work = plan.work_by_row
    over_mean = work.max(axis=1) / work.mean(axis=1) - 1
    one_sample = 1 / plan.batches.sizes.reshape(work.shape).min(axis=1)
    assert np.quantile(over_mean - one_sample, 0.99) <= 0.02
    assert work.max(axis=1).sum() / work.mean(axis=1).sum() < 1.04


@given(
    rows=st.lists(st.lists(st.integers(1, 30), min_size=6, max_size=6), min_size=1, max_size=5),
    per_step=st.integers(0, 40),
    max_tokens=st.integers(30, 90),
)
def test_on_one_rank_the_cut_has_the_least_predicted_time(rows, per_step, max_tokens):
    """Against all 32 ways to cut six samples."""
    tokens = -np.sort(-np.array(rows), axis=1)
    work = tokens.astype(np.float64)
    cuts = cut_updates(tokens, TokenBudget(max_tokens), 1, work, per_step)
    batches = iter(cuts.batches)
    for update, num_steps in zip(tokens.tolist(), cuts.num_steps.tolist(), strict=True):
        found = 0
        for _ in range(num_steps):
            batch = next(batches)
            found += per_step + len(batch) * int(tokens.ravel()[batch].max())
        assert found == pytest.approx(least_time(update, per_step, max_tokens))


def test_each_update_is_tried_once_also_if_its_batches_are_too_small_for_that(monkeypatch):
    """Of 256 samples, steps begin at every fourth one only: too few places for batches of eight."""
    tried = []

    def counting(tokens, *settings):
        tried.append(len(tokens))
        return cut_updates(tokens, *settings)

    monkeypatch.setattr(exact_updates, "cut_updates", counting)
    plan = plan_of(LENGTHS, 8 * int(LENGTHS.max()), samples_per_update=256, grouping=3)
    num_updates = -(-len(LENGTHS) // 256)
    assert len(updates_of(plan)) == num_updates
    assert sum(tried) == num_updates
    monkeypatch.setattr(exact_updates, "way_to_cut", lambda *_: "in turn")
    one_by_one = plan_of(LENGTHS, 8 * int(LENGTHS.max()), samples_per_update=256, grouping=3)
    assert plan.rows == one_by_one.rows


def least_time(update, per_step, max_tokens):
    """The least time of any cut of a sorted update."""
    best = [0.0] + [np.inf] * len(update)
    for stop in range(1, len(update) + 1):
        for start in range(stop):
            padded = (stop - start) * update[start]
            if padded <= max_tokens:
                best[stop] = min(best[stop], best[start] + per_step + padded)
    return best[-1]


def test_a_run_resumes_in_mid_update_on_other_ranks():
    options = {"samples_per_update": 24, "grouping": 5, "seed": 3, "shuffle": True, "work": WORK}
    budget = TokenBudget(1500)
    first = LengthAwareBatchSampler(LENGTHS, budget, world_size=3, **options)
    steps = list(first)
    for used in (0, 1, 7, 20, 61):
        state = first.state_dict(used)
        taken = joined(steps[: 3 * used])
        for ranks in (3, 2):
            resumed = LengthAwareBatchSampler(LENGTHS, budget, world_size=ranks, **options)
            resumed.load_state_dict(state)
            rest = list(resumed)
            assert sorted(joined(rest) + taken) == list(range(len(LENGTHS)))
            if ranks == 3:
                assert rest == steps[3 * used :]
