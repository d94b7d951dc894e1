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
    one = LengthAwareBatchSampler(**{"lengths": LENGTHS, "budget": 20, **arguments})
    assert len(list(one)) == len(one)
    json.dumps(one.state_dict())


def planned(**arguments: Any) -> None:
    usual = {"dataset": Tokens(LENGTHS), "lengths": LENGTHS, "budget": 20, **UPDATES}
    loader = PlannedDataLoader(**{**usual, **arguments})
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def online(**arguments: Any) -> None:
    usual = {"dataset": Tokens(LENGTHS), "budget": 20, **UPDATES}
    loader = OnlineDataLoader(**{**usual, **arguments})
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def with_token_budget(**arguments: Any) -> None:
    sampler(budget=TokenBudget(**{"max_tokens": 20, **arguments}))


def with_memory_budget(**arguments: Any) -> None:
    sampler(budget=MemoryBudget(**{"batch_size": 2, **arguments}))


CALLS: list[tuple[Callable[..., Any], str]] = [
    (sampler, "lengths budget shuffle window seed hardest_first work samples_per_update"),
    (sampler, "order oversize uneven rank world_size"),
    (planned, "lengths budget samples_per_update shuffle seed weigh world"),
    (online, "budget length_of batch_sampler shuffle length_hint window samples_per_update"),
    (online, "accumulation seed weigh world"),
    (with_token_budget, "max_tokens max_samples pad_to_multiple_of layout"),
    (with_memory_budget, "batch_size longest headroom pad_to_multiple_of"),
    (lambda length: sampler(lengths=[3, 3, length]), "length"),
    (lambda index: sampler(order=[0, 1, index]), "index"),
    (lambda weight: planned(weigh=lambda batch: weight), "weight"),
    (lambda answer: online(length_of=lambda sample: answer), "answer"),
]


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
    return list(
        LengthAwareBatchSampler(lengths, budget, rank=rank, world_size=world_size, **options)
    )


class Falling(TokenBudget):
    def largest(self, longest: Any, /) -> Any:
        return longest


HARD = [5, 3, 2, 10, 5, 9, 12]
HARD_LIMIT = 23  # 12 + 9 + 2 and 10 + 5 + 5 + 3, which none of the heuristics finds
PACKED = TokenBudget(100, layout="packed")
WRONG: list[tuple[Any, str]] = [
    (lambda: Work(streams={"patches": 0.5}), "`streams` must be a dict from names to prices"),
    (lambda: Work.fit([(1, 8, 0.1)] * 2), "at least 3 distinct shapes, but has 2 rows of 1 shapes"),
    (lambda: ShapeLadder([5], PACKED), "needs a padded budget"),
    (lambda: ShapeLadder([], 100), "needs at least one length"),
    (
        lambda: ShapeLadder({"tokens": [5], "target": [3]}, 100),
        r"lengths in one stream, but `lengths` has .'tokens', 'target'.; leave `shapes` out, or",
    ),
    (
        lambda: ShapeLadder([5], 100).shape_for(2, 9),
        r"2 samples of 9 tokens is larger than all shapes",
    ),
    (
        lambda: ShapeLadder([5, 200], 100, 1),
        "must be at least 2: samples that do not fit even alone",
    ),
    (lambda: ShapeLadder([5], 100) & TokenBudget(9), "a ShapeLadder cannot be a part of `&`"),
    (lambda: LearningBudget("9"), "`budget` must be a budget such as"),
    (
        lambda: LearningBudget(ShapeLadder([5], 100)),
        "a LearningBudget cannot contain a ShapeLadder",
    ),
    (lambda: PlanConfig(window=8, samples_per_update=8), "not both"),
    (lambda: plan(one_kind="batch"), r"`one_kind` \('batch'\) needs a label"),
    (lambda: plan(kinds=["a", "b"]), "`kinds` has 2 labels for 3 lengths"),
    (
        lambda: plan(kinds=["a", ["b"], "c"]),
        r"kinds\[1\] must be a label that equals its own copy: .* but is \['b'\]",
    ),
    (lambda: plan(order=[2, 3]), "yields index 3, but there are only 3 samples"),
    (lambda: plan(rank=1, world_size=None), r"`rank` \(1\) needs `world_size`"),
    (
        lambda: plan([1] * 9, samples_per_update=3, world_size=4),
        "must be at least the number of ranks",
    ),
    (lambda: balanced_partitions([1, -1], 2), "`costs` must be one finite number"),
    (lambda: shard_micro_batches([3, 3, 3], 4, 10), "4 .num_ranks x multiple_of.; collect 1 more"),
]
TOO_LARGE: list[tuple[Any, str]] = [
    (lambda: balanced_partitions(HARD, 2, limit=HARD_LIMIT), "first fit failed.; allow more parts"),
    (lambda: balanced_partitions([3, 3, 3], 2, limit=4), "into 2 parts .*at least 3 are needed"),
    (lambda: shard_micro_batches([3, 12], 1, 10, oversize="error"), "sample 1 .12 tokens."),
    (
        lambda: plan([5, 50, 3, 60], 10, oversize="error"),
        r"sample 1 \(50 tokens\) does not fit even alone \(one of 2 such samples\)",
    ),
    (lambda: plan([1, 5], Falling(9)), "must allow at least as many shorter samples"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_is_wrong_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), TOO_LARGE)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        call()


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
