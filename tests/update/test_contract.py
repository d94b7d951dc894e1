"""The laws of loaders, written once and run against every loader: planned and online, with updates of a set size and free."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2LMHeadModel

from dynagroup import ConfigError, OnlineDataLoader, PlannedDataLoader, StateError, StepLoader, TokenBudget
from dynagroup.budget.base import Layout
from dynagroup.oom.fields import packed_borders
from dynagroup.testing import assert_conserves, run_ranks
from dynagroup.update.schedule import linear_ramp
from dynagroup.update.step import LoaderStats
from tests import models
from tests.online.helpers import Tokens, collate, collate_packed, lengths_of

pytestmark = pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone")
LENGTHS = lengths_of(37, seed=2, top=40)
COLLATE = {"padded": collate, "packed": collate_packed}
Make = Callable[..., StepLoader[Any]]


def planned(
    world: Any = None, lengths: Any = LENGTHS, *, max_tokens: int = 80, layout: Layout = "padded", **options: Any
) -> StepLoader[Any]:
    options = {"collate_fn": COLLATE[layout], **options}
    return PlannedDataLoader(Tokens(lengths), lengths, TokenBudget(max_tokens, layout=layout), world=world, **options)


def online(
    world: Any = None, lengths: Any = LENGTHS, *, max_tokens: int = 80, layout: Layout = "padded", **options: Any
) -> StepLoader[Any]:
    options = {"collate_fn": COLLATE[layout], "shuffle": True, "window": 8, **options}
    return OnlineDataLoader(Tokens(lengths), TokenBudget(max_tokens, layout=layout), world=world, **options)


LOADERS: dict[str, Make] = {"planned": planned, "online": online}
SIZES: dict[str, dict[str, Any]] = {
    "fixed": {"samples_per_update": 7},
    "ramp": {"samples_per_update": linear_ramp(3, 11, num_updates=6)},
    "free": {"accumulation": 2},
}


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest) -> Make:
    return LOADERS[request.param]


@pytest.fixture(params=SIZES)
def sizes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SIZES[request.param]


@pytest.mark.parametrize("sizes", [{"samples_per_update": 12}, {}], ids=["updates", "free"])
def test_both_loaders_cut_for_time_or_for_the_fewest_batches(sizes: dict[str, Any]) -> None:
    lengths = np.array([2000, 10, 10, 10] * 6)
    steps = {}
    for objective in ("time", "fewest"):
        how: dict[str, Any] = {"lengths": lengths, "max_tokens": 10**6, **sizes}
        both = (planned(plan={"objective": objective}, **how), online(objective=objective, **{"window": 24, **how}))
        steps[objective] = [len(list(loader)) for loader in both]
    assert steps["fewest"] == ([2, 2] if sizes else [steps["fewest"][0], 1])
    assert all(more > fewest for more, fewest in zip(steps["time"], steps["fewest"], strict=True))


def ids_in_batch(batch: Any) -> list[int]:
    borders = packed_borders(batch)
    first_tokens = batch["input_ids"][:, 0] if borders is None else batch["input_ids"][0][borders[:-1]]
    return first_tokens.tolist()


def samples_of(step: Any) -> list[int]:
    """What the batch really holds."""
    found = [] if step.idle else ids_in_batch(step.batch)
    assert step.idle or found == list(step.indices)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_by_hand(make, ranks):
    """Literal: 6 samples, updates of 3; what one rank or two get adds up to each update's labels."""
    lengths = [9, 2, 8, 3, 9, 3]

    def run(world: Any) -> list[list[Any]]:
        return list(make(world, lengths, max_tokens=18, samples_per_update=3).updates())

    by_rank = run_ranks(ranks, run)
    for parts in zip(*by_rank, strict=True):
        steps = [step for part in parts for step in part]
        drawn = [i for step in steps for i in samples_of(step)]
        assert len(drawn) == 3
        labels = sum(lengths[i] - 1 for i in drawn)  # a causal model does not predict the first
        assert all(step.weight.total == labels for step in steps)
        assert sum(step.loss_scale for step in steps) == pytest.approx(ranks)


def causal_lm() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = models.gpt2(width=8, layers=1, n_positions=64, attn_implementation="eager")
    return GPT2LMHeadModel(config).double()


