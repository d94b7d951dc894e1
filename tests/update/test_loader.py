"""Laws of a loader whose items are updates; and loaders apply what running out of memory has taught."""

import json
import math
import os
import re
import signal
import time
import warnings
from collections import Counter
from functools import partial
from itertools import chain, islice, product
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
BUDGET = TokenBudget(80)
RAMP = linear_ramp(5, 20, num_updates=4)
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


def sampler_of(learning, world):
    return LengthAwareBatchSampler(VARIED, learning, shuffle=True, rank=0, world_size=1)


def preserved_of(learning, world):
    return PlannedDataLoader(ROWS, VARIED, learning, world=world, samples_per_update=48, **HOW)


def free_of(learning, world):
    return PlannedDataLoader(ROWS, VARIED, learning, world=world, **HOW)


def online_of(learning, world):
    return OnlineDataLoader(ROWS, learning, shuffle=True, window=64, world=world, **HOW)


KINDS = {"sampler": sampler_of, "preserved": preserved_of, "free": free_of, "online": online_of}


def loader_of(lengths=LENGTHS, budget=BUDGET, data=None, **settings):
    data = range(len(lengths)) if data is None else data
    settings = {**HOW, **settings}
    return PlannedDataLoader(data, lengths, budget, **settings)


def samples(update):
    return sorted(index for step in update if not step.idle for index in step.batch)


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return float(torch.rand(()))


def test_samples_too_large_even_alone_are_told_and_counted():
    message = "sample 1 with 90 tokens does not fit the budget even alone and is a batch of its own"
    with pytest.warns(UserWarning, match=message):
        loader = loader_of([5, 90, 6], samples_per_update=3)
    list(loader)
    assert loader.stats.oversize == 1


def test_samples_too_large_even_alone_may_be_an_error():
    with pytest.raises(BudgetError, match="sample 1 .90 tokens. does not fit even alone"):
        loader_of([5, 90, 6], oversize="error")


def test_a_sampler_needs_a_size_of_updates():
    with pytest.raises(ConfigError, match="`sampler` needs `samples_per_update`"):
        loader_of(sampler=range(53))


def test_lengths_of_another_dataset_are_refused():
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


def noise_loader(num_workers, **settings):
    """Its samples are random numbers, drawn in the workers."""
    return loader_of(data=Noise(), samples_per_update=12, num_workers=num_workers, **settings)


def batches_of_updates(loader):
    return [[step.batch for step in update] for update in loader.updates()]


def test_workers_process_a_resumed_run_alike():
    whole = batches_of_updates(noise_loader(2))
    first = noise_loader(1)
    assert len(list(islice(first.updates(), 2))) == 2
    resumed = noise_loader(1)
    resumed.load_state_dict(first.state_dict())
    assert batches_of_updates(resumed) == whole[2:]


def test_ranks_draw_numbers_of_their_own():
    def run(world):
        steps = noise_loader(1, world=world)
        return list(chain.from_iterable(step.batch for step in steps if not step.idle))

    first, second = run_ranks(2, run)
    assert len({*first, *second}) == 53


def test_ranks_with_another_order_are_told():
    def one(world):
        order = torch.randperm(53, generator=torch.Generator().manual_seed(world.rank)).tolist()
        return list(loader_of(samples_per_update=10, sampler=order, world=world))

    with pytest.raises(AlignmentError, match="ranks have different order of samples"):
        run_ranks(2, one)


def with_times(rows):
    return {**rows, "t": [time.time() for _ in rows["input_ids"]]}


def part_of_data(kind, indices):
    """Of 40 samples of one length those of a rank, as one of several types."""
    data = [{"input_ids": [index] * 9} for index in range(40)]
    part = [data[index] for index in indices]
    if kind == "subset":
        return torch.utils.data.Subset(data, indices)
    if kind == "hf":
        return datasets.Dataset.from_list(part).with_transform(with_times)
    return part


def planned_nines(data, world):
    return PlannedDataLoader(data, [9] * len(data), BUDGET, world=world, **HOW)


def online_nines(data, world):
    return OnlineDataLoader(data, BUDGET, world=world, **HOW)


@pytest.mark.parametrize("make", [planned_nines, online_nines])
@pytest.mark.parametrize("kind", ["list", "subset", "hf"])
def test_ranks_that_were_given_parts_of_the_data_are_told(make, kind):
    """Each part would be divided once more. Files may have other names on other machines, so it is no error."""

    def run(world):
        return list(make(part_of_data(kind, range(world.rank, 40, 2)), world))

    message = "ranks have different first or last samples in their datasets: give every rank the"
    with pytest.warns(UserWarning, match=message):
        run_ranks(2, run)


