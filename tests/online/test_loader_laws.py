"""Laws of the online loader, whatever its data and settings, wherever it stops; what known lengths are worth; law 10."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, TokenBudget, Work
from dynagroup.distributed import DistributedWorld
from dynagroup.lengths import Kinds
from dynagroup.online.messages import number_of
from dynagroup.testing import run_ranks
from tests.laws.loader_laws import assert_loader_laws
from tests.online.helpers import (
    Jittered,
    Stream,
    Tokens,
    collate,
    ids_in,
    legs,
    lengths_of,
    make_loader,
)
from tests.torchrun import on_ranks

EPOCHS = 3
HOW = st.fixed_dictionaries(
    {
        "window": st.sampled_from([1, 5, 16, 64]),
        "window_bytes": st.sampled_from([1, 400, 4000, None]),
        "seed": st.integers(0, 9),
    }
)
RANKS, TOKENS = st.integers(1, 4), st.integers(1, 60)
LENGTHS = np.clip(np.random.default_rng(5).lognormal(5.5, 1.0, 3000), 1, 4096).astype(int)
WORK = Work()
LABEL = st.sampled_from([("rare", 1), 4, 5, 6, 7])
MODES = [{}, {"accumulation": 3}, {"samples_per_update": 12}, {"stream": True}]
LABELLED = lengths_of(90, seed=4)
ONES = (True, 1, 1.0, np.int64(1), np.float32(1))
ALIKE = [ONES, ((1, "a"), (True, "a"), (1.0, np.str_("a"))), (0.5, np.float64(0.5))]


def shard(count: int, rank: int, size: int) -> range:
    """Rank 0 has most."""
    cuts = [0, *(count * (2**r - 1) // 2**r for r in range(1, size)), count]
    return range(cuts[rank], cuts[rank + 1])


class Shard(Stream):
    """One rank's part of a stream; ranks have differently many samples."""

    def own(self) -> range:
        return shard(len(self.lengths), self.rank, self.size)


class Drawn:
    """The user's order of these samples, or batches of it: other ones every epoch, of which only some come."""

    def __init__(
        self, samples: Any, *, shares: tuple[int, ...] = (3, 3, 3), batches: bool = False
    ) -> None:
        self.samples, self.shares, self.batches, self.epoch = list(samples), shares, batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples) * self.shares[self.epoch % 3] // 3

    def __iter__(self) -> Iterator[Any]:
        drawn = random.Random(self.epoch).sample(self.samples, len(self))
        return (drawn[k : k + 4] for k in range(0, len(drawn), 4)) if self.batches else iter(drawn)


SOURCES: dict[str, Any] = {
    "in order": lambda world, lengths, order: {},
    "shuffled": lambda world, lengths, order: {"shuffle": True},
    "jittered": lambda world, lengths, order: {"shuffle": True, "dataset": Jittered},
    "hinted": lambda world, lengths, order: {
        "shuffle": True,
        "length_hint": [1.5 * n for n in lengths],
    },
    "sampler": lambda world, lengths, order: {"sampler": order},
    "batches": lambda world, lengths, order: {
        "batch_sampler": Drawn(shard(len(lengths), *world), batches=True)
    },
    "stream": lambda world, lengths, order: {"dataset": lambda lengths: Shard(lengths, *world)},
}
UPDATES = [
    {"samples_per_update": 12},
    {"samples_per_update": 6, "grouping": 3},
    {"samples_per_update": lambda update, current: 3 + update % 5},
]
UPDATES += [{"samples_per_update": 4, "drop_last": True}]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(TOKENS, min_size=1, max_size=70) | st.lists(TOKENS, min_size=40, max_size=70),
    most=st.sampled_from([30, 128, 400]),
    source=st.sampled_from([*SOURCES]),
    accumulation=st.sampled_from([1, 3]),
    update=st.none() | st.sampled_from(UPDATES),
    how=HOW,
    sizes=st.tuples(RANKS, RANKS, RANKS),
    stops=st.tuples(st.integers(0, 40), st.integers(1, 40)),
)
def test_whatever_the_settings_every_sample_comes_once(
    lengths, most, source, accumulation, update, how, sizes, stops
):
    """Stopped and saved anywhere in three epochs, twice, and resumed on other ranks: what came is read from the batches."""
    if source in ("batches", "stream"):  # divided among ranks by the user
        sizes, update = sizes[:1] * 3, None
    sized, dropping = update or {"accumulation": accumulation}, update is UPDATES[-1]

    def order() -> Drawn:
        return Drawn(range(len(lengths)), shares=(2, 2, 2) if update else (1, 3, 2))

    def fitting(samples: Any) -> Any:
        batch = collate(samples)
        assert batch["input_ids"].numel() <= most or len(samples) == 1
        return batch

    def make(world: Any) -> Any:
        given = SOURCES[source]((world.rank, world.size), lengths, order())
        return make_loader(
            world, lengths, max_tokens=most, collate_fn=fitting, **how, **sized, **given
        )

    if source != "sampler" and not dropping:
        num_samples = (
            None if source == "stream" else len(lengths)
        )  # a stream's indices say how far it was read
        assert_loader_laws(make, num_samples, world_size=sizes[0], epochs=2, resume_at=())
    if not update:
        updates = run_ranks(
            sizes[0], lambda world: [len(steps) for steps in make(world).updates()]
        )[0]
        assert {*updates[:-1]} <= {accumulation}
    known = source != "stream" and len(lengths) >= 12
    rows = legs(make, zip(sizes, (*stops, None), strict=True), epochs=EPOCHS, ends_known=known)
    for epoch in range(EPOCHS):
        came = Counter(i for row in rows.get(epoch, ()) for step in row for i in ids_in(step))
        (drawn := order()).set_epoch(epoch)
        expected = Counter(drawn if source == "sampler" else range(len(lengths)))
        assert not came - expected, "too often"
        assert (expected - came).total() < (4 if dropping else 1), "lost"