def token_mean(model: Any, batch: Any) -> torch.Tensor:
    """The mean over predicted labels, in float64 (transformers' own casts to float32)."""
    ids, labels = batch["input_ids"].clamp(min=0), batch["labels"]
    places = (
        {"position_ids": batch["position_ids"]}
        if "position_ids" in batch
        else {"attention_mask": (labels != -100).long()}
    )
    logits = model(ids, **places, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if g is None else g.flatten()
                      for g, p in zip(found, model.parameters(), strict=True)])  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_one_batch_over_epochs(make, sizes, ranks):
    """Law 5 with a real causal model, token-mean loss and the default `weigh`, in every update of two epochs."""
    lengths = [max(n, 2) for n in lengths_of(24, seed=5, top=30)]
    data, model = Tokens(lengths), causal_lm()

    def run(world: Any) -> list[list[Any]]:
        loader = make(world, lengths, **sizes)
        return [update for _ in range(2) for update in loader.updates()]

    for parts in zip(*run_ranks(ranks, run), strict=True):
        steps = [step for part in parts for step in part]
        whole = gradient(model, token_mean(model, collate([data[i] for step in steps for i in samples_of(step)])))
        ours = torch.stack(
            [gradient(model, token_mean(model, s.batch) * s.loss_scale) for s in steps if s.loss_scale]
        ).sum(0)
        assert (ours / ranks - whole).norm() <= 1e-10 * whole.norm()


@pytest.mark.parametrize("unit", [1e-10, 1e-5, 0.3, 1.0, 6e8, 1e12])
def test_weights_of_any_size_travel_as_they_are(make, sizes, unit):
    def run(world: Any) -> list[list[Any]]:
        return list(make(world, weigh=lambda batch: unit * batch["input_ids"].shape[0], **sizes).updates())

    for parts in zip(*run_ranks(2, run), strict=True):
        steps = [step for part in parts for step in part]
        samples = sum(step.samples.local for step in steps)
        for step in steps:
            assert step.weight.total == pytest.approx(unit * samples, rel=1e-12)
            assert step.loss_scale == pytest.approx(2 * step.samples.local / samples, rel=1e-12)


def test_a_batch_without_labels_needs_another_weight(make):
    loader = make(collate_fn=lambda rows: {"input_ids": collate(rows)["input_ids"]})
    with pytest.raises(ConfigError, match="weigh='tokens' counts a batch's 'labels'.*pass weigh='samples'"):
        next(iter(loader))


# Epochs and iterations.


def epochs_of(loader: StepLoader[Any], number: int) -> list[list[list[int]]]:
    """The samples of each update; of an online loader without a set size, whose later epochs are planned by the lengths that
    it has seen by then, all that is sure: every sample."""
    learns = isinstance(loader, OnlineDataLoader) and loader.sizes is None
    found = [[sorted(i for s in update for i in samples_of(s)) for update in loader.updates()] for _ in range(number)]
    return [[sorted(sum(epoch, []))] for epoch in found] if learns else found


def draws(make: Make, sizes: dict[str, Any]) -> bool:
    """Whether epochs differ in what :func:`epochs_of` says."""
    return make is planned or "samples_per_update" in sizes


def test_epochs_differ_are_numbered_and_come_again(make, sizes):
    first = epochs_of(make(**sizes), 3)
    assert (first[0] != first[1] != first[2]) == draws(make, sizes)
    loader = make(**sizes)
    assert loader.epoch == 0
    loader.set_epoch(2)
    assert loader.epoch == 2
    for step in loader:
        assert loader.epoch == 2, "running"
        loader.set_epoch(0)  # of the next iteration
        samples_of(step)
    assert loader.epoch == 0
    assert epochs_of(loader, 1) == first[:1]
    assert loader.epoch == 1
    loader.set_epoch(2)
    loader.set_epoch(2)
    assert epochs_of(loader, 1) == first[2:]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1"])
def test_an_epoch_is_a_number(make, wrong):
    with pytest.raises(ConfigError, match="`epoch` must be an int of at least 0"):
        make().set_epoch(wrong)


def test_another_iteration_ends_the_one_before(make, sizes):
    loader = make(**sizes)
    old = iter(loader)
    first = samples_of(next(old))
    loader.restart_epoch()
    again = [samples_of(step) for step in loader]
    assert again[0] == first
    assert_conserves(again, range(37))
    with pytest.raises(ConfigError, match="this iteration of the loader has ended: another one was begun"):
        next(old)


