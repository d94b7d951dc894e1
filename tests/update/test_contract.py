"""What both loaders promise beside the laws of tests/laws: epochs, iterations, books and statistics."""

import copy
import json
import pickle
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    ConfigError,
    OnlineDataLoader,
    PlannedDataLoader,
    StateError,
    StepLoader,
    TokenBudget,
)
from dynagroup.testing import assert_conserves, run_ranks
from dynagroup.update.loss_weight import weigher
from dynagroup.update.schedule import linear_ramp
from dynagroup.update.step import LoaderStats
from tests.laws import loaders
from tests.online.helpers import Tokens, collate, lengths_of
from tests.online.helpers import used as samples_of

pytestmark = pytest.mark.filterwarnings("ignore:.*does not fit the budget even alone")
LENGTHS = lengths_of(37, seed=2, top=40)
Make = Callable[..., StepLoader[Any]]


planned = partial(loaders.planned, lengths=LENGTHS, max_tokens=80)
online = partial(loaders.online, lengths=LENGTHS, max_tokens=80)
SIZES: dict[str, dict[str, Any]] = {
    "fixed": {"samples_per_update": 7},
    "free": {"accumulation": 2},
    "ramp": {"samples_per_update": linear_ramp(3, 11, num_updates=6)},
}
TINY = {"vocab": 16, "width": 8, "layers": 1, "heads": 1}
WRONG = [
    ({"num_workers": -1}, "`num_workers`"),
    ({"prefetch_factor": 2}, "prefetch_factor"),
    ({"num_workers": 1, "multiprocessing_context": ""}, "multiprocessing_context"),
    ({"num_worker": 1}, "num_worker"),
    ({"in_order": False}, "`in_order=False` must be left out"),
    ({"batch_size": 1}, "`batch_size` must be left out: the budget decides"),
    (
        {"accumulation": 2, "samples_per_update": 8},
        "`accumulation` .2. and `samples_per_update` cannot both be given",
    ),
    ({"samples_per_update": 0}, "`samples_per_update` must be an int of at least 1"),
    ({"drop_last": True}, "`drop_last` needs `samples_per_update`"),
    ({"seed": -1}, "`seed` must be an int of at least 0"),
    ({"weigh": "bytes"}, "`weigh` must be 'tokens', 'labels', 'samples' or a function"),
    ({"weigh": np.zeros((2, 2))}, "`weigh` must be 'tokens', 'labels', 'samples' or a function"),
    ({"num_workers": 2**31}, "`num_workers` must be an int of at most 4096, but is 2147483648"),
    ({"timeout": 5}, r"`timeout` \(5\) is for workers; set `num_workers`, or leave it out"),
    ({"timeout": "5", "num_workers": 1}, "`timeout` must be a number"),
    (
        {"prefetch_factor": 0, "num_workers": 1},
        "`prefetch_factor` must be an int of at least 1, but is 0",
    ),
    ({"in_order": 0}, "`in_order` must be True or False, but is 0"),
    ({"generator": 3}, "`generator` must be a torch.Generator on the CPU, or None, but is 3"),
    ({"worker_init_fn": 3}, "`worker_init_fn` must be a function of a worker's number, but is 3"),
    ({"collate_fn": 3}, "`collate_fn` must be a function from samples to a batch, but is 3"),
    ({"pad": 3}, "`pad` must be a dict from field to padding value, or a function, but is 3"),
    (
        {"samples_per_update": int},
        "`samples_per_update` must be .* is <class 'int'>; or give a function",
    ),
    ({"kinds": np.array(3)}, r"`kinds` must be one label per sample, but is array\(3\)"),
    (
        {"sampler": np.array(3), "samples_per_update": 4},
        r"`sampler` must be a list or a sampler, .* but is array\(3\)",
    ),
    (
        {"sampler": np.zeros((37, 2), int), "samples_per_update": 4},
        r"must yield integer indices, .* yields int64 \(2,\)",
    ),
    ({"sampler": [[1], [2, 3]], "samples_per_update": 4}, "must yield integer indices .ValueError"),
    (
        {"shapes": 2**31, "length_hint": LENGTHS},
        "`shapes` must be an int of at most 600, but is 2147483648",
    ),
]


@pytest.fixture(params=[planned, online])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


@pytest.fixture(params=SIZES)
def sizes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SIZES[request.param]


def samples_by_update(loader: StepLoader[Any]) -> list[list[int]]:
    updates = []
    for update in loader.updates():
        samples: list[int] = []
        take(samples, [update])
        updates.append(sorted(samples))
    return updates


