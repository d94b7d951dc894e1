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
from dynagroup.plan.epoch import Mixture
from dynagroup.plan.few_shapes import ShapeLadder
from dynagroup.plan.inputs import PlanConfig
from dynagroup.plan.micro_batches import balanced_partitions, shard_micro_batches
from tests.online.helpers import Tokens, collate

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [5, 2, 9, 4, 7, 1, 3, 8]
STRANGE: list[Any] = [
    None,
    "7",
    "",
    math.nan,
    math.inf,
    -3,
    0,
    True,
    2.5,
    np.int8(3),
    np.float32(2.0),
    10**30,
    -(10**30),
    [1],
    {},
    object(),
    torch.tensor([1, 2]),
    1j,
    (i for i in [1]),
    [[0, 2.5]],
]
UPDATES: dict[str, Any] = {"collate_fn": collate, "samples_per_update": 4}


def sampler(**given: Any) -> None:
    made = LengthAwareBatchSampler(**{"lengths": LENGTHS, "budget": 20, **given})
    assert len(list(made)) == len(made)
    json.dumps(made.state_dict())


def planned(**given: Any) -> None:
    loader = PlannedDataLoader(
        **{"dataset": Tokens(LENGTHS), "lengths": LENGTHS, "budget": 20, **UPDATES, **given}
    )
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def online(**given: Any) -> None:
    loader = OnlineDataLoader(**{"dataset": Tokens(LENGTHS), "budget": 20, **UPDATES, **given})
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


CALLS: dict[str, Callable[..., Any]] = {
    "lengths budget shuffle window seed hardest_first work samples_per_update order oversize uneven rank world_size": sampler,
    "lengths budget samples_per_update shuffle seed weigh world": planned,
    "budget length_of batch_sampler shuffle length_hint window samples_per_update accumulation seed weigh world": online,
    "max_tokens max_samples pad_to_multiple_of layout": lambda **how: sampler(
        budget=TokenBudget(**{"max_tokens": 20, **how})
    ),
    "batch_size longest headroom pad_to_multiple_of": lambda **how: sampler(
        budget=MemoryBudget(**{"batch_size": 2, **how})
    ),
    "length": lambda length: sampler(lengths=[3, 3, length]),
    "index": lambda index: sampler(order=[0, 1, index]),
    "weight": lambda weight: planned(weigh=lambda batch: weight),
    "answer": lambda answer: online(length_of=lambda sample: answer),
}


@pytest.mark.parametrize("arguments", CALLS)
def test_strange_arguments_are_refused_at_once_or_work(arguments: str) -> None:
    call = CALLS[arguments]
    for argument in arguments.split():
        for value in STRANGE:
            try:
                call(**{argument: value})
            except (TypeError, ValueError):
                continue
            except Exception as error:
                raise AssertionError(
                    f"{argument}={value!r} ends in {type(error).__name__}: {error}"
                ) from error


def test_a_switch_is_true_or_false_and_indices_are_not_cut_off() -> None:
    for make in (sampler, planned, online):
        for value in ("False", 0, None):
            with pytest.raises(ConfigError, match="`shuffle` must be True or False"):
                make(shuffle=value)
        make(shuffle=np.bool_(False))
    for batch in ([0, 1.5], "12"):
        with pytest.raises(ConfigError, match="as an integer"):
            online(batch_sampler=[[0, 1], batch], samples_per_update=None)


def plan(
    lengths: Any = (1, 2, 3), budget: Any = 60, *, rank: Any = 0, world_size: Any = 1, **how: Any
) -> Any:
    return list(LengthAwareBatchSampler(lengths, budget, rank=rank, world_size=world_size, **how))


class Falling(TokenBudget):
    def largest(self, longest: Any, /) -> Any:
        return longest


HARD, HARD_LIMIT = (
    [5, 3, 2, 10, 5, 9, 12],
    23,
)  # 12 + 9 + 2 and 10 + 5 + 5 + 3, which none of the heuristics finds
SHARES = [
    {"a": 1},
    {"a": 1, "b": -1},
    {"a": 0, "b": 0},
    {"a": 1, "b": float("nan")},
    [1, 2],
    {"a": "x", "b": 1},
]
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
    *(
        (
            lambda n=n: plan(round_batch=lambda size: n),
            "`round_batch` must return an int of at least 1, but returned",
        )
        for n in (0, 2.5, True, None)
    ),
    *(
        (
            lambda shares=shares: Mixture({"a": [0], "b": [1]}, shares),
            r"`shares` must have a weight .* for each of \['a', 'b'\]",
        )
        for shares in SHARES
    ),
    *(
        (
            lambda source=source: Mixture({"a": source}, {"a": 1}),
            "`sources` must map names to dataset indices, .*'a': ",
        )
        for source in ([], [0.5], [True, False], [[0]], None)
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
CASES = [*((ConfigError, *row) for row in WRONG), *((BudgetError, *row) for row in TOO_LARGE)]


@pytest.mark.parametrize(("error", "call", "message"), CASES)
def test_what_cannot_be_planned_is_refused(error: type[Exception], call: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()
