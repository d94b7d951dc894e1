from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import ConfigError, LengthAwareBatchSampler, ShapeLadder, TokenBudget
from dynagroup.testing import assert_budget_law


@settings(max_examples=40)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=60), st.integers(1, 9), st.sampled_from([1, 8]))
def test_planned_batches_have_few_shapes_that_fit(lengths: list[int], num_shapes: int, multiple: int) -> None:
    budget = TokenBudget(400, pad_to_multiple_of=multiple)
    ladder = ShapeLadder(lengths, budget, num_shapes)
    assert len(ladder.shapes) <= num_shapes
    assert all(samples * longest <= 400 for samples, longest in ladder.shapes)
    for batch in LengthAwareBatchSampler(lengths, ladder, rank=0, world_size=1):
        samples, longest = ladder.shape_for(max(lengths[i] for i in batch))
        assert len(batch) <= samples
        assert max(lengths[i] for i in batch) <= longest
    assert_budget_law(ladder, {"tokens": np.asarray(lengths, np.int32)})


def test_rungs_stand_where_lengths_are() -> None:
    lengths = [100] * 50 + [300] * 50 + [290] * 20 + [900] * 2
    assert ShapeLadder(lengths, 1800, num_shapes=3).shapes == [(18, 100), (6, 300), (2, 900)]


def test_what_no_ladder_can_be_made_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs lengths"):
        ShapeLadder([], 100)
    with pytest.raises(ConfigError, match="needs a padded budget"):
        ShapeLadder([5], TokenBudget(100, layout="packed"))
    with pytest.raises(ConfigError, match="sample of 9 tokens is longer than the highest rung, 5"):
        ShapeLadder([5], 100).shape_for(9)