def epochs_of(loader: StepLoader[Any], number: int) -> list[list[list[int]]]:
    """The samples of each update; of an online loader without a set size, whose later epochs are planned by the lengths that
    it has seen by then, all that is sure: every sample."""
    learns = isinstance(loader, OnlineDataLoader) and loader.sizes is None
    epochs = [samples_by_update(loader) for _ in range(number)]
    if not learns:
        return epochs
    return [[sorted(sum(epoch, []))] for epoch in epochs]


def test_epochs_differ(make, sizes):
    is_sized = "samples_per_update" in sizes
    first, second, third = epochs_of(make(**sizes), 3)
    differ = first != second != third
    assert differ == (make is planned or is_sized)


@pytest.mark.parametrize("name", ["fixed", "ramp"])
def test_updates_have_the_same_samples_whenever_lengths_are_known(name):
    early = planned(**SIZES[name])
    late = online(**SIZES[name])
    assert epochs_of(late, 3) == epochs_of(early, 3)


def test_an_epoch_that_is_set_while_one_runs_is_the_next(make, sizes):
    loader = make(**sizes)
    loader.set_epoch(2)
    for step in loader:
        assert loader.epoch == 2, "running"
        loader.set_epoch(0)
        samples_of(step)
    assert loader.epoch == 0


def test_epochs_are_numbered_and_come_again(make, sizes):
    first, _, third = epochs_of(make(**sizes), 3)
    loader = make(**sizes)
    loader.set_epoch(2)
    list(loader)
    loader.set_epoch(0)
    assert epochs_of(loader, 1) == [first]
    assert loader.epoch == 1
    loader.set_epoch(2)
    loader.set_epoch(2)
    assert epochs_of(loader, 1) == [third]


def test_an_epoch_left_early_is_followed_by_the_next(make, sizes):
    loader = make(**sizes)
    loader.set_epoch(3)
    updates = loader.updates()
    next(updates)
    next(updates)
    updates.close()
    assert loader.epoch == 4


def test_another_iteration_ends_the_one_before(make, sizes):
    loader = make(**sizes)
    old = iter(loader)
    first = samples_of(next(old))
    loader.restart_epoch()
    again = [samples_of(step) for step in loader]
    assert again[0] == first
    assert_conserves(again, range(37))
    with pytest.raises(ConfigError, match="another iteration of this loader has begun"):
        next(old)


def as_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_a_state_is_of_its_epoch(make, sizes):
    loader = make(**sizes)
    steps = iter(loader)
    used = [samples_of(next(steps)) for _ in range(3)]
    state = loader.state_dict()
    rest = [samples_of(step) for step in steps]
    again = make(**sizes)
    again.load_state_dict(state)
    again.set_epoch(0)  # the one that stands
    assert [samples_of(step) for step in again] == rest
    again.load_state_dict(state)
    again.restart_epoch()
    assert again.cursor.samples_used == 0
    assert again.cursor.begun_rows == 0
    again.load_state_dict(again.state_dict())
    assert [samples_of(step) for step in again] == used + rest


def test_a_state_at_an_epochs_end_is_of_the_next(make, sizes):
    loader = make(**sizes)
    list(loader)
    resumed = make(**sizes)
    resumed.load_state_dict(as_json(loader.state_dict()))
    assert loader.epoch == 1
    assert resumed.epoch == 1
    resumed.set_epoch(0)
    assert list(resumed) == [], "nothing of it remained"
    assert epochs_of(resumed, 1) == epochs_of(loader, 1)


def resumed_after(make: Any, failing: StepLoader[Any], came: list[int]) -> list[int]:
    """The samples of an epoch that failed after ``came``, and of the rest from its saved state."""
    loader = make()
    loader.load_state_dict(as_json(failing.state_dict()))
    take(came, loader.updates())
    return sorted(came)


def take(came: list[int], updates: Iterable[list[Any]]) -> None:
    for update in updates:
        for step in update:
            came += samples_of(step)


@pytest.mark.parametrize("stop", range(6))
def test_a_step_whose_batch_cannot_be_moved_is_not_used(make, sizes, stop):
    loader = make(**sizes)
    came: list[int] = []
    moved = count()

    def move(batch: Any) -> Any:
        if next(moved) == stop:
            raise torch.OutOfMemoryError("no memory for this batch")
        return {name: value + 0 for name, value in batch.items()}

    with pytest.raises(torch.OutOfMemoryError):
        take(came, ([step] for step in loader.mapped(move)))
    assert loader.stats.steps == stop
    assert resumed_after(partial(make, **sizes), loader, came) == list(range(37))


