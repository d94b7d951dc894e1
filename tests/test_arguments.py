"""What is no argument is refused when it is given, by the project's errors alone: nothing is taken for what it is not, and
nothing that was taken fails later, at the first step or the first checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import dynagroup as dg
from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, ShapeLadder, TokenBudget, Work
from dynagroup.update import schedule
from tests.online.helpers import Tokens, collate

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [5, 2, 9, 4, 7, 1, 3, 8]
STRANGE: list[Any] = [
    None, "7", "", math.nan, math.inf, -3, 0, True, 2.5, 2.0, np.int8(3), np.float32(2.0), np.bool_(True),
    10**30, 2**63, -(10**30),
    [1], {}, object(), b"x", torch.tensor([1, 2]), np.array([1, 2]), 1j, {1}, (i for i in [1]), 1e300,
    np.str_("time"), [[0, 2.5]],
]  # fmt: skip


UPDATES: dict[str, Any] = {"collate_fn": collate, "samples_per_update": 4}


def sampler(**given: Any) -> None:
    made = LengthAwareBatchSampler(**{"lengths": LENGTHS, "budget": 20, **given})
    assert len(list(made)) == len(made)
    json.dumps(made.state_dict())


def run(loader: Any) -> None:
    list(islice(loader, 5))
    json.dumps(loader.state_dict())


def planned(**given: Any) -> None:
    run(PlannedDataLoader(**{"dataset": Tokens(LENGTHS), "lengths": LENGTHS, "budget": 20, **UPDATES, **given}))


def online(**given: Any) -> None:
    run(OnlineDataLoader(**{"dataset": Tokens(LENGTHS), "budget": 20, **UPDATES, **given}))


def using(make: Callable[..., Any], **usual: Any) -> Callable[..., Any]:
    return lambda **given: make(**{**usual, **given})


def method(name: str) -> Callable[..., None]:
    def call(given: Any) -> None:
        for loader in (
            PlannedDataLoader(Tokens(LENGTHS), LENGTHS, 20, **UPDATES),
            OnlineDataLoader(Tokens(LENGTHS), 20, **UPDATES),
        ):
            getattr(loader, name)(given)
            run(loader)

    return call


def returning(make: Callable[..., None], name: str) -> Callable[..., None]:
    """``make`` with a function that gives the strange value."""
    return lambda given: make(**{name: lambda *_: given})


SAMPLER = (
    "lengths budget shuffle window seed hardest_first round_batch work samples_per_update order oversize uneven rank "
    "world_size"
)
PLANNED = "lengths budget samples_per_update accumulation shuffle seed weigh drop_last world"
ONLINE = (
    "budget length_of batch_sampler shuffle length_hint window samples_per_update drop_last accumulation seed weigh "
    "oversize work window_bytes world"
)
FREE: dict[str, Any] = {"samples_per_update": None}
METHODS = "set_epoch set_samples_per_update samples_after"
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "sampler": (sampler, SAMPLER),
    "planned": (planned, f"{PLANNED} sampler"),
    "planned, free": (using(planned, **FREE), PLANNED),
    "online": (online, ONLINE),
    "online, free": (using(online, **FREE), ONLINE),
    **{name: (method(name), "given") for name in METHODS.split()},
    "TokenBudget": (
        lambda **given: sampler(budget=TokenBudget(**{"max_tokens": 20, **given})),
        "max_tokens max_samples pad_to_multiple_of layout",
    ),
    "from_sequence_length": (
        using(TokenBudget.from_sequence_length, sequence_length=4, micro_batch_size=2), "sequence_length micro_batch_size",
    ),
    "MemoryBudget": (
        lambda **given: sampler(budget=dg.MemoryBudget(**{"batch_size": 2, **given})),
        "batch_size longest model headroom pad_to_multiple_of",
    ),
    "AdditiveCap": (using(dg.AdditiveCap, stream="patches", limit=5), "stream limit"),
    "&": (lambda other: TokenBudget(20) & other, "other"),
    "ShapeLadder": (using(ShapeLadder, lengths=LENGTHS, budget=20), "lengths budget num_shapes"),
    "shape_for": (ShapeLadder(LENGTHS, 20).shape_for, "longest"),
    "balanced_partitions": (
        using(dg.balanced_partitions, costs=LENGTHS, num_parts=2), "costs num_parts sizes limit equal_size",
    ),
    "shard_micro_batches": (
        using(dg.shard_micro_batches, lengths=LENGTHS, num_ranks=2, budget=20), "lengths num_ranks budget multiple_of work",
    ),
    "scale_learning_rate": (
        using(dg.scale_learning_rate, learning_rate=0.1, samples_per_update=8, base_samples_per_update=4),
        "learning_rate samples_per_update base_samples_per_update rule",
    ),
    "multiple_of": (lambda number: sampler(round_batch=dg.multiple_of(number)), "number"),
    "friendly_size": (dg.friendly_size, "size"),
    "linear_ramp": (
        lambda **given: planned(samples_per_update=schedule.linear_ramp(**{"first": 1, "last": 4, "num_updates": 3, **given})),
        "first last num_updates multiple_of",
    ),
    "Work": (lambda **given: sampler(work=Work(**given)), "per_step crossover"),
    "Work.fit": (Work.fit, "rows"),
    "Work.fit of a row": (lambda row: Work.fit([row, row, row]), "row"),
    "RefinementCollator": (
        using(dg.RefinementCollator, collate_fn=collate, budget=TokenBudget(20)),
        "collate_fn budget length_of oversize work weigh",
    ),
    "measure_lengths": (using(dg.measure_lengths, data=[[1], [2, 3]]), "column max_length length_of"),
    "a length": (lambda value: sampler(lengths=[3, 3, value]), "value"),
    "a stream's name": (lambda value: sampler(lengths={value: LENGTHS}) if value.__hash__ else None, "value"),
    "an index": (lambda value: sampler(order=[0, 1, value]), "value"),
    "a batch": (lambda value: online(batch_sampler=[[0, 1], value], **FREE), "value"),
    "round_batch's answer": (returning(sampler, "round_batch"), "given"),
    "schedule's answer": (returning(planned, "samples_per_update"), "given"),
    "weigh's answer": (returning(planned, "weigh"), "given"),
    "weigh's answer, online": (returning(online, "weigh"), "given"),
    "length_of's answer": (returning(online, "length_of"), "given"),
    "hint's answer": (returning(online, "length_hint"), "given"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_strange_arguments_are_refused_by_the_projects_errors_or_work(name: str) -> None:
    call, arguments = CALLS[name]
    for argument in arguments.split():
        for value in STRANGE:
            try:
                call(**{argument: value})
            except (dg.ConfigError, dg.BudgetError):
                continue
            except Exception as error:
                raise AssertionError(f"{argument}={value!r} ends in {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("make", [sampler, planned, online])
@pytest.mark.parametrize("value", ["False", "no", 0, 1, None])
def test_a_switch_is_true_or_false(make: Callable[..., None], value: Any) -> None:
    with pytest.raises(dg.ConfigError, match="`shuffle` must be True or False"):
        make(shuffle=value)
    make(shuffle=np.bool_(False))


def test_indices_are_not_cut_off() -> None:
    for batch in ([0, 1.5], "12"):
        with pytest.raises(dg.ConfigError, match="`batch_sampler` must give lists of dataset indices"):
            online(batch_sampler=[[0, 1], batch], **FREE)
