"""Real worker processes, batches of every type, existing loaders taken over; and iterable datasets."""

import warnings
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dynagroup import (
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    RefinementCollator,
    TokenBudget,
)
from dynagroup.online.datasets import IndexedDataset
from dynagroup.online.messages import pin
from dynagroup.testing import run_ranks
from tests.laws.loader_laws import assert_resumes_exactly
from tests.online.helpers import (
    Living,
    Stream,
    Tokens,
    all_ids,
    collate,
    ids_in,
    ids_of,
    legs,
    lengths_of,
    make_loader,
    sample_of,
    used,
)

LENGTHS = lengths_of(120, seed=3)
FEW = LENGTHS[:60]
ALL = list(range(len(LENGTHS)))
ALL_FEW = list(range(len(FEW)))
SPAWN = pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow)
OPTIONS = [
    {"persistent_workers": True},
    {"prefetch_factor": 4, "window": 4},
    {"samples_per_update": 20},
    {"prefetch_factor": 2, "window_bytes": 700},
    SPAWN,
]
KIND = Enum("KIND", "image")  # its members hold their class, which holds its members


def indices_of(steps: Iterable[Any]) -> list[int]:
    """The samples that steps say they hold."""
    return sorted(chain.from_iterable(step.indices for step in steps))


def two_epochs(loader: Iterable[Any]) -> list[list[Any]]:
    return [list(loader), list(loader)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_workers_give_every_sample_once(options: dict[str, Any]) -> None:
    """Also where they fetch before windows are handed out, so that blanks travel, and where they answer in parts."""

    def run(world: Any) -> Any:
        return two_epochs(make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options))

    first, second = zip(*run_ranks(2, run), strict=True)
    assert all_ids(first) == ALL
    assert all_ids(second) == ALL


RESUMED = [{}, {"samples_per_update": 30}, {"samples_per_update": 10, "grouping": 3}]


@pytest.mark.parametrize("options", RESUMED, ids=["free", "update", "grouped"])
def test_resume_with_workers(options: dict[str, Any]) -> None:
    def make(world: Any) -> Any:
        return make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options)

    assert_resumes_exactly(make, world_size=2, steps=[1, 5], indices_of=used)


class Images(torch.utils.data.Dataset):
    """Samples of 48 KB."""

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Any:
        pixels = torch.full((3, 64, 64), float(index))
        return {"pixels": pixels, "input_ids": [index], "kind": KIND.image}


