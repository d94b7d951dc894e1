"""Laws of the online loader, whatever its data and settings, wherever it stops; what known lengths are worth; law 10."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, TokenBudget, Work
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

EPOCHS = 3
WINDOWS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([1, 5, 16, 64]),
        "window_bytes": st.sampled_from([1, 400, 4000, None]),
        "seed": st.integers(0, 9),
    }
)
RANKS = st.integers(1, 4)
TOKENS = st.integers(1, 60)
LENGTHS = np.clip(np.random.default_rng(5).lognormal(5.5, 1.0, 3000), 1, 4096).astype(int)
WORK = Work()


def shard(count: int, rank: int, size: int) -> range:
    """Rank 0 has most."""
    cuts = [0]
    for place in range(1, size):
        cuts.append(count * (2**place - 1) // 2**place)
    cuts.append(count)
    return range(cuts[rank], cuts[rank + 1])


class Shard(Stream):
    """One rank's part of a stream; ranks have differently many samples."""

    def own(self) -> range:
        return shard(len(self.lengths), self.rank, self.size)


class Drawn:
    """The user's order of these samples: another one every epoch, of which only some come."""

    def __init__(self, samples: Iterable[int], thirds: tuple[int, ...] = (3, 3, 3)) -> None:
        self.samples = list(samples)
        self.thirds = thirds
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples) * self.thirds[self.epoch % 3] // 3

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(self.epoch).sample(self.samples, len(self)))


class DrawnBatches(Drawn):
    """Batches of four of that order."""

    def __iter__(self) -> Iterator[Any]:
        drawn = list(super().__iter__())
        return (drawn[start : start + 4] for start in range(0, len(drawn), 4))


SOURCES = ["in order", "shuffled", "jittered", "hinted", "sampler", "batches", "stream"]
OF_THE_USERS_RANKS = ("batches", "stream")
DROPPING = {"samples_per_update": 4, "drop_last": True}
UPDATES: list[dict[str, Any]] = [
    {"samples_per_update": 12},
    {"samples_per_update": 6, "grouping": 3},
    {"samples_per_update": lambda update, current: 3 + update % 5},
    DROPPING,
]


@dataclass(frozen=True)
class Case:
    """A loader's data and settings."""

    lengths: list[int]
    max_tokens: int
    source: str
    accumulation: int
    update: dict[str, Any] | None
    options: dict[str, Any]

    def order(self) -> Drawn:
        thirds = (1, 3, 2) if self.update is None else (2, 2, 2)
        return Drawn(range(len(self.lengths)), thirds)

    def expected(self, epoch: int) -> Counter:
        if self.source != "sampler":
            return Counter(range(len(self.lengths)))
        order = self.order()
        order.set_epoch(epoch)
        return Counter(order)

    def source_options(self, world: Any) -> dict[str, Any]:
        if self.source == "in order":
            return {}
        if self.source == "sampler":
            return {"sampler": self.order()}
        if self.source == "batches":
            samples = shard(len(self.lengths), world.rank, world.size)
            return {"batch_sampler": DrawnBatches(samples)}
        if self.source == "stream":
            return {"dataset": lambda lengths: Shard(lengths, world.rank, world.size)}
        options: dict[str, Any] = {"shuffle": True}
        if self.source == "jittered":
            options["dataset"] = Jittered
        if self.source == "hinted":
            options["length_hint"] = [1.5 * length for length in self.lengths]
        return options

    def collate(self, samples: Any) -> Any:
        batch = collate(samples)
        assert batch["input_ids"].numel() <= self.max_tokens or len(samples) == 1
        return batch

    def loader(self, world: Any) -> OnlineDataLoader:
        options = {**self.options, **self.source_options(world)}
        options.update(self.update or {"accumulation": self.accumulation})
        return make_loader(
            world,
            self.lengths,
            max_tokens=self.max_tokens,
            collate_fn=self.collate,
            **options,
        )


