"""A stream that does not divide itself among workers, or ranks, is told of; one that does, never."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.online.datasets import OPENING, opening_of
from dynagroup.testing import run_ranks
from tests.online.helpers import Stream, lengths_of, make_loader

LENGTHS = lengths_of(40)


class Naive(Stream):
    """Asks nobody which worker, or rank, it is in."""

    def __iter__(self):
        for index, length in enumerate(self.lengths):
            yield {"input_ids": torch.full((length,), index), "labels": torch.full((length,), index)}


class Alike(Naive):
    """The same sample over and over, as stand-ins for data give."""

    def __init__(self, lengths):
        super().__init__([5] * len(lengths))

    def __iter__(self):
        for length in self.lengths:
            yield {"input_ids": torch.ones(length, dtype=torch.int64), "labels": torch.ones(length, dtype=torch.int64)}


def epochs(dataset, world=None, **options):
    """How many samples each of two epochs gives."""
    loader = make_loader(world, LENGTHS, dataset=dataset, **options)
    return [sum(len(step.indices) for step in loader if not step.idle) for _ in range(2)]


def said(run):
    """What the run warned of, and what it gave. Ranks are threads, so one listener hears them all."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = run()
    return [str(w.message) for w in heard if "read the same samples" in str(w.message)], found


def test_a_stream_that_every_worker_reads_wholly_is_told_of():
    (message,), counts = said(lambda: epochs(Naive, num_workers=2))
    assert counts == [2 * len(LENGTHS)] * 2, "it cannot be helped, only told"
    assert "workers 0 and 1 read the same samples" in message
    assert "get_worker_info()" in message


@pytest.mark.parametrize(("dataset", "workers"), [(Stream, 2), (Stream, 0), (Naive, 0), (Naive, 1), (Alike, 2)])
def test_no_false_alarm(dataset, workers):
    assert said(lambda: epochs(dataset, num_workers=workers))[0] == []


def test_a_stream_that_every_rank_reads_wholly_is_told_of_on_every_rank():
    messages, _ = said(lambda: run_ranks(2, lambda world: epochs(Naive, world)))
    assert len(messages) == 2
    assert all("all 2 ranks read the same samples" in message for message in messages)


def test_ranks_with_their_own_parts_hear_nothing():
    def own(world):
        return epochs(lambda lengths: Stream(lengths, world.rank, world.size), world)

    messages, counts = said(lambda: run_ranks(2, own))
    assert messages == []
    assert [sum(epoch) for epoch in zip(*counts, strict=True)] == [len(LENGTHS)] * 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=OPENING, max_size=40), st.integers(2, 4))
def test_only_shares_that_begin_alike_are_taken_for_one(values, workers):
    shares = [values[worker::workers] for worker in range(workers)]
    pairs = [(opening_of(share), tuple(share[:OPENING])) for share in shares]
    assert all((a == b) <= (x == y or a == 0) for a, x in pairs for b, y in pairs)


def test_samples_that_cannot_be_told_apart_say_nothing():
    assert opening_of([np.zeros(3)] * 20) == opening_of([]) == opening_of([lambda: 0] * 20) == 0
    assert opening_of([1, 2, 3]) == 0
    assert opening_of([1, 2, 3, 4]) != 0


SHARES = st.lists(st.lists(st.integers(1, 64), max_size=30), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(SHARES, st.sampled_from([1, 3]))
def test_a_rank_whose_share_is_empty_idles(shares, accumulation):
    """It runs copies of another rank's batch, without weight: every sample comes once, all ranks take as many steps."""

    def epoch(world):
        loader = make_loader(world, shares[world.rank], dataset=Stream, accumulation=accumulation)
        steps = list(loader)
        assert all(
            (step.weight.local, step.loss_scale) == (0, 0) and len(step.batch["input_ids"])
            for step in steps
            if step.idle
        )
        return len(steps), [len(ids) for step in steps if not step.idle for ids in rows(step.batch)]

    found = run_ranks(len(shares), epoch)
    assert len({num_steps for num_steps, _ in found}) == 1
    assert [sorted(lengths) for _, lengths in found] == [sorted(share) for share in shares]


def rows(batch):
    return [ids[ids >= 0] for ids in batch["input_ids"]]


def test_one_of_two_ranks_with_an_empty_stream_for_two_epochs():
    def idles(world):
        loader = make_loader(world, LENGTHS, dataset=lambda lengths: Stream(lengths if world.rank else []))
        return [[step.idle for step in loader] for _ in range(2)]

    empty, full = run_ranks(2, idles)
    assert all(map(all, empty))
    assert not any(map(any, full))
    assert list(map(len, empty)) == list(map(len, full))
