"""Law 10 online: all batches of a step, on all ranks, are of the kind that processing says, and an idle rank's are, too."""

from itertools import groupby

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.distributed import DistributedWorld
from dynagroup.online.messages import number_of
from dynagroup.testing import run_ranks
from tests.online.helpers import Stream, Tokens, collate, legs, lengths_of
from tests.torchrun import on_ranks

LABEL = st.sampled_from([("rare", 1), 4, 5, 6, 7])
MODES = [{}, {"accumulation": 3}, {"samples_per_update": 12}, {"stream": True}]
LENGTHS = lengths_of(90, seed=4)


class Labelled(Tokens):
    """Samples that know their label; a ``fickle`` share is given another one at every reading."""

    def __init__(self, lengths, labels, fickle=0.0):
        super().__init__(lengths)
        self.labels, self.fickle, self.rng = list(labels), fickle, np.random.default_rng(0)

    def __getitem__(self, index):
        other = self.rng.random() < self.fickle
        return {**super().__getitem__(index), "kind": self.labels[self.rng.integers(len(self)) if other else index]}


class LabelledStream(Stream):
    def __init__(self, lengths, labels, world):
        super().__init__(lengths, world.rank, world.size)
        self.labels = labels

    def __iter__(self):
        return ({**sample, "kind": self.labels[int(sample["input_ids"][0])]} for sample in super().__iter__())


def kind_of(sample):
    return sample["kind"]


def collated(samples):
    return {**collate(samples), "kinds": [sample["kind"] for sample in samples]}


def make(world, lengths, labels, *, fickle=0.0, stream=False, known=False, **how):
    data = LabelledStream(lengths, labels, world) if stream else Labelled(lengths, labels, fickle)
    how |= {"kinds": labels} if known and not stream else {"kind_of": kind_of}
    how = {"window": 16, "shuffle": not stream, "collate_fn": collated, **how}
    return OnlineDataLoader(data, TokenBudget(128), world=world, **how)


def checked(rows, one_kind="step"):
    """Rows of the ranks' steps, which keep the law; and the samples in them."""
    rows = list(rows)
    for row in rows:
        kinds = [{*step.batch["kinds"]} for step in row]
        assert all(found == {step.kind} for found, step in zip(kinds, row, strict=True)), "a batch of two kinds"
        assert one_kind == "batch" or len(set.union(*kinds)) == 1, "a step of two kinds"
        assert all(step.batch["input_ids"].numel() <= 128 or len(step.indices) == 1 for step in row)
        assert all(step.loss_scale == step.weight.local == 0 for step in row if step.idle)
        assert not all(step.idle for step in row)
    return rows, sorted(index for row in rows for step in row if not step.idle for index in step.indices)


@settings(max_examples=60)
@given(
    samples=st.lists(st.tuples(st.integers(1, 200), st.sampled_from(["text", "image", None, 3]) | LABEL), max_size=60),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    window=st.integers(1, 40),
    stop=st.integers(0, 60),
    mode=st.sampled_from(MODES),
    how=st.sampled_from([{}, {"known": True}, {"fickle": 0.3}, {"fickle": 0.01}, {"one_kind": "batch"}]),
)
def test_a_step_is_of_one_kind_whatever_is_known_or_changes(samples, sizes, window, stop, mode, how):
    """In a first epoch and in a second, stopped within either, also inside a kind, on as many ranks or on others."""
    lengths, labels = [length for length, _ in samples], [label for _, label in samples]
    plan = [(sizes[0], stop), (sizes[0] if "stream" in mode else sizes[1], None)]
    found = legs(lambda world: make(world, lengths, labels, window=window, **mode, **how), plan, epochs=2)
    for rows in found.values():
        assert checked(rows, how.get("one_kind", "step"))[1] == [*range(len(samples))]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_rare_kinds(mode):
    """Rarer than ranks."""
    labels = [("part", i % 60) if i % 3 else None for i in range(90)]

    def rank(world):
        loader = make(world, LENGTHS, labels, **mode)
        return list(loader), loader.stats.kind_steps

    ranks, added = zip(*run_ranks(4, rank), strict=True)
    rows, used = checked(zip(*ranks, strict=True))
    assert (used, len({*added})) == ([*range(len(labels))], 1)
    ends = np.cumsum([0, *(row[0].ends_update for row in rows)])[:-1].tolist()
    for _, update in groupby(zip(ends, rows, strict=True), key=lambda pair: pair[0]):
        kinds = [kind for kind, _ in groupby(row[0].kind for _, row in update)]
        assert "samples_per_update" not in mode or len(kinds) == len(set(kinds)), "kinds come one after another"
    assert added[0] > 0


def test_kinds_interleave_and_once_known_fill_their_rows():
    labels = np.random.default_rng(5).choice(["text", "image"], 600, p=[0.8, 0.2]).tolist()

    def rank(world):
        loader = make(world, lengths_of(600, seed=6), labels)
        return [list(loader) for _ in range(2)]

    first, second = (checked(zip(*ranks, strict=True))[0] for ranks in zip(*run_ranks(4, rank), strict=True))
    for rows in (first, second):
        fifths = np.array_split([row[0].kind == "image" for row in rows], 5)
        assert all(0 < fifth.mean() < 0.7 for fifth in fifths)
    assert len(second) < len(first)
    assert not any(step.idle for row in second for step in row)


@pytest.mark.parametrize("before", [True, 1, 1.0, (1, 8)])
def test_the_number_of_a_label_is_the_same_whatever_was_asked_before(before):
    number_of.cache_clear()
    alone = number_of(1.0), number_of.cache_clear(), number_of(torch.Size([1, 8]))
    number_of.cache_clear()
    number_of(before)
    assert (number_of(1.0), None, number_of(torch.Size([1, 8]))) == alone


def of_two_towers():
    """Real ranks with real workers; only the first has images."""
    dist.init_process_group("gloo")
    labels = ["image" if i % 2 == 0 and i < 40 else "text" for i in range(90)]
    return [[*make(DistributedWorld(), LENGTHS, labels, num_workers=2, **mode)] for mode in (MODES[2], MODES[3])]


def test_ranks_without_a_kind_idle_on_a_batch_of_it_that_another_lends():
    for ranks in zip(*on_ranks(2, of_two_towers), strict=True):
        assert checked(zip(*ranks, strict=True))[1] == [*range(90)]
    assert any(step.idle and step.kind == "image" for step in ranks[1])
