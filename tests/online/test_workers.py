"""The loader with real worker processes, every kind of dataset and batch, and existing loaders taken over."""

from __future__ import annotations

import json
from collections import UserDict
from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from dynagroup import ConfigError, LengthAwareBatchSampler, OnlineDataLoader, StateError, TokenBudget
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.datasets import IndexedDataset
from dynagroup.testing import assert_resumes_exactly, run_ranks

from .helpers import Stream, Tokens, all_ids, collate, ids_in, lengths_of, make_loader, used

LENGTHS = lengths_of(120, seed=3)


def every_sample_once(loader, epochs=2):
    for _ in range(epochs):
        assert all_ids([list(loader)]) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_start_methods(method):
    every_sample_once(make_loader(None, LENGTHS, num_workers=2, multiprocessing_context=method, shuffle=True))


@pytest.mark.parametrize(
    "options", [{"persistent_workers": True}, {"prefetch_factor": 3}, {"in_order": False}], ids=str
)
def test_worker_options(options):
    every_sample_once(make_loader(None, LENGTHS, num_workers=2, shuffle=True, **options))


def test_update_mode_with_workers_that_answer_out_of_order():
    def run(world):
        loader = make_loader(world, LENGTHS, num_workers=2, samples_per_update=20, in_order=False)
        return [[used(s) for s in update] for update in loader.updates()]

    results = run_ranks(2, run)
    updates = [sorted(i for rank in results for step in rank[k] for i in step) for k in range(6)]
    assert updates == [list(range(k, k + 20)) for k in range(0, 120, 20)]


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 30}], ids=["free", "update"])
def test_resume_with_workers(options):
    assert_resumes_exactly(
        lambda world: make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options),
        world_size=2,
        steps=[1, 5],
        indices_of=used,
    )


def test_workers_fetch_before_windows_are_handed_out():
    """More prefetching than windows: blanks travel, and no sample is lost."""

    def run(world):
        return list(make_loader(world, LENGTHS[:40], num_workers=2, prefetch_factor=4, window=4))

    assert all_ids(run_ranks(2, run)) == list(range(40))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_streams_keep_their_own_sharding(num_workers, accumulation):
    def run(world):
        data = Stream(LENGTHS, world.rank, world.size)
        loader = OnlineDataLoader(
            data,
            TokenBudget(128),
            collate_fn=collate,
            window=16,
            world=world,
            num_workers=num_workers,
            accumulation=accumulation,
        )
        return [list(loader) for _ in range(2)]

    by_rank = run_ranks(2, run)
    for epoch in range(2):
        steps = [by_rank[rank][epoch] for rank in range(2)]
        assert sorted(i for rank in steps for step in rank for i in ids_in(step)) == list(range(120))
        arrivals = [i for rank in steps for step in rank if not step.idle for i in step.indices]
        assert len(set(arrivals)) == 120
        assert len({len(rank) for rank in steps}) == 1


