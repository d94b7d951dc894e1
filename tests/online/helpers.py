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
    return (
        np.clip(np.random.default_rng(seed).lognormal(2.2, 0.9, num_samples), 1, top)
        .astype(int)
        .tolist()
    )


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
        return sample_of(index, max(1, int(self.lengths[index] * random.uniform(0.7, 1.4))))


class Stream(IterableDataset):
    """The same samples as a stream, divided among workers, and among ranks where asked."""

    def __init__(self, lengths, rank=0, size=1):
        self.lengths, self.rank, self.size = list(lengths), rank, size

    def own(self):
        return range(self.rank, len(self.lengths), self.size)

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return (sample_of(index, self.lengths[index]) for index in self.own()[worker::workers])


class Living(Stream):
    """Resumes by its own state: the dict that it goes on changing."""

    state = None

    def __iter__(self):
        self.state = self.state or {"at": 0}
        for place, sample in enumerate(super().__iter__()):
            if place >= self.state["at"]:
                self.state["at"] = place + 1
                yield sample
        self.state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in samples], batch_first=True, padding_value=-1)
    return {
        "input_ids": ids,
        "labels": pad([s["labels"] for s in samples], batch_first=True, padding_value=-100),
    }


def collate_packed(samples):
    """Samples end to end; the first label of each is nobody's to predict."""
    first = torch.tensor([-100])
    return {
        "input_ids": torch.cat([s["input_ids"] for s in samples])[None],
        "position_ids": torch.cat([torch.arange(len(s["input_ids"])) for s in samples])[None],
        "labels": torch.cat([torch.cat([first, s["labels"][1:]]) for s in samples])[None],
    }


def ids_in(step):
    """Which samples a step's batch really holds."""
    return [] if step.idle else step.batch["input_ids"][:, 0].tolist()


def used(step):
    assert step.idle or ids_in(step) == list(step.indices)
    return ids_in(step)


def all_ids(steps_by_rank):
    return sorted(chain.from_iterable(used(step) for steps in steps_by_rank for step in steps))


def make_loader(world, lengths, *, dataset=Tokens, max_tokens=128, **options):
    options = {"window": 16, "collate_fn": collate, **options}
    return OnlineDataLoader(dataset(lengths), TokenBudget(max_tokens), world=world, **options)


def legs(make, plan, *, epochs, ends_known=False):
    """Epoch -> rows of the ranks' steps, of loaders that stop, are saved as JSON and go on on as many ranks or on others.
    ``plan``: ranks and steps of each leg; None: until so many epochs are over. ``ends_known``: none is resumed at its end."""
    found, states = {}, None

    def leg(world, states, left):
        loader, came = make(world), {}
        if states is not None:
            loader.load_state_dict(states[world.rank] if len(states) == world.size else [*states])
        while loader.epoch < epochs and left > 0:
            epoch = loader.epoch
            came[epoch] = list(islice(loader, left))
            left -= len(came[epoch])
        assert not (ends_known and states and came) or came[min(came)], (
            "an epoch was resumed of which nothing was left"
        )
        return came, json.loads(json.dumps(loader.state_dict()))

    for size, steps in plan:
        left = sys.maxsize if steps is None else steps
        ranks, states = zip(
            *run_ranks(size, lambda world, s=states, k=left: leg(world, s, k)), strict=True
        )
        for epoch in ranks[0]:
            rows = list(zip(*(came[epoch] for came in ranks), strict=True))
            assert all(
                len({(step.ends_update, step.weight.total) for step in row}) == 1 for row in rows
            )
            found.setdefault(epoch, []).extend(rows)
    return found
