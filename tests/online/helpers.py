"""Small real data for the online tests; picklable, so that workers of every start method can have it."""

import json
import random
import sys
from itertools import chain, islice

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.testing import run_ranks

torch.set_num_threads(1)


def lengths_of(num_samples: int, seed: int = 0, top: int = 64) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(2.2, 0.9, num_samples)
    return np.clip(drawn, 1, top).astype(int).tolist()


def sample_of(index, length):
    ids = torch.full((length,), index, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


class Tokens(Dataset):
    """Sample i: its length's worth of the number i."""

    def __init__(self, lengths):
        self.lengths = list(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return sample_of(index, self.lengths[index])


class Jittered(Tokens):
    """Processing that changes lengths from one reading to the next."""

    def __getitem__(self, index):
        length = int(self.lengths[index] * random.uniform(0.7, 1.4))
        return sample_of(index, max(1, length))


class Stream(IterableDataset):
    """The same samples as a stream, divided among workers, and among ranks where asked."""

    def __init__(self, lengths, rank=0, size=1):
        self.lengths = list(lengths)
        self.rank = rank
        self.size = size

    def own(self):
        return range(self.rank, len(self.lengths), self.size)

    def __iter__(self):
        indices = self.own()
        info = get_worker_info()
        if info is not None:
            indices = indices[info.id :: info.num_workers]
        return (sample_of(index, self.lengths[index]) for index in indices)


class Living(Stream):
    """Resumes by its own state: the dict that it goes on changing."""

    state = None

    def __iter__(self):
        if self.state is None:
            self.state = {"at": 0}
        for place, sample in enumerate(super().__iter__()):
            if place >= self.state["at"]:
                self.state["at"] = place + 1
                yield sample
        self.state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def padded(samples, name, padding_value):
    rows = [sample[name] for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_value)


def collate(samples):
    return {
        "input_ids": padded(samples, "input_ids", -1),
        "labels": padded(samples, "labels", -100),
    }


def collate_packed(samples):
    """Samples end to end; the first label of each is nobody's to predict."""
    ids = [sample["input_ids"] for sample in samples]
    positions = [torch.arange(len(row)) for row in ids]
    labels = []
    for sample in samples:
        labels += [torch.tensor([-100]), sample["labels"][1:]]
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "labels": torch.cat(labels)[None],
    }


def ids_in(step):
    """Which samples a step's batch really holds."""
    return [] if step.idle else step.batch["input_ids"][:, 0].tolist()


def used(step):
    ids = ids_in(step)
    assert step.idle or ids == list(step.indices)
    return ids


def ids_of(steps):
    """The samples of some steps, in their order."""
    return list(chain.from_iterable(map(used, steps)))


def all_ids(steps_by_rank):
    return sorted(ids_of(chain.from_iterable(steps_by_rank)))


def as_json(state):
    return json.loads(json.dumps(state))


def make_loader(world, lengths, *, dataset=Tokens, max_tokens=128, **options):
    options = {"window": 16, "collate_fn": collate, **options}
    return OnlineDataLoader(dataset(lengths), TokenBudget(max_tokens), world=world, **options)


def leg(loader, states, *, rank, size, num_steps, epochs):
    """Epoch -> steps of a rank that goes on from these states for so many steps, and its state then."""
    if states is not None:
        loader.load_state_dict(states[rank] if len(states) == size else list(states))
    steps_of = {}
    while loader.epoch < epochs and num_steps > 0:
        epoch = loader.epoch
        steps_of[epoch] = list(islice(loader, num_steps))
        num_steps -= len(steps_of[epoch])
    return steps_of, as_json(loader.state_dict())


def legs(make, plan, *, epochs, ends_known=False):
    """Epoch -> rows of the ranks' steps, of loaders that stop, are saved as JSON and go on.

    ``plan``: ranks and steps of each leg; None: until so many epochs are over.
    ``ends_known``: no leg is resumed at the end of an epoch.
    """
    rows_of = {}
    states = None
    for size, num_steps in plan:

        def run(world, states=states, num_steps=num_steps):
            left = sys.maxsize if num_steps is None else num_steps
            loader = make(world)
            return leg(
                loader, states, rank=world.rank, size=world.size, num_steps=left, epochs=epochs
            )

        ranks, new_states = zip(*run_ranks(size, run), strict=True)
        if ends_known and states is not None:
            for steps_of in ranks:
                starts_empty = bool(steps_of) and not steps_of[min(steps_of)]
                assert not starts_empty, "an epoch was resumed of which nothing was left"
        states = new_states
        for epoch in ranks[0]:
            rows = list(zip(*(steps_of[epoch] for steps_of in ranks), strict=True))
            rows_of.setdefault(epoch, []).extend(rows)
            for row in rows:
                assert len({(step.ends_update, step.weight.total) for step in row}) == 1
    return rows_of
