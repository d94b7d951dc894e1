"""Promises to the user that were once broken: what is refused, when, and what goes on by itself."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dynagroup import AlignmentError, ConfigError, MemoryBudget, OnlineDataLoader, StateError, TokenBudget
from dynagroup.memory import PaddedTokens
from dynagroup.online.collator import RefinementCollator
from dynagroup.testing import run_ranks

from .helpers import Tokens, collate, ids_in, lengths_of, make_loader, used

LENGTHS = lengths_of(60, seed=3)


def test_a_length_beyond_int32_is_refused():
    """It would wrap to a small number, and fit."""
    collator = RefinementCollator(list, TokenBudget(100), length_of=lambda sample: sample, weigh="samples")
    with pytest.raises(ConfigError, match=f"sample 1 has {2**31} units"):
        collator([3, 2**31])
    assert [r.real for r in collator([2**31 - 1])] == [2**31 - 1]


def test_a_budget_without_a_limit_is_refused_at_once():
    data = Tokens(LENGTHS)
    for budget in (MemoryBudget(2, model=PaddedTokens()), TokenBudget(900) & MemoryBudget(2, model=PaddedTokens())):
        with pytest.raises(ConfigError, match="longest=tokens of the longest sample"):
            OnlineDataLoader(data, budget, collate_fn=collate)
    known = MemoryBudget(2, longest=64, model=PaddedTokens())
    assert sum(len(step.indices) for step in OnlineDataLoader(data, known, collate_fn=collate)) == 60


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_an_iterator_that_is_used_up_after_an_epoch_is_refused(name):
    rows = [[0, 1], [2]] if name == "batch_sampler" else [0, 1, 2]
    with pytest.raises(ConfigError, match=f"`{name}` is a list_iterator.*used up after one epoch"):
        make_loader(None, LENGTHS, **{name: iter(rows)})
    loader = make_loader(None, LENGTHS, **{name: rows})
    assert [sorted(i for step in loader for i in used(step)) for _ in range(2)] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("name", ["seed", "window", "accumulation", "samples_per_update", "shuffle"])
def test_numpy_numbers_are_settings_like_others(name):
    value = np.bool_(True) if name == "shuffle" else np.int64(3)
    loader = make_loader(None, LENGTHS, **{name: value})
    next(iter(loader))
    json.dumps(loader.state_dict())


@pytest.mark.parametrize("options", [{"drop_last": True, "samples_per_update": 16}, {"sampler": list(range(0, 60, 2))}])
def test_lengths_of_the_samples_in_use_are_enough(options):
    """In a fixed order the last samples never come: the others' lengths plan the next epoch all the same."""

    def run(world):
        loader = make_loader(world, LENGTHS, **options)
        first, second = (list(loader) for _ in range(2))
        return [sum(step.batch["input_ids"].numel() for step in steps if not step.idle) for steps in (first, second)]

    padded = np.sum(run_ranks(2, run), axis=0)
    assert padded[1] < padded[0], "batches of known lengths are matched"


@pytest.mark.parametrize("hinted", [False, True])
def test_a_checkpoint_after_the_last_step_resumes_on_other_ranks(hinted):
    """Lengths known, or hinted: nothing remains of the epoch, and the next is whole."""

    def first(world, stop):
        loader = make_loader(world, LENGTHS, shuffle=True, **({"length_hint": LENGTHS} if hinted else {}))
        if not hinted:
            list(loader)
        for number, _ in enumerate(loader):
            if number == stop:
                return json.loads(json.dumps(loader.state_dict()))
        return number

    def rest(world, states):
        loader = make_loader(world, LENGTHS, shuffle=True, **({"length_hint": LENGTHS} if hinted else {}))
        loader.load_state_dict(states)
        return [[i for step in loader for i in used(step)] for _ in range(2)]

    last = run_ranks(2, lambda world: first(world, None))[0]
    states = run_ranks(2, lambda world: first(world, last))
    for size in (1, 3):
        epochs = run_ranks(size, lambda world: rest(world, states))
        counts = [sorted(i for rank in epochs for i in rank[number]) for number in range(2)]
        assert counts[0] in ([], list(range(60)))
        assert counts[1] == list(range(60))


