"""A wrong argument is refused when it is given, by name, with its value and a way out: nothing fails later."""

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    LengthAwareBatchSampler,
    MemoryBudget,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.budget.learning import LearningBudget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.plan.cost import Work
from dynagroup.plan.few_shapes import ShapeLadder
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.micro_batches import balanced_partitions, shard_micro_batches
from dynagroup.plan.mixture import Mixture
from tests.online.helpers import Tokens, collate

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [5, 2, 9, 4, 7, 1, 3, 8]
STRANGE: list[Any] = [None, "7", "", math.nan, math.inf, -3, 0, True, 2.5]
STRANGE += [np.int8(3), np.float32(2.0), 10**30, -(10**30), [1], {}, object()]
STRANGE += [torch.tensor([1, 2]), 1j, (number for number in [1]), [[0, 2.5]]]
UPDATES: dict[str, Any] = {"collate_fn": collate, "samples_per_update": 4}


def sampler(**arguments: Any) -> None:
    settings = {"lengths": LENGTHS, "budget": 20}
    settings.update(arguments)
    batches = LengthAwareBatchSampler(**settings)
    assert len(list(batches)) == len(batches)
    json.dumps(batches.state_dict())


def planned(**arguments: Any) -> None:
    settings = {"dataset": Tokens(LENGTHS), "lengths": LENGTHS, "budget": 20}
    settings.update(UPDATES)
    settings.update(arguments)
    loader = PlannedDataLoader(**settings)
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def online(**arguments: Any) -> None:
    settings = {"dataset": Tokens(LENGTHS), "budget": 20}
    settings.update(UPDATES)
    settings.update(arguments)
    loader = OnlineDataLoader(**settings)
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def with_token_budget(**arguments: Any) -> None:
    settings = {"max_tokens": 20}
    settings.update(arguments)
    sampler(budget=TokenBudget(**settings))


def with_memory_budget(**arguments: Any) -> None:
    settings = {"batch_size": 2}
    settings.update(arguments)
    sampler(budget=MemoryBudget(**settings))


def with_last_length(length: Any) -> None:
    sampler(lengths=[3, 3, length])


def with_last_index(index: Any) -> None:
    sampler(order=[0, 1, index])


def with_weight(weight: Any) -> None:
    planned(weigh=lambda batch: weight)


def with_measured_length(length: Any) -> None:
    online(length_of=lambda sample: length)


CALLS: list[tuple[Callable[..., Any], str]] = []
CALLS += [(sampler, "lengths budget shuffle window seed hardest_first work samples_per_update")]
CALLS += [(sampler, "order oversize uneven rank world_size")]
CALLS += [(planned, "lengths budget samples_per_update shuffle seed weigh world")]
CALLS += [(online, "budget length_of batch_sampler shuffle length_hint window samples_per_update")]
CALLS += [(online, "accumulation seed weigh world")]
CALLS += [(with_token_budget, "max_tokens max_samples pad_to_multiple_of layout")]
CALLS += [(with_memory_budget, "batch_size longest headroom pad_to_multiple_of")]
CALLS += [(with_last_length, "length"), (with_last_index, "index")]
CALLS += [(with_weight, "weight"), (with_measured_length, "length")]


@pytest.mark.parametrize(("call", "names"), CALLS, ids=range(len(CALLS)))
def test_strange_arguments_are_refused_at_once_or_work(
    call: Callable[..., Any], names: str
) -> None:
    for name in names.split():
        for value in STRANGE:
            try:
                call(**{name: value})
            except (TypeError, ValueError):
                continue
            except Exception as error:
                kind = type(error).__name__
                raise AssertionError(f"{name}={value!r} ends in {kind}: {error}") from error


@pytest.mark.parametrize("make", [sampler, planned, online])
def test_a_switch_is_true_or_false(make: Callable[..., None]) -> None:
    for value in ("False", 0, None):
        with pytest.raises(ConfigError, match="`shuffle` must be True or False"):
            make(shuffle=value)
    make(shuffle=np.bool_(False))


@pytest.mark.parametrize("batch", [[0, 1.5], "12"])
def test_indices_are_not_cut_off(batch: Any) -> None:
    with pytest.raises(ConfigError, match="as an integer"):
        online(batch_sampler=[[0, 1], batch], samples_per_update=None)


def plan(
    lengths: Any = (1, 2, 3),
    budget: Any = 60,
    *,
    rank: Any = 0,
    world_size: Any = 1,
    **options: Any,
) -> Any:
    sampler = LengthAwareBatchSampler(lengths, budget, rank=rank, world_size=world_size, **options)
    return list(sampler)


def test_prices_of_streams_are_a_dict():
    with pytest.raises(ConfigError, match="`streams` must be a dict from names to prices"):
        Work(streams={"patches": 0.5})


def test_work_is_not_fitted_to_one_shape():
    with pytest.raises(ConfigError, match="at least 3 distinct shapes, but has 2 rows of 1 shapes"):
        Work.fit([(1, 8, 0.1)] * 2)


def test_a_ladder_needs_a_padded_budget():
    with pytest.raises(ConfigError, match="needs a padded budget"):
        ShapeLadder([5], TokenBudget(100, layout="packed"))


def test_a_ladder_needs_lengths():
    with pytest.raises(ConfigError, match="needs at least one length"):
        ShapeLadder([], 100)


