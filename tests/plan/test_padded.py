"""Windows are cut into batches that fit, with the least time; and the batches of a row are equal work (law 9)."""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.data import FILES, LENGTHS, pairs_of
from dynagroup import LengthAwareBatchSampler, Price, ShapeLadder, TokenBudget, Work
from dynagroup.budget.base import AdditiveCap, Budget, padded_tokens
from dynagroup.plan import cut as cutting
from dynagroup.plan.batches import Batches, RoundBatch, friendly_size, multiple_of, shapes_of
from dynagroup.plan.cut import prove
from dynagroup.plan.padded import FEWEST, in_order
from dynagroup.plan.rules import CutRules
from dynagroup.shapes import IntArray, Streams
from tests import strategies
from tests.plan.helpers import as_lists, streams

WORKS = st.builds(
    Work,
    per_step=st.sampled_from([0.0, 1.0, 30.0, 1024.0]),
    crossover=st.sampled_from([10.0, math.inf]),
)
FEW = st.lists(st.integers(0, 20), min_size=1, max_size=8)
PATCHES = {"patches": Price(unit=0.1)}
WORK_OF_IMAGES = {
    "unpriced": Work(),
    "step": Work(streams=PATCHES),
    "stream": Work(streams=PATCHES, meet="stream"),
}


def cut(
    lengths: Streams,
    budget: Budget,
    num_ranks: int = 1,
    *,
    work: Work | None = None,
    round_batch: RoundBatch | None = None,
) -> Batches:
    rules = CutRules(budget, work or Work(), round_batch)
    return cutting.cut(lengths, rules, num_ranks)


def fits(batches: Batches, lengths: Streams, budget: Budget) -> bool:
    is_lawful = budget.fits(shapes_of(batches, lengths)) | (batches.sizes == 1)
    return bool(is_lawful.all())


def time_of(batches: Batches, lengths: Streams, budget: Budget, work: Work) -> float:
    return work.of_rows(work.of_batches(batches, lengths, budget)[:, None])


# What fits


class Window(NamedTuple):
    lengths: Streams
    budget: Budget


def one_stream(values: list[int], budget: Budget) -> Window:
    return Window(streams(values), budget)


def two_streams(values: list[int], budget: Budget) -> Window:
    return Window(streams(values, labels=values[::-1]), budget)


def capped_stream(values: list[int], budget: Budget) -> Window:
    patches = [value % 37 for value in values]
    return Window(streams(values, patches=patches), budget)


WINDOWS = st.one_of(
    st.builds(one_stream, strategies.lengths, strategies.budgets),
    st.builds(two_streams, strategies.lengths, strategies.budgets),
    st.builds(capped_stream, strategies.lengths, strategies.capped_budgets),
)


@settings(max_examples=150, deadline=None)
@given(WINDOWS, strategies.ROUNDINGS, WORKS, st.integers(1, 9))
@example(two_streams([0] * 3, TokenBudget(2)), None, Work(per_step=0.0, crossover=10.0), 2)
def test_every_batch_fits_in_rows_that_are_full_wherever_a_batch_can_be_divided(
    window, rounding, work, num_ranks
):
    lengths = window.lengths
    budget = window.budget.bind(lengths)
    batches = cut(lengths, budget, num_ranks, work=work, round_batch=rounding)
    num_samples = len(lengths["tokens"])
    prove(batches, num_samples, lengths, budget, np.ones(num_samples, np.bool_))
    assert fits(batches, lengths, budget)
    assert len(batches) % num_ranks == 0 or (batches.sizes == 1).all()
    assert budget.layout == "packed" or strategies.are_allowed(batches.sizes, rounding)


# The least time


class WithoutTable(TokenBudget):
    """Forces the search that serves budgets which cannot be tabulated by length."""

    def largest(self, longest: IntArray, /) -> None:
        return None


LEAST_TIME = settings(max_examples=60, deadline=None)
BUDGETS = st.builds(TokenBudget, st.integers(5, 120)) | st.builds(WithoutTable, st.integers(5, 120))


def every_cut(
    lengths: Streams, budget: Budget, work: Work, rounding: RoundBatch | None
) -> Iterator[Batches]:
    """Every cut of a sorted window into runs that fit and have allowed sizes."""
    order, _ = in_order(lengths, CutRules(budget, work))
    num_samples = len(order)
    for num_borders in range(num_samples):
        for borders in combinations(range(1, num_samples), num_borders):
            batches = Batches(order, np.array([0, *borders, num_samples]))
            is_allowed = strategies.are_allowed(batches.sizes, rounding)
            if is_allowed and fits(batches, lengths, budget):
                yield batches