@pytest.mark.parametrize("make", [planned_nines, online_nines])
@pytest.mark.parametrize("kind", ["list", "subset", "hf"])
def test_ranks_that_were_given_all_of_the_data_share_it(make, kind):
    """Also where reading a sample twice gives other fields."""

    def run(world):
        steps = make(part_of_data(kind, range(40)), world)
        return list(chain.from_iterable(step.indices for step in steps if not step.idle))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run_ranks(2, run)
    assert sorted(first + second) == list(range(40))


@pytest.mark.filterwarnings("ignore:.*does not fit the budget even alone")
@pytest.mark.parametrize("sampler", [None, list(range(9))])
def test_samples_that_are_dropped_leave_updates_whole(sampler):
    """Three of nine do not fit: updates are drawn from the others, in the seeded order and in a sampler's."""
    lengths = [90, 90, 90, 5, 6, 7, 8, 9, 10]
    loader = loader_of(lengths, samples_per_update=3, oversize="drop", sampler=sampler)
    assert loader.num_samples == 6
    assert loader.num_updates == 2
    assert loader.plan.dropped.tolist() == [0, 1, 2]
    updates = list(map(samples, loader.updates()))
    assert list(map(len, updates)) == [3, 3]
    assert sorted(chain.from_iterable(updates)) == [3, 4, 5, 6, 7, 8]


@pytest.mark.filterwarnings("ignore:.*does not fit the budget even alone")
def test_a_sample_that_is_drawn_twice_is_dropped_twice():
    lengths = [90, 90, 90, 5, 6, 7, 8, 9, 10]
    loader = loader_of(lengths, samples_per_update=2, oversize="drop", sampler=[0, 3, 0, 4])
    assert loader.plan.dropped.tolist() == [0, 0]


def failing_at_seven(rows):
    if 7 in rows:
        raise OSError("cannot read 7")
    return rows


def failing_weight(rows):
    return len(failing_at_seven(rows))


@pytest.mark.parametrize("failing", [{"collate_fn": failing_at_seven}, {"weigh": failing_weight}])
@pytest.mark.parametrize("sizes", [{"samples_per_update": 10}, {}])
def test_a_rank_that_fails_ends_the_others_at_once(failing, sizes):
    """Not after the ten minutes in which a rank that does not answer counts as gone."""

    def run(world):
        with pytest.raises((OSError, RuntimeError)) as error:
            list(loader_of(world=world, **failing, **sizes))
        return str(error.value)

    texts = run_ranks(2, run)
    [failed] = [text for text in texts if text.endswith("cannot read 7")]
    texts.remove(failed)
    assert "another rank failed while it loaded or weighed update" in texts[0]


class Deadly(torch.utils.data.Dataset):
    """Its worker dies at sample 7, until it is mended."""

    mended = False

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index == 7 and not self.mended:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def planned(data, **settings):
    return PlannedDataLoader(data, LENGTHS, BUDGET, **settings)


def online(data, **settings):
    return OnlineDataLoader(data, BUDGET, length_of=LENGTHS.__getitem__, **settings)


@pytest.mark.usefixtures("dead_workers_are_seen_soon")
@pytest.mark.parametrize("kind", [planned, online])
def test_after_a_worker_died_all_ranks_go_on_with_new_workers(kind):
    def run(world):
        data = Deadly()
        settings = {**HOW, "samples_per_update": 10, "world": world}
        loader = kind(data, num_workers=1, persistent_workers=True, **settings)
        with pytest.raises((RuntimeError, AlignmentError)):
            list(loader)
        data.mended = True
        loader.restart_epoch()
        return list(chain.from_iterable(map(samples, loader.updates())))

    first, second = run_ranks(2, run)
    assert sorted(first + second) == list(range(53))


def warned_by(lengths, budget, collate, data=LENGTHS):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader_of(lengths, budget, data, collate_fn=collate, samples_per_update=10))
    return [str(warning.message) for warning in caught]


def pad(rows):
    return {"input_ids": torch.zeros(len(rows), max(rows))}


def pad_to_eight(rows):
    return {"input_ids": torch.zeros(len(rows), 8 * math.ceil(max(rows) / 8))}


def pack_pairs(rows):
    sources, labels = zip(*rows, strict=True)
    return {"input_ids": torch.zeros(1, sum(sources)), "labels": torch.zeros(1, sum(labels))}


UNPLANNED = r"does not have its planned shape: .* collated to \d+ x \d+ {}, but planned as \d+"
NOT_FITTING = r"planned shape, and does not fit the budget: .* to \d+ x \d+ {}, but planned as \d+"