class Interrupts:
    """Raises KeyboardInterrupt at the n-th line that runs in the loaders, before a step is handed over."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        inside = re.search(
            r"dynagroup/(online/(engine|feeds)|update/planned)", frame.f_code.co_filename
        )
        return (
            self.line
            if inside
            and frame.f_code.co_name not in ("_emit", "_run", "mapped", "_stop", "__iter__")
            else None
        )

    def line(self, frame: Any, event: str, arg: Any) -> Any:
        self.count += event == "line"
        if event == "line" and self.count == self.at:
            raise KeyboardInterrupt
        return self.line

    def over(self, steps: Iterator[Any], came: list[int]) -> None:
        """Takes the steps until one is interrupted; only the loader's own lines count."""
        before = sys.gettrace()
        while True:
            sys.settrace(self)
            try:
                step = next(steps)
            except (StopIteration, KeyboardInterrupt):
                return
            finally:
                sys.settrace(before)
            came += samples_of(step)


@pytest.mark.parametrize("sizes", [SIZES["ramp"], {"window": 5}])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_after_an_interrupt_at_any_line_the_state_is_whole_or_refused(make, sizes):
    whole = Interrupts(-1)
    whole.over(iter(make(**sizes)), [])
    for at in np.random.default_rng(0).integers(1, whole.count, 60).tolist():
        loader = make(**sizes)
        came: list[int] = []
        Interrupts(at).over(iter(loader), came)
        try:
            loader.state_dict()
        except StateError as error:
            assert "interrupted between two steps" in str(error)  # noqa: PT017
            continue
        if loader.epoch == 0 or len(came) < 37:
            came = resumed_after(partial(make, **sizes), loader, came)
        assert sorted(came) == list(range(37)), at


def wide(samples: list[Any]) -> Any:
    """Wider than planned, if a long sample is in the batch."""
    batch = collate(samples)
    if batch["input_ids"].shape[1] <= 24:
        return batch
    return {name: torch.nn.functional.pad(value, (0, 3)) for name, value in batch.items()}


@pytest.mark.parametrize("whole_updates", [False, True])
@pytest.mark.parametrize(
    "surprising",
    [
        partial(planned, collate_fn=wide),
        partial(online, lengths=[*LENGTHS[:17], 90, *LENGTHS[18:]], seed=1),
    ],
)
def test_a_warning_that_is_an_error_loses_no_sample(surprising, sizes, whole_updates):
    make = partial(surprising, **sizes)
    loader = make()
    came: list[int] = []
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="does not have its planned shape|not fit the budget"):
        take(came, loader.updates() if whole_updates else ([step] for step in loader))
    assert len(came) < 37
    warnings.simplefilter("ignore")
    assert resumed_after(make, loader, came) == list(range(37))


def test_a_collate_function_that_pads_under_a_packed_budget_is_told_of():
    budget = TokenBudget(90, layout="packed")
    loader = PlannedDataLoader(Tokens(LENGTHS), LENGTHS, budget, collate_fn=collate)
    message = (
        r"samples were collated to \d+ x \d+ tokens, but planned as \d+.*needs a packing collator"
    )
    with pytest.warns(UserWarning, match=message):
        list(loader)


def test_a_loader_is_copied_and_pickled_between_epochs_alone(make, sizes):
    """Also with workers that stay: a copy starts its own, and they end with their loader (a cycle would keep them)."""
    before, loader = active_children(), make(**sizes, num_workers=1, persistent_workers=True)
    for _ in range(2):
        copies = copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))
        assert [epochs_of(one, 1) for one in copies] == [epochs_of(loader, 1)] * 2
    next(_ := iter(loader))  # still alive
    for again in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            StateError, match="pickled or copied while it is iterated; do so between epochs"
        ):
            again(loader)
    del loader, copies, _
    assert set(active_children()) <= set(before)


def test_iterating_leaves_the_global_random_state_alone(make):
    """So that a resumed training draws the dropout masks that an uninterrupted one draws."""
    before = torch.get_rng_state()
    samples = [samples_of(step) for step in make()]
    after = torch.get_rng_state()
    assert_conserves(samples, range(37))
    assert torch.equal(after, before)