def cases() -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        lengths=st.lists(TOKENS, min_size=1, max_size=70)
        | st.lists(TOKENS, min_size=40, max_size=70),
        max_tokens=st.sampled_from([30, 128, 400]),
        source=st.sampled_from(SOURCES),
        accumulation=st.sampled_from([1, 3]),
        update=st.none() | st.sampled_from(UPDATES),
        options=WINDOWS,
    )


def assert_no_sample_is_lost_or_repeated(case: Case, rows_of: dict[int, list[Any]]) -> None:
    num_dropped = 3 if case.update is DROPPING else 0
    for epoch in range(EPOCHS):
        steps = chain.from_iterable(rows_of.get(epoch, ()))
        came = Counter(chain.from_iterable(map(ids_in, steps)))
        expected = case.expected(epoch)
        assert not came - expected, "too often"
        assert (expected - came).total() <= num_dropped, "lost"


def assert_updates_have_their_steps(case: Case, size: int) -> None:
    def run(world: Any) -> list[int]:
        return list(map(len, case.loader(world).updates()))

    *before_last, _ = run_ranks(size, run)[0]
    assert set(before_last) <= {case.accumulation}


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, deadline=None)
@given(
    case=cases(),
    sizes=st.tuples(RANKS, RANKS, RANKS),
    stops=st.tuples(st.integers(0, 40), st.integers(1, 40)),
)
def test_whatever_the_settings_every_sample_comes_once(
    case: Case, sizes: tuple[int, ...], stops: tuple[int, ...]
) -> None:
    """Stopped and saved anywhere in three epochs, twice, and resumed on other ranks: what came is read from the batches."""
    if case.source in OF_THE_USERS_RANKS:
        sizes = (sizes[0],) * 3
        case = replace(case, update=None)
    if case.source != "sampler" and case.update is not DROPPING:
        # A stream's indices say how far it was read.
        num_samples = None if case.source == "stream" else len(case.lengths)
        assert_loader_laws(case.loader, num_samples, world_size=sizes[0], epochs=2, resume_at=())
    if case.update is None:
        assert_updates_have_their_steps(case, sizes[0])
    ends_known = case.source != "stream" and len(case.lengths) >= 12
    plan = zip(sizes, (*stops, None), strict=True)
    rows_of = legs(case.loader, plan, epochs=EPOCHS, ends_known=ends_known)
    assert_no_sample_is_lost_or_repeated(case, rows_of)


def second_epoch(lengths: list[int], size: int = 2, **options: Any) -> list[list[Any]]:
    """The steps of each rank in the epoch that knows its lengths."""

    def run(world: Any) -> list[Any]:
        loader = make_loader(world, lengths, shuffle=True, **options)
        list(loader)
        return list(loader)

    return run_ranks(size, run)


def test_an_epoch_with_known_lengths_pads_like_the_offline_plan() -> None:
    lengths = lengths_of(600, seed=2)
    budget = TokenBudget(128)
    sampler = LengthAwareBatchSampler(lengths, budget, shuffle=True, rank=0, world_size=2)
    first, second = second_epoch(lengths)
    assert not any(step.idle for step in first + second)
    assert len(first) <= 1.02 * sampler.plan.num_steps + 1


def test_ranks_take_turns_with_the_dearest_batches() -> None:
    lengths = lengths_of(256, seed=5, top=60)
    ranks = second_epoch(lengths, samples_per_update=64, max_tokens=300)
    sizes = np.array([[step.batch["input_ids"].numel() for step in steps] for steps in ranks])
    first, second = sizes[:, sizes[0] != sizes[1]]
    assert 0.25 < np.mean(first > second) < 0.75


def time_of(step: Any, layout: str) -> float:
    """Predicted; an idle step costs its overhead."""
    if step.idle:
        return WORK.per_step
    lengths = LENGTHS[step.indices]
    if layout == "padded":
        lengths = np.full(len(lengths), lengths.max())
    return WORK.per_step + float(np.sum(WORK.of_lengths(lengths)))


def excess_of(times: Any) -> float:
    """Time of the dearest rank of each step over the mean rank's, all steps together."""
    by_rank = np.array(times)
    return by_rank.max(0).sum() / by_rank.mean(0).sum() - 1