def test_a_short_stream_idles_while_a_long_one_goes_on():
    def run(world):
        data = Stream(LENGTHS[100:] if world.rank else LENGTHS[:100])  # ranks that begin alike are told of
        loader = OnlineDataLoader(data, TokenBudget(128), collate_fn=collate, window=16, world=world)
        return [(step.idle, step.loss_scale) for step in loader]

    long, short = run_ranks(2, run)
    assert len(long) == len(short)
    assert not any(idle for idle, _ in long)
    assert any(idle and scale == 0.0 for idle, scale in short)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_resume_exactly_once(num_workers):
    def make():
        return OnlineDataLoader(
            Stream(LENGTHS),
            TokenBudget(128),
            collate_fn=collate,
            window=16,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    for stop in (1, 6, 9):
        loader, before = make(), []
        items = iter(loader)
        for _ in range(stop):
            before += ids_in(next(items))
        state = json.loads(json.dumps(loader.state_dict()))
        loader = make()
        loader.load_state_dict(state)
        rest = [i for step in loader for i in ids_in(step)]
        assert sorted(before + rest) == list(range(120))
        assert sorted(i for step in loader for i in ids_in(step)) == list(range(120))


def hf_stream(num_shards=4):
    from datasets import Dataset

    rows = {"input_ids": [[i] * n for i, n in enumerate(LENGTHS)], "labels": [[i] * n for i, n in enumerate(LENGTHS)]}
    return Dataset.from_dict(rows).to_iterable_dataset(num_shards=num_shards)


def collate_lists(samples):
    return collate([{k: torch.tensor(v) for k, v in s.items()} for s in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_streams_shuffle_and_resume(num_workers):
    def make():
        data = hf_stream().shuffle(seed=1, buffer_size=10)
        return OnlineDataLoader(data, TokenBudget(128), collate_fn=collate_lists, window=16, num_workers=num_workers)

    whole = [[i for step in loader for i in ids_in(step)] for loader in [make()] for _ in range(1)][0]
    assert sorted(whole) == list(range(120))
    plain = OnlineDataLoader(
        hf_stream(), TokenBudget(128), collate_fn=collate_lists, window=16, num_workers=num_workers
    )
    items, before = iter(plain), []
    for _ in range(5):
        before += ids_in(next(items))
    state = json.loads(json.dumps(plain.state_dict()))
    again = OnlineDataLoader(
        hf_stream(), TokenBudget(128), collate_fn=collate_lists, window=16, num_workers=num_workers
    )
    again.load_state_dict(state)
    assert sorted(before + [i for step in again for i in ids_in(step)]) == list(range(120))


def test_hugging_face_epochs_differ_in_persistent_workers():
    data = hf_stream().shuffle(seed=1, buffer_size=50)
    loader = OnlineDataLoader(
        data, TokenBudget(128), collate_fn=collate_lists, window=16, num_workers=2, persistent_workers=True
    )
    first, second = ([i for step in loader for i in ids_in(step)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


class Counting(Tokens):
    """A dataset that reads many items at once, and knows its epoch."""

    epoch = 0

    def __getitems__(self, indices):
        return [{**self[i], "labels": torch.full((self.lengths[i],), self.epoch)} for i in indices]

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_getitems_and_set_epoch_reach_persistent_workers():
    loader = make_loader(None, LENGTHS, dataset=Counting, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        labels = {int(v) for step in loader for v in step.batch["labels"].unique() if v >= 0}
        assert labels == {epoch}


class Pair(NamedTuple):
    input_ids: torch.Tensor
    labels: torch.Tensor


class Custom:
    def __init__(self, data):
        self.data, self.pinned = data, False

    def pin_memory(self):
        self.pinned = True
        return self


def as_pair(samples):
    return Pair(**collate(samples))


def as_custom(samples):
    return Custom(collate(samples))


def as_user_dict(samples):
    return UserDict(collate(samples))


def as_encoding(samples):
    from transformers import BatchEncoding

    return BatchEncoding(collate(samples))


@pytest.mark.parametrize(("make", "kind"), [(as_pair, Pair), (as_custom, Custom), (as_user_dict, UserDict)])
def test_batches_of_any_type_come_through(make, kind):
    loader = make_loader(None, LENGTHS, collate_fn=make, weigh="samples", num_workers=2)
    steps = list(loader)
    assert all(type(step.batch) is kind for step in steps)
    assert sorted(i for step in steps for i in step.indices) == list(range(120))
    assert all(step.pin_memory() is not step for step in steps[:1] if kind is Custom)


def test_batch_encodings_keep_their_type_and_weigh_by_tokens():
    from transformers import BatchEncoding

    steps = list(make_loader(None, LENGTHS, collate_fn=as_encoding))
    assert all(isinstance(step.batch, BatchEncoding) for step in steps)
    assert sum(step.weight.local for step in steps) == sum(n - 1 for n in LENGTHS)


def test_a_loader_is_taken_over_and_not_changed():
    data = Tokens(LENGTHS)
    for sampler, kept in ((SequentialSampler(data), False), (RandomSampler(data), True)):
        plain = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate, num_workers=2)
        before = dict(vars(plain))
        loader = OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16)
        assert loader.config.shuffle is kept
        every_sample_once(loader, epochs=1)
        assert vars(plain) == before
        assert plain.dataset is data


def test_a_loader_with_a_sampler_of_its_own_keeps_the_order():
    weights = WeightedRandomSampler([1.0] * 60 + [0.0] * 60, 90, generator=torch.Generator().manual_seed(1))
    loader = OnlineDataLoader.from_dataloader(
        DataLoader(Tokens(LENGTHS), batch_size=8, sampler=weights, collate_fn=collate), TokenBudget(128), window=16
    )
    ids = [i for step in loader for i in used(step)]
    assert len(ids) == 90
    assert max(ids) < 60


def test_drop_last_is_not_taken_over():
    plain = DataLoader(Tokens(LENGTHS), batch_size=16, drop_last=True, collate_fn=collate)
    with pytest.warns(UserWarning, match="every sample is used"):
        every_sample_once(OnlineDataLoader.from_dataloader(plain, TokenBudget(128)), epochs=1)


def test_planned_batches_that_fit_stay_untouched():
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(128), shuffle=True, rank=0, world_size=1)
    planned = [list(batch) for batch in sampler]
    loader = OnlineDataLoader(Tokens(LENGTHS), TokenBudget(128), collate_fn=collate, batch_sampler=sampler)
    assert [list(step.indices) for step in loader] == planned


def test_planned_batches_that_grew_are_split():
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(128), shuffle=True, rank=0, world_size=1)
    loader = OnlineDataLoader(
        Tokens([2 * n for n in LENGTHS]), TokenBudget(128), collate_fn=collate, batch_sampler=sampler
    )
    steps = list(loader)
    assert all_ids([steps]) == list(range(120))
    assert all(step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1 for step in steps)
    assert loader.stats.steps > len(sampler.plan.rows)


def test_the_collator_works_in_a_plain_loader():
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(128), rank=0, world_size=1)
    plain = DataLoader(
        IndexedDataset(Tokens(LENGTHS)),
        batch_sampler=sampler,
        collate_fn=RefinementCollator(collate, TokenBudget(64)),
        num_workers=2,
    )
    refined = [r for window in plain for r in window]
    assert sorted(i for r in refined for i in r.indices) == list(range(120))
    assert all(r.batch["input_ids"][:, 0].tolist() == r.indices for r in refined)
    assert all(r.padded <= 64 or len(r) == 1 for r in refined)


def test_stateful_dataloader_style_state_survives_json_between_processes_settings():
    loader = make_loader(None, LENGTHS, shuffle=True)
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    other = make_loader(None, LENGTHS, shuffle=True, num_workers=2, persistent_workers=True)
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert len([i for s in other for i in used(s)]) == 120 - state["cursor"]["samples_used"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"seed": 5}, "seed: 0 then, 5 now"),
        ({"window": 8}, "window: 16 then, 8 now"),
        ({"max_tokens": 64}, "budget"),
        ({"samples_per_update": 9}, "samples_per_update"),
    ],
)
def test_a_strange_state_is_refused(change, match):
    loader = make_loader(None, LENGTHS)
    next(iter(loader))
    with pytest.raises(StateError, match=match):
        make_loader(None, LENGTHS, **change).load_state_dict(loader.state_dict())