def test_the_users_generator_is_drawn_from_and_never_seeded():
    generator = torch.Generator().manual_seed(3)
    loader = online(generator=generator)
    next(iter(loader))
    assert generator.initial_seed() == 3


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ["fixed", "ramp"])
def test_updates_are_counted_exactly(make, name, drop_last):
    def run(world: Any) -> None:
        loader = make(world, **SIZES[name], drop_last=drop_last)
        announced = [loader.updates_in(epochs) for epochs in (1, 2, 3)]
        done = samples = 0
        for epoch in range(3):
            assert loader.num_updates == announced[epoch] - done
            for update in loader.updates():
                assert [step.ends_update for step in update] == [False] * (len(update) - 1) + [True]
                size, done = int(update[0].samples.total), done + 1
                samples, cursor = samples + size, loader.cursor
                assert (cursor.epoch, cursor.update, cursor.samples_seen) == (epoch, done, samples)
                assert loader.samples_after(done) == samples
            assert done == announced[epoch]
        assert (loader.stats.updates, loader.stats.update_samples) == (done, samples)

    run_ranks(2, run)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_change_at_run_time_takes_effect_at_the_update_it_names(make, workers):
    loader = make(samples_per_update=3, num_workers=workers, prefetch_factor=2 if workers else None)
    sizes, first, state = [], -1, {}
    for number, update in enumerate(loader.updates()):
        sizes.append(int(update[0].samples.total))
        if number == 1:
            first, state = loader.set_samples_per_update(8), loader.state_dict()
    assert sizes[:first] == [3] * first
    assert set(sizes[first:-1]) == {8}
    assert first - 2 <= workers * 2, "the delay is at most what workers prefetch"
    resumed = make(samples_per_update=3)
    resumed.load_state_dict(state)
    assert [int(update[0].samples.total) for update in resumed.updates()] == sizes[2:]


def test_a_planned_loader_has_a_length_and_an_online_one_has_none(sizes):
    loader = planned(**sizes)
    for _ in range(2):
        assert len(loader) == len(list(loader))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no len"):
        len(online(**sizes))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="samples_per_update"):
        _ = online().num_updates


@pytest.mark.parametrize("lengths", [[], [3, 4]])
def test_what_is_never_reached_is_an_error(make, lengths):
    loader = make(lengths=lengths, samples_per_update=5, drop_last=True)
    assert loader.num_updates == 0
    assert list(loader) == []
    with pytest.raises(ConfigError, match="epoch 0 has none"):
        loader.samples_after(1)


def test_books_go_on_after_resuming_on_other_ranks(make, sizes):
    """Updates and samples done are facts: they are not counted again by the new number of ranks."""
    first = make(**sizes)
    for _ in range(3):
        list(first)
    updates = first.updates()
    next(updates)
    next(updates)
    state = first.state_dict()
    cursor = first.cursor

    def go_on(world: Any) -> None:
        loader = make(world, **sizes)
        loader.load_state_dict([state])
        assert (loader.epoch, loader.cursor.epoch, loader.cursor.update) == (3, 3, cursor.update)
        assert loader.cursor.samples_seen == cursor.samples_seen
        announced = (
            loader.updates_in(5) if make is planned or "samples_per_update" in sizes else None
        )
        assert announced is None or loader.samples_after(loader.updates_in(4)) == 4 * 37
        assert announced is None or loader.samples_after(0) in (0, 3 * 37), (
            "at the first point that is known"
        )
        rest = [int(update[0].samples.total) for update in loader.updates()]
        assert loader.cursor.update == cursor.update + len(rest)
        assert loader.cursor.samples_seen == cursor.samples_seen + sum(rest) == 4 * 37
        list(loader)
        assert loader.cursor.samples_seen == 5 * 37
        assert announced in (None, loader.cursor.update)

    run_ranks(3, go_on)


def test_statistics_add_up_subtract_and_merge(make, sizes):
    def run(world: Any) -> tuple[LoaderStats, LoaderStats, LoaderStats]:
        loader = make(world, **sizes)
        first = list(loader)
        before = loader.stats.copy()
        second = list(loader)
        since = loader.stats - before
        for found, steps in ((before, first), (since, second)):
            used = [step for step in steps if not step.idle]
            assert (found.steps, found.idle_steps) == (len(steps), len(steps) - len(used))
            assert found.samples == sum(step.samples.local for step in steps)
            assert found.updates == sum(step.ends_update for step in steps)
            assert found.batch_sizes == Counter(len(step.indices) for step in used)
            assert found.real_tokens == sum(LENGTHS[i] for step in used for i in step.indices)
            assert found.padded_tokens == sum(step.batch["input_ids"].numel() for step in used)
        assert replace(before + since, wait_s=0) == replace(loader.stats, wait_s=0)
        return before, since, loader.stats.merged(world)

    by_rank = run_ranks(2, run)
    merged = by_rank[0][2]
    assert merged.samples == 2 * 37
    assert merged.real_tokens == 2 * sum(LENGTHS)
    assert merged.batch_sizes == sum((s.batch_sizes for run in by_rank for s in run[:2]), Counter())


