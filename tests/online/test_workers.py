"""Real worker processes, batches of every type, existing loaders taken over; and iterable datasets."""

import warnings
from collections import UserDict
from enum import Enum
from typing import Any, NamedTuple

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
    legs,
    lengths_of,
    make_loader,
    sample_of,
    used,
)

LENGTHS = lengths_of(120, seed=3)
SPAWN = pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.slow)
PARTS = {"prefetch_factor": 2, "window_bytes": 700}
OPTIONS = [
    {"persistent_workers": True},
    {"prefetch_factor": 4, "window": 4},
    {"samples_per_update": 20},
    PARTS,
    SPAWN,
]
FEW, KIND = (
    LENGTHS[:60],
    Enum("KIND", "image"),
)  # its members hold their class, which holds its members


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_workers_give_every_sample_once(options: dict[str, Any]) -> None:
    """Also where they fetch before windows are handed out, so that blanks travel, and where they answer in parts."""

    def run(world: Any) -> Any:
        return list(
            map(list, [make_loader(world, LENGTHS, num_workers=2, shuffle=True, **options)] * 2)
        )

    by_rank = run_ranks(2, run)
    for epoch in range(2):
        assert all_ids([epochs[epoch] for epochs in by_rank]) == list(range(120))


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
        return {
            "pixels": torch.full((3, 64, 64), float(index)),
            "input_ids": [index],
            "kind": KIND.image,
        }