LAYOUTS: list[tuple[Any, bool, float]] = [
    ("padded", False, 0.11),
    ("padded", True, 0.06),
    ("packed", False, 0.06),
    ("packed", True, 0.05),
]


@pytest.mark.parametrize(("layout", "hinted", "bound"), LAYOUTS)
def test_batches_of_like_work_meet_in_a_step_before_lengths_are_known(
    layout: Any, hinted: bool, bound: float
) -> None:
    """In a first epoch on four ranks."""
    noise = np.random.default_rng(1).lognormal(0, 0.25, len(LENGTHS))

    def run(world: Any) -> list[float]:
        loader = OnlineDataLoader(
            range(len(LENGTHS)),
            TokenBudget(8192, layout=layout),
            collate_fn=list,
            length_of=lambda index: int(LENGTHS[index]),
            length_hint=LENGTHS * noise if hinted else None,
            weigh="samples",
            shuffle=True,
            seed=1,
            window=128,
            work=WORK,
            world=world,
        )
        return [time_of(step, layout) for step in loader]

    assert excess_of(run_ranks(4, run)) < bound


class Grown:
    """From the second epoch on 0.9 % of the samples are half as long again."""

    epoch = 0

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> int:
        grows = self.epoch > 0 and index % 111 == 0
        return int(LENGTHS[index] * (1.5 if grows else 1))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 512}], ids=["free", "updates"])
def test_once_a_planned_batch_is_split_batches_of_like_work_meet_again(
    options: dict[str, Any],
) -> None:
    """On one rank all later rows would come a step later."""

    def run(world: Any) -> list[float]:
        loader = OnlineDataLoader(
            Grown(),
            TokenBudget(8192),
            collate_fn=list,
            length_of=int,
            weigh="samples",
            shuffle=True,
            window=128,
            world=world,
            **options,
        )
        list(loader)
        return [WORK.per_step + len(step.batch) * max(step.batch) for step in loader]

    assert excess_of(run_ranks(2, run)) < 0.08


class Labelled(Tokens):
    """Samples that know their label; a ``fickle`` share is given another one at every reading."""

    def __init__(self, lengths: list[int], labels: list[Any], fickle: float = 0.0) -> None:
        super().__init__(lengths)
        self.labels = list(labels)
        self.fickle = fickle
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if self.rng.random() < self.fickle:
            index = self.rng.integers(len(self))
        return {**sample, "kind": self.labels[index]}


class LabelledStream(Stream):
    def __init__(self, lengths: list[int], labels: list[Any], world: Any) -> None:
        super().__init__(lengths, world.rank, world.size)
        self.labels = labels

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield {**sample, "kind": self.labels[int(sample["input_ids"][0])]}


def kind_of(sample: dict[str, Any]) -> Any:
    return sample["kind"]


def collate_labelled(samples: list[dict[str, Any]]) -> Any:
    return {**collate(samples), "kinds": [sample.pop("kind") for sample in samples]}


def labelled(
    world: Any,
    lengths: list[int],
    labels: list[Any],
    *,
    fickle: float = 0.0,
    stream: bool = False,
    known: bool = False,
    **options: Any,
) -> OnlineDataLoader:
    """A loader that reads kinds; ``known``: or is given them, where the data are no stream."""
    data = LabelledStream(lengths, labels, world) if stream else Labelled(lengths, labels, fickle)
    if known and not stream:
        options["kinds"] = labels
    else:
        options["kind_of"] = kind_of
    options = {"window": 16, "shuffle": not stream, **options}
    return OnlineDataLoader(
        data, TokenBudget(128), collate_fn=collate_labelled, world=world, **options
    )


def assert_row_is_of_one_kind(row: Any, one_kind: str) -> None:
    kinds = set()
    for step in row:
        assert set(step.batch["kinds"]) == {step.kind}, "a batch of two kinds"
        kinds.add(step.kind)
        assert step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1
        if step.idle:
            assert step.loss_scale == step.weight.local == 0
    assert one_kind == "batch" or len(kinds) == 1, "a step of two kinds"
    assert not all(step.idle for step in row)


