"""Planned batches that came out smaller after processing are joined, and counted."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dynagroup import TokenBudget
from dynagroup.online.collator import RefinementCollator
from dynagroup.online.messages import Request, WindowSamples
from dynagroup.testing import run_ranks

from .helpers import Tokens, ids_in, lengths_of, make_loader, used


class Shrinking(Tokens):
    """From epoch 1 on, longer samples are cut off at 20 tokens: a curriculum that the plan does not know of."""

    def set_epoch(self, epoch):
        self.top = 20 if epoch else 64

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        return {name: values[: self.top] for name, values in sample.items()}


def test_neighbours_that_both_shrank_are_joined_where_they_fit():
    def window(lengths, groups, costs):
        samples = [{"input_ids": [0] * length} for length in lengths]
        collator = RefinementCollator(list, TokenBudget(12), weigh="samples")
        request = Request(np.arange(len(samples)), groups, costs, number=0, indices=range(len(samples)))
        return [
            (refined.indices, refined.group, refined.joined) for refined in collator(WindowSamples(request, samples))
        ]

    assert window([3, 3, 3, 9, 2], (1, 2, 1, 1), (8, 12, 9, 5)) == [([0, 1, 2], 0, 1), ([3], 2, 0), ([4], 3, 0)]
    assert window([3, 3, 3], (1, 2), None) == [([0], 0, 0), ([1, 2], 1, 0)], (
        "batches that a resumed run had stay as they were"
    )
    assert window([7, 7, 3], (1, 2), (8, 12)) == [([0], 0, 0), ([1], 1, 0), ([2], 1, 0)], "what does not fit is cut"


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 40}], ids=["free", "update"])
@pytest.mark.parametrize("size", [1, 2])
def test_shorter_samples_make_fewer_steps_and_resume_exactly(size, options):
    lengths = lengths_of(200, seed=6)

    def make(world):
        return make_loader(world, lengths, dataset=Shrinking, shuffle=True, **options)

    def run(world, stop=3):
        loader = make(world)
        first = list(loader)
        assert loader.stats.merges == 0, "as planned"
        steps, state = [], {}
        for number, step in enumerate(loader):
            steps.append(used(step))
            if number == stop:
                state = json.loads(json.dumps(loader.state_dict()))
        return len(first), steps, loader.stats.merges, state

    results = run_ranks(size, run)
    assert sorted(i for _, steps, _, _ in results for step in steps for i in step) == list(range(200))
    assert sum(merges for _, _, merges, _ in results) > 0
    assert all(len(steps) < num_first for num_first, steps, _, _ in results)
    assert len({len(steps) for _, steps, _, _ in results}) == 1

    def rest(world):
        loader = make(world)
        loader.load_state_dict(results[world.rank][3])
        return [ids_in(step) for step in loader]

    assert run_ranks(size, rest) == [steps[4:] for _, steps, _, _ in results]
