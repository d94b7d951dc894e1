"""Small real data for the online tests; picklable, so that workers of every start method can have it."""

from itertools import chain

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from dynagroup import OnlineDataLoader, TokenBudget

torch.set_num_threads(1)


def lengths_of(num_samples: int, seed: int = 0, top: int = 64) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(2.2, 0.9, num_samples), 1, top).astype(int).tolist()


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

    def __init__(self, lengths):
        super().__init__(lengths)
        self.rng = np.random.default_rng(len(self.lengths))

    def __getitem__(self, index):
        return sample_of(index, max(1, int(self.lengths[index] * self.rng.uniform(0.7, 1.4))))


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


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([s["input_ids"] for s in samples], batch_first=True, padding_value=-1)
    labels = pad([s["labels"] for s in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "labels": labels}


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