class Short(torch.utils.data.IterableDataset):
    """A stream whose ranks have differently many samples."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        for index in range(*(info.id, len(self.lengths), info.num_workers) if info else (len(self.lengths),)):
            ids = torch.full((self.lengths[index],), index)
            yield {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumes_while_a_rank_idles(num_workers):
    def make(world):
        data = Short(LENGTHS[: 6 if world.rank else 60])
        return make_loader(world, data, dataset=lambda data: data, window=8, num_workers=num_workers)

    whole = run_ranks(2, lambda world: [ids_in(step) for step in make(world)])
    stops = range(len(whole[0])) if not num_workers else (len(whole[0]) - 2,)

    def first(world, stop):
        loader, came = make(world), []
        steps = iter(loader)
        for _ in range(stop):
            came += ids_in(next(steps))
        return came, json.loads(json.dumps(loader.state_dict()))

    def rest(world, states):
        loader = make(world)
        loader.load_state_dict(states[world.rank])
        return [i for step in loader for i in ids_in(step)]

    for stop in stops:
        came = run_ranks(2, lambda world, stop=stop: first(world, stop))
        after = run_ranks(2, lambda world, came=came: rest(world, [state for _, state in came]))
        for rank, count in ((0, 60), (1, 6)):
            assert sorted(came[rank][0] + after[rank]) == list(range(count)), f"stopped after {stop}"


class Seeded:
    """A sampler that a run may give another seed."""

    def __init__(self, seed, batches=False):
        self.seed, self.batches, self.epoch = seed, batches, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 60

    def __iter__(self):
        drawn = np.random.default_rng((self.seed, self.epoch)).permutation(60).tolist()
        return iter([drawn[k : k + 4] for k in range(0, 60, 4)] if self.batches else drawn)


OTHER = {
    "sampler": (lambda seed: {"sampler": Seeded(seed)}, "`sampler` gives other indices in epoch 1"),
    "batch_sampler": (
        lambda seed: {"batch_sampler": Seeded(seed, batches=True)},
        "`batch_sampler` gives other indices",
    ),
    "length_hint": (lambda seed: {"length_hint": [seed + n for n in LENGTHS]}, "length_hint: .* then, .* now"),
    "weigh": (lambda seed: {"weigh": lambda batch: float(seed + 1)}, "weigh: .* then, .* now"),
    "schedule": (lambda seed: {"samples_per_update": lambda update, current: 8 + seed}, "samples_per_update: .* then"),
    "oversize": (lambda seed: {"oversize": ("alone", "error")[seed]}, "oversize: 'alone' then, 'error' now"),
    "objective": (lambda seed: {"objective": ("time", "fewest")[seed]}, "objective: 'time' then, 'fewest' now"),
    "window_bytes": (lambda seed: {"window_bytes": (None, 900)[seed]}, "window_bytes: None then, 900 now"),
}


@pytest.mark.parametrize(("options", "said"), OTHER.values(), ids=OTHER)
def test_a_state_of_another_order_is_refused(options, said):
    """Taken over, it would lose samples and repeat others."""
    loader = make_loader(None, LENGTHS, **options(0))
    loader.set_epoch(1)
    steps, came = iter(loader), []
    for _ in range(3):
        came += used(next(steps))
    state = json.loads(json.dumps(loader.state_dict()))
    other = make_loader(None, LENGTHS, **options(1))
    with pytest.raises(StateError, match=said):
        other.load_state_dict(state)
    assert other.epoch == 0
    same = make_loader(None, LENGTHS, **options(0))
    same.load_state_dict(state)
    assert sorted(came + [i for step in same for i in used(step)]) == list(range(60))


def test_a_rank_takes_no_other_ranks_state():
    states = run_ranks(2, lambda world: _after_one_step(make_loader(world, LENGTHS)))

    def load(world):
        with pytest.raises(StateError, match=f"the state of rank {1 - world.rank}, and this is rank {world.rank}"):
            make_loader(world, LENGTHS).load_state_dict(states[1 - world.rank])

    run_ranks(2, load)


def _after_one_step(loader):
    next(iter(loader))
    return loader.state_dict()


def test_a_rank_that_cannot_load_again_what_it_had_tells_the_others():
    """Also where the epoch's last steps were agreed, so that resumed ranks ask each other whether that is still the end."""
    states = run_ranks(2, lambda world: _after_steps(make_loader(world, LENGTHS), 1))
    assert states[0]["running"]["ended"]

    class Gone(Tokens):
        def __getitem__(self, index):
            raise OSError("the disk is gone")

    def load(world):
        loader = make_loader(world, LENGTHS, dataset=Gone if world.rank else Tokens)
        loader.load_state_dict(states[world.rank])
        with pytest.raises(RuntimeError if world.rank else AlignmentError, match="the disk is gone"):
            list(loader)

    run_ranks(2, load)


def _after_steps(loader, count):
    steps = iter(loader)
    for _ in range(count):
        next(steps)
    return loader.state_dict()


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 16}])
def test_of_an_epoch_that_is_begun_anew_nothing_is_used(options):
    loader = make_loader(None, LENGTHS, **options)
    steps = iter(loader)
    while not next(steps).ends_update:
        pass
    seen = loader.cursor.samples_seen
    assert (loader.cursor.samples_used, seen > 0) == (seen, True)
    back = make_loader(None, LENGTHS, **options)
    back.load_state_dict(loader.state_dict())
    back.restart_epoch()
    assert back.cursor.samples_used == 0
    resumed = make_loader(None, LENGTHS, **options)
    resumed.load_state_dict(back.state_dict())
    assert sorted(i for step in resumed for i in used(step)) == list(range(60))
    assert options or resumed.cursor.samples_seen == seen + 60
    resumed.set_epoch(0)
    resumed.load_state_dict(resumed.state_dict())
    assert (resumed.epoch, resumed.cursor.samples_used) == (0, 0)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", ["length_of", "weigh", "collate_fn"])
def test_errors_of_own_functions_come_with_what_they_were_asked_about(name, workers):
    """A StopIteration would end the iteration, and leave a message about something else."""
    loader = make_loader(None, LENGTHS, **{name: stop_iteration, "num_workers": workers})
    with pytest.raises(
        RuntimeError, match=rf"{name} failed on (sample 0|the batch of .*indices \[).*StopIteration: no more"
    ):
        list(loader)


def stop_iteration(_asked):
    raise StopIteration("no more")