def assert_least_time(
    lengths: Streams, budget: Budget, work: Work, rounding: RoundBatch | None
) -> None:
    best = math.inf
    for batches in every_cut(lengths, budget, work, rounding):
        best = min(best, time_of(batches, lengths, budget, work))
    ours = cut(lengths, budget, work=work, round_batch=rounding)
    time = time_of(ours, lengths, budget, work)
    assert time == pytest.approx(best, rel=1e-9, abs=1e-9)


@LEAST_TIME
@given(FEW, BUDGETS, strategies.ROUNDINGS, WORKS)
def test_no_cut_into_runs_takes_less_time(values, budget, rounding, work) -> None:
    assert_least_time(streams(values), budget, work, rounding)


@LEAST_TIME
@given(FEW, BUDGETS, strategies.ROUNDINGS, WORKS)
def test_no_cut_of_two_streams_takes_less_time(values, budget, rounding, work) -> None:
    assert_least_time(streams(values, labels=sorted(values)), budget, work, rounding)


@settings(max_examples=20, deadline=None)
@given(FEW, WORKS)
def test_no_cut_into_few_shapes_takes_less_time(values, work) -> None:
    lengths = streams(values)
    ladder = ShapeLadder(lengths, TokenBudget(90), 3, window=3, work=work)
    assert_least_time(lengths, ladder, work, None)


def number_and_padding(batches: Batches, lengths: Streams, budget: Budget) -> tuple[int, int]:
    padded = padded_tokens(shapes_of(batches, lengths), budget)
    return len(batches), int(padded.sum())


@LEAST_TIME
@given(FEW, BUDGETS, strategies.ROUNDINGS)
def test_if_steps_are_dear_the_cut_has_the_fewest_batches_and_of_those_the_least_padding(
    values, budget, rounding
) -> None:
    lengths = streams(values)
    work = Work(per_step=FEWEST, crossover=math.inf)
    best = (len(values) + 1, 0)
    for batches in every_cut(lengths, budget, work, rounding):
        best = min(best, number_and_padding(batches, lengths, budget))
    ours = cut(lengths, budget, work=work, round_batch=rounding)
    assert number_and_padding(ours, lengths, budget) == best


# Literal cuts

CHEAP_STEP = streams([10, 6, 6, 1, 1, 1])


def test_a_window_is_cut_into_batches_of_similar_lengths() -> None:
    batches = cut(streams([3, 9, 2, 8, 50]), TokenBudget(18))
    assert as_lists(batches) == [[4], [1, 3], [0, 2]]


def test_a_cheap_step_buys_less_padding_with_more_batches_the_one_of_most_work_first() -> None:
    batches = cut(CHEAP_STEP, TokenBudget(60), work=Work(per_step=1))
    assert as_lists(batches) == [[1, 2], [0], [3, 4, 5]]


def test_if_a_step_is_dear_one_batch_is_enough() -> None:
    assert len(cut(CHEAP_STEP, TokenBudget(60), work=Work(per_step=100))) == 1


def test_no_samples_are_no_batches() -> None:
    assert len(cut(streams([]), TokenBudget(5))) == 0


