"""Before lengths are known: batches of like work meet in a step, as far as what the ranks hold allows."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import OnlineDataLoader, TokenBudget
from dynagroup.online.protocol import placed
from dynagroup.plan.cost import Work
from dynagroup.testing import run_ranks

LENGTHS = np.clip(np.random.default_rng(5).lognormal(5.5, 1.0, 3000), 1, 4096).astype(int)
WORK = Work()


def time_of(step: Any, layout: str) -> float:
    lengths = LENGTHS[step.indices]
    samples = WORK.of_lengths(lengths) if layout == "packed" else len(lengths) * WORK.of_lengths([lengths.max()])
    return WORK.per_step + (0 if step.idle else float(samples.sum()))


@pytest.mark.parametrize(
    ("layout", "hinted", "most"),
    [("padded", False, 0.11), ("padded", True, 0.06), ("packed", False, 0.06), ("packed", True, 0.05)],
)
def test_batches_of_like_work_meet_in_a_step_before_lengths_are_known(layout: Any, hinted: bool, most: float) -> None:
    """Predicted time of the dearest rank of each step, over the mean rank's, all steps of a first epoch together."""
    noise = np.random.default_rng(1).lognormal(0, 0.25, len(LENGTHS))
    how: dict[str, Any] = {"length_hint": LENGTHS * noise} if hinted else {}
    how |= {"weigh": "samples", "shuffle": True, "seed": 1, "window": 128, "work": WORK}
    how["length_of"] = lambda i: int(LENGTHS[i])

    def rank(world: Any) -> list[float]:
        budget = TokenBudget(8192, layout=layout)
        loader = OnlineDataLoader(range(len(LENGTHS)), budget, collate_fn=list, world=world, **how)
        return [time_of(step, layout) for step in loader]

    times = np.array(run_ranks(4, rank))
    assert times.max(0).sum() / times.mean(0).sum() - 1 < most


class Grown:
    """From the second epoch on 0.9 % of the samples are half as long again."""

    epoch = 0

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> int:
        return int(LENGTHS[index] * (1.5 if self.epoch and index % 111 == 0 else 1))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 512}], ids=["free", "updates"])
def test_once_a_planned_batch_is_split_batches_of_like_work_meet_again(options: dict[str, Any]) -> None:
    """On one rank all later rows would come a step later."""

    def rank(world: Any) -> list[float]:
        how: dict[str, Any] = {"collate_fn": list, "length_of": int, "weigh": "samples", "shuffle": True, "window": 128}
        loader = OnlineDataLoader(Grown(), TokenBudget(8192), **how, world=world, **options)
        return [[WORK.per_step + len(s.batch) * max(s.batch) for s in loader] for _ in range(2)][1]

    times = np.array(run_ranks(2, rank))
    assert times.max(0).sum() / times.mean(0).sum() - 1 < 0.08


@settings(max_examples=50)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=2, max_size=3),
    st.permutations([0.1, 0.4, 0.4, 0.8]),
)
def test_no_other_order_of_what_ranks_have_picked_waits_less(ranks: Any, at: Any) -> None:
    def total(rows: Any) -> int:
        return sum(map(max, zip(*rows, strict=True)))

    ours = [placed(sorted(works, reverse=True), at) for works in ranks]
    assert [sorted(works) for works in ours] == [sorted(works) for works in ranks]
    others = [[ranks[0]]]
    for works in ranks[1:]:
        others = [[*rows, list(order)] for rows in others for order in permutations(works)]
    assert total(ours) == min(map(total, others))
