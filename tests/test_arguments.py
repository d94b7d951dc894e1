"""What is no argument is refused when it is given, by a TypeError or ValueError (as the project's errors are): nothing that was
taken fails later, at the first step or the first checkpoint."""

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import dynagroup as dg
from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, TokenBudget
from tests.online.helpers import Tokens, collate

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = [5, 2, 9, 4, 7, 1, 3, 8]
STRANGE: list[Any] = [
    None, "7", "", math.nan, math.inf, -3, 0, True, 2.5, np.int8(3), np.float32(2.0), 10**30, -(10**30), [1], {}, object(),
    torch.tensor([1, 2]), 1j, (i for i in [1]), [[0, 2.5]],
]  # fmt: skip
UPDATES: dict[str, Any] = {"collate_fn": collate, "samples_per_update": 4}


def sampler(**given: Any) -> None:
    made = LengthAwareBatchSampler(**{"lengths": LENGTHS, "budget": 20, **given})
    assert len(list(made)) == len(made)
    json.dumps(made.state_dict())


def planned(**given: Any) -> None:
    loader = PlannedDataLoader(**{"dataset": Tokens(LENGTHS), "lengths": LENGTHS, "budget": 20, **UPDATES, **given})
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
    "max_tokens max_samples pad_to_multiple_of layout": lambda **given: sampler(
        budget=TokenBudget(**{"max_tokens": 20, **given})
    ),
    "batch_size longest headroom pad_to_multiple_of": lambda **given: sampler(
        budget=dg.MemoryBudget(**{"batch_size": 2, **given})
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
                raise AssertionError(f"{argument}={value!r} ends in {type(error).__name__}: {error}") from error


def test_a_switch_is_true_or_false_and_indices_are_not_cut_off() -> None:
    for make in (sampler, planned, online):
        for value in ("False", 0, None):
            with pytest.raises(dg.ConfigError, match="`shuffle` must be True or False"):
                make(shuffle=value)
        make(shuffle=np.bool_(False))
    for batch in ([0, 1.5], "12"):
        with pytest.raises(dg.ConfigError, match="as an integer"):
            online(batch_sampler=[[0, 1], batch], samples_per_update=None)