def test_packed_labels_that_were_not_planned_are_noticed_by_their_own_stream():
    """Sources are as planned, targets were measured in another order: only their field shows it."""
    targets = [min(length, 20) for length in LENGTHS[::-1]]
    data = list(zip(LENGTHS, targets, strict=True))
    budget = TokenBudget(160, layout="packed")
    assert warned_by({"source": LENGTHS, "target": targets}, budget, pack_pairs, data) == []
    reversed_targets = {"source": LENGTHS, "target": targets[::-1]}
    first, second = warned_by(reversed_targets, budget, pack_pairs, data)
    assert re.search(UNPLANNED.format("target"), first)
    assert re.search(NOT_FITTING.format("target"), second)
    assert re.search(r"to 1 x \d+ target, but", first)


def test_lengths_in_another_order_are_noticed_once_and_once_where_a_batch_does_not_fit():
    first, second = warned_by(LENGTHS[::-1], BUDGET, pad)
    assert re.search(UNPLANNED.format("tokens"), first)
    assert re.search(NOT_FITTING.format("tokens"), second)
    assert "in dataset order" in first


def test_padding_further_than_the_budget_was_told_is_noticed():
    first, second = warned_by(LENGTHS, BUDGET, pad_to_eight)
    assert re.search(UNPLANNED.format("tokens"), first)
    assert re.search(NOT_FITTING.format("tokens"), second)
    assert warned_by(LENGTHS, TokenBudget(160, pad_to_multiple_of=8), pad_to_eight) == []


def test_batches_that_the_loader_fills_to_a_shape_are_as_planned():
    ladder = ShapeLadder(LENGTHS, BUDGET, num_shapes=4, window=10)
    assert warned_by(LENGTHS, ladder, pad) == []
    message = "more than any of the shapes .* give `lengths` in dataset order"
    with pytest.raises(ConfigError, match=message):
        warned_by(LENGTHS[::-1], ladder, pad)


def test_a_batch_without_names_shows_nothing():
    assert warned_by(LENGTHS, BUDGET, torch.tensor) == []


def assert_plan_is_of(plan, steps, rank):
    assert plan.num_steps == len(steps)
    assert plan.update_ends.tolist() == [step.ends_update for step in steps]
    scales = [step.loss_scale for step in steps]
    assert plan.loss_scale[:, rank] == pytest.approx(scales)
    for row, step in zip(plan.rows, steps, strict=True):
        assert step.idle or list(row[rank]) == list(step.batch)


@settings(max_examples=40)
@given(
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 2),
    stop=st.integers(0, 9),
    mode=st.sampled_from(MODES),
)
def test_a_plan_is_what_the_steps_are_that_remain(ranks, epoch, stop, mode):
    """Of a whole epoch, and after a resume; free updates go on over the borders of windows of a few rows each."""

    def run(world):
        loader = loader_of(world=world, **mode)
        loader.set_epoch(epoch)
        whole = loader.plan
        assert whole.epoch == epoch
        assert len(loader) == whole.num_steps
        assert loader.num_updates == whole.num_updates
        steps = list(islice(loader, stop))
        resumed = loader_of(world=world, **mode)
        resumed.load_state_dict(loader.state_dict())
        if resumed.epoch == epoch:
            plan = resumed.plan
            assert plan.epoch == epoch
            rest = list(resumed)
            assert_plan_is_of(plan, rest, world.rank)
            steps += rest
        assert resumed.plan_of(epoch).fingerprint == whole.fingerprint, "reading moves nothing"
        assert_plan_is_of(whole, steps, world.rank)
        return whole.fingerprint

    assert len(set(run_ranks(ranks, run))) == 1


@pytest.mark.parametrize("sizes", [{"samples_per_update": 10}, {}])
def test_a_rank_may_ask_alone(monkeypatch, sizes):
    """Looking the ranks up is collective: one that prints its plan before the others iterate must not wait for them."""

    def current_world():
        pytest.fail("asked the other ranks")

    monkeypatch.setattr("dynagroup.update.loader.current_world", current_world)
    loader = loader_of(**sizes)
    assert loader.plan.num_steps == len(loader)
    assert loader.num_updates == loader.updates_in(1)
    assert loader.cursor.samples_seen == 0
    resumed = loader_of(**sizes)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.cursor == loader.cursor


