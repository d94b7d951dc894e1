"""The small parts: pinning, weights, the collator's messages, packing, worlds."""

from __future__ import annotations

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dynagroup import BudgetError, ConfigError, OnlineDataLoader, TokenBudget
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.messages import pack_tensors, unpack_tensors
from dynagroup.online.plans import EpochOrders, OnlineConfig
from dynagroup.online.protocol import Exchange, quantile
from dynagroup.testing import run_ranks
from dynagroup.update.loss_weight import Share, count_label_tokens, weigher
from dynagroup.update.step import LoaderStats, Step, pin

from .helpers import collate, collate_packed, make_loader

Pair = namedtuple("Pair", ["a", "b"])


class Pinnable:
    pinned = False

    def pin_memory(self):
        new = Pinnable()
        new.pinned = True
        return new


@dataclass
class Record:
    part: object
    name: str = "x"


@pytest.mark.parametrize(
    ("make", "reach"),
    [
        (lambda p: p, lambda v: v),
        (lambda p: {"a": p}, lambda v: v["a"]),
        (lambda p: UserDict(a=[p]), lambda v: v["a"][0]),
        (lambda p: (1, p), lambda v: v[1]),
        (lambda p: Pair(p, "text"), lambda v: v.a),
        (lambda p: Record(p), lambda v: v.part),
    ],
)
def test_pinning_keeps_containers_and_changes_no_original(make, reach):
    original = make(Pinnable())
    step = Step(original, [0], Share(1, 1), Share(1, 1), 1.0, True)
    pinned = step.pin_memory().batch
    assert type(pinned) is type(original)
    assert reach(pinned).pinned
    assert not reach(original).pinned


def test_pinning_passes_everything_else_on():
    value = {"text": "abc", "none": None, "number": 3}
    assert pin(value) == value


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        ({"labels": torch.tensor([[-100, 5, 6], [7, 8, -100]])}, 3),
        ({"labels": [[1, 2], [3, -100]]}, 1),
        ({"labels": torch.tensor([1, 0, -100])}, 2),
        ({"shift_labels": torch.tensor([[5, -100]]), "labels": torch.tensor([[9, 9]])}, 1),
    ],
)
def test_label_tokens_that_are_predicted(batch, count):
    assert count_label_tokens(batch) == count


def test_labels_that_no_one_shifts():
    assert count_label_tokens({"labels": torch.tensor([[1, 2], [3, -100]])}, shifted=False) == 3


def test_a_batch_without_labels_says_what_to_pass():
    with pytest.raises(ConfigError, match="weigh='samples'"):
        count_label_tokens({"input_ids": torch.ones(1, 2)})
    with pytest.raises(ConfigError, match="from 0 to"):
        weigher(lambda batch: -1.0)(None, 1)


def samples(*lengths):
    return [
        {"input_ids": torch.ones(n, dtype=torch.int64), "labels": torch.ones(n, dtype=torch.int64)} for n in lengths
    ]


def wide(batch):
    made = collate(batch)
    return {k: torch.nn.functional.pad(v, (0, 90)) for k, v in made.items()}


def slightly_wide(batch):
    made = collate(batch)
    return {k: torch.nn.functional.pad(v, (0, 1)) for k, v in made.items()}


def failing(batch):
    raise ValueError("no such token")


def test_a_collate_that_raises_names_the_samples():
    with pytest.raises(RuntimeError, match=r"dataset indices \[0, 1\]: ValueError: no such token"):
        RefinementCollator(failing, TokenBudget(100))(samples(3, 4))


def ids_of(sample):
    return len(sample["input_ids"])


def test_a_batch_wider_than_length_of_says_is_refused_where_it_does_not_fit():
    with pytest.raises(BudgetError, match="94 tokens wide.*measures 4"):
        RefinementCollator(wide, TokenBudget(100), ids_of)(samples(3, 4))
    with pytest.warns(UserWarning, match="pad_to_multiple_of"):
        RefinementCollator(slightly_wide, TokenBudget(100), ids_of)(samples(3, 4))
    with pytest.raises(BudgetError, match="30 tokens long.*which measure 24"):
        RefinementCollator(longer_packed, TokenBudget(24, layout="packed"), ids_of)(samples(8, 8, 8))


def longer_packed(batch):
    """Packs, with two tokens more in front of every sample."""
    return collate_packed([{name: torch.cat([ids[:2], ids]) for name, ids in sample.items()} for sample in batch])


def from_text(batch):
    """Tokenizes in the collate function, takes the text out of the samples, and puts five tokens in front."""
    return collate(samples(*(5 + len(sample.pop("text")) for sample in batch)))


