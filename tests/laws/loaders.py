"""Every loader as one entry of the table of laws: how it is made, and what else it could have been made with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynagroup import (
    AdditiveCap,
    Budget,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.plan.cost import Work
from dynagroup.update.loss_weight import Share
from dynagroup.update.schedule import linear_ramp
from dynagroup.update.step import Step
from tests.online.helpers import Stream, Tokens, collate, collate_packed, lengths_of

LENGTHS = lengths_of(19, seed=2, top=30)
TOKENS, MOST_EDGES = 60, 120


def kinds_of(number: int) -> list[Any]:
    """Labels of so many samples: one kind is rare, one of them a single sample's, one None."""
    return [
        ("clip", 7) if k == 4 else 2 if k % 5 == 3 else None if k % 3 else "image"
        for k in range(number)
    ]


KINDS = kinds_of(len(LENGTHS))
COLLATE = {"padded": collate, "packed": collate_packed}


def budget_of(lengths: Any, max_tokens: Any, layout: Any) -> Budget:
    budget: Any = (
        max_tokens(layout) if callable(max_tokens) else TokenBudget(max_tokens, layout=layout)
    )
    return budget & AdditiveCap("edges", MOST_EDGES) if isinstance(lengths, dict) else budget


def data_of(lengths: Any) -> Tokens:
    return Tokens(lengths["nodes"] if isinstance(lengths, dict) else lengths)


def graph_of(nodes: int) -> dict[str, int]:
    return {"nodes": nodes, "edges": nodes + 37 * nodes % 50}


def graphs_of(lengths: list[int]) -> dict[str, list[int]]:
    return {name: [graph_of(nodes)[name] for nodes in lengths] for name in ("nodes", "edges")}


def size_of(sample: Any) -> dict[str, int]:
    return graph_of(len(sample["input_ids"]))


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
            total = (
                plan.batches.sizes[plan.table[row]]
                * self.size
                / np.maximum(plan.loss_scale[row], 1e-9)
            )
            share = Share(len(batch) if scale else 0, float(np.round(total.min())))
            kind = plan.kinds[row][self.rank]
            yield Step(
                batch, batch, share, share, scale, bool(plan.update_ends[row]), not scale, kind
            )
        self.sampler.set_epoch(epoch + 1)

    def updates(self) -> Iterator[list[Step[Any]]]:
        update: list[Step[Any]] = []
        for step in self:
            update.append(step)
            if step.ends_update:
                yield update
                update = []


def sampler(
    world: Any,
    layout: Any = "padded",
    *,
    lengths: Any = LENGTHS,
    max_tokens: int = TOKENS,
    **how: Any,
) -> Any:
    budget = budget_of(lengths, max_tokens, layout)
    how = {"shuffle": True, **how}
    made = LengthAwareBatchSampler(lengths, budget, rank=world.rank, world_size=world.size, **how)
    return SamplerSteps(made, world.rank, world.size)


def planned(
    world: Any = None,
    layout: Any = "padded",
    *,
    lengths: Any = LENGTHS,
    max_tokens: Any = TOKENS,
    **how: Any,
):
    data, how = how.pop("data", None) or data_of(lengths), {"collate_fn": COLLATE[layout], **how}
    return PlannedDataLoader(
        data, lengths, budget_of(lengths, max_tokens, layout), world=world, **how
    )


def online(
    world: Any = None,
    layout: Any = "padded",
    *,
    lengths: Any = LENGTHS,
    max_tokens: Any = TOKENS,
    **how: Any,
):
    data, how = (
        how.pop("data", None) or data_of(lengths),
        {"shuffle": "sampler" not in how, "window": 6, **how},
    )
    how = {"collate_fn": COLLATE[layout], **how}
    return OnlineDataLoader(data, budget_of(lengths, max_tokens, layout), world=world, **how)


def streamed(world: Any, layout: Any = "padded", *, max_tokens: int = TOKENS, **how: Any) -> Any:
    how = {"collate_fn": COLLATE[layout], "window": 6, **how}
    data = Stream(LENGTHS, world.rank, world.size)
    return OnlineDataLoader(data, budget_of(LENGTHS, max_tokens, layout), world=world, **how)


def labelled(world: Any, layout: Any = "padded", *, kinds: Any, **how: Any) -> Any:
    """A loader whose samples tell their kinds only once they are processed."""
    return online(world, layout, kind_of=lambda sample: kinds[int(sample["input_ids"][0])], **how)


@dataclass(frozen=True)
class Entry:
    """One loader of the table. ``make``: (world, layout, **settings) -> what one rank iterates; ``base``: settings of the
    entry; ``others``: settings, one at a time, with which a state of the entry must be refused; ``moves``: whether a state
    says what remains, in order and for any number of ranks (a stream's says how far it was read)."""

    make: Callable[..., Any]
    base: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    moves: bool = True


DATA = {"lengths": LENGTHS[:-1], "max_tokens": TOKENS + 1, "layout": "packed", "identity": ["v2"]}
BOTH = {**DATA, "seed": 1, "weigh": "samples", "work": Work(per_step=9)}
SIZED = {
    **BOTH,
    "samples_per_update": 6,
    "drop_last": True,
    "shuffle": False,
    "sampler": [*range(19)],
}
PLANNED = {"lengths": [*LENGTHS[:-1], LENGTHS[-1] + 1], "round_batch": abs, "oversize": "drop"}
GRAPHS = {"lengths": graphs_of(LENGTHS)}
FEWER = {"nodes": LENGTHS, "edges": [0] * len(LENGTHS)}
RAMP, OTHER = linear_ramp(2, 7, num_updates=4), linear_ramp(2, 7, num_updates=5)
WINDOW = {**DATA, "seed": 1, "shuffle": False, "window": 8, "order": [*range(19)]}
HINT = {"length_hint": LENGTHS}

