"""What fits: the law of budgets for all of them, what each counts by hand, and what is refused."""

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, AllOf, Budget, padded_tokens
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.lengths import as_streams
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.ranks import cut
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape, target_tokens
from dynagroup.testing import assert_budget_law
from tests import strategies

LENGTHS = {"tokens": np.array([0, 1, 5, 9, 30, 60], np.int32), "patches": np.array([0, 9, 0, 40, 2, 7], np.int32)}
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}


class Bytes(PaddedTokens):
    """10 bytes for a token of the encoder, 20 for one of the decoder, whatever that stream is called."""

    fingerprint = "seq2seq"
    static_bytes = 1000

    def batch_bytes(self, shape: BatchShape, /) -> np.ndarray:
        return shape.num_samples * (10.0 * shape.longest["tokens"] + 20.0 * target_tokens(shape))


@settings(max_examples=40)
@given(st.one_of(strategies.budgets, strategies.capped_budgets))
def test_no_budget_accepts_more_after_refusing_less(budget: Budget) -> None:
    assert_budget_law(budget, LENGTHS, num_shapes=300)
    if not isinstance(budget, MemoryBudget) and "patches" not in budget.fingerprint:
        assert_budget_law(budget, {"tokens": LENGTHS["tokens"]}, num_shapes=300)