def test_an_epoch_left_early_is_followed_by_the_next(make, sizes):
    expected = epochs_of(make(**sizes), 2)
    loader = make(**sizes)
    for _ in loader:
        break
    assert loader.epoch == 1
    assert epochs_of(loader, 1) == expected[1:]


def test_updates_are_the_same_steps(make, sizes):
    steps = [samples_of(step) for step in make(**sizes)]
    updates = list(make(**sizes).updates())
    assert [samples_of(step) for update in updates for step in update] == steps
    assert all([step.ends_update for step in update] == [False] * (len(update) - 1) + [True] for update in updates)


# Books.


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("name", ["fixed", "ramp"])
def test_updates_are_counted_exactly(make, name, drop_last, ranks):
    def run(world: Any) -> None:
        loader = make(world, **SIZES[name], drop_last=drop_last)
        announced = [loader.num_updates_in(epoch) for epoch in range(3)]
        done = samples = 0
        for epoch in range(3):
            assert loader.num_updates == announced[epoch]
            for update in loader.updates():
                done, samples = done + 1, samples + int(update[0].samples.total)
                cursor = loader.cursor
                assert (cursor.epoch, cursor.update, cursor.samples_seen) == (epoch, done, samples)
                assert loader.samples_after(done) == samples
                assert loader.updates_until(samples) == done
                assert loader.updates_until(samples - int(update[0].samples.total) + 1) == done
            assert done == sum(announced[: epoch + 1])
        assert (loader.stats.updates, loader.stats.update_samples) == (done, samples)

    run_ranks(ranks, run)


def test_a_planned_loader_has_a_length_and_an_online_one_says_what_it_has_instead(sizes):
    loader = planned(**sizes)
    for _ in range(2):
        assert len(loader) == len(loader) == len(list(loader))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="num_updates"):
        len(online(**sizes))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="samples_per_update"):
        _ = online().num_updates


@pytest.mark.parametrize("lengths", [[], [3, 4]])
def test_what_is_never_reached_is_an_error(make, lengths):
    loader = make(None, lengths, samples_per_update=5, drop_last=True)
    assert loader.num_updates == 0
    assert list(loader) == []
    with pytest.raises(ConfigError, match="epoch 0 has no update"):
        loader.updates_until(1)


def counts_of(stats: LoaderStats) -> dict[str, Any]:
    """All but times, which are no whole numbers and add up to rounding only."""
    names = [f.name for f in fields(stats) if f.name != "times" and not f.name.endswith("_s")]
    return {name: getattr(stats, name) for name in names}


def test_statistics_add_up_subtract_and_merge(make, sizes):
    def run(world: Any) -> tuple[LoaderStats, LoaderStats, LoaderStats]:
        loader = make(world, **sizes)
        first = list(loader)
        before = loader.stats.copy()
        second = list(loader)
        since = loader.stats - before
        for found, steps in ((before, first), (since, second)):
            used = [step for step in steps if not step.idle]
            assert (found.steps, found.batches, found.idle_steps) == (len(steps), len(used), len(steps) - len(used))
            assert found.samples == sum(step.samples.local for step in steps)
            assert found.updates == sum(step.ends_update for step in steps)
            assert found.largest_batch == max(len(step.indices) for step in used)
            assert found.smallest_batch == min(len(step.indices) for step in used)
            assert found.real_tokens == sum(LENGTHS[i] for step in used for i in step.indices)
            assert found.padded_tokens == sum(step.batch["input_ids"].numel() for step in used)
        assert counts_of(before + since) == counts_of(loader.stats)
        return before, since, loader.stats.merged(world)

    by_rank = run_ranks(2, run)
    merged = by_rank[0][2]
    assert merged.samples == 2 * 37
    assert merged.real_tokens == 2 * sum(LENGTHS)
    assert merged.batch_sizes == sum((s.batch_sizes for run in by_rank for s in run[:2]), Counter())
    assert 0 <= merged.padding < 1