def test_a_row_is_shared_by_work_and_not_by_number() -> None:
    lengths = streams([90, 40, 40, 30, 30, 30, 10, 10, 10, 10])
    work = Work(per_step=1000, crossover=math.inf)
    batches = cut(lengths, TokenBudget(100), 4, work=work)
    assert sorted(as_lists(batches)) == [[0], [1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_the_row_of_the_longest_sample_is_in_front() -> None:
    lengths = streams([9, 9, 4, 4, 1, 1, 1, 1])
    work = Work(per_step=1, crossover=math.inf)
    batches = cut(lengths, TokenBudget(9), 2, work=work)
    assert as_lists(batches)[:2] == [[0], [1]]


def test_equal_lengths_are_shared_equally_over_the_ranks() -> None:
    batches = cut(streams([10] * 30), TokenBudget(100), 4)
    assert sorted(batches.sizes.tolist()) == [6, 8, 8, 8]  # not 10, 10, 5, 5


@pytest.mark.parametrize(
    ("limit", "rounding", "sizes"),
    [(100, multiple_of(8), [7, 8, 8]), (70, friendly_size, [1, 4, 6, 6, 6])],
)
def test_sizes_are_rounded_down(limit: int, rounding: RoundBatch, sizes: list[int]) -> None:
    batches = cut(streams([10] * 23), TokenBudget(limit), round_batch=rounding)
    assert sorted(batches.sizes.tolist()) == sizes


def test_a_rounding_that_rounds_up_does_so_before_it_is_checked_what_fits() -> None:
    """5 becomes 7, which fits; 6 becomes 8, which does not."""
    batches = cut(streams([10] * 23), TokenBudget(70), round_batch=lambda size: size + 2)
    assert batches.sizes.max() <= 7


def test_friendly_sizes_are_powers_of_two_and_three_times_those() -> None:
    powers = [2**exponent for exponent in range(8)]
    friendly = powers + [3 * power for power in powers]
    for size in range(1, 200):
        assert friendly_size(size) == max(value for value in friendly if value <= size)


def test_streams_that_have_little_to_do_with_one_another_are_hardly_padded() -> None:
    drawn = np.random.default_rng(0).lognormal(4, 0.8, (2, 2000))
    tokens, labels = drawn.clip(1, 900).astype(np.int32)
    labels[317] = 3000
    lengths = {"tokens": tokens, "labels": labels}
    sampler = LengthAwareBatchSampler(lengths, TokenBudget(16_384), rank=0, world_size=1)
    assert sampler.plan.statistics["padding"] < 0.2
    assert 317 in sampler.plan.rows[0][0]  # the sample of most tokens comes first


# Equal work


def greedy_runs_suffice(
    limit: float, values: list[int], work_of: NDArray[np.float64], num_ranks: int, max_tokens: int
) -> bool:
    """Whether so many batches, each as large as the limit of its work allows, have all samples of a sorted row."""
    place = 0
    for _ in range(num_ranks):
        if place < len(values):
            most_work = int(limit / work_of[place] * (1 + 1e-12))
            size = min(most_work, max_tokens // values[place])
            if work_of[place] <= limit:
                size = max(size, 1)
            place += size
    return place >= len(values)


def least_dearest(row: list[int], num_ranks: int, max_tokens: int, work: Work) -> float:
    """The least work that the dearest of so many batches can be.

    Bisection over all amounts of work that a run can have: greedy runs under a limit are the fewest.
    """
    values = sorted(row, reverse=True)
    work_of = work.of_lengths(values)
    sizes = np.arange(1, len(values) + 1)
    candidates = np.unique(sizes[:, None] * work_of[None, :])
    low = 0
    high = len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if greedy_runs_suffice(float(candidates[middle]), values, work_of, num_ranks, max_tokens):
            high = middle
        else:
            low = middle + 1
    return float(candidates[low])


def assert_equal_work(values: NDArray[np.int32], max_tokens: int, ranks: int, work: Work) -> None:
    """Law 9, padded: 99 % of rows differ by at most 5 %, or have the least dearest batch that whole samples allow; over all
    rows ranks wait at most 3 % beyond that least. The least is exact: such batches are runs of the sorted row, and greedy
    runs under a limit are the fewest. With 8 samples a rank, whole samples force up to 7.7 % of waiting."""
    lengths = {"tokens": values}
    budget = TokenBudget(max_tokens)
    batches = cut(lengths, budget, ranks, work=work)
    by_row = work.of_batches(batches, lengths, budget).reshape(-1, ranks)
    least = []
    for row in range(len(by_row)):
        samples = batches.take(np.arange(row * ranks, (row + 1) * ranks)).order
        least.append(least_dearest(values[samples].tolist(), ranks, max_tokens, work))
    dearest = by_row.max(axis=1)
    is_even = np.ptp(by_row, axis=1) <= 0.05 * by_row.mean(axis=1)
    is_least = dearest <= 1.005 * np.asarray(least)
    uneven = np.flatnonzero(~(is_even | is_least))
    assert len(uneven) <= 0.01 * len(by_row), (uneven, len(by_row))
    forced = np.maximum(by_row.mean(axis=1), least)
    assert dearest.sum() - forced.sum() <= 0.03 * work.of_rows(by_row)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=12, max_size=150),
    st.integers(300, 3000),
    WORKS,
    st.integers(2, 6),
)
def test_batches_of_a_row_are_equal_work_or_the_least_that_its_samples_allow(
    values, max_tokens, work, ranks
):
    tokens = np.asarray(values, np.int32)
    batches = cut({"tokens": tokens}, TokenBudget(max_tokens), ranks, work=work)
    if len(batches) % ranks == 0:
        assert_equal_work(tokens, max_tokens, ranks, work)


@pytest.mark.parametrize("name", FILES)
def test_real_lengths_are_equal_work_or_the_least_that_a_row_allows(name: str) -> None:
    file = np.load(LENGTHS / f"{name}.npz")
    tokens = np.random.default_rng(1).permutation(file["tokens"])[:4096]
    longest = int(tokens.max())
    four_long = 4 * int(np.quantile(tokens, 0.99))
    for num_samples, ranks in ((64, 8), (256, 8), (512, 64), (4096, 8)):
        if len(tokens) < num_samples:
            continue
        for max_tokens in (16 * longest, max(four_long, longest)):
            assert_equal_work(tokens[:num_samples], max_tokens, ranks, Work())


# Texts with images


def images(share: float, count: int) -> dict[str, NDArray[np.int32]]:
    """Texts of some 300 tokens, a share of them with 1 to 4 images of 256 to 2,048 patches, a quarter as many tokens each."""
    rng = np.random.default_rng(0)
    text = np.clip(rng.lognormal(np.log(300), 0.9, count), 8, 6000).astype(np.int64)
    sizes = rng.integers(256, 2049, (count, 4))
    num_images = rng.integers(1, 5, count)
    is_there = np.arange(4) < num_images[:, None]
    has_images = rng.random(count) < share
    patches = np.where(has_images, (sizes * is_there).sum(axis=1), 0)
    return streams(text + patches // 4, patches=patches)


def spread(values: NDArray, batches: Batches, ranks: int) -> float:
    """The largest sum of a row over the mean of its ranks; the median of the rows."""
    sums = np.asarray([values[batch].sum() for batch in batches], np.float64)
    by_row = sums.reshape(-1, ranks)
    by_row = by_row[by_row.any(axis=1)]
    return float(np.median(by_row.max(axis=1) / by_row.mean(axis=1)))


IMAGES_PACKED = TokenBudget(16_384, layout="packed") & AdditiveCap("patches", 24_576)
IMAGES_PADDED = TokenBudget(16_384) & AdditiveCap("patches", 24_576)


@pytest.mark.parametrize(
    ("share", "work", "most", "mixed_rows"),
    [
        (0.5, "unpriced", 1.10, 0),
        (0.5, "step", 1.10, 0),
        (0.5, "stream", 1.10, 0),
        (0.2, "unpriced", 1.10, 0),
        (0.2, "step", 1.10, 0),
        (0.2, "stream", 1.10, 0),
        (0.05, "unpriced", 1.15, 0),
        (0.05, "step", 1.29, 1),
        (0.05, "stream", 1.15, 0),
    ],
)
def test_packed_rows_are_even_in_tokens_and_in_patches(
    share: float, work: str, most: float, mixed_rows: int
) -> None:
    """Updates of 2,048 on 8 ranks, of texts of which a share has images: medians of rows, and no row that mixes. At 5 % a rank
    has 1.6 samples with images in a step."""
    lengths = images(share, 2048)
    batches = cut(lengths, IMAGES_PACKED, 8, work=WORK_OF_IMAGES[work])
    prove(batches, 2048, lengths, IMAGES_PACKED, np.zeros(2048, np.bool_))
    assert spread(lengths["tokens"], batches, 8) <= 1.05
    assert spread(lengths["patches"], batches, 8) <= most
    has_images = np.asarray([lengths["patches"][batch].any() for batch in batches])
    num_with_images = has_images.reshape(-1, 8).sum(axis=1)
    is_mixed = (num_with_images > 0) & (num_with_images < 8)
    assert is_mixed.sum() <= mixed_rows


@pytest.mark.parametrize("share", [0.5, 0.2, 0.05])
def test_balancing_a_length_without_a_price_takes_little_time(share: float) -> None:
    """On 64 ranks, one with 1.6 samples with images on average, balancing patches made steps 17 % longer."""
    lengths = images(share, 2048)
    without = streams(lengths["tokens"], patches=0 * lengths["patches"])
    rules = CutRules(IMAGES_PACKED, Work())
    time = rules.time_of_steps(cut(lengths, IMAGES_PACKED, 64), lengths, 64)
    time_without = rules.time_of_steps(cut(without, IMAGES_PACKED, 64), lengths, 64)
    assert time <= 1.05 * time_without


@pytest.mark.parametrize("work", WORK_OF_IMAGES)
@pytest.mark.parametrize(("share", "most"), [(0.5, 1.101), (0.2, 1.19), (0.05, 1.29)])
def test_padded_rows_of_one_kind_are_even_in_tokens_and_in_patches(
    share: float, most: float, work: str
) -> None:
    """Updates of 2,048 on 8 ranks, medians of rows. At 5 % a rank has four samples with images in a step."""
    lengths = images(share, 8192)
    plan = LengthAwareBatchSampler(
        lengths,
        IMAGES_PADDED,
        kinds=lengths["patches"] > 0,
        samples_per_update=2048,
        work=WORK_OF_IMAGES[work],
        rank=0,
        world_size=8,
    ).plan
    padded = plan.padded[plan.table]
    assert np.median(padded.max(axis=1) / padded.mean(axis=1)) <= 1.05
    assert plan.statistics["imbalance_patches"] <= most


def time_on_two_ranks(batches: Batches, lengths: Streams, budget: Budget, work: Work) -> float:
    """Without the fixed time of the step."""
    return work.of_rows(work.by_stream(batches, lengths, budget)[None]) - work.per_step


def best_division(lengths: Streams, budget: Budget, work: Work) -> float:
    """The least time of all divisions of eight samples over two ranks, tried one by one."""
    best = math.inf
    for mask in range(1, 255):
        is_first = np.asarray([bool(mask >> sample & 1) for sample in range(8)])
        division = Batches.of([np.flatnonzero(is_first), np.flatnonzero(~is_first)])
        best = min(best, time_on_two_ranks(division, lengths, budget, work))
    return best


@pytest.mark.parametrize(
    ("layout", "work", "most"),
    [
        ("padded", "unpriced", 1.05),
        ("padded", "step", 1.08),
        ("padded", "stream", 1.05),
        ("packed", "unpriced", 1.06),
        ("packed", "step", 1.05),
        ("packed", "stream", 1.05),
    ],
)
def test_tiny_rows_are_nearly_the_best_division(layout: Any, work: str, most: float) -> None:
    budget = TokenBudget(10_000, layout=layout) & AdditiveCap("patches", 10_000)
    price = WORK_OF_IMAGES[work]
    ours = 0.0
    best = 0.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(10, 99, 8)
        patches = rng.integers(0, 900, 8) * rng.integers(0, 2, 8)
        lengths = streams(tokens, patches=patches)
        batches = cut(lengths, budget, 2, work=price)
        ours += time_on_two_ranks(batches, lengths, budget, price)
        best += best_division(lengths, budget, price)
    assert ours <= most * best


# Pairs

WAITING = {(64, 8): 0.09, (256, 2): 0.02, (256, 8): 0.05, (1024, 8): 0.025}
"""Samples and ranks -> the share of the predicted time by which the dearest batches may exceed what follows."""


@pytest.mark.parametrize(("num_samples", "ranks"), WAITING)
@pytest.mark.parametrize("name", [name for name in FILES if pairs_of(name, 1)])
def test_rows_of_real_pairs_wait_little_beyond_what_their_dearest_sample_makes_them(
    name: str, num_samples: int, ranks: int
) -> None:
    """Two padded streams: the least that a row allows is not known. What holds is a sum over the rows: their dearest batches
    against their means (padding as it was cut) or, where that is more, against their dearest samples by themselves."""
    file = np.load(LENGTHS / f"{name}.npz")
    chosen = np.random.default_rng(1).permutation(len(file["tokens"]))[:1024]
    pairs = streams(file["src_tokens"][chosen], target=file["tgt_tokens"][chosen])
    longest = int((pairs["tokens"] + pairs["target"]).max())
    budget = TokenBudget(16 * longest)
    work = Work()
    waited = 0.0
    time = 0.0
    for first in range(0, 1024, num_samples):
        part = {name: values[first : first + num_samples] for name, values in pairs.items()}
        batches = cut(part, budget, ranks, work=work)
        by_row = work.of_batches(batches, part, budget).reshape(-1, ranks)
        work_of = work.of_lengths(part)
        samples = np.array([work_of[batch].max() for batch in batches])
        dearest_sample = samples.reshape(-1, ranks).max(axis=1)
        forced = np.maximum(by_row.mean(axis=1), dearest_sample)
        waited += float((by_row.max(axis=1) - forced).sum())
        time += work.of_rows(by_row)
    assert waited <= WAITING[num_samples, ranks] * time