def stack(samples: list[Any]) -> Any:
    return {"pixels": torch.stack([sample["pixels"] for sample in samples])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_answer_holds_more_than_was_asked_for(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 300 images is 15 MB; they come a megabyte at a time."""
    window_bytes = 1 << 20
    answers: list[int] = []
    plain_iter = DataLoader.__iter__

    def watched(loader: Any) -> Any:
        for window in plain_iter(loader):
            answers.append(sum(refined.batch["pixels"].nbytes for refined in window))
            yield window

    monkeypatch.setattr(DataLoader, "__iter__", watched)
    loader = OnlineDataLoader(
        Images(),
        TokenBudget(8),
        num_workers=num_workers,
        collate_fn=stack,
        window=300,
        window_bytes=window_bytes,
        weigh="samples",
    )
    assert indices_of(loader) == list(range(300))
    assert max(answers) <= window_bytes + 64 * 49152, "the first read says how large samples are"
    assert np.count_nonzero(answers) >= 4


class Counting(Tokens):
    """A dataset that reads many items at once, and knows its epoch."""

    epoch = 0

    def __getitems__(self, indices: Any) -> Any:
        return [{**self[i], "labels": torch.full((self.lengths[i],), self.epoch)} for i in indices]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def online_counting(**options: Any) -> Any:
    return make_loader(None, LENGTHS, dataset=Counting, **options)


def planned_counting(**options: Any) -> Any:
    return PlannedDataLoader(Counting(LENGTHS), LENGTHS, 128, **options)


def epochs_read(loader: Iterable[Any]) -> set[int]:
    """The epochs that samples were read in."""
    labels = torch.cat([step.batch["labels"].flatten() for step in loader])
    return set(labels[labels >= 0].tolist())


@pytest.mark.parametrize("make", [online_counting, planned_counting])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_getitems_and_set_epoch_reach_persistent_workers(
    make: Callable[..., Any], workers: dict[str, Any]
) -> None:
    """Also of a planned loader, as accelerate does it for the plain Trainer; and in the epoch of a loaded state."""
    loader = make(**workers, weigh="labels", collate_fn=collate)
    assert epochs_read(loader) == {0}
    assert epochs_read(loader) == {1}
    next(iter(loader))
    resumed = make(**workers, weigh="labels", collate_fn=collate)
    resumed.load_state_dict(loader.state_dict())
    assert epochs_read(resumed) == {2}


class Pair(NamedTuple):
    input_ids: Any
    labels: Any


def as_pair(samples: Any) -> Any:
    return Pair(**collate(samples))


def as_user_dict(samples: Any) -> Any:
    return UserDict(collate(samples))


@pytest.mark.parametrize(("make", "kind"), [(as_pair, Pair), (as_user_dict, UserDict)])
def test_batches_of_any_type_come_through(make: Any, kind: type) -> None:
    steps = list(make_loader(None, LENGTHS, collate_fn=make, weigh="samples", num_workers=2))
    assert {type(step.batch) for step in steps} == {kind}
    assert indices_of(steps) == ALL


def taken_over(**options: Any) -> tuple[Any, DataLoader]:
    plain = DataLoader(Tokens(LENGTHS), collate_fn=collate, **options)
    return OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16), plain


@pytest.mark.parametrize(
    ("sampler", "shuffles"), [(SequentialSampler, False), (RandomSampler, True)]
)
def test_a_loader_is_taken_over_and_not_changed(sampler: Any, shuffles: bool) -> None:
    order = sampler(ALL)
    loader, plain = taken_over(batch_size=8, sampler=order, num_workers=2, drop_last=shuffles)
    before = dict(vars(plain))
    assert loader.config.shuffle is shuffles
    assert all_ids([list(loader)]) == ALL
    assert vars(plain) == before


SOME = range(9)
SAMPLERS = [
    {"sampler": SequentialSampler(SOME)},
    {"sampler": RandomSampler(SOME)},
    {"batch_sampler": BatchSampler(SubsetRandomSampler(SOME), 4, drop_last=False)},
]


@pytest.mark.parametrize("options", SAMPLERS, ids=["in order", "random", "batches"])
def test_a_sampler_of_some_samples_is_kept(options: dict[str, Any]) -> None:
    loader, _ = taken_over(**options)
    assert all_ids([list(loader)]) == list(SOME)


def test_a_sampler_that_draws_with_replacement_is_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler([1.0] * 60 + [0.0] * 60, 90, generator=generator)
    loader, _ = taken_over(batch_size=8, sampler=sampler)
    ids = ids_of(loader)
    assert len(ids) == 90
    assert max(ids) < 60


@pytest.fixture
def sampler() -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(LENGTHS, TokenBudget(128), shuffle=True, rank=0, world_size=1)


def test_planned_batches_that_fit_stay(sampler: LengthAwareBatchSampler) -> None:
    planned = list(map(list, sampler))
    loader = make_loader(None, LENGTHS, batch_sampler=sampler)
    assert [list(step.indices) for step in loader] == planned


def test_planned_batches_that_grew_are_split(sampler: LengthAwareBatchSampler) -> None:
    num_planned = len(list(sampler))
    lengths = [2 * length for length in LENGTHS]
    steps = list(make_loader(None, lengths, batch_sampler=sampler))
    assert all_ids([steps]) == ALL
    assert len(steps) > num_planned
    for step in steps:
        assert step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1


def test_a_plain_loader_may_split_batches_that_grew(sampler: LengthAwareBatchSampler) -> None:
    collator = RefinementCollator(collate, TokenBudget(64))
    data = IndexedDataset(Tokens(LENGTHS))
    plain = DataLoader(data, batch_sampler=sampler, collate_fn=collator, num_workers=2)
    refined = list(chain.from_iterable(plain))
    assert indices_of(refined) == ALL
    for part in refined:
        assert part.batch["input_ids"][:, 0].tolist() == part.indices
        assert part.padded <= 64 or len(part) == 1


class Divided(Stream):
    """Divided over workers by a ``worker_init_fn``, which sets its rank and size."""

    def __iter__(self) -> Any:
        return (sample_of(index, self.lengths[index]) for index in self.own())


def divide(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.rank = worker
    info.dataset.size = info.num_workers


def test_a_worker_init_fn_sets_what_is_the_datasets() -> None:
    loader = make_loader(None, LENGTHS, dataset=Divided, num_workers=2, worker_init_fn=divide)
    assert sorted(ids_of_stream(loader)) == ALL


def ids_of_stream(steps: Iterable[Any]) -> list[int]:
    """The samples of some steps of a stream, whose indices count what was read."""
    return list(chain.from_iterable(map(ids_in, steps)))


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def in_user_dict(value: Any) -> Any:
    return UserDict(a=[value])


def in_tuple(value: Any) -> Any:
    return (1, value)


def in_named_tuple(value: Any) -> Any:
    return Pair(value, "abc")


@pytest.mark.parametrize("contain", [in_user_dict, in_tuple, in_named_tuple])
def test_pinning_keeps_containers_and_changes_no_original(contain: Any) -> None:
    original = contain(Pinnable())
    before = repr(original)
    assert pin(original) == contain("pinned")
    assert repr(original) == before


class Naive(Stream):
    """Asks nobody which worker, or rank, it is in."""

    def __iter__(self) -> Any:
        return map(sample_of, range(len(self.lengths)), self.lengths)


class Alike(Naive):
    """The same sample over and over, as stand-ins for data give."""

    def __iter__(self) -> Any:
        return (sample_of(1, 5) for _ in self.lengths)


def counted(dataset: Any, world: Any = None, num_workers: int = 0) -> list[int]:
    """How many samples each of two epochs gives."""
    loader = make_loader(world, FEW, dataset=dataset, num_workers=num_workers)
    counts = []
    for steps in two_epochs(loader):
        counts.append(sum(len(step.indices) for step in steps if not step.idle))
    return counts


@pytest.fixture
def told() -> Iterator[Callable[[], list[str]]]:
    """Warnings of streams that are read twice. Ranks are threads, so one listener hears them all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def messages() -> list[str]:
            texts = [str(warning.message) for warning in caught]
            return [text for text in texts if "read the same samples" in text]

        yield messages


def test_a_stream_that_every_worker_reads_wholly_is_told_of(told: Any) -> None:
    counts = counted(Naive, num_workers=2)
    assert counts == [2 * len(FEW)] * 2, "it cannot be helped, only told"
    [message] = told()
    assert "workers 0 and 1 read the same samples" in message


@pytest.mark.parametrize(("dataset", "num_workers"), [(Stream, 2), (Naive, 0), (Alike, 2)])
def test_streams_that_nobody_reads_twice_raise_no_alarm(
    dataset: Any, num_workers: int, told: Any
) -> None:
    counted(dataset, num_workers=num_workers)
    assert told() == []


def test_a_stream_that_every_rank_reads_wholly_is_told_of_on_every_rank(told: Any) -> None:
    run_ranks(2, lambda world: counted(Naive, world))
    messages = told()
    assert len(messages) == 2
    assert all("all 2 ranks read the same samples" in message for message in messages)


def test_a_stream_that_ranks_divide_raises_no_alarm(told: Any) -> None:
    def run(world: Any) -> list[int]:
        return counted(lambda lengths: Stream(lengths, world.rank, world.size), world)

    counts = np.array(run_ranks(2, run))
    assert told() == []
    assert counts.sum(axis=0).tolist() == [len(FEW)] * 2


def share_of(rank: int, size: int) -> range:
    """Which samples a rank has: of two, the second soon has none left."""
    if size == 1:
        return range(60)
    return range(54) if rank == 0 else range(6)


def assert_resumes_once(make: Any, size: int) -> None:
    """Stopped after five steps, then one step later, every sample of a rank's share comes once."""
    [rows] = legs(make, [(size, 5), (size, 1), (size, None)], epochs=1).values()
    for rank, steps in enumerate(zip(*rows, strict=True)):
        assert sorted(ids_of_stream(steps)) == list(share_of(rank, size))


@pytest.mark.parametrize(("size", "kind"), [(1, Stream), (2, Stream), (1, Living)])
def test_a_stream_resumes_also_while_a_rank_idles(size: int, kind: Any) -> None:
    window = 4 if kind is Living else 20

    def make(world: Any) -> Any:
        stream = kind(FEW[: len(share_of(world.rank, size))])
        options = {"window": window, "window_bytes": 900, "max_tokens": 64, "num_workers": 2}
        return make_loader(world, FEW, dataset=lambda lengths: stream, **options)

    assert_resumes_once(make, size)


def as_tensors(samples: Any) -> Any:
    rows = []
    for sample in samples:
        rows.append({name: torch.tensor(values) for name, values in sample.items()})
    return collate(rows)


def of_hugging_face(data: Any, num_workers: int, world: Any = None, **options: Any) -> Any:
    options.update(window=4, num_workers=num_workers, collate_fn=as_tensors)
    return make_loader(world, FEW, dataset=lambda lengths: data, **options)


@pytest.fixture
def hugging_face_stream() -> Any:
    from datasets import Dataset

    rows = [[index] * length for index, length in enumerate(FEW)]
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return data.to_iterable_dataset(num_shards=4)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_streams_resume(
    num_workers: int, shuffled: bool, hugging_face_stream: Any
) -> None:
    data = hugging_face_stream
    if shuffled:
        data = data.shuffle(seed=1, buffer_size=12)  # its state leaves out the buffer
    assert_resumes_once(lambda world: of_hugging_face(data, num_workers, world), size=1)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_streams_are_shuffled_anew_in_persistent_workers(
    num_workers: int, hugging_face_stream: Any
) -> None:
    data = hugging_face_stream.shuffle(seed=1, buffer_size=12)
    loader = of_hugging_face(data, num_workers, persistent_workers=num_workers > 0)
    first, second = map(ids_of_stream, two_epochs(loader))
    assert sorted(first) == sorted(second) == ALL_FEW
    assert ALL_FEW != first != second
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    assert sorted(ids_of_stream(loader)) != ALL_FEW, "the rest of the resumed epoch"
    loader.set_epoch(2)
    assert sorted(ids_of_stream(loader)) == ALL_FEW, "all of it again"