def test_books_go_on_after_resuming_on_other_ranks(make, sizes):
    """Updates and samples done are facts: they are not counted again by the new number of ranks."""

    def run(world: Any) -> Any:
        loader = make(world, **sizes)
        for _ in range(3):
            list(loader)
        updates = loader.updates()
        done = [next(updates) for _ in range(2)]
        return loader.state_dict(), loader.cursor, len(done)

    states = run_ranks(1, run)
    _, cursor, _ = states[0]

    def go_on(world: Any) -> None:
        loader = make(world, **sizes)
        loader.load_state_dict([state for state, *_ in states])
        here = loader.cursor
        assert (here.epoch, here.update, here.samples_used, here.samples_seen) == (
            3, cursor.update, cursor.samples_used, cursor.samples_seen
        )  # fmt: skip
        assert loader.epoch == 3
        rest = [int(update[0].samples.total) for update in loader.updates()]
        after = loader.cursor
        assert after.update == cursor.update + len(rest)
        assert after.samples_seen == cursor.samples_seen + sum(rest) == 4 * 37
        list(loader)
        assert loader.cursor.samples_seen == 5 * 37

    run_ranks(3, go_on)


def test_a_state_at_an_epochs_end_goes_on_with_the_next(make, sizes):
    first = make(**sizes)
    expected = epochs_of(first, 1)
    again = make(**sizes)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.epoch == 1
    found = epochs_of(again, 1)
    assert found == epochs_of(first, 1)
    assert (found != expected) == draws(make, sizes)


def test_a_loaded_place_is_kept_by_its_epoch_and_forgotten_by_others(make, sizes):
    loader = make(**sizes)
    steps = iter(loader)
    used = [samples_of(next(steps)) for _ in range(3)]
    state = loader.state_dict()
    whole = [samples_of(step) for step in make(**sizes)]
    again = make(**sizes)
    again.load_state_dict(state)
    again.set_epoch(0)
    assert again.epoch == 0
    assert used + [samples_of(step) for step in again] == whole
    again.load_state_dict(state)
    again.restart_epoch()
    assert [samples_of(step) for step in again] == whole


# States that do not belong, or are not whole.


def facts_of(loader: StepLoader[Any]) -> Any:
    return copy.deepcopy((loader.state_dict(), loader.epoch, loader.cursor, loader.budget.fingerprint))


def refuses(loader: StepLoader[Any], state: Any, match: str | None = None) -> None:
    before = facts_of(loader)
    with pytest.raises(StateError, match=match):
        loader.load_state_dict(state)
    assert facts_of(loader) == before, "a refused state changes nothing"


def test_states_of_the_other_loader_are_refused(sizes):
    refuses(planned(**sizes), online(**sizes).state_dict(), "'OnlineDataLoader', not of PlannedDataLoader")
    refuses(online(**sizes), planned(**sizes).state_dict(), "'PlannedDataLoader', not of OnlineDataLoader")


class Counting:
    """A sampler that gives 10, 15, 20 ... indices from epoch to epoch, or always says another number than it gives."""

    def __init__(self, said: int | None = None) -> None:
        self.said, self.epoch = said, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.said is None else 0

    def __len__(self) -> int:
        return 10 + 5 * self.epoch if self.said is None else self.said

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 + 5 * self.epoch))


@pytest.mark.parametrize(("said", "epoch"), [(8, 0), (12, 0), (None, 1)])
def test_a_sampler_draws_as_many_as_it_says_where_updates_are_counted(make, said, epoch):
    options = {"shuffle": False} if make is online else {}
    loader = make(sampler=Counting(said), samples_per_update=4, **options)
    for _ in range(epoch):
        assert len(list(loader.updates())) == loader.num_updates == 3
    with pytest.raises(ConfigError, match=rf"`sampler` gives \d+ indices in epoch {epoch}, but"):
        list(loader)


@pytest.mark.parametrize("where", ["dataset", "collate_fn", "weigh"])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_stray_stop_iteration_does_not_end_the_epoch(make, sizes, where, at):
    """What a DataLoader takes for its end is an error while samples are left."""
    calls = iter(range(at))

    def strayed(batch: Any) -> float:
        next(calls)
        return 1.0

    class Strayed(Tokens):
        def __getitem__(self, index: int) -> Any:
            if where == "dataset":
                strayed(index)
            return super().__getitem__(index)

    def collated(samples: list[Any]) -> Any:
        if where == "collate_fn":
            strayed(samples)
        return collate(samples)

    options: dict[str, Any] = {"collate_fn": collated, "weigh": strayed if where == "weigh" else "samples", **sizes}
    budget = TokenBudget(40)
    if make is planned:
        loader: StepLoader[Any] = PlannedDataLoader(Strayed(LENGTHS), LENGTHS, budget, **options)
    else:
        loader = OnlineDataLoader(Strayed(LENGTHS), budget, window=8, **options)
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)