def stack(samples: list[Any]) -> Any:
    return {"pixels": torch.stack([s["pixels"] for s in samples])}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_answer_holds_more_than_was_asked_for(
    num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of 300 images is 15 MB; they come a megabyte at a time."""
    seen: list[int] = []
    inner = DataLoader.__iter__

    def watched(loader: Any) -> Any:
        for window in inner(loader):
            seen.append(sum(refined.batch["pixels"].nbytes for refined in window))
            yield window

    monkeypatch.setattr(DataLoader, "__iter__", watched)
    how: dict[str, Any] = {
        "collate_fn": stack,
        "window": 300,
        "window_bytes": 1 << 20,
        "weigh": "samples",
    }
    steps = [
        step.indices
        for step in OnlineDataLoader(Images(), TokenBudget(8), num_workers=num_workers, **how)
    ]
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


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_getitems_and_set_epoch_reach_persistent_workers(workers: Any) -> None:
    """Also of a planned loader, as accelerate does it for the plain Trainer; and in the epoch of a loaded state."""
    how: dict[str, Any] = {**workers, "weigh": "labels", "collate_fn": collate}
    for make in (
        lambda: make_loader(None, LENGTHS, dataset=Counting, **how),
        lambda: PlannedDataLoader(Counting(LENGTHS), LENGTHS, 128, **how),
    ):
        loader = make()
        epochs = [
            [int(v) for step in loader for v in step.batch["labels"].unique() if v >= 0]
            for _ in range(2)
        ]
        assert [set(found) for found in epochs] == [{0}, {1}]
        next(iter(loader))
        (again := make()).load_state_dict(loader.state_dict())
        assert {int(v) for step in again for v in step.batch["labels"].unique() if v >= 0} == {2}


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
        plain = DataLoader(
            data, batch_size=8, sampler=sampler, collate_fn=collate, num_workers=2, drop_last=kept
        )
        before = dict(vars(plain))
        loader = OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16)
        assert loader.config.shuffle is kept
        assert all_ids([list(loader)]) == list(range(120))
        assert vars(plain) == before
    for some in (
        SequentialSampler(range(9)),
        RandomSampler(range(9)),
        BatchSampler(SubsetRandomSampler(range(9)), 4, False),
    ):
        how: dict[str, Any] = {
            "batch_sampler" if isinstance(some, BatchSampler) else "sampler": some
        }
        loader = OnlineDataLoader.from_dataloader(
            DataLoader(data, collate_fn=collate, **how), TokenBudget(128)
        )
        assert all_ids([list(loader)]) == list(range(9))
    weights = WeightedRandomSampler(
        [1.0] * 60 + [0.0] * 60, 90, generator=torch.Generator().manual_seed(1)
    )
    plain = DataLoader(Tokens(LENGTHS), batch_size=8, sampler=weights, collate_fn=collate)
    ids = [
        i
        for step in OnlineDataLoader.from_dataloader(plain, TokenBudget(128), window=16)
        for i in used(step)
    ]
    assert (len(ids), max(ids) < 60) == (90, True)


def test_planned_batches_that_fit_stay_those_that_grew_are_split_and_a_plain_loader_may_do_it() -> (
    None
):
    sampler = LengthAwareBatchSampler(LENGTHS, TokenBudget(128), shuffle=True, rank=0, world_size=1)
    planned = [list(batch) for batch in sampler]
    assert [
        list(step.indices) for step in make_loader(None, LENGTHS, batch_sampler=sampler)
    ] == planned
    steps = list(make_loader(None, [2 * n for n in LENGTHS], batch_sampler=sampler))
    assert all_ids([steps]) == list(range(120))
    assert all(step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1 for step in steps)
    assert len(steps) > len(planned)
    collator = RefinementCollator(collate, TokenBudget(64))
    plain = DataLoader(
        IndexedDataset(Tokens(LENGTHS)), batch_sampler=sampler, collate_fn=collator, num_workers=2
    )
    refined = [r for window in plain for r in window]
    assert sorted(i for r in refined for i in r.indices) == list(range(120))
    assert all(r.batch["input_ids"][:, 0].tolist() == r.indices for r in refined)
    assert all(r.padded <= 64 or len(r) == 1 for r in refined)


class Divided(Stream):
    """Divided over workers by a ``worker_init_fn``, which sets its rank and size."""

    def __iter__(self) -> Any:
        return (sample_of(index, self.lengths[index]) for index in self.own())


def divide(worker: int) -> None:
    info: Any = torch.utils.data.get_worker_info()
    info.dataset.rank, info.dataset.size = worker, info.num_workers


def test_a_worker_init_fn_sets_what_is_the_datasets() -> None:
    loader = make_loader(None, LENGTHS, dataset=Divided, num_workers=2, worker_init_fn=divide)
    assert sorted(i for step in loader for i in ids_in(step)) == list(range(120))


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


@pytest.mark.parametrize(
    "holds", [lambda p: UserDict(a=[p]), lambda p: (1, p), lambda p: Pair(p, "abc")]
)
def test_pinning_keeps_containers_and_changes_no_original(holds: Any) -> None:
    original = holds(Pinnable())
    before = repr(original)
    assert (pin(original), repr(original)) == (holds("pinned"), before)


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
    loader = make_loader(world, FEW, dataset=dataset, **options)
    return [sum(len(step.indices) for step in loader if not step.idle) for _ in range(2)]


def said(run: Any) -> tuple[list[str], Any]:
    """What the run warned of, and what it gave. Ranks are threads, so one listener hears them all."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = run()
    return [str(w.message) for w in heard if "read the same samples" in str(w.message)], found


def test_a_stream_that_every_worker_reads_wholly_is_told_of_without_false_alarms() -> None:
    (message,), counts = said(lambda: counted(Naive, num_workers=2))
    assert counts == [2 * len(FEW)] * 2, "it cannot be helped, only told"
    assert "workers 0 and 1 read the same samples" in message
    for dataset, workers in ((Stream, 2), (Naive, 0), (Alike, 2)):
        assert said(lambda data=dataset, count=workers: counted(data, num_workers=count))[0] == []


def test_a_stream_that_every_rank_reads_wholly_is_told_of_on_every_rank() -> None:
    messages, _ = said(lambda: run_ranks(2, lambda world: counted(Naive, world)))
    assert (
        len([m for m in messages if "all 2 ranks read the same samples" in m]) == len(messages) == 2
    )
    own = said(
        lambda: run_ranks(
            2, lambda world: counted(lambda n: Stream(n, world.rank, world.size), world)
        )
    )
    assert own[0] == []
    assert [sum(epoch) for epoch in zip(*own[1], strict=True)] == [len(FEW)] * 2


def resumed_once(make: Any, size: int) -> None:
    """Stopped after five steps, then one step later, every sample of a rank's share comes once."""
    for rank, steps in enumerate(
        zip(*legs(make, [(size, 5), (size, 1), (size, None)], epochs=1)[0], strict=True)
    ):
        assert sorted([i for step in steps for i in ids_in(step)]) == sorted(shares_of(rank, size))


def shares_of(rank: int, size: int) -> range:
    return range(60 if size == 1 else 6 if rank else 54)


@pytest.mark.parametrize(("size", "kind"), [(1, Stream), (2, Stream), (1, Living)])
def test_a_stream_resumes_also_while_a_rank_idles(size: int, kind: Any) -> None:
    def make(world: Any) -> Any:
        data = kind(FEW[: shares_of(world.rank, size).stop])
        how = {
            "window": 4 if kind is Living else 20,
            "window_bytes": 900,
            "max_tokens": 64,
            "num_workers": 2,
        }
        return make_loader(world, data, dataset=lambda data: data, **how)

    resumed_once(make, size)


def as_tensors(samples: Any) -> Any:
    return collate(
        [{name: torch.tensor(values) for name, values in sample.items()} for sample in samples]
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_hugging_face_streams_resume_and_are_shuffled_anew_in_persistent_workers(
    num_workers: int,
) -> None:
    from datasets import Dataset

    rows = {name: [[i] * n for i, n in enumerate(FEW)] for name in ("input_ids", "labels")}
    data = Dataset.from_dict(rows).to_iterable_dataset(num_shards=4)
    how = {
        "dataset": lambda _: data,
        "collate_fn": as_tensors,
        "num_workers": num_workers,
        "window": 4,
    }
    resumed_once(lambda world: make_loader(world, FEW, **how), 1)
    data = data.shuffle(seed=1, buffer_size=12)  # its state leaves out the buffer
    resumed_once(lambda world: make_loader(world, FEW, **how), 1)
    loader = make_loader(None, FEW, **how, persistent_workers=num_workers > 0)
    first, second = ([i for step in loader for i in ids_in(step)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(60)) != first != second
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    for whole in False, True:  # the resumed epoch, and then all of it again
        assert (sorted(i for step in loader for i in ids_in(step)) == list(range(60))) == whole
        loader.set_epoch(2)