def second_epoch(lengths, ranks=2, **options):
    def run(world):
        return list(map(list, [make_loader(world, lengths, shuffle=True, **options)] * 2))[1]

    return run_ranks(ranks, run)


def test_an_epoch_with_known_lengths_pads_like_the_offline_plan_and_ranks_take_turns_with_dearest_batches():
    lengths = lengths_of(600, seed=2)
    second = second_epoch(lengths)
    plan = LengthAwareBatchSampler(
        lengths, TokenBudget(128), shuffle=True, rank=0, world_size=2
    ).plan
    assert not any(step.idle for steps in second for step in steps)
    assert len(second[0]) <= 1.02 * plan.num_steps + 1
    ranks = second_epoch(lengths_of(256, seed=5, top=60), samples_per_update=64, max_tokens=300)
    first, second = ([step.batch["input_ids"].numel() for step in steps] for steps in ranks)
    dearer = [a > b for a, b in zip(first, second, strict=True) if a != b]
    assert 0.25 < sum(dearer) / len(dearer) < 0.75


def time_of(step: Any, layout: str) -> float:
    lengths = LENGTHS[step.indices]
    samples = (
        WORK.of_lengths(lengths)
        if layout == "packed"
        else len(lengths) * WORK.of_lengths([lengths.max()])
    )
    return WORK.per_step + (0 if step.idle else float(samples.sum()))


@pytest.mark.parametrize(
    ("layout", "hinted", "most"),
    [
        ("padded", False, 0.11),
        ("padded", True, 0.06),
        ("packed", False, 0.06),
        ("packed", True, 0.05),
    ],
)
def test_batches_of_like_work_meet_in_a_step_before_lengths_are_known(
    layout: Any, hinted: bool, most: float
) -> None:
    """Predicted time of the dearest rank of each step, over the mean rank's, all steps of a first epoch together."""
    noise = np.random.default_rng(1).lognormal(0, 0.25, len(LENGTHS))
    how: dict[str, Any] = {"length_hint": LENGTHS * noise} if hinted else {}
    how |= {"weigh": "samples", "shuffle": True, "seed": 1, "window": 128, "work": WORK}
    how["length_of"] = lambda i: int(LENGTHS[i])

    def rank(world: Any) -> list[float]:
        budget = TokenBudget(8192, layout=layout)
        loader = OnlineDataLoader(range(len(LENGTHS)), budget, collate_fn=list, world=world, **how)
        return [time_of(step, layout) for step in loader]

    times = np.array(run_ranks(4, rank))
    assert times.max(0).sum() / times.mean(0).sum() - 1 < most


class Grown:
    """From the second epoch on 0.9 % of the samples are half as long again."""

    epoch = 0

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> int:
        return int(LENGTHS[index] * (1.5 if self.epoch and index % 111 == 0 else 1))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 512}], ids=["free", "updates"])
def test_once_a_planned_batch_is_split_batches_of_like_work_meet_again(
    options: dict[str, Any],
) -> None:
    """On one rank all later rows would come a step later."""

    def rank(world: Any) -> list[float]:
        how: dict[str, Any] = {
            "collate_fn": list,
            "length_of": int,
            "weigh": "samples",
            "shuffle": True,
            "window": 128,
        }
        loader = OnlineDataLoader(Grown(), TokenBudget(8192), **how, world=world, **options)
        return [[WORK.per_step + len(s.batch) * max(s.batch) for s in loader] for _ in range(2)][1]

    times = np.array(run_ranks(2, rank))
    assert times.max(0).sum() / times.mean(0).sum() - 1 < 0.08


class Labelled(Tokens):
    """Samples that know their label; a ``fickle`` share is given another one at every reading."""

    def __init__(self, lengths, labels, fickle=0.0):
        super().__init__(lengths)
        self.labels, self.fickle, self.rng = list(labels), fickle, np.random.default_rng(0)

    def __getitem__(self, index):
        other = self.rng.random() < self.fickle
        return {
            **super().__getitem__(index),
            "kind": self.labels[self.rng.integers(len(self)) if other else index],
        }