def test_damaged_and_incomplete_states_are_refused():
    def run(world):
        loader = make_loader(world, LENGTHS)
        next(iter(loader))
        return loader.state_dict()

    states = run_ranks(2, run)
    loader = make_loader(None, LENGTHS)
    with pytest.raises(StateError, match="list of all ranks' states"):
        loader.load_state_dict(states[0])
    with pytest.raises(StateError, match="ranks"):
        loader.load_state_dict([states[0], states[0]])
    with pytest.raises(StateError, match="no state of OnlineDataLoader"):
        loader.load_state_dict({"epoch": 3})
    with pytest.raises(StateError, match="version"):
        loader.load_state_dict({**states[0], "version": 99})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"window": 0}, "`window`"),
        ({"accumulation": 2, "samples_per_update": 8}, "exclude each other"),
        ({"shuffle": True, "sampler": [0]}, "exclude each other"),
        ({"batch_size": 4}, "`batch_size` is not an argument"),
        ({"uneven": "pad"}, "`uneven`"),
        ({"uneven": "stop", "samples_per_update": 8}, "drop_last"),
        ({"weigh": "loss"}, "`weigh`"),
        ({"length_hint": [1.0]}, "`length_hint`"),
        ({"sampler": torch.utils.data.DistributedSampler(range(120), num_replicas=2, rank=0)}, "divides its indices"),
        ({"samples_per_update": 4, "batch_sampler": [[0]]}, "no `batch_sampler`"),
    ],
)
def test_wrong_arguments_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        make_loader(None, LENGTHS, **options)


def test_a_free_running_loader_has_no_length():
    with pytest.raises(TypeError, match="samples_per_update"):
        len(make_loader(None, LENGTHS))


def test_padded_samples_are_measured_by_their_mask():
    from dynagroup.online.collator import measure_sample

    with pytest.warns(UserWarning, match="samples come padded"):
        assert (
            measure_sample({"input_ids": torch.zeros(8), "attention_mask": torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])}) == 3
        )
    with pytest.raises(ConfigError, match="length_of"):
        measure_sample({"pixels": 1})
