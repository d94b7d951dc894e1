"""Iterable datasets: they divide themselves, resume where they were, and are told where they do not divide themselves."""

import warnings
from typing import Any

import pytest
import torch

from dynagroup.testing import run_ranks
from tests.online.helpers import Stream, collate, ids_in, legs, lengths_of, make_loader, sample_of

LENGTHS = lengths_of(60, seed=3)


class Naive(Stream):
    """Asks nobody which worker, or rank, it is in."""

    def __iter__(self) -> Any:
        return map(sample_of, range(len(self.lengths)), self.lengths)


class Alike(Naive):
    """The same sample over and over, as stand-ins for data give."""

    def __iter__(self) -> Any:
        return (sample_of(1, 5) for _ in self.lengths)


def counted(dataset: Any, world: Any = None, **options: Any) -> list[int]:
    """How many samples each of two epochs gives."""
    loader = make_loader(world, LENGTHS, dataset=dataset, **options)
    return [sum(len(step.indices) for step in loader if not step.idle) for _ in range(2)]


def said(run: Any) -> tuple[list[str], Any]:
    """What the run warned of, and what it gave. Ranks are threads, so one listener hears them all."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = run()
    return [str(w.message) for w in heard if "read the same samples" in str(w.message)], found


def test_a_stream_that_every_worker_reads_wholly_is_told_of_without_false_alarms() -> None:
    (message,), counts = said(lambda: counted(Naive, num_workers=2))
    assert counts == [2 * len(LENGTHS)] * 2, "it cannot be helped, only told"
    assert "workers 0 and 1 read the same samples" in message
    for dataset, workers in ((Stream, 2), (Naive, 0), (Alike, 2)):
        assert said(lambda data=dataset, count=workers: counted(data, num_workers=count))[0] == []


def test_a_stream_that_every_rank_reads_wholly_is_told_of_on_every_rank() -> None:
    messages, _ = said(lambda: run_ranks(2, lambda world: counted(Naive, world)))
    assert len([m for m in messages if "all 2 ranks read the same samples" in m]) == len(messages) == 2
    own = said(lambda: run_ranks(2, lambda world: counted(lambda n: Stream(n, world.rank, world.size), world)))
    assert own[0] == []
    assert [sum(epoch) for epoch in zip(*own[1], strict=True)] == [len(LENGTHS)] * 2


def resumed_once(make: Any, size: int, stops: Any) -> None:
    """Stopped anywhere, then one step later, every sample of a rank's share comes once."""
    for first in stops:
        rows = legs(make, [(size, first), (size, 1), (size, None)], epochs=1)[0]
        for rank, steps in enumerate(zip(*rows, strict=True)):
            ids = [i for step in steps for i in ids_in(step)]
            assert sorted(ids) == sorted(shares_of(rank, size)), f"stopped after {first}, and one later"


def shares_of(rank: int, size: int) -> range:
    return range(60 if size == 1 else 6 if rank else 54)


@pytest.mark.parametrize(("num_workers", "size"), [(0, 1), (2, 1), (0, 2), (2, 2)])
def test_a_stream_resumes_anywhere_also_while_a_rank_idles(num_workers: int, size: int) -> None:
    def make(world: Any) -> Any:
        data = Stream(LENGTHS[: shares_of(world.rank, size).stop])
        how = {"window": 20, "window_bytes": 900, "max_tokens": 64, "num_workers": num_workers}
        return make_loader(world, data, dataset=lambda data: data, **how)

    resumed_once(make, size, (5,) if num_workers else range(1, 14, 2))


def as_tensors(samples: Any) -> Any:
    return collate([{name: torch.tensor(values) for name, values in sample.items()} for sample in samples])


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_streams_resume_and_are_shuffled_anew_in_persistent_workers(num_workers: int) -> None:
    from datasets import Dataset

    rows = {name: [[i] * n for i, n in enumerate(LENGTHS)] for name in ("input_ids", "labels")}
    data = Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
    how = {"dataset": lambda _: data, "collate_fn": as_tensors, "num_workers": num_workers}
    resumed_once(lambda world: make_loader(world, LENGTHS, **how), 1, (5,))
    data = data.shuffle(seed=1, buffer_size=50)
    loader = make_loader(None, LENGTHS, **how, persistent_workers=num_workers > 0)
    first, second = ([i for step in loader for i in ids_in(step)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(60))
    assert first != second
