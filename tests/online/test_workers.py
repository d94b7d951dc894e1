"""The loader with real worker processes, every kind of batch, and existing loaders taken over."""

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, RefinementCollator, TokenBudget
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.messages import pin
from dynagroup.testing import assert_resumes_exactly, run_ranks
from tests.online.helpers import Tokens, all_ids, collate, lengths_of, make_loader, used

LENGTHS = lengths_of(120, seed=3)
SPAWN = pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow)
PARTS = {"prefetch_factor": 2, "window_bytes": 700}
OPTIONS = [{"persistent_workers": True}, {"prefetch_factor": 4, "window": 4}, {"samples_per_update": 20}, PARTS, SPAWN]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_workers_give_every_sample_once(options: dict[str, Any]) -> None:
    """Also where they fetch before windows are handed out, so that blanks travel, and where they answer in parts."""

    def run(world: Any) -> Any:
        loader = make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options)
        return [list(loader) for _ in range(2)]

    by_rank = run_ranks(2, run)
    for epoch in range(2):
        assert all_ids([epochs[epoch] for epochs in by_rank]) == list(range(120))


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 30}], ids=["free", "update"])
def test_resume_with_workers(options: dict[str, Any]) -> None:
    def make(world: Any) -> Any:
        return make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options)

    assert_resumes_exactly(make, world_size=2, steps=[1, 5], indices_of=used)


class Images(torch.utils.data.Dataset):
    """Samples of 48 KB."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        return {"pixels": torch.full((3, 64, 64), float(index)), "input_ids": [index]}


def stack(samples: list[Any]) -> Any:
    return {"pixels": torch.stack([s["pixels"] for s in samples])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_answer_holds_more_than_was_asked_for(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 300 images is 15 MB; they come a megabyte at a time."""
    seen: list[int] = []
    inner = DataLoader.__iter__

    def watched(loader: Any) -> Any:
        for window in inner(loader):
            seen.append(sum(refined.batch["pixels"].nbytes for refined in window))
            yield window

    monkeypatch.setattr(DataLoader, "__iter__", watched)
    how: dict[str, Any] = {"collate_fn": stack, "window": 300, "window_bytes": 1 << 20, "weigh": "samples"}
    steps = [step.indices for step in OnlineDataLoader(Images(), TokenBudget(8), num_workers=num_workers, **how)]
    assert sorted(i for indices in steps for i in indices) == list(range(300))
    assert max(seen) <= (1 << 20) + 64 * 49152, "the first read says how large samples are"
    assert len([size for size in seen if size]) >= 4


class Counting(Tokens):
    """A dataset that reads many items at once, and knows its epoch."""

    epoch = 0

    def __getitems__(self, indices: Any) -> Any:
        return [{**self[i], "labels": torch.full((self.lengths[i],), self.epoch)} for i in indices]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_getitems_and_set_epoch_reach_persistent_workers() -> None:
    loader = make_loader(None, LENGTHS, dataset=Counting, num_workers=2, persistent_workers=True)
    for epoch in range(2):
        assert {int(v) for step in loader for v in step.batch["labels"].unique() if v >= 0} == {epoch}


class Pair(NamedTuple):
    input_ids: Any
    labels: Any


def as_pair(samples: Any) -> Any:
    return Pair(**collate(samples))


def as_user_dict(samples: Any) -> Any:
    return UserDict(collate(samples))


def test_batches_of_any_type_come_through() -> None:
    for make, kind in ((as_pair, Pair), (as_user_dict, UserDict)):
        steps = list(make_loader(None, LENGTHS, collate_fn=make, weigh="samples", num_workers=2))
        assert all(type(step.batch) is kind for step in steps)
        assert sorted(i for step in steps for i in step.indices) == list(range(120))


def test_a_loader_is_taken_over_with_its_samplers_order_and_not_changed() -> None:
    data = Tokens(LENGTHS)
    for sampler, kept in ((SequentialSampler(data), False), (RandomSampler(data), True)):
        plain = DataLoader(data, batch_size=8, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=kept)
        before = dict(vars(plain))
        loader = OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16)
        assert loader.config.shuffle is kept
        assert all_ids([list(loader)]) == list(range(120))
        assert vars(plain) == before
    weights = WeightedRandomSampler([1.0] * 60 + [0.0] * 60, 90, generator=torch.Generator().manual_seed(1))
    plain = DataLoader(Tokens(LENGTHS), batch_size=8, sampler=weights, collate_fn=collate)
    ids = [i for step in OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16) for i in used(step)]
    assert (len(ids), max(ids) < 60) == (90, True)


def test_planned_batches_that_fit_stay_those_that_grew_are_split_and_a_plain_loader_may_do_it() -> None:
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(128), shuffle=True, rank=0, world_size=1)
    planned = [list(batch) for batch in sampler]
    assert [list(step.indices) for step in make_loader(None, LENGTHS, batch_sampler=sampler)] == planned
    steps = list(make_loader(None, [2 * n for n in LENGTHS], batch_sampler=sampler))
    assert all_ids([steps]) == list(range(120))
    assert all(step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1 for step in steps)
    assert len(steps) > len(planned)
    collator = RefinementCollator(collate, TokenBudget(64))
    plain = DataLoader(IndexedDataset(Tokens(LENGTHS)), batch_sampler=sampler, collate_fn=collator, num_workers=2)
    refined = [r for window in plain for r in window]
    assert sorted(i for r in refined for i in r.indices) == list(range(120))
    assert all(r.batch["input_ids"][:, 0].tolist() == r.indices for r in refined)
    assert all(r.padded <= 64 or len(r) == 1 for r in refined)


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


@pytest.mark.parametrize("holds", [lambda p: UserDict(a=[p]), lambda p: (1, p), lambda p: Pair(p, "abc")])
def test_pinning_keeps_containers_and_changes_no_original(holds: Any) -> None:
    original = holds(Pinnable())
    before = repr(original)
    assert (pin(original), repr(original)) == (holds("pinned"), before)