def test_a_ladder_has_one_stream():
    message = (
        r"lengths in one stream, but `lengths` has .'tokens', 'target'.; leave `shapes` out, or"
    )
    with pytest.raises(ConfigError, match=message):
        ShapeLadder({"tokens": [5], "target": [3]}, 100)


def test_a_ladder_has_no_shape_for_what_is_larger_than_all():
    ladder = ShapeLadder([5], 100)
    with pytest.raises(ConfigError, match=r"2 samples of 9 tokens is larger than all shapes"):
        ladder.shape_for(2, 9)


def test_a_ladder_needs_a_shape_for_samples_that_do_not_fit():
    message = "must be at least 2: samples that do not fit even alone"
    with pytest.raises(ConfigError, match=message):
        ShapeLadder([5, 200], 100, 1)


def test_a_ladder_is_no_part_of_an_intersection():
    ladder = ShapeLadder([5], 100)
    with pytest.raises(ConfigError, match="a ShapeLadder cannot be a part of `&`"):
        _ = ladder & TokenBudget(9)


def test_what_learns_wraps_a_budget():
    wrong: Any = "9"
    with pytest.raises(ConfigError, match="`budget` must be a budget such as"):
        LearningBudget(wrong)


def test_what_learns_wraps_no_ladder():
    with pytest.raises(ConfigError, match="a LearningBudget cannot contain a ShapeLadder"):
        LearningBudget(ShapeLadder([5], 100))


def test_a_plan_has_a_window_or_updates():
    with pytest.raises(ConfigError, match="not both"):
        PlanConfig(window=8, samples_per_update=8)


def test_batches_of_one_kind_need_kinds():
    with pytest.raises(ConfigError, match=r"`one_kind` \('batch'\) needs a label"):
        plan(one_kind="batch")


def test_every_sample_has_a_kind():
    with pytest.raises(ConfigError, match="`kinds` has 2 labels for 3 lengths"):
        plan(kinds=["a", "b"])


def test_a_kind_equals_its_own_copy():
    message = r"kinds\[1\] must be a label that equals its own copy: .* but is \['b'\]"
    with pytest.raises(ConfigError, match=message):
        plan(kinds=["a", ["b"], "c"])


def test_an_order_has_indices_of_samples():
    with pytest.raises(ConfigError, match="yields index 3, but there are only 3 samples"):
        plan(order=[2, 3])


def test_a_rank_is_one_of_a_number():
    with pytest.raises(ConfigError, match=r"`rank` \(1\) needs `world_size`"):
        plan(rank=1, world_size=None)


def test_an_update_has_a_sample_for_each_rank():
    with pytest.raises(ConfigError, match="must be at least the number of ranks"):
        plan([1] * 9, samples_per_update=3, world_size=4)


def test_costs_are_not_negative():
    with pytest.raises(ConfigError, match="`costs` must be one finite number"):
        balanced_partitions([1, -1], 2)


def test_each_rank_has_a_sample():
    message = "4 .num_ranks x multiple_of.; collect 1 more"
    with pytest.raises(ConfigError, match=message):
        shard_micro_batches([3, 3, 3], 4, 10)


def test_heuristics_do_not_find_every_partition():
    hard = [5, 3, 2, 10, 5, 9, 12]
    limit = 23  # 12 + 9 + 2 and 10 + 5 + 5 + 3, which none of the heuristics finds
    with pytest.raises(BudgetError, match="first fit failed.; allow more parts"):
        balanced_partitions(hard, 2, limit=limit)


def test_a_refused_partition_says_how_many_parts_are_needed():
    with pytest.raises(BudgetError, match="into 2 parts .*at least 3 are needed"):
        balanced_partitions([3, 3, 3], 2, limit=4)


def test_a_sample_that_does_not_fit_a_micro_batch_is_named():
    with pytest.raises(BudgetError, match="sample 1 .12 tokens."):
        shard_micro_batches([3, 12], 1, 10, oversize="error")


def test_the_first_sample_that_does_not_fit_is_named():
    message = r"sample 1 \(50 tokens\) does not fit even alone \(one of 2 such samples\)"
    with pytest.raises(BudgetError, match=message):
        plan([5, 50, 3, 60], 10, oversize="error")


class Falling(TokenBudget):
    def largest(self, longest: Any, /) -> Any:
        return longest


def test_a_budget_allows_at_least_as_many_shorter_samples():
    with pytest.raises(BudgetError, match="must allow at least as many shorter samples"):
        plan([1, 5], Falling(9))


@pytest.mark.parametrize("size", [0, 2.5, True, None])
def test_a_rounding_returns_a_size(size: Any) -> None:
    message = "`round_batch` must return an int of at least 1, but returned"
    with pytest.raises(ConfigError, match=message):
        plan(round_batch=lambda _: size)


SHARES: list[Any] = [{"a": 1}, {"a": 1, "b": -1}, {"a": 0, "b": 0}, {"a": 1, "b": math.nan}]
SHARES += [[1, 2], {"a": "x", "b": 1}]


@pytest.mark.parametrize("shares", SHARES)
def test_a_mixture_has_a_weight_for_each_source(shares: Any) -> None:
    message = r"`shares` must have a weight .* for each of \['a', 'b'\]"
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": [0], "b": [1]}, shares)


@pytest.mark.parametrize("source", [[], [0.5], [True, False], [[0]], None])
def test_a_source_of_a_mixture_has_dataset_indices(source: Any) -> None:
    message = "`sources` must map names to dataset indices, .*'a': "
    with pytest.raises(ConfigError, match=message):
        Mixture({"a": source}, {"a": 1})