class Raw:
    """Texts that nobody has tokenized."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return {"text": "x" * (1 + 7 * index % 30)}


IDS = samples(*range(1, 61))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("data", "collate_fn", "layout"),
    [(Raw(), from_text, "padded"), (IDS, wide, "padded"), (IDS, longer_packed, "packed")],
    ids=["text", "wider", "packed"],
)
@pytest.mark.filterwarnings("ignore:collate_fn made a batch")
def test_what_a_collate_function_adds_is_measured(data, collate_fn, layout, num_workers):
    """Without `length_of` every batch fits as it comes, in every epoch, also where samples have no ids before."""
    loader = OnlineDataLoader(
        data, TokenBudget(600, layout=layout), collate_fn=collate_fn, window=16, num_workers=num_workers, shuffle=True
    )
    for _ in range(2):
        steps = list(loader)
        assert sorted(i for step in steps for i in step.indices) == list(range(60))
        assert all(step.batch["input_ids"].numel() <= 600 for step in steps)
    assert loader.stats.padded_tokens == loader.stats.real_tokens or layout == "padded"


def test_samples_are_collated_by_themselves_only_where_that_changes_their_length():
    asked = []

    def counted(batch):
        asked.append(len(batch))
        return collate(batch)

    steps = list(OnlineDataLoader(IDS, TokenBudget(600), collate_fn=counted, window=16))
    assert sorted(asked) == sorted(len(step.indices) for step in steps), "each batch once, and nothing else"


def test_oversize_samples_come_alone_or_are_refused():
    window = RefinementCollator(collate, TokenBudget(5))(samples(3, 9, 2))
    assert [(r.indices, r.oversize) for r in window] == [([1], True), ([0], False), ([2], False)]
    with pytest.raises(BudgetError, match=r"sample 1 \(9 tokens\)"):
        RefinementCollator(collate, TokenBudget(5), oversize="error")(samples(3, 9, 2))


@pytest.mark.parametrize("bad", [-1, 2.5, None, True])
def test_lengths_must_be_counts(bad):
    with pytest.raises(ConfigError, match="length_of"):
        RefinementCollator(collate, TokenBudget(5), length_of=lambda s: bad)(samples(3, 4))


def test_planned_batches_that_fit_are_left_alone_others_are_cut():
    collator = RefinementCollator(collate, TokenBudget(20))
    assert [r.indices for r in collator(samples(4, 5, 3))] == [[0, 1, 2]]
    assert [r.indices for r in collator(samples(9, 5, 3))] == [[0], [1, 2]], "9 + 10 tokens instead of 18 + 3"


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8])
def test_tensors_of_any_type_and_shape_survive_packing(dtype):
    value = [
        torch.ones(3, 2).to(dtype),
        torch.zeros(0, 4, dtype=dtype),
        torch.tensor(1).to(dtype),
        torch.ones(4, 4).to(dtype).T,
    ]
    back = unpack_tensors(*pack_tensors({"x": value, "same": value[0]}))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back["x"], value, strict=True))
    assert back["same"] is back["x"][0]


def test_a_window_survives_pickling_with_more_than_a_block(monkeypatch):
    monkeypatch.setattr("dynagroup.online.messages.BLOCK_BYTES", 256)
    window = RefinementCollator(collate, TokenBudget(20))(samples(4, 5, 3, 19, 7, 7))
    back = pickle.loads(pickle.dumps(window))
    assert [r.indices for r in back] == [r.indices for r in window]
    for one, other in zip(back, window, strict=True):
        assert torch.equal(one.batch["input_ids"], other.batch["input_ids"])


def test_quantiles_cover_the_queue_evenly_and_differ_by_seed():
    drawn = np.array([quantile(1, 2, step) for step in range(160)])
    assert np.bincount((drawn * 16).astype(int)).tolist() == [10] * 16
    assert [quantile(1, 2, s) for s in range(9)] != [quantile(3, 2, s) for s in range(9)]


def test_stats_add_up_over_ranks():
    found = run_ranks(3, lambda world: LoaderStats(steps=2, real_tokens=world.rank, wait_s=0.5).merged(world))
    assert found[0] == found[2] == LoaderStats(steps=6, real_tokens=3, wait_s=1.5)


def test_an_error_of_one_rank_is_raised_on_all():
    def run(world):
        exchange = Exchange(world)
        try:
            exchange.highest([1], ValueError("unreadable") if world.rank == 1 else None)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    texts = run_ranks(3, run)
    assert texts[1] == "ValueError: unreadable"
    assert texts[0] == texts[2] == "AlignmentError: rank 1 failed while it loaded data: ValueError: unreadable"


def test_iterating_leaves_the_global_random_state_alone():
    """So that a resumed training draws the dropout masks that an uninterrupted one draws."""
    before = torch.get_rng_state()
    assert sum(len(step.indices) for step in make_loader(None, range(1, 9))) == 8
    assert torch.equal(torch.get_rng_state(), before)
    given = torch.Generator().manual_seed(3)
    next(iter(make_loader(None, range(1, 9), generator=given)))
    assert given.initial_seed() == 3, "the user's generator is drawn from, never seeded"


class Turns:
    """A batch sampler that no one can tell the epoch: whenever it is read comes its next turn."""

    turn = -1

    def __iter__(self):
        self.turn += 1
        return iter([[self.turn]])


def test_batches_that_cannot_be_told_the_epoch_are_drawn_once_for_each_before():
    def orders():
        return EpochOrders(9, OnlineConfig(), batch_sampler=Turns())

    one_by_one = orders()
    assert [one_by_one.batches(epoch) for epoch in (0, 0, 1, 2)] == [[[0]], [[0]], [[1]], [[2]]]
    assert orders().batches(2) == [[2]], "a run that resumes there draws what the first run drew"