FIRST = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.5)
BOUND = MemoryBudget(2, model=PaddedTokens(), headroom=1.0).bind({"tokens": np.array([4, 10, 2], np.int32)})
PARTLY = MemoryBudget(2, longest=10, model=PaddedTokens(), headroom=1.0).bind(
    {"tokens": np.array([4], np.int32), "labels": np.array([30], np.int32)}
)
PACKED = TokenBudget(64, layout="packed", pad_to_multiple_of=8) & AdditiveCap("tokens", 20) & AdditiveCap("patches", 9)
KNOWN = MemoryBudget(4, longest=100, headroom=0.5).with_memory(PaddedTokens)
BY_HAND: dict[str, tuple[Budget, BatchShape, list[bool]]] = {
    "padding of collation counts": (
        TokenBudget(64, pad_to_multiple_of=8), BatchShape.of([4, 4, 8], longest=[16, 17, 8]), [True, False, True],
    ),
    "packed: the sum": (TokenBudget(64, layout="packed"), BatchShape.of([4, 4], 60, [64, 65]), [True, False]),
    "empty samples": (TokenBudget(64), BatchShape.of([64, 65], 0), [True, False]),
    "64 bits": (TokenBudget(2**41), BatchShape.of([2**40, 2**40, 2**41], [2**31 - 1, 2, 2]), [False, True, False]),
    "no harder than the first batch": (
        FIRST, BatchShape.of([4, 3, 5, 2, 4], [100, 100, 100, 101, 50]), [True, True, False, False, True],
    ),
    "the first batch by the data": (BOUND, BatchShape.of(5, [4, 5]), [True, False]),
    "the first batch, a stream by the data": (
        PARTLY, BatchShape.of([2, 2, 3], {"tokens": 10, "labels": [30, 31, 20]}), [True, False, False],
    ),
    "bytes": (MemoryBudget.from_bytes(4000, model=Bytes(), headroom=1.0), BatchShape.of([10, 11], 10), [True, False]),
    "all parts": (
        TokenBudget(100) & AdditiveCap("patches", 10) & TokenBudget(50),
        BatchShape.of([1, 1, 1], {"tokens": [50, 51, 50], "patches": [10, 1, 11]}),
        [True, False, False],
    ),
    "a first batch beside a cap": (
        MemoryBudget(2, longest=7, model=PaddedTokens(), headroom=1.0) & AdditiveCap("patches", 10),
        BatchShape.of([2, 2, 3], {"tokens": 7, "patches": [5, 6, 1]}),
        [True, False, False],
    ),
    "a cap is not shown a packed row's padding": (
        PACKED, BatchShape.of([3, 3, 3], {"tokens": 8, "patches": 5}, {"tokens": [20, 21, 20], "patches": [9, 9, 10]}),
        [True, False, False],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("budget", "shape", "fits"), BY_HAND.values(), ids=BY_HAND)
def test_what_fits_by_hand(budget: Budget, shape: BatchShape, fits: list[bool]) -> None:
    assert budget.fits(shape).tolist() == fits


def test_figures_by_hand() -> None:
    assert padded_tokens(BatchShape.of(3, 17), TokenBudget(64, pad_to_multiple_of=8)).tolist() == [72]
    assert TokenBudget.from_sequence_length(2048, 4) == TokenBudget(16384) == as_budget(16384)
    assert TokenBudget(64).largest(np.array([0])).tolist() == [64]  # type: ignore[union-attr]
    assert (TokenBudget(100) & TokenBudget(50)).largest(np.array([10])).tolist() == [5]  # type: ignore[union-attr]
    assert (TokenBudget(100) & AdditiveCap("patches", 10)).largest(np.array([10])) is None
    assert (TokenBudget(100, pad_to_multiple_of=4) & TokenBudget(50, pad_to_multiple_of=6)).pad_to_multiple_of == 12


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), min_size=2, max_size=3),
    st.sampled_from(["padded", "packed"]),
)
@example([5] * 8, [(40, 1), (1000, 8)], "padded")
@example([5] * 3, [(40, 4), (1000, 6)], "packed")
def test_combined_budgets_count_what_the_collate_function_pads_to(lengths, parts, layout):
    """It pads to a multiple of all parts: each part holds for that, also one that asks for less padding itself."""
    both = AllOf.of(*(TokenBudget(most, pad_to_multiple_of=pad, layout=layout) for most, pad in parts))
    pad = both.pad_to_multiple_of
    width = -(-max(lengths) // pad) * pad
    made = len(lengths) * width if layout == "padded" else -(-sum(lengths) // pad) * pad
    least = min(most for most, _ in parts)
    shape = BatchShape.of_samples({"tokens": np.array(lengths, np.int32)})
    assert bool(both.fits(shape)[0]) == (made <= least and len(lengths) <= least)
    if layout == "padded" and width:
        assert both.largest(np.array([max(lengths)]))[0] == least // width


PAIRS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=40)


def test_memory_that_nobody_described_is_what_a_host_knows_of_its_model() -> None:
    """Before or after lengths are known, within what wraps a budget; a model that was given stays."""
    lengths, cap = {"tokens": LENGTHS["tokens"]}, AdditiveCap("tokens", 99)
    for wrap in (lambda budget: budget, LearningBudget, lambda budget: budget & cap):
        plain, told = wrap(MemoryBudget(4)), wrap(MemoryBudget(4, model=PaddedTokens())).bind(lengths).fingerprint
        assert plain.with_memory(PaddedTokens).bind(lengths).fingerprint == told != plain.bind(lengths).fingerprint
        assert plain.bind(lengths).with_memory(PaddedTokens).fingerprint == told
        assert plain.with_memory(PaddedTokens).with_memory(Bytes).bind(lengths).fingerprint == told
    assert (TokenBudget(9).with_memory(Bytes), KNOWN) == (TokenBudget(9), FIRST)
    learned = LearningBudget(MemoryBudget(4))
    learned.with_memory(PaddedTokens).record_failed_cost(7.0)
    assert learned.limits[1] == 7.0


@settings(max_examples=40)
@given(PAIRS, st.sampled_from(["target", "labels"]), st.integers(1, 400), st.sampled_from([1, 8]))
def test_source_and_target_count_together(lengths: list[tuple[int, int]], name: str, most: int, multiple: int) -> None:
    """Padded tokens of both, or the bytes of both."""
    device = MemoryBudget.from_bytes(10 * most + 1200, model=Bytes(), headroom=1.0)
    streams = dict(zip(("tokens", name), np.array(lengths, np.int32).T, strict=True))
    for budget in (TokenBudget(most, pad_to_multiple_of=multiple), device):
        batches = cut(streams, budget.bind(streams))
        for part in np.split(batches.order, batches.offsets[1:-1]):
            longest, widest = (int(values[part].max()) for values in streams.values())
            padded = -(-longest // multiple) * multiple + -(-widest // multiple) * multiple
            made, limit = (padded, most) if budget is not device else (10 * longest + 20 * widest, 10 * most + 200)
            assert len(part) == 1 or len(part) * made <= limit


@settings(max_examples=40)
@given(
    st.one_of(
        st.builds(TokenBudget, st.integers(1, 400), pad_to_multiple_of=st.sampled_from([1, 8])),
        st.builds(lambda n: MemoryBudget(n, model=PaddedTokens(), headroom=1.0), st.integers(1, 6)),
    ),
    PAIRS,
    st.integers(1, 300),
    st.booleans(),
)
def test_a_capped_stream_is_not_counted_as_padding(budget, lengths, limit, learns) -> None:
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


@pytest.mark.parametrize(("make", "message"), [
    (lambda: TokenBudget(0), "`max_tokens` must be an int of at least 1, but is 0"),
    (lambda: TokenBudget(8, layout="ragged"), "`layout` must be one of 'padded', 'packed', but is 'ragged'"),  # type: ignore[arg-type]
    (lambda: MemoryBudget(4, longest={"tokens": 8, "target": -1}), "`target` must be an int of at least 1"),
    (lambda: MemoryBudget(4, model=object()), "`model` must predict memory, but is object"),  # type: ignore[arg-type]
    (lambda: MemoryBudget.from_bytes(9, model=PaddedTokens()), "`model` must predict bytes"),  # type: ignore[arg-type]
    (lambda: TokenBudget(8) & TokenBudget(8, layout="packed"), "either padded or packed"),
    (lambda: MemoryBudget(4).fits(BatchShape.of(1, 1)), "`longest` is not known"),
    (lambda: as_budget(True), "`budget` must be a Budget such as TokenBudget(4096)"),
    (
        lambda: MemoryBudget(2, longest=7, model=PaddedTokens()).fits(BatchShape.of(1, {"tokens": 1, "labels": 1})),
        "how long the first batch is in 'labels' is not known",
    ),
    (lambda: AdditiveCap("patches", 4).fits(BatchShape.of(1, 1)), "needs the stream 'patches', but lengths have"),
])  # fmt: skip
def test_bad_arguments_name_themselves(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


# Budgets of the user's own.


def own(base: type[Any] = Budget, **methods: Any) -> Any:
    return type("Mine", (base,), methods)(*(() if base is Budget else (99,)))


@pytest.mark.parametrize(("budget", "message"), [
    (own(fits=lambda self, shape, /: shape.num_samples % 2 == 0), "but accepts it after a sample"),
    (own(TokenBudget, fits=lambda self, shape, /: shape.longest["tokens"] > 10), "but accepts it after"),
    (own(TokenBudget, largest=lambda self, longest, /: longest * 0 + 3), "`largest` says 3 samples"),
])  # fmt: skip
def test_a_law_breaking_budget_is_caught(budget: Budget, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_budget_law(budget, {"tokens": LENGTHS["tokens"]})


@pytest.mark.parametrize(("budget", "message"), [
    *((own(fits=lambda self, shape, /, a=a: a), r"Mine\.fits must give") for a in (True, None, np.ones(3))),
    (own(TokenBudget, largest=lambda self, longest, /: 4), r"Mine\.largest must give an array with one number"),
])  # fmt: skip
def test_a_budget_of_the_users_own_answers_for_every_shape(budget: Budget, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assert LengthAwareBatchSampler(np.array([3, 40, 5, 6], np.int32), budget, **ALONE).plan


# Names.


def test_messages_and_budgets_know_the_names_that_the_user_gave() -> None:
    pairs = {"source": [3, 90], "target": [4, 5]}
    assert MemoryBudget(1, longest=90).bind(as_streams(pairs)).most_samples({"source": 90, "target": 5}) == 1
    assert (
        len(LengthAwareBatchSampler(pairs, own(fits=lambda self, s, /: s.total["source"] < 93), **ALONE).plan.rows) == 2
    )
    with pytest.raises(BudgetError, match=r"sample 1 \(90 source, 5 target\) does not fit even alone"):
        LengthAwareBatchSampler(pairs, 50, oversize="error", **ALONE)
    with pytest.warns(UserWarning, match="the first is sample 1 with 90 source, 5 target;"):
        LengthAwareBatchSampler(pairs, 50, **ALONE)
    with pytest.raises(ConfigError, match=r"needs the stream 'patches', but lengths have \['source', 'target'\]"):
        LengthAwareBatchSampler(pairs, TokenBudget(100) & AdditiveCap("patches", 5), **ALONE)
    report = LengthAwareBatchSampler(pairs, 200, **ALONE).plan.report()
    assert "sample length in 'source', median" in report
    assert "'tokens'" not in report
