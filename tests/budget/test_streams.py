"""Two padded streams, as sequence-to-sequence data has them, and streams that are laid end to end beside one."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, Budget
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import as_streams
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.online.loader import OnlineDataLoader
from dynagroup.plan.padded import cut
from dynagroup.plan.partition import shard_micro_batches
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape, said, target_tokens
from dynagroup.testing import assert_budget_law
from dynagroup.update.planned import PlannedDataLoader


class _Seq2Seq(PaddedTokens):
    """10 bytes for a token of the encoder, 20 for one of the decoder, whatever that stream is called."""

    fingerprint = "seq2seq"
    static_bytes = 1000

    def batch_bytes(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * (10.0 * shape.longest["tokens"] + 20.0 * target_tokens(shape))


SEQ2SEQ = _Seq2Seq()

pairs = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=40)
names = st.sampled_from(["target", "labels", "decoder"])
budgets = st.one_of(
    st.builds(TokenBudget, st.integers(1, 400), pad_to_multiple_of=st.sampled_from([1, 8])),
    st.builds(lambda n: MemoryBudget(n, model=PaddedTokens(), headroom=1.0), st.integers(1, 6)),
)


def emitted(streams: dict[str, np.ndarray], budget: Budget) -> list[BatchShape]:
    batches = cut(streams, budget.bind(streams))
    parts = np.split(batches.order, batches.offsets[1:-1])
    return [BatchShape.of_samples({name: values[part] for name, values in streams.items()}) for part in parts]


@settings(max_examples=60)
@given(pairs, names, st.integers(1, 400), st.sampled_from([1, 8]))
def test_no_batch_has_more_padded_tokens_than_its_budget_whatever_the_second_stream_is_called(
    lengths: list[tuple[int, int]], name: str, most: int, multiple: int
) -> None:
    source, target = np.array(lengths, np.int32).T
    for shape in emitted(
        {"tokens": source, name: target}, TokenBudget(most, max_samples=9, pad_to_multiple_of=multiple)
    ):
        n = int(shape.num_samples[0])
        width = sum(-(-int(v[0]) // multiple) * multiple for v in shape.longest.values())
        assert n == 1 or n * width <= most


def test_source_and_target_count_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, (2, 400)).astype(np.int32)
    shapes = emitted({"tokens": lengths[0], "labels": lengths[1]}, as_budget(4096))
    assert max(int(s.num_samples[0] * (s.longest["tokens"] + s.longest["labels"])[0]) for s in shapes) <= 4096


@settings(max_examples=40)
@given(pairs, st.integers(1000, 40_000))
def test_no_batch_exceeds_the_bytes_of_a_device_in_two_streams(lengths: list[tuple[int, int]], limit: int) -> None:
    source, target = np.array(lengths, np.int32).T
    budget = MemoryBudget.from_bytes(limit + 1200, model=SEQ2SEQ, headroom=1.0)
    for shape in emitted({"tokens": source, "labels": target}, budget):
        n, long, wide = int(shape.num_samples[0]), int(shape.longest["tokens"][0]), int(shape.longest["labels"][0])
        assert n == 1 or 1000 + n * (10 * long + 20 * wide) <= limit + 1200


@settings(max_examples=40)
@given(budgets, pairs, st.integers(1, 300), st.booleans())
def test_a_capped_stream_is_not_counted_as_padding(
    budget: Budget, lengths: list[tuple[int, int]], limit: int, learns: bool
) -> None:
    tokens, patches = np.array(lengths, np.int32).T
    streams = {"tokens": tokens, "patches": patches}
    alone = budget.bind({"tokens": tokens})
    both = ((LearningBudget(budget) if learns else budget) & AdditiveCap("patches", limit)).bind(streams)
    count = np.arange(1, 9)
    shape = BatchShape.of(count, {"tokens": int(tokens.max()), "patches": 5})
    expected = alone.fits(BatchShape.of(count, int(tokens.max()))) & (count * 5 <= limit)
    assert both.fits(shape).tolist() == expected.tolist()
    assert both.cost(shape).tolist() == alone.cost(shape.without(["patches"])).tolist()
    assert_budget_law(both, streams, num_shapes=100)


def test_a_first_batch_of_known_length_beside_a_cap() -> None:
    budget = MemoryBudget(2, longest=7, model=PaddedTokens(), headroom=1.0) & AdditiveCap("patches", 10)
    shape = BatchShape.of([2, 2, 3], {"tokens": [7, 7, 7], "patches": [5, 6, 1]})
    assert budget.fits(shape).tolist() == [True, False, False]


def test_what_is_not_said_of_the_first_batch_is_taken_from_the_data() -> None:
    budget = MemoryBudget(2, longest=10, model=PaddedTokens(), headroom=1.0)
    bound = budget.bind({"tokens": np.array([4], np.int32), "labels": np.array([30], np.int32)})
    assert bound.fits(BatchShape.of([2, 2, 3], {"tokens": [10, 10, 10], "labels": [30, 31, 20]})).tolist() == [
        True,
        False,
        False,
    ]


def test_streams_that_are_named_alone_count() -> None:
    budget = TokenBudget(100, streams=("tokens",))
    assert budget.fits(BatchShape.of([2, 3], {"tokens": 50, "labels": 900})).tolist() == [True, False]


@pytest.mark.parametrize("budget", [TokenBudget(64), MemoryBudget.from_bytes(4096, model=SEQ2SEQ)])
def test_the_largest_batch_is_asked_only_where_tokens_are_the_only_stream(budget: Budget) -> None:
    class Watched(TokenBudget):
        def largest(self, longest: np.ndarray, /) -> np.ndarray:
            raise AssertionError("the second stream would be forgotten")

    lengths = np.array([3, 9, 4], np.int32)
    cut({"tokens": lengths, "labels": lengths}, Watched(64))
    with pytest.raises(AssertionError):
        cut({"tokens": lengths}, Watched(64))
    assert budget.largest(np.array([8])) is not None


def test_a_number_is_a_budget_of_tokens_wherever_budgets_are_taken() -> None:
    lengths = [3, 9, 4, 7]
    options = {"rank": 0, "world_size": 1}
    assert list(LengthAwareBatchSampler(lengths, 18, **options)) == list(
        LengthAwareBatchSampler(lengths, TokenBudget(18), **options)
    )
    assert shard_micro_batches(lengths, 2, 18) == shard_micro_batches(lengths, 2, TokenBudget(18))
    assert OnlineDataLoader([[1]], 18).budget == PlannedDataLoader([[1]], [1], 18).budget == TokenBudget(18)


def test_messages_and_budgets_know_the_names_that_the_user_gave() -> None:
    pairs = {"source": [3, 90], "target": [4, 5]}
    streams = as_streams(pairs)
    assert sorted(streams) == ["target", "tokens"]  # what budgets are written for
    with pytest.raises(BudgetError, match=r"sample 1 \(90 source, 5 target\) does not fit even alone"):
        LengthAwareBatchSampler(pairs, 50, oversize="error", rank=0, world_size=1)
    with pytest.warns(UserWarning, match="the first is sample 1 with 90 source, 5 target;"):
        LengthAwareBatchSampler(pairs, 50, rank=0, world_size=1)
    with pytest.raises(BudgetError, match=r"sample 1 \(90 source, 5 target\)"):
        shard_micro_batches(pairs, 1, 50, oversize="error")
    with pytest.raises(ConfigError, match=r"{'source': 2, 'target': 1} samples"):
        as_streams({"source": [3, 90], "target": [4]})
    with pytest.raises(ConfigError, match=r"lengths\['source'\]\[1\] must be a whole number"):
        as_streams({"source": [3, -1], "target": [4, 4]})
    with pytest.raises(ConfigError, match=r"`streams` names 'patches', but lengths have \['source', 'target'\]"):
        LengthAwareBatchSampler(pairs, TokenBudget(100, streams=("patches",)), rank=0, world_size=1)
    named = LengthAwareBatchSampler(pairs, TokenBudget(200, streams=("source",)), rank=0, world_size=1).plan
    assert named.statistics["padded_tokens"] == 180
    report = LengthAwareBatchSampler(pairs, 200, rank=0, world_size=1).plan.report()
    assert "sample length in 'source', median" in report
    assert "'tokens'" not in report


def test_a_renamed_stream_travels() -> None:
    streams = as_streams({"source": [3], "target": [4]})
    (first, _) = pickle.loads(pickle.dumps(streams))
    assert (said(first), first, json.dumps({first: 1})) == ("source", "tokens", '{"tokens": 1}')
    pairs = [{name: [3, 9, 4], "labels": [1, 2, 3]} for name in ("source", "tokens")]
    plans = [LengthAwareBatchSampler(lengths, 40, rank=0, world_size=1) for lengths in pairs]
    plans[1].load_state_dict(plans[0].state_dict())
    assert plans[0].plan.fingerprint == plans[1].plan.fingerprint
