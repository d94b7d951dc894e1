"""Two padded streams, measured after processing: batches fit, pad little in both, and are counted in both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dynagroup import OnlineDataLoader, RefinementCollator, TokenBudget
from dynagroup.distributed import SingleProcess
from dynagroup.errors import BudgetError
from dynagroup.online.state import LearnedLengths
from dynagroup.shapes import Streams
from dynagroup.testing import assert_conserves

PAIRS = np.random.default_rng(0).lognormal(3, 0.8, (300, 2)).clip(1, 200).astype(int).tolist()


def length_of(pair: list[int]) -> dict[str, int]:
    return {"source": pair[0], "target": pair[1]}


@pytest.mark.parametrize("mode", [{}, {"shuffle": True, "window": 100}, {"samples_per_update": 60}])
def test_batches_fit_and_are_counted_in_both_streams_in_every_epoch(mode: dict[str, Any]) -> None:
    options: dict[str, Any] = {"collate_fn": list, "length_of": length_of, "weigh": "samples", **mode}
    loader = OnlineDataLoader(PAIRS, TokenBudget(2000), **options)
    for _ in range(2):  # the second epoch is planned from what the first has measured
        before = loader.stats.copy()
        steps = list(loader)
        assert_conserves([list(step.indices) for step in steps], range(300))
        shapes = [(len(step.batch), *np.max(step.batch, axis=0)) for step in steps]
        assert all(count * (source + target) <= 2000 for count, source, target in shapes)
        stats = loader.stats - before
        assert stats.padded_tokens == sum(count * (source + target) for count, source, target in shapes)
        assert stats.real_tokens == np.sum(PAIRS)
        assert stats.padding < 0.45


def padded(extra: dict[str, int]) -> Any:
    """A collate function that pads each field to its longest sample, and so much further."""

    def collate(samples: list[list[int]]) -> dict[str, np.ndarray]:
        widths = zip(("input_ids", "labels"), np.max(samples, axis=0), strict=True)
        return {name: np.ones((len(samples), width + extra.get(name, 0))) for name, width in widths}

    return collate


def refining(collate: Any, budget: TokenBudget, **options: Any) -> RefinementCollator:
    return RefinementCollator(collate, budget, length_of, weigh="samples", **options)


@pytest.mark.parametrize(("name", "stream", "longest"), [("input_ids", "source", 4), ("labels", "target", 5)])
def test_a_batch_wider_than_measured_in_any_stream_is_refused_where_it_does_not_fit(
    name: str, stream: str, longest: int
) -> None:
    batch = [[3, 5], [4, 2]]
    assert len(refining(padded({}), TokenBudget(100))(batch)) == 1
    told = f"{longest + 90} {stream} wide.*measures {longest}"
    with pytest.raises(BudgetError, match=told):
        refining(padded({name: 90}), TokenBudget(100))(batch)
    with pytest.warns(UserWarning, match=f"{longest + 1} {stream} wide"):
        refining(padded({name: 1}), TokenBudget(100))(batch)
    with pytest.raises(BudgetError, match="44 source and 45 target wide.*measures 4 and 5"):
        refining(padded({"input_ids": 40, "labels": 40}), TokenBudget(100))(batch)


def test_a_stream_that_is_shown_under_its_own_name_or_padded_to_a_multiple_or_not_counted_is_no_mistake() -> None:
    batch = [[3, 5], [4, 2]]
    with pytest.raises(BudgetError, match="95 target wide"):
        refining(lambda samples: {"target": np.ones((2, 95))}, TokenBudget(100))(batch)
    refining(padded({"labels": 3}), TokenBudget(100, pad_to_multiple_of=8))(batch)
    refining(padded({"labels": 90}), TokenBudget(100, streams=("source",)))(batch)
    refining(padded({"labels": 90}), TokenBudget(100, layout="packed"))(batch)


def test_what_does_not_fit_is_named_in_all_streams() -> None:
    with pytest.raises(BudgetError, match=r"sample 1 \(60 source, 50 target\) does not fit even alone"):
        refining(list, TokenBudget(100), oversize="error")([[3, 5], [60, 50]])
    loader = OnlineDataLoader(
        [[3, 5], [60, 50]], TokenBudget(100), collate_fn=list, length_of=length_of, weigh="samples"
    )
    with pytest.warns(UserWarning, match=r"sample 1 \(60 source, 50 target\) does not fit the budget even alone"):
        list(loader)


def test_lengths_are_steady_where_no_stream_changes() -> None:
    learned = LearnedLengths(100)

    def epoch(**changed: list[int]) -> bool:
        lengths: Streams = {name: np.full(100, 7, np.int32) for name in ("tokens", "target")}
        for name, samples in changed.items():
            lengths[name][samples] += 1
        learned.observe(range(100), lengths)
        learned.merge(SingleProcess())
        return learned.steady

    assert epoch()
    assert epoch(target=[3], tokens=[3])  # 1 % of the samples
    assert epoch(target=[3], tokens=[3])
    assert not epoch(target=[4, 5])  # and 3, which changes back
    assert not epoch()
    assert epoch()
