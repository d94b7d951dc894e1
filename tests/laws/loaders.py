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
TOKENS = 60
MOST_EDGES = 120


def kind_at(place: int) -> Any:
    """One kind is rare, one of them a single sample's, one None."""
    if place == 4:
        return ("clip", 7)
    if place % 5 == 3:
        return 2
    return None if place % 3 else "image"


def kinds_of(number: int) -> list[Any]:
    """Labels of so many samples."""
    return [kind_at(place) for place in range(number)]


KINDS = kinds_of(len(LENGTHS))
COLLATE = {"padded": collate, "packed": collate_packed}


def budget_of(lengths: Any, max_tokens: Any, layout: Any) -> Budget:
    if callable(max_tokens):
        budget: Any = max_tokens(layout)
    else:
        budget = TokenBudget(max_tokens, layout=layout)
    if isinstance(lengths, dict):
        return budget & AdditiveCap("edges", MOST_EDGES)
    return budget


def data_of(lengths: Any, data: Any) -> Any:
    """These data, or samples of these lengths."""
    if data is not None:
        return data
    return Tokens(lengths["nodes"] if isinstance(lengths, dict) else lengths)


def graph_of(nodes: int) -> dict[str, int]:
    return {"nodes": nodes, "edges": nodes + 37 * nodes % 50}


def graphs_of(lengths: list[int]) -> dict[str, list[int]]:
    graphs = [graph_of(nodes) for nodes in lengths]
    return {name: [graph[name] for graph in graphs] for name in ("nodes", "edges")}


def size_of(sample: Any) -> dict[str, int]:
    return graph_of(len(sample["input_ids"]))


class SamplerSteps:
    """A sampler's batches as the steps that a loop makes of them with its plan."""

    def __init__(self, sampler: LengthAwareBatchSampler, rank: int, size: int) -> None:
        self.sampler = sampler
        self.rank = rank
        self.size = size
        self.state_dict = sampler.state_dict
        self.load_state_dict = sampler.load_state_dict
        self.num_samples = len(LENGTHS)

    def __iter__(self) -> Iterator[Step[Any]]:
        plan = self.sampler.plan
        epoch = self.sampler.epoch
        for row, batch in enumerate(self.sampler):
            yield self._step(plan, row, batch)
        self.sampler.set_epoch(epoch + 1)

    def _step(self, plan: Any, row: int, batch: list[int]) -> Step[Any]:
        scales = plan.loss_scale[row]
        sizes = plan.batches.sizes[plan.table[row]]
        # A batch's loss scale is its size times the ranks over the update's size; 0 if it idles.
        totals = sizes * self.size / np.maximum(scales, 1e-9)
        scale = float(scales[self.rank])
        is_idle = scale == 0
        share = Share(0 if is_idle else len(batch), float(np.round(totals.min())))
        return Step(
            batch,
            batch,
            samples=share,
            weight=share,
            loss_scale=scale,
            ends_update=bool(plan.update_ends[row]),
            idle=is_idle,
            kind=plan.kinds[row][self.rank],
        )

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
    shuffle: bool = True,
    **settings: Any,
) -> Any:
    batches = LengthAwareBatchSampler(
        lengths,
        budget_of(lengths, max_tokens, layout),
        rank=world.rank,
        world_size=world.size,
        shuffle=shuffle,
        **settings,
    )
    return SamplerSteps(batches, world.rank, world.size)


def planned(
    world: Any = None,
    layout: Any = "padded",
    *,
    lengths: Any = LENGTHS,
    max_tokens: Any = TOKENS,
    data: Any = None,
    **settings: Any,
):
    settings = {"collate_fn": COLLATE[layout], **settings}
    budget = budget_of(lengths, max_tokens, layout)
    return PlannedDataLoader(data_of(lengths, data), lengths, budget, world=world, **settings)


