"""A free-running loader's sampler may draw another number in every epoch, as a curriculum does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dynagroup.testing import run_ranks
from tests.online.helpers import lengths_of, make_loader

LENGTHS = lengths_of(90)


class Changing:
    def __init__(self, counts):
        self.counts, self.epoch = counts, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.counts[self.epoch]

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(90)[: len(self)].tolist())


def samples(step):
    return [] if step.idle else sorted(set(step.batch["input_ids"].flatten().tolist()) - {-1})


@pytest.mark.parametrize("hint", [None, LENGTHS])
@pytest.mark.parametrize("counts", [(20, 60, 90), (80, 50, 30), (40, 0, 70)])
def test_a_run_resumes_in_every_epoch(counts, hint):
    def run(world):
        def make():
            return make_loader(world, LENGTHS, sampler=Changing(counts), length_hint=hint, max_tokens=64)

        loader, epochs, resumed = make(), [], []
        for _ in counts:
            steps, state = [], None
            for step in loader:
                steps.append(samples(step))
                state = loader.state_dict() if len(steps) == 2 else state
            epochs.append(steps)
            if state is not None:
                again = make()
                again.load_state_dict(state)
                resumed.append([*steps[:2], *(samples(step) for step in again)])
            else:
                resumed.append(steps)
        return epochs, resumed

    found = run_ranks(2, run)
    for epoch, count in enumerate(counts):
        drawn = Changing(counts)
        drawn.set_epoch(epoch)
        for kind in (0, 1):
            steps = [rank[kind][epoch] for rank in found]
            assert len({len(each) for each in steps}) == 1
            assert sorted(itertools.chain(*itertools.chain(*steps))) == sorted(drawn)
            assert len(list(drawn)) == count
