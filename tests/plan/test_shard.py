import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import BudgetError, ConfigError, TokenBudget
from dynagroup.plan.partition import shard_micro_batches


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=24, max_size=120),
    num_ranks=st.integers(1, 6),
    multiple_of=st.integers(1, 4),
    layout=st.sampled_from(["padded", "packed"]),
)
def test_ranks_get_equally_many_batches_that_fit_and_every_sample_once(lengths, num_ranks, multiple_of, layout):
    budget = TokenBudget(100, layout=layout)
    shards = shard_micro_batches(lengths, num_ranks, budget, multiple_of=multiple_of)
    counts = {len(rank) for rank in shards}
    assert len(shards) == num_ranks
    assert len(counts) == 1
    assert counts.pop() % multiple_of == 0
    assert sorted(i for rank in shards for batch in rank for i in batch) == list(range(len(lengths)))
    for rank in shards:
        for batch in rank:
            longest = [lengths[i] for i in batch]
            assert (max(longest) * len(batch) if layout == "padded" else sum(longest)) <= 100


def test_ranks_carry_about_the_same_load():
    lengths = np.random.default_rng(0).lognormal(5, 1, 512).clip(8, 2000).astype(int)
    shards = shard_micro_batches(lengths, 8, TokenBudget(8192))
    loads = [sum(max(lengths[i] for i in batch) * len(batch) for batch in rank) for rank in shards]
    assert max(loads) / (sum(loads) / 8) < 1.05


def test_a_sample_that_does_not_fit_is_named():
    with pytest.raises(BudgetError, match=r"sample 1 \(12 tokens\) does not fit even alone"):
        shard_micro_batches([3, 12], 1, TokenBudget(10), oversize="error")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize(("oversize", "done"), [("alone", "emitted alone"), ("drop", "left out")])
def test_a_sample_that_does_not_fit_comes_alone_or_is_left_out_as_a_sampler_does_it(layout, oversize, done):
    lengths = [3, 12, 4, 2, 5, 1]
    with pytest.warns(
        UserWarning, match=f"1 samples do not fit the budget even alone and are {done}; the first is sample 1"
    ):
        shards = shard_micro_batches(lengths, 2, TokenBudget(10, layout=layout), oversize=oversize)
    batches = [batch for rank in shards for batch in rank]
    assert len({len(rank) for rank in shards}) == 1
    assert sorted(i for batch in batches for i in batch) == (
        [0, 1, 2, 3, 4, 5] if oversize == "alone" else [0, 2, 3, 4, 5]
    )
    assert ([1] in batches) == (oversize == "alone")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"oversize": "clip"}, "oversize"),
        ({"work": 3.0}, "`work` must be a Work"),
        ({"multiple_of": 0}, "`multiple_of` must be an int of at least 1"),
    ],
)
def test_mistakes_are_named(settings, said):
    with pytest.raises(ConfigError, match=said):
        shard_micro_batches([3, 4], 1, TokenBudget(10), **settings)


def test_too_few_samples_are_refused():
    with pytest.raises(ConfigError, match="3 samples cannot be divided into a multiple of num_ranks x multiple_of = 4"):
        shard_micro_batches([3, 3, 3], 4, TokenBudget(10))


def test_sharding_needs_no_torch():
    code = "import sys, dynagroup.plan.partition; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_to_shard():
    assert shard_micro_batches([], 2, TokenBudget(10)) == [[], []]
