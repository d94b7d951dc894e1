"""An online loader's own promises beside the laws: what is refused and when, copies, and what goes on by itself."""

import json
import weakref
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    AlignmentError,
    ConfigError,
    MemoryBudget,
    OnlineDataLoader,
    PlannedDataLoader,
    StateError,
    TokenBudget,
)  # fmt: skip
from dynagroup.distributed import SingleProcess
from dynagroup.memory import PaddedTokens
from dynagroup.online.state import LearnedLengths
from dynagroup.testing import run_ranks
from dynagroup.update.schedule import linear_ramp
from tests.online.helpers import Tokens, collate, lengths_of, make_loader, used

LENGTHS = lengths_of(60, seed=3)
WRONG = [
    ({"window": 0}, "`window`"),
    ({"shuffle": True, "sampler": [0]}, "exclude each other"),
    ({"length_hint": [1.0]}, "`length_hint`"),
    ({"sampler": torch.utils.data.DistributedSampler(range(60), num_replicas=2, rank=0)}, "divides its indices"),
    ({"sampler": iter([0, 1])}, "anew every epoch, not <list_iterator"),
    ({"batch_sampler": iter([[0]])}, "anew every epoch"),
    ({"samples_per_update": 4, "batch_sampler": [[0]]}, "no `batch_sampler`"),
]


@pytest.mark.parametrize(("options", "match"), WRONG)
def test_wrong_arguments_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_loader(None, LENGTHS, **options)


def test_a_budget_without_a_limit_is_refused_at_once() -> None:
    for budget in (MemoryBudget(2, model=PaddedTokens()), TokenBudget(900) & MemoryBudget(2, model=PaddedTokens())):
        with pytest.raises(ConfigError, match="longest=tokens of the longest sample"):
            OnlineDataLoader(Tokens(LENGTHS), budget, collate_fn=collate)
    known = MemoryBudget(2, longest=64, model=PaddedTokens())
    assert sum(len(step.indices) for step in OnlineDataLoader(Tokens(LENGTHS), known, collate_fn=collate)) == 60


def test_a_loader_is_let_go_of_at_once() -> None:
    """In a circle of objects its workers would take five seconds each to end."""
    loader = make_loader(None, LENGTHS, samples_per_update=16, num_workers=1, persistent_workers=True)
    list(islice(loader, 2))
    left = weakref.ref(loader)
    del loader
    assert left() is None


@pytest.mark.parametrize("options", [{"drop_last": True, "samples_per_update": 16}, {"sampler": list(range(0, 60, 2))}])
def test_lengths_of_the_samples_in_use_are_enough(options: dict[str, Any]) -> None:
    """In a fixed order the last samples never come: the others' lengths plan the next epoch all the same."""

    def run(world: Any) -> list[int]:
        loader = make_loader(world, LENGTHS, **options)
        return [sum(step.batch["input_ids"].numel() for step in loader if not step.idle) for _ in range(2)]

    padded = np.sum(run_ranks(2, run), axis=0)
    assert padded[1] < padded[0], "batches of known lengths are matched"


def test_lengths_are_steady_where_no_stream_changes() -> None:
    learned = LearnedLengths(100)

    def epoch(**changed: list[int]) -> bool:
        lengths = {name: np.full(100, 7, np.int32) for name in ("tokens", "target")}
        for name, samples in changed.items():
            lengths[name][samples] += 1
        learned.observe(range(100), lengths)
        learned.merge(SingleProcess())
        return learned.steady

    assert epoch()
    assert epoch(target=[3], tokens=[3])  # 1 % of the samples
    assert not epoch(target=[4, 5])  # and 3, which changes back
    assert not epoch()
    assert epoch()


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_state_of_another_order_is_refused(name: str) -> None:
    """Taken over, it would lose samples and repeat others."""
    order: list[Any] = list(range(60)) if name == "sampler" else [[2 * i, 2 * i + 1] for i in range(30)]
    loader = make_loader(None, LENGTHS, **{name: order})
    came = [i for step in islice(loader, 3) for i in used(step)]
    state = json.loads(json.dumps(loader.state_dict()))
    with pytest.raises(StateError, match=f"`{name}` gives other indices in epoch 0"):
        make_loader(None, LENGTHS, **{name: order[::-1]}).load_state_dict(state)
    same = make_loader(None, LENGTHS, **{name: order})
    same.load_state_dict(state)
    assert sorted(came + [i for step in same for i in used(step)]) == list(range(60))