ENTRIES: dict[str, Entry] = {
    "sampler": Entry(
        sampler,
        {"window": 9},
        {**WINDOW, "hardest_first": 2, "oversize": "drop", "uneven": "drop", "round_batch": abs},
    ),
    "sampler-updates": Entry(
        sampler, {"samples_per_update": 5}, {**DATA, "samples_per_update": 6, "seed": 1}
    ),
    "sampler-grouped": Entry(
        sampler,
        {"samples_per_update": 3, "grouping": 2},
        {"seed": 1, "grouping": 3, "samples_per_update": 4},
    ),
    "sampler-graphs": Entry(
        sampler, {**GRAPHS, "window": 9}, {"lengths": FEWER, "max_tokens": TOKENS + 1}
    ),
    "sampler-kinds": Entry(
        sampler,
        {"window": 9, "kinds": KINDS},
        {"kinds": KINDS[::-1], "one_kind": "batch", "seed": 1, "window": 8},
    ),
    "sampler-updates-kinds": Entry(
        sampler,
        {"samples_per_update": 5, "grouping": 2, "kinds": KINDS, "one_kind": "batch"},
        {"one_kind": "step", "kinds": [*KINDS[:-1], "other"]},
    ),
    "planned-set": Entry(planned, {"samples_per_update": 5}, {**SIZED, **PLANNED}),
    "planned-scheduled": Entry(
        planned, {"samples_per_update": RAMP}, {**SIZED, "samples_per_update": OTHER}
    ),
    "planned-grouped": Entry(
        planned, {"samples_per_update": 3, "grouping": 2}, {"seed": 1, "grouping": None}
    ),
    "planned-free": Entry(
        planned,
        {"accumulation": 2, "window": 9},
        {**BOTH, **PLANNED, "accumulation": 3, "window": 8, "shuffle": False},
    ),
    "planned-graphs": Entry(
        planned, {**GRAPHS, "samples_per_update": 5}, {"lengths": FEWER, "seed": 1}
    ),
    "planned-set-kinds": Entry(
        planned,
        {"samples_per_update": 7, "kinds": KINDS},
        {"kinds": [repr(kind) for kind in KINDS], "one_kind": "batch", "grouping": 2},
    ),
    "planned-scheduled-kinds": Entry(
        planned,
        {"samples_per_update": RAMP, "kinds": KINDS, "grouping": 2},
        {"kinds": None, "one_kind": "batch"},
    ),
    "planned-free-kinds": Entry(
        planned, {"accumulation": 2, "kinds": KINDS}, {"kinds": [None] * 19, "window": 9}
    ),
    "planned-free-kinds-batch": Entry(
        planned,
        {"accumulation": 2, "window": 9, "kinds": KINDS, "one_kind": "batch"},
        {"kinds": [None] * 19, "one_kind": "step"},
    ),
    "planned-shapes": Entry(
        planned, {"samples_per_update": 5, "shapes": 3}, {"shapes": 4, "max_tokens": TOKENS + 1}
    ),
    "planned-free-shapes": Entry(
        planned, {"window": 9, "shapes": 4, "accumulation": 2}, {"shapes": 3, "window": 8}
    ),
    "online-set": Entry(online, {"samples_per_update": 5}, {**SIZED, "window": 7}),
    "online-free": Entry(
        online,
        {"accumulation": 2},
        {**BOTH, **HINT, "accumulation": 3, "window": 7, "shuffle": False},
    ),
    "online-scheduled": Entry(
        online, {"samples_per_update": RAMP, **HINT}, {"samples_per_update": OTHER}
    ),
    "online-grouped": Entry(
        online,
        {"samples_per_update": 3, "grouping": 2},
        {"seed": 1, "grouping": 3, "strata": 1, "samples_per_update": 4},
    ),
    "online-scheduled-grouped": Entry(
        online,
        {"samples_per_update": linear_ramp(4, 6, num_updates=2), "grouping": 3, **HINT},
        {"grouping": None, "drop_last": True},
    ),
    "online-grouped-kinds": Entry(
        labelled, {"samples_per_update": 7, "grouping": 2, "kinds": KINDS}, {"strata": 2}
    ),
    "online-in-parts": Entry(online, {"window_bytes": 200, "window": 19}, {"window_bytes": None}),
    "online-planned": Entry(online, HINT, {"seed": 1, "length_hint": LENGTHS[::-1]}),
    "online-graphs": Entry(
        online,
        {**GRAPHS, "samples_per_update": 5, "length_of": size_of},
        {"max_tokens": TOKENS + 1},
    ),
    "online-set-kinds": Entry(
        labelled, {"samples_per_update": 7, "kinds": KINDS}, {"seed": 1, "identity": "v2"}
    ),
    "online-free-kinds": Entry(
        labelled, {"accumulation": 2, "kinds": KINDS}, {"window": 7, "one_kind": "batch"}
    ),
    "online-known-kinds": Entry(
        online, {"kinds": KINDS}, {"kinds": KINDS[::-1], "one_kind": "batch", "window": 7}
    ),
    "online-shapes": Entry(
        online,
        {"samples_per_update": 5, "shapes": 3, **HINT},
        {"shapes": 4, "length_hint": LENGTHS[::-1]},
    ),
    "online-free-shapes": Entry(
        online, {"shapes": 4, **HINT}, {"shapes": 3, "length_hint": LENGTHS[::-1]}
    ),
    "online-stream": Entry(
        streamed, {}, {"window": 7, "max_tokens": TOKENS + 1, "weigh": "samples"}, moves=False
    ),
}