class LabelledStream(Stream):
    def __init__(self, lengths, labels, world):
        super().__init__(lengths, world.rank, world.size)
        self.labels = labels

    def __iter__(self):
        return (
            {**sample, "kind": self.labels[int(sample["input_ids"][0])]}
            for sample in super().__iter__()
        )


def kind_of(sample):
    return sample["kind"]


def collated(samples):
    return {**collate(samples), "kinds": [sample.pop("kind") for sample in samples]}


def labelled(world, lengths, labels, *, fickle=0.0, stream=False, known=False, **how):
    data = LabelledStream(lengths, labels, world) if stream else Labelled(lengths, labels, fickle)
    how |= {"kinds": labels} if known and not stream else {"kind_of": kind_of}
    how = {"window": 16, "shuffle": not stream, "collate_fn": collated, **how}
    return OnlineDataLoader(data, TokenBudget(128), world=world, **how)


def checked(rows, one_kind="step"):
    """Rows of the ranks' steps, which keep the law; and the samples in them."""
    rows = list(rows)
    for row in rows:
        kinds = [{*step.batch["kinds"]} for step in row]
        assert all(found == {step.kind} for found, step in zip(kinds, row, strict=True)), (
            "a batch of two kinds"
        )
        assert one_kind == "batch" or len(set.union(*kinds)) == 1, "a step of two kinds"
        assert all(step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1 for step in row)
        assert all(step.loss_scale == step.weight.local == 0 for step in row if step.idle)
        assert not all(step.idle for step in row)
    return rows, sorted(
        index for row in rows for step in row if not step.idle for index in step.indices
    )


@settings(max_examples=60)
@given(
    samples=st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from(["text", "image", None, 3]) | LABEL),
        max_size=60,
    ),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    window=st.integers(1, 40),
    stop=st.integers(0, 60),
    mode=st.sampled_from(MODES),
    how=st.sampled_from(
        [{}, {"known": True}, {"fickle": 0.3}, {"fickle": 0.01}, {"one_kind": "batch"}]
    ),
)
def test_a_step_is_of_one_kind_whatever_is_known_or_changes(
    samples, sizes, window, stop, mode, how
):
    """In a first epoch and in a second, stopped within either, also inside a kind, on as many ranks or on others."""
    lengths, labels = [length for length, _ in samples], [label for _, label in samples]
    plan = [(sizes[0], stop), (sizes[0] if "stream" in mode else sizes[1], None)]
    found = legs(
        lambda world: labelled(world, lengths, labels, window=window, **mode, **how), plan, epochs=2
    )
    for rows in found.values():
        assert checked(rows, how.get("one_kind", "step"))[1] == [*range(len(samples))]


def test_kinds_interleave_and_once_known_fill_their_rows():
    labels = np.random.default_rng(5).choice(["text", "image"], 600, p=[0.8, 0.2]).tolist()

    def rank(world):
        loader = labelled(world, lengths_of(600, seed=6), labels)
        return [list(loader) for _ in range(2)]

    first, second = (
        checked(zip(*ranks, strict=True))[0] for ranks in zip(*run_ranks(4, rank), strict=True)
    )
    for rows in (first, second):
        assert all(
            0 < fifth.mean() < 0.7
            for fifth in np.array_split([row[0].kind == "image" for row in rows], 5)
        )
    assert len(second) < len(first)
    assert not any(step.idle for row in second for step in row)


@pytest.mark.parametrize("labels", [*ALIKE, ((1, 8), torch.Size([1, 8])), (None,)], ids=str)
def test_labels_that_are_equal_are_one_kind_whatever_was_asked_before(labels):
    """Offline as keys of a dict, online by a number that all processes give them."""
    assert len(Kinds.read(labels, len(labels)).labels) == 1
    alone = [(number_of.cache_clear(), number_of(label))[1] for label in labels]
    assert {*alone, *map(number_of, labels)} == {alone[0]}
    others = [1, 0.5, (1, 8), (1, "a"), None, "1", "None", (1,), 2**70, float("inf")]
    assert len({*map(number_of, others)}) == len(others)


def of_two_towers():
    """Real ranks with real workers; only the first has images."""
    dist.init_process_group("gloo")
    labels = ["image" if i % 2 == 0 and i < 40 else "text" for i in range(90)]
    dist.new_group([0])  # now the first rank is in a group more than the other
    world = DistributedWorld(dist.new_group([0, 1]))
    return [
        [*labelled(world, LABELLED, labels, num_workers=2, **mode)] for mode in (MODES[2], MODES[3])
    ]


def test_ranks_without_a_kind_idle_on_a_batch_of_it_that_another_lends():
    for ranks in zip(*on_ranks(2, of_two_towers), strict=True):
        assert checked(zip(*ranks, strict=True))[1] == [*range(90)]
    assert any(step.idle and step.kind == "image" for step in ranks[1])