def test_a_sampler_that_draws_what_is_left_out_more_often_in_some_epoch_is_refused():
    class Other(list):
        def set_epoch(self, epoch):
            self[:] = [0, 1, 2, 3] if epoch == 0 else [0, 0, 1, 2]

    settings = {"sampler": Other(range(4)), "samples_per_update": 1, "oversize": "drop"}
    loader = loader_of([1000, 5, 5, 5], TokenBudget(50), **settings)
    assert len(list(loader)) == 3
    with pytest.raises(ConfigError, match=r"\(2 that fit\) in epoch 1, but \d+ \(3"):
        list(loader)


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_a_learning_rate_follows_the_size_of_updates_by_a_rule(rule, expected):
    sizes = {"samples_per_update": 64, "base_samples_per_update": 16}
    assert scale_learning_rate(0.1, rule=rule, **sizes) == pytest.approx(expected)


def test_a_ramp_goes_from_one_size_to_another_in_equal_steps():
    up = linear_ramp(8, 32, num_updates=4, multiple_of=8)
    down = linear_ramp(32, 8, num_updates=3)
    assert [up(update, None) for update in range(5)] == [8, 8, 16, 24, 32]
    assert [down(update, None) for update in range(5)] == [32, 24, 16, 8, 8]


def test_a_changed_size_holds_in_later_epochs():
    sizes = UpdateSizes(4, lambda: 10)
    assert sizes.change(next(sizes.cursors(sizes.start(0))), 5) == 1
    spans = [*sizes.spans(sizes.start(0)), *sizes.spans(sizes.start(1))]
    assert [stop - start for start, stop, _ in spans] == [4, 5, 1, 5, 5]


def test_updates_before_a_far_epoch_are_counted_at_once():
    assert UpdateSizes(8, lambda: 1000).start(10**6).update == 125 * 10**6


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a loader of that kind, or a sampler, with what has been learned."""
    return partial(KINDS[request.param], world=None)


def batches(items: Any) -> list[list[int]]:
    """The dataset indices of each batch, of a sampler's or of a loader's steps."""
    rows = []
    for item in items:
        if not getattr(item, "idle", False):
            rows.append(list(getattr(item, "indices", item)))
    return rows


def flat(rows: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(rows))


def largest(rows: list[list[int]]) -> int:
    return max(len(batch) * int(VARIED[batch].max()) for batch in rows)


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
    relearned = LearningBudget(TokenBudget(1000))
    resumed = make(relearned)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert relearned.report.num_ooms == 2
    rest = batches(items)
    assert largest(second + rest) <= LEARNED
    assert sorted(flat(second + rest)) == list(range(300))
    assert batches(resumed) == rest
    if hasattr(loader, "cursor"):
        # The books count what was, not what the new limit would have made of it.
        assert resumed.cursor == loader.cursor
    assert largest(batches(resumed)) <= 0.9 * 800


def test_an_epoch_that_fails_as_it_begins_leaves_the_one_before_used_up(make):
    """Samples that do not fit what was learned are warned of as the next epoch begins, or in it; here warnings are errors."""
    used: Counter[tuple[int, int]] = Counter()

    def train(loader: Any, learning: LearningBudget) -> None:
        for epoch in range(loader.epoch, 2):
            loader.set_epoch(epoch)
            for item in loader:
                used.update((epoch, index) for index in flat(batches([item])))
            learning.record_oom(BatchShape.of(1, 90))

    learning = LearningBudget(TokenBudget(1000))
    loader = make(learning)
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="not fit"):
        train(loader, learning)
    state = json.loads(json.dumps(loader.state_dict()))
    warnings.simplefilter("ignore")
    learning = LearningBudget(TokenBudget(1000))
    loader = make(learning)
    loader.load_state_dict(state)
    train(loader, learning)
    assert used == Counter(product(range(2), range(300)))


def test_free_updates_that_were_done_are_counted_as_they_were():
    learning = LearningBudget(TokenBudget(1000))
    loader = KINDS["free"](learning, None)
    list(loader)
    learning.record_oom(FAILED)
    first = loader.cursor.update
    assert loader.num_updates == first
    list(loader)
    assert first < loader.cursor.update - first
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

    (first, fingerprint), (second, other_fingerprint) = run_ranks(2, run)
    assert largest(first + second) <= LEARNED
    assert fingerprint == other_fingerprint
    assert sorted(flat(first + second)) == list(range(300))


def test_samples_that_no_batch_may_hold_after_what_was_learned_are_told_and_counted():
    budget = LearningBudget(TokenBudget(64))
    loader = loader_of([50, 40, 4, 3], budget, samples_per_update=2, oversize="drop")
    assert sorted(flat(batches(loader))) == [0, 1, 2, 3]
    loader.budget.learner.record_oom(BatchShape.of(2, longest=16))
    message = "sample 0 .* does not fit the budget even alone .*and is left out"
    with pytest.warns(UserWarning, match=message):
        assert sorted(flat(batches(loader))) == [2, 3]


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
