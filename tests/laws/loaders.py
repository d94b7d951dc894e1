"""Every loader as one entry of the table of laws: how it is made, and what else it could have been made with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, StepLoader, TokenBudget
from dynagroup.plan.cost import Work
from dynagroup.update.loss_weight import Share
from dynagroup.update.schedule import linear_ramp
from dynagroup.update.step import Step
from tests.online.helpers import Stream, Tokens, collate, collate_packed, lengths_of

LENGTHS = lengths_of(19, seed=2, top=30)
TOKENS = 60
COLLATE = {"padded": collate, "packed": collate_packed}


class SamplerSteps:
    """A sampler's batches as the steps that a loop makes of them with its plan."""

    def __init__(self, sampler: LengthAwareBatchSampler, rank: int, size: int) -> None:
        self.sampler, self.rank, self.size = sampler, rank, size
        self.state_dict, self.load_state_dict = sampler.state_dict, sampler.load_state_dict
        self.num_samples = len(LENGTHS)

    def __iter__(self) -> Iterator[Step[Any]]:
        plan, epoch = self.sampler.plan, self.sampler.epoch
        for row, batch in enumerate(self.sampler):
            scale = float(plan.loss_scale[row, self.rank])
            total = plan.batches.sizes[plan.table[row]] * self.size / np.maximum(plan.loss_scale[row], 1e-9)
            share = Share(len(batch) if scale else 0, float(np.round(total.min())))
            yield Step(batch, batch, share, share, scale, bool(plan.update_ends[row]), not scale)
        self.sampler.set_epoch(epoch + 1)

    updates: Any = StepLoader.updates


def sampler(world: Any, layout: Any = "padded", *, lengths: Any = LENGTHS, max_tokens: int = TOKENS, **how: Any) -> Any:
    budget = TokenBudget(max_tokens, layout=layout)
    how = {"shuffle": True, **how}
    made = LengthAwareBatchSampler(lengths, budget, rank=world.rank, world_size=world.size, **how)
    return SamplerSteps(made, world.rank, world.size)


def planned(world: Any, layout: Any = "padded", *, lengths: Any = LENGTHS, max_tokens: int = TOKENS, **how: Any) -> Any:
    how = {"collate_fn": COLLATE[layout], **how}
    return PlannedDataLoader(Tokens(lengths), lengths, TokenBudget(max_tokens, layout=layout), world=world, **how)


def online(world: Any, layout: Any = "padded", *, lengths: Any = LENGTHS, max_tokens: int = TOKENS, **how: Any) -> Any:
    how = {"collate_fn": COLLATE[layout], "shuffle": True, "window": 6, **how}
    return OnlineDataLoader(Tokens(lengths), TokenBudget(max_tokens, layout=layout), world=world, **how)


def streamed(
    world: Any, layout: Any = "padded", *, lengths: Any = LENGTHS, max_tokens: int = TOKENS, **how: Any
) -> Any:
    how = {"collate_fn": COLLATE[layout], "window": 6, **how}
    data = Stream(lengths, world.rank, world.size)
    return OnlineDataLoader(data, TokenBudget(max_tokens, layout=layout), world=world, **how)


@dataclass(frozen=True)
class Entry:
    """One loader of the table.

    Args:
        make: (world, layout, **settings) -> what one rank iterates.
        base: settings of the entry.
        others: settings, one at a time, with which a state of the entry must be refused.
        moves: whether a state says what remains, in order and for any number of ranks; a stream's says how far it was read.
    """

    make: Callable[..., Any]
    base: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    moves: bool = True


DATA = {"lengths": LENGTHS[:-1], "max_tokens": TOKENS + 1, "layout": "packed"}
BOTH = {**DATA, "seed": 1, "weigh": "samples", "work": Work(per_step=9)}
SIZED = {**BOTH, "samples_per_update": 6, "drop_last": True, "shuffle": False, "sampler": [*range(19)]}
PLANNED = {"lengths": [*LENGTHS[:-1], LENGTHS[-1] + 1], "round_batch": abs, "oversize": "drop"}
ENTRIES: dict[str, Entry] = {
    "sampler": Entry(
        sampler,
        {"window": 9},
        {
            **DATA,
            "seed": 1,
            "shuffle": False,
            "window": 8,
            "hardest_first": 2,
            "oversize": "drop",
            "uneven": "drop",
            "round_batch": abs,
            "order": [*range(19)],
        },
    ),  # fmt: skip
    "sampler-updates": Entry(sampler, {"samples_per_update": 5}, {**DATA, "samples_per_update": 6, "seed": 1}),
    "sampler-grouped": Entry(
        sampler, {"samples_per_update": 3, "grouping": 2}, {"seed": 1, "grouping": 3, "samples_per_update": 4}
    ),
    "planned-grouped": Entry(planned, {"samples_per_update": 3, "grouping": 2}, {"seed": 1, "grouping": None}),
    "planned-set": Entry(planned, {"samples_per_update": 5}, {**SIZED, **PLANNED}),
    "planned-scheduled": Entry(
        planned,
        {"samples_per_update": linear_ramp(2, 7, num_updates=4)},
        {**SIZED, "samples_per_update": linear_ramp(2, 7, num_updates=5)},
    ),
    "planned-free": Entry(
        planned,
        {"accumulation": 2, "window": 9},
        {**BOTH, **PLANNED, "accumulation": 3, "window": 8, "shuffle": False},
    ),
    "online-set": Entry(online, {"samples_per_update": 5}, {**SIZED, "window": 7}),
    "online-free": Entry(
        online,
        {"accumulation": 2},
        {**BOTH, "accumulation": 3, "window": 7, "shuffle": False, "length_hint": LENGTHS},
    ),
    "online-scheduled": Entry(
        online,
        {"samples_per_update": linear_ramp(2, 7, num_updates=4), "length_hint": LENGTHS},
        {"samples_per_update": linear_ramp(2, 7, num_updates=5)},
    ),
    "online-in-parts": Entry(online, {"window_bytes": 200, "window": 19}, {"window_bytes": None}),
    "online-planned": Entry(online, {"length_hint": LENGTHS}, {"seed": 1, "length_hint": LENGTHS[::-1]}),
    "online-stream": Entry(streamed, {}, {"window": 7, "max_tokens": TOKENS + 1, "weigh": "samples"}, moves=False),
}