class Counting:
    """A sampler that gives 10, 15, 20 ... indices from epoch to epoch, or always says another number than it gives."""

    def __init__(self, said: int | None = None) -> None:
        self.said = said
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.said is None else 0

    def __len__(self) -> int:
        return 10 + 5 * self.epoch if self.said is None else self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 + 5 * self.epoch))


@pytest.mark.parametrize(("said", "epoch"), [(8, 0), (12, 0), (None, 1)])
def test_a_sampler_draws_as_many_as_it_says_where_updates_are_counted(make, said, epoch):
    loader = make(sampler=Counting(said), samples_per_update=4)
    for _ in range(epoch):
        assert len(list(loader.updates())) == loader.num_updates == 3
    with pytest.raises(
        ConfigError, match=rf"`sampler` yields \d+ indices \(\d+ that fit\) in epoch {epoch}, but"
    ):
        list(loader)


@pytest.mark.parametrize("added", [1, -1])
def test_a_dataset_that_changed_its_size_is_refused_at_the_next_epoch(make, sizes, added):
    loader = make(**sizes)
    assert_conserves([samples_of(step) for step in loader], range(37))
    loader.dataset.lengths = [*loader.dataset.lengths, 5][: 37 + added]
    with pytest.raises(
        ConfigError,
        match=f"37 entries, but the dataset has {37 + added}|has {37 + added} samples, but had 37",
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    "where", ["dataset", "collate_fn", "weigh", "one sample per index", "index, in order"]
)
@pytest.mark.parametrize("at", [0, 9])
def test_a_stray_stop_iteration_does_not_end_the_epoch(make, sizes, where, at):
    """What a DataLoader takes for its end is an error while samples are left."""
    calls = count()

    def stray(place: str) -> float:
        return next(iter(()) if place == where and next(calls) == at else iter([1.0]))

    class Strayed(Tokens):
        def __getitem__(self, index: int) -> Any:
            stray("dataset")
            return super().__getitem__(index)

        def __getitems__(self, indices: list[int]) -> list[Any]:
            found = [self[index] for index in indices][short:]
            return np.array(found) if where.startswith("index") else found  # type: ignore[return-value]

    short = where.startswith(("one", "index"))
    collated = lambda samples: stray("collate_fn") and collate(samples)  # noqa: E731
    weigh = (lambda batch: stray("weigh")) if where == "weigh" else "samples"
    loader = make(data=Strayed(LENGTHS), max_tokens=40, collate_fn=collated, weigh=weigh, **sizes)
    with pytest.raises(RuntimeError, match=where if short else "StopIteration"):
        assert all(len(step.batch["input_ids"]) == len(step.indices) for step in loader), (
            "those of another batch"
        )


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_wrong_arguments_are_refused_at_once(make, wrong, said):
    settings = dict(wrong)
    if make is planned:
        settings.pop("length_hint", None)
    with pytest.raises(ConfigError, match=said):
        next(iter(make(**settings)))


ROWS = [[-100, 5, 6], [7, 8, -100]]


@pytest.mark.parametrize(
    ("batch", "shifted", "expected"),
    [
        (
            {"labels": torch.tensor(ROWS), "input_ids": torch.tensor([[1, 2, 3], [7, 8, 9]])},
            True,
            3,
        ),
        ({"labels": np.array(ROWS)}, False, 4),
        ({"labels": ROWS}, True, 3),
        ({"labels": torch.tensor([0, 2, 1])}, True, 3),
        ({"shift_labels": torch.tensor(ROWS), "labels": torch.tensor(ROWS)}, True, 4),
        ({"labels": torch.full((2, 3), -100)}, True, 0),
        ({"labels": torch.tensor([[0.5, -100.0], [1.0, 2.0]])}, True, 4),
    ],
)
def test_label_tokens_are_those_that_are_predicted(batch, shifted, expected):
    assert weigher("tokens" if shifted else "labels")(batch, 9) == expected


def test_a_batch_without_labels_is_refused():
    message = "weigh='tokens' or 'labels' needs a field 'labels' .* this dict has none"
    weigh = weigher("tokens")
    with pytest.raises(ConfigError, match=message):
        weigh({"input_ids": torch.ones(4, 7)}, 4)


def test_a_dict_is_no_way_to_weigh():
    with pytest.raises(ConfigError, match=r"passes it to loss_scales\(update, weigh\)"):
        weigher({"intent": "samples"})


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_function_without_a_number_is_refused(weight):
    weigh = weigher(lambda batch: weight)
    message = "`weigh` must return a number from 0 to 1e\\+30, but returned"
    with pytest.raises(ConfigError, match=message):
        weigh(None, 1)
