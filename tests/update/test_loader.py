"""Laws of a loader whose items are updates; and loaders apply what running out of memory has taught."""

import json
import os
import re
import signal
import time
import warnings
from collections import Counter
from itertools import islice, product
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import (
    LearningBudget,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.errors import AlignmentError, BudgetError, ConfigError
from dynagroup.plan.few_shapes import ShapeLadder
from dynagroup.shapes import BatchShape
from dynagroup.testing import run_ranks
from dynagroup.update.schedule import UpdateSizes, linear_ramp, scale_learning_rate

LENGTHS = np.random.default_rng(0).integers(1, 40, 53).tolist()
BUDGET, RAMP = TokenBudget(80), linear_ramp(5, 20, num_updates=4)
MODES = [
    {"samples_per_update": 9},
    {"samples_per_update": RAMP},
    {},
    {"accumulation": 3, "window": 16},
]
VARIED = np.random.default_rng(0).integers(5, 100, 300)
ROWS = [{"input_ids": [1] * length} for length in VARIED]
FAILED = BatchShape.of(9, 100)
LEARNED = 810  # 0.9 of what failed
HOW: dict[str, Any] = {"collate_fn": list, "weigh": "samples"}
SIZED = {**HOW, "samples_per_update": 48}
KINDS = {
    "sampler": lambda learning, world: LengthAwareBatchSampler(
        VARIED, learning, shuffle=True, rank=0, world_size=1
    ),
    "preserved": lambda learning, world: PlannedDataLoader(
        ROWS, VARIED, learning, world=world, **SIZED
    ),
    "free": lambda learning, world: PlannedDataLoader(ROWS, VARIED, learning, world=world, **HOW),
    "online": lambda learning, world: OnlineDataLoader(
        ROWS, learning, shuffle=True, window=64, world=world, **HOW
    ),
}


def loader_of(lengths=LENGTHS, budget=BUDGET, data=None, **settings):
    data = range(len(lengths)) if data is None else data
    return PlannedDataLoader(
        data, lengths, budget, **{"weigh": "samples", "collate_fn": list, **settings}
    )


def samples(update):
    return sorted(index for step in update if not step.idle for index in step.batch)


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return float(torch.rand(()))


def test_samples_too_large_even_alone_are_counted_and_mistakes_are_named():
    with pytest.warns(
        UserWarning,
        match="sample 1 with 90 tokens does not fit the budget even alone and is a batch of its own",
    ):
        loader = loader_of([5, 90, 6], samples_per_update=3)
    list(loader)
    assert loader.stats.oversize == 1
    with pytest.raises(BudgetError, match="sample 1 .90 tokens. does not fit even alone"):
        loader_of([5, 90, 6], oversize="error")
    with pytest.raises(ConfigError, match="`sampler` needs `samples_per_update`"):
        loader_of(sampler=range(53))
    with pytest.raises(ConfigError, match="`lengths` has 53 entries, but the dataset has 60"):
        loader_of(data=range(60))


def test_stats_tell_the_seconds_spent_on_samples(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    class Slow(list):
        def __getitem__(self, index):
            now[0] += 1.0
            return super().__getitem__(index)

    loader = loader_of(data=Slow(LENGTHS), samples_per_update=12)
    assert sum(step.samples.local for step in loader) == loader.stats.wait_s == 53


def test_workers_process_a_resumed_run_alike():
    def run(loader):
        return [[step.batch for step in update] for update in loader.updates()]

    def made(num_workers, **more):
        return loader_of(data=Noise(), samples_per_update=12, num_workers=num_workers, **more)

    whole, first, resumed = run(made(2)), made(1), made(1)
    assert len(list(islice(first.updates(), 2))) == 2
    resumed.load_state_dict(first.state_dict())
    assert run(resumed) == whole[2:]
    found = run_ranks(
        2, lambda world: [n for step in made(1, world=world) if not step.idle for n in step.batch]
    )
    assert len({*found[0], *found[1]}) == 53, "ranks draw numbers of their own"


def test_ranks_with_another_order_are_told():
    def one(world):
        order = torch.randperm(53, generator=torch.Generator().manual_seed(world.rank)).tolist()
        return list(loader_of(samples_per_update=10, sampler=order, world=world))

    with pytest.raises(AlignmentError, match="ranks have different order of samples"):
        run_ranks(2, one)


def parts(kind: str, rank: int, by: int) -> Any:
    """Of 40 samples of one length those of one rank, or (``by`` is 1) all of them, as one of several types."""
    data = [{"input_ids": [i] * 9} for i in range(rank % by, 40, by)]
    if kind == "subset":
        return torch.utils.data.Subset(
            [{"input_ids": [i] * 9} for i in range(40)], range(rank % by, 40, by)
        )
    timed = lambda rows: {**rows, "t": [time.time() for _ in rows["input_ids"]]}  # noqa: E731
    return datasets.Dataset.from_list(data).with_transform(timed) if kind == "hf" else data


@pytest.mark.parametrize(
    "make",
    [
        lambda data, **how: PlannedDataLoader(data, [9] * len(data), BUDGET, **how),
        lambda data, **how: OnlineDataLoader(data, BUDGET, **how),
    ],
)
@pytest.mark.parametrize("kind", ["list", "subset", "hf"])
def test_ranks_that_were_given_parts_of_the_data_are_told(make, kind):
    """Each part would be divided once more. Files may have other names on other machines, so it is no error."""

    def used(by):
        return run_ranks(
            2,
            lambda world: [
                i
                for step in make(parts(kind, world.rank, by), world=world, **HOW)
                if not step.idle
                for i in step.indices
            ],
        )

    with pytest.warns(
        UserWarning,
        match="ranks have different first or last samples in their datasets: give every rank the",
    ):
        used(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(sum(used(1), [])) == [*range(40)]


@pytest.mark.filterwarnings("ignore:.*does not fit the budget even alone")
@pytest.mark.parametrize("sampler", [None, list(range(9))])
def test_samples_that_are_dropped_leave_updates_whole(sampler):
    """Three of nine do not fit: updates are drawn from the others, in the seeded order and in a sampler's."""
    lengths = [90, 90, 90, 5, 6, 7, 8, 9, 10]
    loader = loader_of(lengths, samples_per_update=3, oversize="drop", sampler=sampler)
    assert (loader.num_samples, loader.num_updates) == (6, 2)
    assert loader.plan.dropped.tolist() == [0, 1, 2]
    found = [samples(update) for update in loader.updates()]
    assert [len(update) for update in found] == [3, 3]
    assert sorted(sum(found, [])) == [3, 4, 5, 6, 7, 8]
    twice = loader_of(lengths, samples_per_update=2, oversize="drop", sampler=[0, 3, 0, 4])
    assert twice.plan.dropped.tolist() == [0, 0]


@pytest.mark.parametrize("where", ["load", "weigh"])
@pytest.mark.parametrize("how", [{"samples_per_update": 10}, {}])
def test_a_rank_that_fails_ends_the_others_at_once(where, how):
    """Not after the ten minutes in which a rank that does not answer counts as gone."""

    def fail(place, held):
        if place == where and 7 in held:
            raise OSError("cannot read 7")
        return held

    def one(world):
        weigh = lambda rows: len(fail("weigh", rows))  # noqa: E731
        loader = loader_of(
            world=world, collate_fn=lambda rows: fail("load", rows), weigh=weigh, **how
        )
        with pytest.raises((OSError, RuntimeError)) as found:
            list(loader)
        return str(found.value)

    told, failed = sorted(run_ranks(2, one), key=lambda text: text.endswith("cannot read 7"))
    assert failed.endswith("cannot read 7")
    assert "another rank failed while it loaded or weighed update" in told


class Deadly(torch.utils.data.Dataset):
    """Its worker dies at sample 7, until it is mended."""

    mended = False

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index == 7 and not self.mended:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


@pytest.mark.parametrize("kind", [PlannedDataLoader, OnlineDataLoader])
def test_after_a_worker_died_all_ranks_go_on_with_new_workers(kind):
    def one(world):
        data, how = (
            Deadly(),
            {
                **HOW,
                "samples_per_update": 10,
                "num_workers": 1,
                "persistent_workers": True,
                "world": world,
            },
        )
        online = {"length_of": LENGTHS.__getitem__}
        loader = (
            kind(data, BUDGET, **how, **online)
            if kind is OnlineDataLoader
            else kind(data, LENGTHS, BUDGET, **how)
        )
        with pytest.raises((RuntimeError, AlignmentError)):
            list(loader)
        data.mended = True
        loader.restart_epoch()
        return [index for update in loader.updates() for index in samples(update)]

    assert sorted(sum(run_ranks(2, one), [])) == list(range(53))


def warned_by(lengths, budget, collate, data):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader_of(lengths, budget, data, collate_fn=collate, samples_per_update=10))
    return [str(w.message) for w in caught]


def padded_to(multiple):
    return lambda rows: {"input_ids": torch.zeros(len(rows), -(-max(rows) // multiple) * multiple)}


def test_batches_that_are_not_what_was_planned_are_noticed_once_packed_labels_by_their_own_stream():
    """Sources are as planned, targets were measured in another order: only their field shows it."""
    targets = [min(n, 20) for n in LENGTHS[::-1]]

    def both(rows):
        sources, labels = zip(*rows, strict=True)
        return {"input_ids": torch.zeros(1, sum(sources)), "labels": torch.zeros(1, sum(labels))}

    data, budget = list(zip(LENGTHS, targets, strict=True)), TokenBudget(160, layout="packed")
    assert warned_by({"source": LENGTHS, "target": targets}, budget, both, data) == []
    [text, _] = warned_by({"source": LENGTHS, "target": targets[::-1]}, budget, both, data)
    assert re.search(r"to 1 x \d+ target, but planned as \d+", text)
    [text, *_] = warned_by(LENGTHS[::-1], BUDGET, padded_to(1), LENGTHS)
    assert re.search(
        r"\d+ samples were collated to \d+ x \d+ tokens, but planned as \d+ x \d+", text
    )
    assert "in dataset order" in text
    assert len(warned_by(LENGTHS, BUDGET, padded_to(8), LENGTHS)) in (1, 2), (
        "padded further than the budget was told"
    )
    assert warned_by(LENGTHS, TokenBudget(160, pad_to_multiple_of=8), padded_to(8), LENGTHS) == []
    ladder = ShapeLadder(LENGTHS, BUDGET, num_shapes=4, window=10)
    assert warned_by(LENGTHS, ladder, padded_to(1), LENGTHS) == [], "filled by the loader"
    with pytest.raises(
        ConfigError, match="more than any of the shapes .* give `lengths` in dataset order"
    ):
        warned_by(LENGTHS[::-1], ladder, padded_to(1), LENGTHS)
    assert warned_by(LENGTHS, BUDGET, torch.tensor, LENGTHS) == [], (
        "a batch without names shows nothing"
    )


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 2),
    stop=st.integers(0, 9),
    how=st.sampled_from(MODES),
)
def test_a_plan_is_what_the_steps_are_that_remain(ranks, epoch, stop, how):
    """Of a whole epoch, and after a resume; free updates go on over the borders of windows of a few rows each."""

    def one(world):
        first, again = loader_of(world=world, **how), loader_of(world=world, **how)
        first.set_epoch(epoch)
        whole, counted = first.plan, (len(first), first.num_updates)
        assert counted == (whole.num_steps, whole.num_updates)
        begun = list(islice(first, stop))
        again.load_state_dict(first.state_dict())
        plan = again.plan if again.epoch == epoch else None
        assert again.plan_of(epoch).fingerprint == whole.fingerprint, "reading moves nothing"
        return whole, plan, begun, list(again) if plan is not None else []

    on_ranks = run_ranks(ranks, one)
    for rank, (whole, plan, begun, rest) in enumerate(on_ranks):
        assert whole.fingerprint == on_ranks[0][0].fingerprint
        for found, steps in ((whole, begun + rest), (plan, rest)):
            if found is not None:
                assert (found.num_steps, found.epoch) == (len(steps), epoch)
                assert found.update_ends.tolist() == [step.ends_update for step in steps]
                assert found.loss_scale[:, rank] == pytest.approx(
                    [step.loss_scale for step in steps]
                )
                rows = [
                    list(row[rank])
                    for row, step in zip(found.rows, steps, strict=True)
                    if not step.idle
                ]
                assert rows == [list(step.batch) for step in steps if not step.idle]


def test_a_rank_may_ask_alone(monkeypatch):
    """Looking the ranks up is collective: one that prints its plan before the others iterate must not wait for them."""
    monkeypatch.setattr(
        "dynagroup.update.loader.current_world", lambda: pytest.fail("asked the other ranks")
    )
    for how in ({"samples_per_update": 10}, {}):
        loader = loader_of(**how)
        assert loader.plan.num_steps == len(loader)
        assert loader.num_updates == loader.updates_in(1)
        assert loader.cursor.samples_seen == 0
        again = loader_of(**how)
        again.load_state_dict(loader.state_dict())
        assert again.cursor == loader.cursor


@pytest.mark.filterwarnings("ignore:. samples do not fit")
def test_a_sampler_that_draws_what_is_left_out_more_often_in_some_epoch_is_refused():
    class Other(list):
        def set_epoch(self, epoch):
            self[:] = [0, 1, 2, 3] if epoch == 0 else [0, 0, 1, 2]

    loader = loader_of(
        [1000, 5, 5, 5],
        TokenBudget(50),
        sampler=Other(range(4)),
        samples_per_update=1,
        oversize="drop",
    )
    assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match=r"\(2 that fit\) in epoch 1, but \d+ \(3"):
        list(loader)


def test_literal_rules_of_the_learning_rate_ramps_and_changes_that_hold_in_later_epochs():
    for rule, expected in (("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)):
        found = scale_learning_rate(
            0.1, samples_per_update=64, base_samples_per_update=16, rule=rule
        )
        assert found == pytest.approx(expected)
    assert [linear_ramp(8, 32, num_updates=4, multiple_of=8)(u, None) for u in range(5)] == [
        8,
        8,
        16,
        24,
        32,
    ]
    assert [linear_ramp(32, 8, num_updates=3)(u, None) for u in range(5)] == [32, 24, 16, 8, 8]
    sizes = UpdateSizes(4, lambda: 10)
    assert sizes.change(next(sizes.cursors(sizes.start(0))), 5) == 1
    assert [
        stop - start for epoch in (0, 1) for start, stop, _ in sizes.spans(sizes.start(epoch))
    ] == [4, 5, 1, 5, 5]
    assert UpdateSizes(8, lambda: 1000).start(10**6).update == 125 * 10**6


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    return lambda learning, world=None: KINDS[request.param](learning, world)


def batches(items: Any) -> list[list[int]]:
    return [
        list(getattr(item, "indices", item)) for item in items if not getattr(item, "idle", False)
    ]


def largest(found: list[list[int]]) -> int:
    return max(len(batch) * max(VARIED[i] for i in batch) for batch in found)


def test_an_epoch_follows_what_the_one_before_taught_and_states_hold_it(make):
    learning = LearningBudget(TokenBudget(1000))
    loader = make(learning)
    items = iter(loader)
    next(items)
    learning.record_oom(FAILED)
    assert largest(batches(items)) > LEARNED, "a plan stays what it was while it is carried out"
    items = iter(loader)
    second = batches([next(items) for _ in range(2)])
    learning.record_oom(BatchShape.of(8, 100))
    again = LearningBudget(TokenBudget(1000))
    resumed = make(again)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert again.report.num_ooms == 2
    rest = batches(items)
    assert largest(second + rest) <= LEARNED
    assert sorted(i for batch in second + rest for i in batch) == list(range(300))
    assert batches(resumed) == rest
    if hasattr(loader, "cursor"):
        assert resumed.cursor == loader.cursor, (
            "the books count what was, not what the new limit would have made of it"
        )
    assert largest(batches(resumed)) <= 0.9 * 800


def test_an_epoch_that_fails_as_it_begins_leaves_the_one_before_used_up(make):
    """Samples that do not fit what was learned are warned of as the next epoch begins, or in it; here warnings are errors."""
    used: Counter[tuple[int, int]] = Counter()

    def train(loader: Any) -> None:
        for epoch in range(loader.epoch, 2):
            loader.set_epoch(epoch)
            for item in loader:
                used.update((epoch, index) for batch in batches([item]) for index in batch)
            learning.record_oom(BatchShape.of(1, 90))

    loader = make(learning := LearningBudget(TokenBudget(1000)))
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="not fit"):
        train(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    warnings.simplefilter("ignore")
    loader = make(learning := LearningBudget(TokenBudget(1000)))
    loader.load_state_dict(state)
    train(loader)
    assert used == Counter(product(range(2), range(300)))


def test_free_updates_that_were_done_are_counted_as_they_were():
    learning = LearningBudget(TokenBudget(1000))
    loader = KINDS["free"](learning, None)
    list(loader)
    learning.record_oom(FAILED)
    first, announced = loader.cursor.update, loader.num_updates
    list(loader)
    assert first == announced < loader.cursor.update - first
    assert loader.updates_in(2) == loader.cursor.update


@pytest.mark.parametrize("kind", ["preserved", "free", "online"])
def test_ranks_follow_the_one_that_learned_most(kind):
    def run(world):
        learning = LearningBudget(TokenBudget(1000))
        loader = KINDS[kind](learning, world)
        batches(loader)
        if world.rank == 1:
            learning.record_oom(FAILED)
        return batches(loader), loader.budget.fingerprint

    results = run_ranks(2, run)
    assert largest([batch for found, _ in results for batch in found]) <= LEARNED
    assert results[0][1] == results[1][1]
    assert sorted(i for found, _ in results for batch in found for i in batch) == list(range(300))


def test_samples_that_no_batch_may_hold_after_what_was_learned_are_told_and_counted():
    budget = LearningBudget(TokenBudget(64))
    loader = PlannedDataLoader(
        range(4), [50, 40, 4, 3], budget, samples_per_update=2, oversize="drop", **HOW
    )
    assert sorted(i for step in loader for i in step.indices) == [0, 1, 2, 3]
    loader.budget.learner.record_oom(BatchShape.of(2, longest=16))
    with pytest.warns(
        UserWarning,
        match="sample 0 .* does not fit the budget even alone .*and is left out",
    ):
        assert sorted(i for step in loader for i in step.indices) == [2, 3]


def two_tensors(indices: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(indices)
    return {"ids": ids, "twice": 2 * ids}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_sends_all_tensors_of_a_batch_as_one_block(num_workers: int) -> None:
    loader = loader_of(collate_fn=two_tensors, samples_per_update=9, num_workers=num_workers)
    for step in loader:
        ids = step.batch["ids"]
        twice = step.batch["twice"]
        assert ids.tolist() == step.indices
        assert twice.tolist() == [2 * index for index in step.indices]
        is_one_block = ids.untyped_storage().data_ptr() == twice.untyped_storage().data_ptr()
        assert is_one_block == (num_workers == 1)
