"""Laws of a loader whose items are updates."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import (
    AlignmentError,
    BudgetError,
    ConfigError,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    ShapeLadder,
    TokenBudget,
)
from dynagroup.plan.cost import Work
from dynagroup.plan.epoch import epoch_order
from dynagroup.testing import run_ranks
from dynagroup.update.planned import PlannedDataLoader
from dynagroup.update.schedule import doubling, linear_ramp

LENGTHS = np.random.default_rng(0).integers(1, 40, 53).tolist()
BUDGET = TokenBudget(80)


def loader_of(lengths=LENGTHS, budget=BUDGET, data=None, collate=list, **settings):
    return PlannedDataLoader(
        range(len(lengths)) if data is None else data,
        lengths,
        budget,
        collate_fn=collate,
        **{"weigh": "samples", **settings},
    )


def samples(update):
    return sorted(index for step in update if not step.idle for index in step.batch)


def test_updates_hold_the_samples_that_fixed_batches_would():
    order = epoch_order(53, seed=3, epoch=1)
    loader = loader_of(samples_per_update=10, seed=3)
    loader.set_epoch(1)
    expected = [sorted(order[k : k + 10].tolist()) for k in range(0, 53, 10)]
    assert [samples(update) for update in loader.updates()] == expected
    assert loader.num_updates_in(1) == len(expected) == 6


def test_schedules_end_an_epoch_by_samples_with_and_without_its_tail():
    schedule = doubling(8, milestones=(2,))
    assert [len(samples(u)) for u in loader_of(samples_per_update=schedule).updates()] == [8, 8, 16, 16, 5]
    dropping = loader_of(samples_per_update=schedule, drop_last=True)
    assert [len(samples(u)) for u in dropping.updates()] == [8, 8, 16, 16]
    assert (dropping.num_updates_in(0), dropping.num_updates_in(1)) == (4, 3), (
        "16 samples an update from the next epoch on"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_change_at_run_time_takes_effect_at_the_update_it_names(workers):
    loader = loader_of(samples_per_update=4, num_workers=workers, prefetch_factor=2 if workers else None)
    sizes, first = [], None
    for number, update in enumerate(loader.updates()):
        sizes.append(len(samples(update)))
        if number == 1:
            first = loader.set_samples_per_update(10)
            state = loader.state_dict()
    assert first is not None
    assert sizes[:first] == [4] * first
    assert set(sizes[first:-1]) == {10}
    assert first - 2 <= workers * 2, "the delay is at most what workers prefetch"
    resumed = loader_of(samples_per_update=4)
    resumed.load_state_dict(state)
    assert [len(samples(update)) for update in resumed.updates()] == sizes[2:]


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return float(torch.rand(()))


def test_workers_process_a_resumed_run_alike():
    def run(loader):
        return [[step.batch for step in update] for update in loader.updates()]

    whole = run(loader_of(data=Noise(), samples_per_update=12, num_workers=2))
    first = loader_of(data=Noise(), samples_per_update=12, num_workers=1)
    for number, _ in enumerate(first.updates()):
        if number == 1:
            break
    resumed = loader_of(data=Noise(), samples_per_update=12, num_workers=1)
    resumed.load_state_dict(first.state_dict())
    assert run(resumed) == whole[2:]


def test_iterating_leaves_the_global_random_state_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(loader_of(samples_per_update=12))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_with_another_order_are_told():
    def one(world):
        order = torch.randperm(53, generator=torch.Generator().manual_seed(world.rank)).tolist()
        return list(loader_of(samples_per_update=10, sampler=order, world=world))

    with pytest.raises(AlignmentError, match="ranks differ in order of samples"):
        run_ranks(2, one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples_per_update": 0}, "`samples_per_update` must be an int of at least 1"),
        ({"samples_per_update": 4, "accumulation": 2}, "`accumulation` .2. is whatever the memory needs"),
        ({"sampler": range(53)}, "`sampler` needs `samples_per_update`"),
        ({"plan": {"windows": 3}}, "`plan` knows the settings"),
        ({"plan": {"window": 9}, "window": 9}, "'window'. are given beside `plan` and in it"),
        ({"drop_last": True}, "`drop_last` needs `samples_per_update`"),
        ({"seed": -1}, "`seed` must be an int of at least 0"),
        ({"data": iter([])}, "OnlineDataLoader takes streams"),
        ({"data": range(60)}, "`lengths` has 53 entries, but the dataset has 60 samples"),
        ({"batch_size": 3}, "are decided by PlannedDataLoader"),
        ({"weigh": "bytes"}, "`weigh` must be 'tokens', 'samples' or a function"),
        ({"num_workers": 1, "in_order": False}, "`in_order=False` lets batches of different updates mix"),
    ],
)
def test_mistakes_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        loader_of(**settings)


@pytest.mark.parametrize(
    "said", [{"oversize": "error"}, {"work": Work(per_step=0)}, {"objective": "fewest"}, {"work": None}], ids=str
)
def test_a_setting_of_the_plan_may_be_said_by_its_name(said):
    """As messages advise (``oversize='error'``, ``work=loader.stats.work``), and as samplers and online loaders take it."""
    inside = {name: value for name, value in said.items() if value is not None}
    plain = loader_of(samples_per_update=10, num_workers=0, **said)
    as_before = loader_of(samples_per_update=10, plan=inside)
    assert list(plain.plan.rows) == list(as_before.plan.rows)
    assert plain.state_dict() == as_before.state_dict()


def test_samples_that_do_not_fit_are_refused_where_the_loader_is_told_to():
    with pytest.raises(BudgetError, match="sample 0 .9 tokens. does not fit even alone, nor do 1 others"):
        loader_of(lengths=[9, 2, 9], budget=8, oversize="error")


def test_ranks_idle_in_an_update_of_fewer_samples():
    by_rank = run_ranks(3, lambda world: list(loader_of(samples_per_update=2, world=world).updates()))
    for update in zip(*by_rank, strict=True):
        steps = [step for steps in update for step in steps]
        assert sum(step.samples.local for step in steps) == sum(not step.idle for step in steps) <= 2
        assert sum(step.loss_scale for step in steps) == pytest.approx(3)
    assert sorted(i for updates in by_rank for update in updates for i in samples(update)) == list(range(53))


# What goes wrong is told.


class Failing(torch.utils.data.Dataset):
    def __init__(self, index):
        self.index = index

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        if index == self.index:
            raise OSError(f"cannot read {index}")
        return index


@pytest.mark.parametrize("settings", [{"samples_per_update": 10}, {}])
def test_a_rank_that_fails_ends_the_others_at_once(settings):
    """Not after the ten minutes in which a rank that does not answer counts as gone."""

    def one(world):
        expected = OSError if world.rank == 1 else AlignmentError
        loader = loader_of(data=Failing(7), world=world, weigh=lambda batch: 1.0, **settings)
        try:
            list(loader)
        except (OSError, AlignmentError) as error:
            return type(error).__name__, str(error)
        raise AssertionError(f"no {expected.__name__}")

    assert_told(run_ranks(2, one))


def assert_told(found):
    names = sorted(name for name, _ in found)
    assert names == ["AlignmentError", "OSError"]
    assert any("another rank failed while it loaded or weighed update" in text for _, text in found)


def test_a_rank_that_cannot_weigh_a_batch_is_told_of_too():
    def one(world):
        def weigh(batch):
            if 7 in batch:
                raise OSError("cannot weigh 7")
            return 1.0

        try:
            list(loader_of(world=world, weigh=weigh, samples_per_update=30))
        except (OSError, AlignmentError) as error:
            return type(error).__name__, str(error)
        raise AssertionError("nothing raised")

    assert_told(run_ranks(2, one))


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.ones(self.lengths[index], dtype=torch.int64)


def padded_to(multiple):
    def collate(rows):
        width = -(-max(map(len, rows)) // multiple) * multiple
        return {"input_ids": torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])}

    return collate


def warned_by(lengths, budget=BUDGET, collate=None, data=LENGTHS):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(loader_of(lengths, budget, Rows(data), collate or padded_to(1), samples_per_update=10))
    return [str(w.message) for w in caught]


def test_batches_that_are_not_what_was_planned_are_noticed_once():
    [text] = warned_by(LENGTHS[::-1])
    assert re.search(r"\d+ samples came out \d+ tokens wide, but the longest of them was planned with \d+", text)
    assert "another order than the dataset" in text
    assert len(warned_by([min(n, 9) for n in LENGTHS])) == 1, "truncated otherwise"
    assert len(warned_by(LENGTHS, collate=padded_to(8))) == 1, "padded further than the budget was told"
    assert warned_by(LENGTHS) == []
    assert warned_by(LENGTHS, TokenBudget(160, pad_to_multiple_of=8), padded_to(8)) == []


def test_a_batch_padded_to_its_rung_is_what_was_planned():
    ladder = ShapeLadder(LENGTHS, BUDGET, num_shapes=4)

    def on_rungs(rows):
        width = ladder.shape_for(max(map(len, rows)))[1]
        return {"input_ids": torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])}

    assert warned_by(LENGTHS, ladder, on_rungs) == []
    assert warned_by(LENGTHS, ladder & TokenBudget(10**6), on_rungs) == []
    assert len(warned_by(LENGTHS[::-1], ladder, on_rungs)) == 1


def test_a_batch_that_is_a_tensor_is_not_asked_for_names():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader_of(data=torch.arange(53), collate=torch.stack, samples_per_update=8))


@pytest.mark.parametrize(
    ("layout", "said"), [("padded", r"\d+ target tokens wide, but"), ("packed", r"as \d+ target tokens, but")]
)
@pytest.mark.parametrize("names", [("source", "target"), ("input_ids", "labels"), ("tokens", "target")])
def test_labels_are_compared_with_their_own_stream(layout, said, names):
    """Sources are as planned, targets were measured before truncation, or in another order: only their field shows it."""
    targets = [min(n, 20) for n in LENGTHS[::-1]]

    def both(rows):
        sources, labels = zip(*((torch.ones(n), torch.ones(t)) for n, t in rows), strict=True)
        if layout == "packed":
            return {"input_ids": torch.cat(sources)[None], "labels": torch.cat(labels)}
        return {"input_ids": padded(sources), "labels": padded(labels)}

    def padded(rows):
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def warned(measured):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lengths = dict(zip(names, (LENGTHS, measured), strict=True))
            data = list(zip(LENGTHS, targets, strict=True))
            list(loader_of(lengths, TokenBudget(160, layout=layout), data, both, samples_per_update=10))
        return [str(w.message) for w in caught]

    assert warned(targets) == []
    [text] = warned(LENGTHS[::-1])
    assert re.search(said.replace("target", names[1]), text)
    assert len(warned(targets[::-1])) == 1


def test_packed_batches_are_compared_by_all_their_tokens():
    def packed(rows):
        return {"input_ids": torch.cat(rows)[None]}

    budget = TokenBudget(80, layout="packed")
    assert warned_by(LENGTHS, budget, packed) == []
    [text] = warned_by(LENGTHS[::-1], budget, packed)
    assert "tokens, but were planned with" in text


@pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone")
@pytest.mark.parametrize("sampler", [None, list(range(9))])
def test_samples_that_are_dropped_leave_updates_whole(sampler):
    """Three of nine do not fit. In the seeded order updates are drawn from the others; a sampler's updates lose theirs, and one
    of them that loses all is an error, not an empty update or a StopIteration."""
    lengths = [90, 90, 90, 5, 6, 7, 8, 9, 10]
    loader = loader_of(lengths, samples_per_update=3, plan={"oversize": "drop"}, sampler=sampler)
    if sampler is None:
        assert loader.num_updates == 2
        found = [samples(update) for update in loader.updates()]
        assert [len(update) for update in found] == [3, 3]
        assert sorted(sum(found, [])) == [3, 4, 5, 6, 7, 8]
        return
    with pytest.raises(BudgetError, match="no sample of update 0 fits the budget even alone; filter such samples out"):
        list(loader)


def test_oversize_samples_are_counted_and_warned_of_once():
    with pytest.warns(
        UserWarning, match="1 samples do not fit the budget even alone and are emitted alone; the first is"
    ):
        loader = loader_of([5, 90, 6], samples_per_update=3)
    list(loader)
    assert loader.stats.oversize == 1


def test_what_keeps_updates_from_saving_more_is_said_once() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int) + 1
    loader = PlannedDataLoader(
        range(2000), lengths, TokenBudget(1 << 20), samples_per_update=4, weigh="samples", collate_fn=list
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader) >= 500  # counting warns of nothing
    with pytest.warns(UserWarning, match=r"^\d\d% of the tokens are padding: .* take more samples an update") as said:
        list(loader)
    assert [warning.filename for warning in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
        list(PlannedDataLoader(range(2000), lengths, TokenBudget(4096), weigh="samples", collate_fn=list))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples_per_update": 4}, r"^\d\d% of .* padding: a rank's share of an update, 4 samples, is 1\.\d batches, "),
        ({"window": 8}, r"^\d\d% of .* padding: a window of 8 samples is \d batches, too few to sort; raise `window`"),
    ],
)  # fmt: skip
def test_an_online_loader_says_once_what_keeps_it_from_saving_more(options: dict[str, int], said: str) -> None:
    data = [[0] * n for n in (np.random.default_rng(0).lognormal(4, 1, 1200).astype(int) + 1).tolist()]
    loader = OnlineDataLoader(data, TokenBudget(1 << 20), collate_fn=list, length_of=len, weigh="samples", **options)
    with pytest.warns(UserWarning, match=said) as found:
        list(loader)
    assert [warning.filename for warning in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(loader)
        wide = OnlineDataLoader(data, TokenBudget(4096), collate_fn=list, length_of=len, weigh="samples")
        assert sum(len(step.indices) for step in wide) == 1200


@settings(max_examples=25)
@given(
    ranks=st.integers(1, 4),
    epoch=st.integers(0, 2),
    how=st.sampled_from(
        [{"samples_per_update": 9}, {"samples_per_update": linear_ramp(5, 20, num_updates=4)}, {}, {"accumulation": 3}]
    ),
)
def test_the_plan_of_an_epoch_is_what_its_steps_are(ranks, epoch, how):
    def one(world):
        loader = loader_of(world=world, **how)
        loader.set_epoch(epoch)
        plan, planned, updates = loader.plan, len(loader), loader.num_updates
        return plan, planned, updates, list(loader)

    on_ranks = run_ranks(ranks, one)
    for rank, (plan, planned, updates, steps) in enumerate(on_ranks):
        assert (plan.num_steps, plan.num_updates, plan.epoch) == (planned, updates, epoch)
        assert plan.update_ends.tolist() == [step.ends_update for step in steps]
        assert [list(row[rank]) for row, step in zip(plan.rows, steps, strict=True) if not step.idle] == [
            list(step.batch) for step in steps if not step.idle
        ]
        assert plan.loss_scale[:, rank] == pytest.approx([step.loss_scale for step in steps])
        assert plan.fingerprint == on_ranks[0][0].fingerprint


def test_the_report_is_that_of_the_sampler_and_reading_it_moves_nothing():
    loader, again = loader_of(shuffle=False), loader_of(shuffle=False)
    expected = LengthAwareBatchSampler(LENGTHS, BUDGET).plan.report(batch_size=4)
    assert loader.plan.report(batch_size=4) == expected
    steps = iter(loader)
    next(steps)
    state = loader.state_dict()
    assert loader.plan.report(batch_size=4) == expected, "the whole epoch, also where a part of it was used"
    assert loader.state_dict() == state
    assert [step.batch for step in steps] == [step.batch for step in again][1:]


def test_the_plan_follows_a_change_of_size():
    loader = loader_of(samples_per_update=10)
    assert loader.plan.num_updates == 6
    loader.set_samples_per_update(20)
    assert loader.plan.num_updates == loader.num_updates == 3


def test_a_rank_may_ask_alone(monkeypatch):
    """Looking the ranks up is collective: one that prints its plan before the others iterate must not wait for them."""
    monkeypatch.setattr("dynagroup.update.loader.current_world", lambda: pytest.fail("asked the other ranks"))
    for how in ({"samples_per_update": 10}, {}):
        loader = loader_of(**how)
        assert loader.plan.num_steps == len(loader)
        assert loader.num_updates == loader.updates_until(53)
        assert loader.cursor.samples_seen == 0
        again = loader_of(**how)
        again.load_state_dict(loader.state_dict())
        assert again.cursor == loader.cursor


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 8), (3, 5)])
def test_a_free_running_update_has_all_its_rows_but_the_epochs_last(ranks, accumulation):
    """Windows of 16 samples are a few rows each: updates go on over their borders, also after a resume."""
    how = {"accumulation": accumulation, "window": 16}

    def one(world):
        loader = loader_of(world=world, **how)
        counts = [len(update) for update in loader.updates()]
        assert set(counts[:-1]) == {accumulation}
        assert loader.num_updates_in(0) == len(counts) == -(-sum(counts) // accumulation)
        steps = iter(first := loader_of(world=world, **how))
        next(steps)
        again = loader_of(world=world, **how)
        again.load_state_dict(first.state_dict())
        assert [len(update) for update in again.updates()] == [accumulation - 1, *counts[1:]]

    run_ranks(ranks, one)


@pytest.mark.parametrize("how", [{"samples_per_update": 10}, {"accumulation": 3, "window": 16}])
def test_a_plan_after_a_resume_is_what_remains(how):
    for stop in (0, 1, 4, 9):
        first, again = loader_of(**how), loader_of(**how)
        steps = iter(first)
        for _ in range(stop):
            next(steps)
        again.load_state_dict(first.state_dict())
        plan, whole = again.plan, again.plan_of(0)
        assert plan.num_steps == whole.num_steps - stop == len(again) - stop
        found = list(again)
        assert [list(row[0]) for row in plan.rows] == [step.batch for step in found]
        assert plan.loss_scale[:, 0] == pytest.approx([step.loss_scale for step in found])
        assert plan.update_ends.tolist() == [step.ends_update for step in found]
        assert again.plan.epoch == 1


@pytest.mark.parametrize("how", [{"samples_per_update": 10, "num_workers": 1, "persistent_workers": True}, {}])
def test_a_copy_goes_on_where_the_loader_stands(how):
    """Between epochs, in the middle of one, and of one that was left: what its state says."""
    loader = loader_of(**how)
    for steps in (iter(loader), iter(loader)):
        next(steps)
        twins = copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))
        rest = [step.batch for step in steps]
        assert all([step.batch for step in twin] == rest for twin in twins)
        assert copy.deepcopy(loader).epoch == loader.epoch
    for _ in loader:
        break
    assert copy.deepcopy(loader).state_dict() == loader.state_dict()