def assert_rows_have_all(rows: Iterable[Any], count: int, one_kind: str = "step") -> None:
    """Rows of the ranks' steps, each of one kind; every sample comes once."""
    indices: list[int] = []
    for row in rows:
        assert_row_is_of_one_kind(row, one_kind)
        for step in row:
            if not step.idle:
                indices.extend(step.indices)
    assert sorted(indices) == list(range(count))


LABEL = st.sampled_from(["text", "image", None, 3]) | st.sampled_from([("rare", 1), 4, 5, 6, 7])
MODES: list[dict[str, Any]] = [
    {},
    {"accumulation": 3},
    {"samples_per_update": 12},
    {"stream": True},
]
KNOWLEDGE = [{}, {"known": True}, {"fickle": 0.3}, {"fickle": 0.01}, {"one_kind": "batch"}]


@settings(max_examples=60)
@given(
    samples=st.lists(st.tuples(st.integers(1, 200), LABEL), max_size=60),
    sizes=st.tuples(RANKS, RANKS),
    window=st.integers(1, 40),
    stop=st.integers(0, 60),
    mode=st.sampled_from(MODES),
    options=st.sampled_from(KNOWLEDGE),
)
def test_a_step_is_of_one_kind_whatever_is_known_or_changes(
    samples: Any, sizes: Any, window: int, stop: int, mode: Any, options: Any
) -> None:
    """In a first epoch and in a second, stopped within either, also inside a kind, on as many ranks or on others."""
    lengths = [length for length, _ in samples]
    labels = [label for _, label in samples]
    resumed_size = sizes[0] if "stream" in mode else sizes[1]

    def make(world: Any) -> OnlineDataLoader:
        return labelled(world, lengths, labels, window=window, **mode, **options)

    rows_of = legs(make, [(sizes[0], stop), (resumed_size, None)], epochs=2)
    for rows in rows_of.values():
        assert_rows_have_all(rows, len(samples), options.get("one_kind", "step"))


@pytest.fixture(scope="module")
def two_epochs() -> list[list[Any]]:
    """Rows of the ranks' steps of a first epoch, and of one that knows its kinds."""
    labels = np.random.default_rng(5).choice(["text", "image"], 600, p=[0.8, 0.2]).tolist()

    def run(world: Any) -> list[list[Any]]:
        loader = labelled(world, lengths_of(600, seed=6), labels)
        return [list(loader), list(loader)]

    ranks = run_ranks(4, run)
    return [list(zip(*epoch, strict=True)) for epoch in zip(*ranks, strict=True)]


def test_kinds_interleave(two_epochs: list[list[Any]]) -> None:
    for rows in two_epochs:
        assert_rows_have_all(rows, 600)
        are_images = [row[0].kind == "image" for row in rows]
        for fifth in np.array_split(are_images, 5):
            assert 0 < fifth.mean() < 0.7


def test_kinds_that_are_known_fill_their_rows(two_epochs: list[list[Any]]) -> None:
    first, second = two_epochs
    assert len(second) < len(first)
    assert not any(step.idle for step in chain.from_iterable(second))


ALIKE: list[tuple[Any, ...]] = [
    (True, 1, 1.0, np.int64(1), np.float32(1)),
    ((1, "a"), (True, "a"), (1.0, np.str_("a"))),
    (0.5, np.float64(0.5)),
    ((1, 8), torch.Size([1, 8])),
    (None,),
]


def number_alone(label: Any) -> int:
    """Its number where no label was asked for before."""
    number_of.cache_clear()
    return number_of(label)


@pytest.mark.parametrize("labels", ALIKE, ids=str)
def test_labels_that_are_equal_are_one_kind_whatever_was_asked_before(labels: Any) -> None:
    """Offline as keys of a dict, online by a number that all processes give them."""
    assert len(Kinds.read(labels, len(labels)).labels) == 1
    alone = set(map(number_alone, labels))
    assert len(alone) == 1
    assert set(map(number_of, labels)) == alone


def test_other_labels_are_other_kinds() -> None:
    others = [1, 0.5, (1, 8), (1, "a"), None, "1", "None", (1,), 2**70, float("inf")]
    assert len(set(map(number_of, others))) == len(others)