def online(
    world: Any = None,
    layout: Any = "padded",
    *,
    lengths: Any = LENGTHS,
    max_tokens: Any = TOKENS,
    data: Any = None,
    **settings: Any,
):
    settings = {"collate_fn": COLLATE[layout], "window": 6, **settings}
    settings.setdefault("shuffle", "sampler" not in settings)
    budget = budget_of(lengths, max_tokens, layout)
    return OnlineDataLoader(data_of(lengths, data), budget, world=world, **settings)


def streamed(
    world: Any, layout: Any = "padded", *, max_tokens: int = TOKENS, **settings: Any
) -> Any:
    settings = {"collate_fn": COLLATE[layout], "window": 6, **settings}
    stream = Stream(LENGTHS, world.rank, world.size)
    return OnlineDataLoader(stream, budget_of(LENGTHS, max_tokens, layout), world=world, **settings)


def labelled(world: Any, layout: Any = "padded", *, kinds: Any, **settings: Any) -> Any:
    """A loader whose samples tell their kinds only once they are processed."""

    def kind_of(sample: Any) -> Any:
        return kinds[int(sample["input_ids"][0])]

    return online(world, layout, kind_of=kind_of, **settings)


@dataclass(frozen=True)
class Entry:
    """One loader of the table.

    ``make``: (world, layout, **settings) -> what one rank iterates; ``base``: settings of the entry; ``others``:
    settings, one at a time, with which a state of the entry must be refused; ``moves``: whether a state says what
    remains, in order and for any number of ranks (a stream's says how far it was read).
    """

    make: Callable[..., Any]
    base: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    moves: bool = True


DATA = {"lengths": LENGTHS[:-1], "max_tokens": TOKENS + 1, "layout": "packed", "identity": ["v2"]}
BOTH = {**DATA, "seed": 1, "weigh": "samples", "work": Work(per_step=9)}
ORDER = list(range(19))
SIZED = {
    **BOTH,
    "samples_per_update": 6,
    "drop_last": True,
    "shuffle": False,
    "sampler": ORDER,
}
PLANNED = {"lengths": [*LENGTHS[:-1], LENGTHS[-1] + 1], "round_batch": abs, "oversize": "drop"}
GRAPHS = {"lengths": graphs_of(LENGTHS)}
FEWER = {"nodes": LENGTHS, "edges": [0] * len(LENGTHS)}
RAMP = linear_ramp(2, 7, num_updates=4)
OTHER = linear_ramp(2, 7, num_updates=5)
GROUPED_RAMP = linear_ramp(4, 6, num_updates=2)
WINDOW = {**DATA, "seed": 1, "shuffle": False, "window": 8, "order": ORDER}
HINT = {"length_hint": LENGTHS}

ENTRIES: dict[str, Entry] = {}


def add(
    name: str,
    make: Callable[..., Any],
    base: dict[str, Any],
    others: dict[str, Any],
    moves: bool = True,
) -> None:
    ENTRIES[name] = Entry(make, base, others, moves)