def stopped(loader: Any, count: int = 1) -> Any:
    for _ in islice(loader, count):
        pass
    return loader.state_dict()


def test_a_rank_takes_no_other_ranks_state_and_one_that_cannot_load_again_tells_the_others() -> None:
    """Also where the epoch's last steps were agreed, so that resumed ranks ask each other whether that is still the end."""
    states = run_ranks(2, lambda world: stopped(make_loader(world, LENGTHS)))
    assert states[0]["running"]["ended"]

    class Gone(Tokens):
        def __getitem__(self, index: int) -> Any:
            raise OSError("the disk is gone")

    def load(world: Any) -> None:
        with pytest.raises(StateError, match=rf"ranks \[{1 - world.rank}\] of 2 .* this is rank {world.rank} of 2"):
            make_loader(world, LENGTHS).load_state_dict(states[1 - world.rank])
        loader = make_loader(world, LENGTHS, dataset=Gone if world.rank else Tokens)
        loader.load_state_dict(states[world.rank])
        with pytest.raises(RuntimeError if world.rank else AlignmentError, match="the disk is gone"):
            list(loader)

    run_ranks(2, load)
    with pytest.raises(StateError, match="list of all ranks' states"):
        make_loader(SingleProcess(), LENGTHS).load_state_dict(states[0])
    with pytest.raises(StateError, match=r"ranks \[0, 0\] of 2"):
        make_loader(SingleProcess(), LENGTHS).load_state_dict([states[0]] * 2)


RAMP = linear_ramp(5, 23, num_updates=7)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "workers"), [(1, {"num_workers": 2, "prefetch_factor": 2}), (2, {}), (3, {})])
def test_updates_of_a_schedule_are_those_of_the_offline_loader(size, workers, drop_last):
    """Whatever is prefetched."""
    lengths, how = lengths_of(90, seed=4), {"samples_per_update": RAMP, "drop_last": drop_last, "seed": 3}

    def epochs(loader: Any) -> list[list[list[int]]]:
        found = []
        for _ in range(3):
            announced = loader.num_updates
            found.append([[i for step in update for i in used(step)] for update in loader.updates()])
            assert announced == len(found[-1])
        return found

    by_rank = run_ranks(size, lambda world: epochs(make_loader(world, lengths, shuffle=True, **how, **workers)))
    offline = epochs(PlannedDataLoader(Tokens(lengths), lengths, TokenBudget(128), collate_fn=collate, **how))
    found = [[sorted(sum(parts, [])) for parts in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]
    assert found == [[sorted(update) for update in epoch] for epoch in offline]
    sizes = [len(update) for epoch in found for update in epoch]
    assert sizes[:5] == [5, 7, 10, 12, 15]
    assert sum(sizes) < 270 if drop_last else sum(sizes) == 270
    assert sizes[8:11] == [23, 23, 23], "the schedule counts over the whole run"


def test_schedules_that_differ_or_make_no_sense_are_refused() -> None:
    def sized(world: Any, least: int) -> Any:
        return make_loader(world, LENGTHS, samples_per_update=lambda update, current: least)

    with pytest.raises(AlignmentError, match=r"ranks differ in .*sizes of updates"):
        run_ranks(2, lambda world: list(sized(world, 4 + world.rank)))
    with pytest.raises(ConfigError, match="`samples_per_update` must be an int of at least 1.* at update 0"):
        next(iter(sized(None, 0)))
    with pytest.raises(ConfigError, match="this one is free-running"):
        make_loader(None, LENGTHS).set_samples_per_update(4)
