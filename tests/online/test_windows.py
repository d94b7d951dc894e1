"""Windows that are handed over in parts: bounded by bytes, in one order, resumed anywhere."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.online.datasets import IndexedDataset, sample_bytes
from dynagroup.online.messages import Request
from dynagroup.online.workers import Workers
from dynagroup.testing import assert_resumes_exactly, run_ranks

from .helpers import Stream, all_ids, collate, ids_in, lengths_of, make_loader, used

LENGTHS = lengths_of(150, seed=3)


class Images(torch.utils.data.Dataset):
    """Samples of 48 KB; counts what is held at once."""

    def __len__(self):
        return 300

    def __getitem__(self, index):
        return {"pixels": torch.full((3, 64, 64), float(index)), "input_ids": [index]}


def stack(samples):
    return {"pixels": torch.stack([s["pixels"] for s in samples])}


def test_a_request_is_answered_as_far_as_its_bytes_go():
    def answer(count, **asked):
        request = Request(np.arange(count), number=0, indices=range(count), **asked)
        return IndexedDataset(Images()).__getitems__(request)

    answered = answer(300, max_bytes=100 * 49152)
    assert 100 <= len(answered.samples) <= 101
    assert len(answered.request) == len(answered.samples)
    answered = answer(300, groups=(70, 70, 160), costs=(70, 70, 160), max_bytes=100 * 49152)
    assert (answered.request.groups, answered.request.costs, len(answered.samples)) == ((70, 70), (70, 70), 140)
    assert len(answer(2, max_bytes=1).samples) == 2, "read at once"
    assert sample_bytes(Images()[0]) == 3 * 64 * 64 * 4 + 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_answer_holds_more_than_was_asked_for(num_workers, monkeypatch):
    """A window of 300 images is 15 MB; they come a megabyte at a time."""
    seen = []
    loader = OnlineDataLoader(
        Images(),
        TokenBudget(8),
        collate_fn=stack,
        window=300,
        window_bytes=1 << 20,
        weigh="samples",
        num_workers=num_workers,
    )
    steps, taken = [], Workers.open_map

    def watched(workers):
        for window in taken(workers):
            seen.append(sum(refined.batch["pixels"].nbytes for refined in window))
            yield window

    monkeypatch.setattr(Workers, "open_map", watched)
    for step in loader:
        steps += step.batch["pixels"][:, 0, 0, 0].tolist()
    assert sorted(steps) == list(range(300))
    assert max(seen) <= (1 << 20) + 64 * 49152, "the first read says how large samples are"
    assert len([size for size in seen if size]) >= 4


@pytest.mark.parametrize("max_bytes", [1, 700, 5000])
@pytest.mark.parametrize(
    "options", [{}, {"length_hint": LENGTHS}, {"samples_per_update": 32}], ids=["free", "hint", "update"]
)
def test_parts_keep_every_law_of_resuming(options, max_bytes):
    def make(world):
        return make_loader(world, LENGTHS, shuffle=True, window_bytes=max_bytes, window=80, **options)

    assert_resumes_exactly(make, world_size=2, indices_of=used, steps=[1, 5, 9])
    assert_resumes_exactly(make, world_size=2, resume_world_size=3, indices_of=used, steps=[2, 6])


@pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters, reason="DataLoader has in_order from torch 2.6 on"
)
def test_parts_with_workers_that_answer_in_any_order():
    def run(world):
        loader = make_loader(
            world, LENGTHS, num_workers=2, prefetch_factor=2, in_order=False, window_bytes=700, window=40
        )
        return [list(loader) for _ in range(2)]

    by_rank = run_ranks(2, run)
    for epoch in range(2):
        assert all_ids([epochs[epoch] for epochs in by_rank]) == list(range(150))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_windows_of_streams_end_by_bytes(num_workers):
    loader = OnlineDataLoader(
        Stream(LENGTHS), TokenBudget(128), collate_fn=collate, window=64, window_bytes=900, num_workers=num_workers
    )
    for _ in range(2):
        assert sorted(i for step in loader for i in ids_in(step)) == list(range(150))


def test_a_stream_resumed_twice_within_a_window_leaves_nothing_out():
    """What was kept of a window and not read again yet is kept by the next state too."""

    def make():
        return OnlineDataLoader(Stream(LENGTHS), TokenBudget(64), collate_fn=collate, window=20)

    for first in range(1, 40, 2):
        came, state = [], None
        for stop in (first, 1, None):
            loader = make()
            if state is not None:
                loader.load_state_dict(state)
            for number, step in enumerate(loader):
                came += ids_in(step)
                if stop is not None and number == stop - 1:
                    break
            state = loader.state_dict()
        assert sorted(came) == list(range(150)), f"stopped after {first} steps, and one later"