add(
    "sampler",
    sampler,
    {"window": 9},
    {**WINDOW, "hardest_first": 2, "oversize": "drop", "uneven": "drop", "round_batch": abs},
)
add(
    "sampler-updates",
    sampler,
    {"samples_per_update": 5},
    {**DATA, "samples_per_update": 6, "seed": 1},
)
add(
    "sampler-grouped",
    sampler,
    {"samples_per_update": 3, "grouping": 2},
    {"seed": 1, "grouping": 3, "samples_per_update": 4},
)
add(
    "sampler-graphs", sampler, {**GRAPHS, "window": 9}, {"lengths": FEWER, "max_tokens": TOKENS + 1}
)
add(
    "sampler-kinds",
    sampler,
    {"window": 9, "kinds": KINDS},
    {"kinds": KINDS[::-1], "one_kind": "batch", "seed": 1, "window": 8},
)
add(
    "sampler-updates-kinds",
    sampler,
    {"samples_per_update": 5, "grouping": 2, "kinds": KINDS, "one_kind": "batch"},
    {"one_kind": "step", "kinds": [*KINDS[:-1], "other"]},
)
add("planned-set", planned, {"samples_per_update": 5}, {**SIZED, **PLANNED})
add(
    "planned-scheduled",
    planned,
    {"samples_per_update": RAMP},
    {**SIZED, "samples_per_update": OTHER},
)
add(
    "planned-grouped",
    planned,
    {"samples_per_update": 3, "grouping": 2},
    {"seed": 1, "grouping": None},
)
add(
    "planned-free",
    planned,
    {"accumulation": 2, "window": 9},
    {**BOTH, **PLANNED, "accumulation": 3, "window": 8, "shuffle": False},
)
add("planned-graphs", planned, {**GRAPHS, "samples_per_update": 5}, {"lengths": FEWER, "seed": 1})
add(
    "planned-set-kinds",
    planned,
    {"samples_per_update": 7, "kinds": KINDS},
    {"kinds": [repr(kind) for kind in KINDS], "one_kind": "batch", "grouping": 2},
)
add(
    "planned-scheduled-kinds",
    planned,
    {"samples_per_update": RAMP, "kinds": KINDS, "grouping": 2},
    {"kinds": None, "one_kind": "batch"},
)
add(
    "planned-free-kinds",
    planned,
    {"accumulation": 2, "kinds": KINDS},
    {"kinds": [None] * 19, "window": 9},
)
add(
    "planned-free-kinds-batch",
    planned,
    {"accumulation": 2, "window": 9, "kinds": KINDS, "one_kind": "batch"},
    {"kinds": [None] * 19, "one_kind": "step"},
)
add(
    "planned-shapes",
    planned,
    {"samples_per_update": 5, "shapes": 3},
    {"shapes": 4, "max_tokens": TOKENS + 1},
)
add(
    "planned-free-shapes",
    planned,
    {"window": 9, "shapes": 4, "accumulation": 2},
    {"shapes": 3, "window": 8},
)
add("online-set", online, {"samples_per_update": 5}, {**SIZED, "window": 7})
add(
    "online-free",
    online,
    {"accumulation": 2},
    {**BOTH, **HINT, "accumulation": 3, "window": 7, "shuffle": False},
)
add("online-scheduled", online, {"samples_per_update": RAMP, **HINT}, {"samples_per_update": OTHER})
add(
    "online-grouped",
    online,
    {"samples_per_update": 3, "grouping": 2},
    {"seed": 1, "grouping": 3, "strata": 1, "samples_per_update": 4},
)
add(
    "online-scheduled-grouped",
    online,
    {"samples_per_update": GROUPED_RAMP, "grouping": 3, **HINT},
    {"grouping": None, "drop_last": True},
)
add(
    "online-grouped-kinds",
    labelled,
    {"samples_per_update": 7, "grouping": 2, "kinds": KINDS},
    {"strata": 2},
)
add("online-in-parts", online, {"window_bytes": 200, "window": 19}, {"window_bytes": None})
add("online-planned", online, HINT, {"seed": 1, "length_hint": LENGTHS[::-1]})
add(
    "online-graphs",
    online,
    {**GRAPHS, "samples_per_update": 5, "length_of": size_of},
    {"max_tokens": TOKENS + 1},
)
add(
    "online-set-kinds",
    labelled,
    {"samples_per_update": 7, "kinds": KINDS},
    {"seed": 1, "identity": "v2"},
)
add(
    "online-free-kinds",
    labelled,
    {"accumulation": 2, "kinds": KINDS},
    {"window": 7, "one_kind": "batch"},
)
add(
    "online-known-kinds",
    online,
    {"kinds": KINDS},
    {"kinds": KINDS[::-1], "one_kind": "batch", "window": 7},
)
add(
    "online-shapes",
    online,
    {"samples_per_update": 5, "shapes": 3, **HINT},
    {"shapes": 4, "length_hint": LENGTHS[::-1]},
)
add(
    "online-free-shapes", online, {"shapes": 4, **HINT}, {"shapes": 3, "length_hint": LENGTHS[::-1]}
)
add(
    "online-stream",
    streamed,
    {},
    {"window": 7, "max_tokens": TOKENS + 1, "weigh": "samples"},
    moves=False,
)
