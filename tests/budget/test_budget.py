"""What fits: the law of all budgets, what each counts by hand, what is refused; and limits that are learned."""

import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup import (
    BudgetError,
    ConfigError,
    LearningBudget,
    LengthAwareBatchSampler,
    MemoryBudget,
    StateError,
)
from dynagroup.budget.base import AdditiveCap, AllOf, Budget, padded_tokens
from dynagroup.budget.memory import parsed_bytes
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.lengths import as_streams
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.shapes import BatchShape, target_tokens
from dynagroup.testing import assert_budget_law, run_ranks
from tests import strategies

LENGTHS = {
    "tokens": np.array([0, 1, 5, 9, 30, 60], np.int32),
    "patches": np.array([0, 9, 0, 40, 2, 7], np.int32),
}
ALONE: dict[str, Any] = {"rank": 0, "world_size": 1}
PAIRS = st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=40)
FAILURES = st.tuples(st.integers(1, 12), st.integers(1, 120))


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


class Aligned(PaddedTokens):
    """Masks are padded to a multiple of 8, so a shorter sample may need more memory."""

    def relative(self, shape: BatchShape, first: BatchShape, /) -> np.ndarray:
        ragged = shape.longest["tokens"] % 8 != 0
        return super().relative(shape, first) * np.where(ragged, 1.1, 1.0)


def test_a_plan_that_fits_takes_at_most_the_whole_limit() -> None:
    budget = MemoryBudget(4, model=Aligned(), headroom=0.9)
    plan = LengthAwareBatchSampler([64, 63, 63, 63, 63], budget, **ALONE).plan
    assert not len(plan.oversize)
    [line] = [line for line in plan.report().splitlines() if "share of the limit" in line]
    assert line.split()[-1] == "100.0%"
    assert budget.bind({"tokens": np.array([64])}).predicted(BatchShape.of(5, 64)) > 1


@pytest.mark.parametrize(
    ("text", "size"),
    [("24G", 24e9), ("24 gb", 24e9), ("24Gi", 24 * 2**30), ("1.5T", 1.5e12), ("512M", 512e6)],
)
def test_sizes_may_leave_out_the_word_for_bytes(text: str, size: float) -> None:
    assert parsed_bytes(text) == size


FIRST = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.5)
BOUND = MemoryBudget(2, model=PaddedTokens(), headroom=1.0).bind(
    {"tokens": np.array([4, 10, 2], np.int32)}
)
LABELS = {"tokens": np.array([4], np.int32), "labels": np.array([30], np.int32)}
PARTLY = MemoryBudget(2, longest=10, model=PaddedTokens(), headroom=1.0).bind(LABELS)
PACKED = (
    TokenBudget(64, layout="packed", pad_to_multiple_of=8)
    & AdditiveCap("tokens", 20)
    & AdditiveCap("patches", 9)
)
KNOWN = MemoryBudget(4, longest=100, headroom=0.5).with_memory(PaddedTokens)
BY_HAND: dict[str, tuple[Budget, BatchShape, list[bool]]] = {
    "padding counts": (
        TokenBudget(64, pad_to_multiple_of=8),
        BatchShape.of([4, 4, 8], [16, 17, 8]),
        [True, False, True],
    ),
    "packed: the sum": (
        TokenBudget(64, layout="packed"),
        BatchShape.of([4, 4], 60, [64, 65]),
        [True, False],
    ),
    "empty samples": (TokenBudget(64), BatchShape.of([64, 65], 0), [True, False]),
    "64 bits": (
        TokenBudget(2**41),
        BatchShape.of([2**40, 2**40, 2**41], [2**31 - 1, 2, 2]),
        [False, True, False],
    ),
    "as the first batch": (
        FIRST,
        BatchShape.of([4, 3, 5, 2], [100, 100, 100, 101]),
        [True, True, False, False],
    ),
    "the first batch by the data": (BOUND, BatchShape.of(5, [4, 5]), [True, False]),
    "one stream by the data": (
        PARTLY,
        BatchShape.of([2, 2, 3], {"tokens": 10, "labels": [30, 31, 20]}),
        [True, False, False],
    ),
    "bytes": (
        MemoryBudget.from_bytes(4000, model=Bytes(), headroom=1.0),
        BatchShape.of([10, 11], 10),
        [True, False],
    ),
    "bytes of two streams": (
        MemoryBudget.from_bytes(2800, model=Bytes(), headroom=1.0),
        BatchShape.of([6, 7], {"tokens": 10, "labels": 10}),
        [True, False],
    ),
    "padded tokens of two streams": (
        TokenBudget(80, pad_to_multiple_of=8),
        BatchShape.of([2, 2, 2], {"tokens": 17, "target": [16, 17, 8]}),
        [True, False, True],
    ),
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
        PACKED,
        BatchShape.of(
            [3, 3, 3], {"tokens": 8, "patches": 5}, {"tokens": [20, 21, 20], "patches": [9, 9, 10]}
        ),
        [True, False, False],
    ),
}


@pytest.mark.parametrize(("budget", "shape", "fits"), BY_HAND.values(), ids=BY_HAND)
def test_what_fits_by_hand(budget: Budget, shape: BatchShape, fits: list[bool]) -> None:
    assert budget.fits(shape).tolist() == fits


def test_figures_by_hand() -> None:
    by_layout = (
        TokenBudget(64, pad_to_multiple_of=8),
        TokenBudget(64, layout="packed", pad_to_multiple_of=8),
    )
    assert [padded_tokens(BatchShape.of(3, 17), budget).tolist() for budget in by_layout] == [
        [72],
        [56],
    ]
    assert TokenBudget.from_sequence_length(2048, 4) == TokenBudget(16384) == as_budget(16384)
    assert TokenBudget(64).largest(np.array([0])).tolist() == [64]  # type: ignore[union-attr]
    assert (TokenBudget(100) & TokenBudget(50)).largest(np.array([10])).tolist() == [5]  # type: ignore[union-attr]
    assert (TokenBudget(100) & AdditiveCap("patches", 10)).largest(np.array([10])) is None
    assert (
        TokenBudget(100, pad_to_multiple_of=4) & TokenBudget(50, pad_to_multiple_of=6)
    ).pad_to_multiple_of == 12


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), min_size=2, max_size=3),
    st.sampled_from(["padded", "packed"]),
)
@example([5] * 8, [(40, 1), (1000, 8)], "padded")
@example([5] * 3, [(40, 4), (1000, 6)], "packed")
def test_combined_budgets_count_what_the_collate_function_pads_to(lengths, parts, layout):
    """It pads to a multiple of all parts: each part holds for that, also one that asks for less padding itself."""
    both = AllOf.of(
        *(TokenBudget(most, pad_to_multiple_of=pad, layout=layout) for most, pad in parts)
    )
    pad = both.pad_to_multiple_of
    width = -(-max(lengths) // pad) * pad
    made = len(lengths) * width if layout == "padded" else -(-sum(lengths) // pad) * pad
    least = min(most for most, _ in parts)
    shape = BatchShape.of_samples({"tokens": np.array(lengths, np.int32)})
    assert bool(both.fits(shape)[0]) == (made <= least and len(lengths) <= least)
    if layout == "padded" and width:
        assert both.largest(np.array([max(lengths)]))[0] == least // width


def test_memory_that_nobody_described_is_what_a_host_knows_of_its_model() -> None:
    """Before or after lengths are known, within what wraps a budget; a model that was given stays."""
    lengths, cap = {"tokens": LENGTHS["tokens"]}, AdditiveCap("tokens", 99)
    for wrap in (lambda budget: budget, LearningBudget, lambda budget: budget & cap):
        plain, told = (
            wrap(MemoryBudget(4)),
            wrap(MemoryBudget(4, model=PaddedTokens())).bind(lengths).fingerprint,
        )
        assert (
            plain.with_memory(PaddedTokens).bind(lengths).fingerprint
            == told
            != plain.bind(lengths).fingerprint
        )
        assert plain.bind(lengths).with_memory(PaddedTokens).fingerprint == told
        assert plain.with_memory(PaddedTokens).with_memory(Bytes).bind(lengths).fingerprint == told
    assert (TokenBudget(9).with_memory(Bytes), KNOWN) == (TokenBudget(9), FIRST)
    learned = LearningBudget(MemoryBudget(4))
    learned.with_memory(PaddedTokens).record_failed_cost(7.0)
    assert learned.limit == 0.9 * 7.0


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
    both = ((LearningBudget(budget) if learns else budget) & AdditiveCap("patches", limit)).bind(
        streams
    )
    count = np.arange(1, 9)
    shape = BatchShape.of(count, {"tokens": int(tokens.max()), "patches": 5})
    expected = alone.fits(BatchShape.of(count, int(tokens.max()))) & (count * 5 <= limit)
    assert both.fits(shape).tolist() == expected.tolist()
    assert both.cost(shape).tolist() == alone.cost(shape.without(["patches"])).tolist()
    assert_budget_law(both, streams, num_shapes=100)


def own(base: type[Any] = Budget, **methods: Any) -> Any:
    """A budget of the user's own."""
    return type("Mine", (base,), methods)(*(() if base is Budget else (99,)))


def planned(budget: Any) -> Any:
    return LengthAwareBatchSampler(np.array([3, 40, 5, 6], np.int32), budget, **ALONE).plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda a=a: planned(own(fits=lambda self, shape, /: a)), "Mine.fits` must return")
            for a in (True, None, np.ones(3))
        ),
        (
            lambda: planned(own(TokenBudget, largest=lambda self, longest, /: 4)),
            "Mine.largest` must return an array with one number",
        ),
        (lambda: TokenBudget(0), "`max_tokens` must be an int of at least 1, but is 0"),
        (
            lambda: TokenBudget(8, layout="ragged"),
            "`layout` must be one of 'padded', 'packed', but is 'ragged'",
        ),  # type: ignore[arg-type]
        (
            lambda: MemoryBudget(4, longest={"tokens": 8, "target": -1}),
            "`target` must be an int of at least 1",
        ),
        (lambda: MemoryBudget(4, model=object()), "`model` must be a memory model, but is object"),  # type: ignore[arg-type]
        (lambda: MemoryBudget.from_bytes(9, model=PaddedTokens()), "`model` must predict bytes"),  # type: ignore[arg-type]
        (lambda: TokenBudget(8) & TokenBudget(8, layout="packed"), "cannot join padded and packed"),
        (lambda: MemoryBudget(4).fits(BatchShape.of(1, 1)), "`longest` is missing"),
        (lambda: as_budget(True), "`budget` must be a budget such as TokenBudget(4096)"),
        (
            lambda: MemoryBudget(2, longest=7, model=PaddedTokens()).fits(
                BatchShape.of(1, {"tokens": 1, "labels": 1})
            ),
            "the longest length of 'labels' is missing",
        ),
        (
            lambda: AdditiveCap("patches", 4).fits(BatchShape.of(1, 1)),
            "needs the stream 'patches', but `lengths` has",
        ),
    ],
)
def test_bad_arguments_name_themselves(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (
            own(fits=lambda self, shape, /: shape.num_samples % 2 == 0),
            "but accepts the batch after a sample",
        ),
        (
            own(TokenBudget, fits=lambda self, shape, /: shape.longest["tokens"] > 10),
            "but accepts the batch after",
        ),
        (
            own(TokenBudget, largest=lambda self, longest, /: longest * 0 + 3),
            "`largest` allows 3 samples",
        ),
    ],
)
def test_a_law_breaking_budget_is_caught(budget: Budget, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_budget_law(budget, {"tokens": LENGTHS["tokens"]})


def test_messages_and_budgets_know_the_names_that_the_user_gave() -> None:
    pairs = {"source": [3, 90], "target": [4, 5]}
    assert (
        MemoryBudget(1, longest=90)
        .bind(as_streams(pairs))
        .most_samples({"source": 90, "target": 5})
        == 1
    )
    mine = own(fits=lambda self, shape, /: shape.total["source"] < 93)
    assert len(LengthAwareBatchSampler(pairs, mine, **ALONE).plan.rows) == 2
    with pytest.raises(
        BudgetError, match=r"sample 1 \(90 source, 5 target\) does not fit even alone"
    ):
        LengthAwareBatchSampler(pairs, 50, oversize="error", **ALONE)
    with pytest.warns(UserWarning, match="the first is sample 1 with 90 source, 5 target;"):
        LengthAwareBatchSampler(pairs, 50, **ALONE)
    with pytest.raises(
        ConfigError,
        match=r"needs the stream 'patches', but `lengths` has only \['source', 'target'\]",
    ):
        LengthAwareBatchSampler(pairs, TokenBudget(100) & AdditiveCap("patches", 5), **ALONE)
    report = LengthAwareBatchSampler(pairs, 200, **ALONE).plan.report()
    assert "sample length in 'source', median" in report
    assert "'tokens'" not in report


LONGER = {"tokens": np.array([3, 90, 40, 100, 7], dtype=np.int32)}


IN_BYTES = MemoryBudget.from_bytes(11_000, model=Bytes(), headroom=1.0)
BUDGETS: list[Any] = [None, TokenBudget(1000, pad_to_multiple_of=8, max_samples=30), IN_BYTES]
BUDGETS += [TokenBudget(1000, layout="packed"), TokenBudget(1000) & AdditiveCap("patches", 50)]


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda b: "none" if b is None else b.fingerprint)
@settings(max_examples=25)
@given(failures=st.lists(FAILURES, max_size=30))
def test_what_failed_and_all_that_is_predicted_as_heavy_never_fits_again(
    budget: Any, failures: list[Any]
) -> None:
    learning = LearningBudget(budget)
    bound = learning.bind({**LONGER, "patches": LONGER["tokens"]})
    counts, longests = (a.ravel() for a in np.meshgrid(np.arange(1, 13), np.arange(1, 121, 7)))
    grid = BatchShape.of(counts, {"tokens": longests, "patches": 1})
    own = np.ones(len(grid), bool) if budget is None else budget.fits(grid)
    failed = math.inf
    for count, longest in failures:
        shape = BatchShape.of(count, {"tokens": longest, "patches": 1})
        failed = min(failed, float(learning.cost(shape)[0]))
        learning.record_oom(shape)
        learning.apply()
        ok = learning.fits(grid)
        assert (ok == (own & learning.allows(grid))).all()
        assert not ok[learning.cost(grid) >= failed].any()
        assert bound.limit == learning.limit, "what is learned is shared"
    if not isinstance(budget, AllOf):
        assert_budget_law(learning, LONGER, num_shapes=50)


def test_the_limit_is_a_share_of_the_smallest_cost_that_failed() -> None:
    learning = LearningBudget(IN_BYTES)
    for samples in (10, 20):
        learning.record_oom(BatchShape.of(samples, 100))
        assert learning.allows(BatchShape.of([8, 9, 10], 100)).tolist() == [True, True, False]


def test_a_budget_that_learns_counts_capped_streams_neither_in_plans_nor_in_failures() -> None:
    learning = LearningBudget(TokenBudget(1000)) & AdditiveCap("patches", 9000)
    failed = BatchShape.of(8, {"tokens": 100, "patches": 900}, {"tokens": 800, "patches": 7200})
    learning.learner.record_oom(failed)
    learning.learner.apply()
    assert not learning.fits(failed)[0]
    assert not learning.learner.allows(failed)[0]


@pytest.mark.parametrize("costs", [(100, 80), (None, 100)])
def test_plans_follow_only_what_is_applied_and_ranks_the_lowest_of_all(costs: Any) -> None:
    def run(world: Any) -> Any:
        learning = LearningBudget(TokenBudget(1000))
        if costs[world.rank] is not None:
            learning.record_oom(BatchShape.of(1, costs[world.rank]))
        before = learning.applied
        learning.apply(world)
        return before, learning.limit, learning.applied

    limit = 0.9 * costs[1]
    assert run_ranks(2, run) == [(None, limit, limit)] * 2


def test_state_goes_through_json_and_belongs_to_a_budget() -> None:
    learning = LearningBudget(TokenBudget(1000))
    learning.record_oom(BatchShape.of(8, 100), wasted_s=1.5)
    learning.apply()
    state = json.loads(json.dumps(learning.state_dict(), allow_nan=False))
    again = LearningBudget(TokenBudget(1000))
    again.load_state_dict(state)
    assert json.dumps(again.state_dict()) == json.dumps(learning.state_dict())
    assert again.applied == learning.applied == 720
    assert str(again.report).startswith("1 out-of-memory errors, 2 parts run again, 1.5 s wasted")
    with pytest.raises(
        StateError, match=r"budget was .*max_tokens=1000.* then, is .*max_tokens=2000.* now"
    ):
        LearningBudget(TokenBudget(2000)).load_state_dict(state)
    for damaged in [{**state, key: "x"} for key in state] + [
        {**state, "limits": [1, *state["limits"][1:]]},
        [],
        3,
    ]:
        with pytest.raises(StateError):
            again.load_state_dict(damaged)
    assert json.dumps(again.state_dict()) == json.dumps(state), "half of nothing is taken over"


def fits_in_a_worker(learning: LearningBudget, asked: Any, answers: Any) -> None:
    while asked.get() is not None:
        answers.put(learning.fits(BatchShape.of(8, 100)).tolist())


def test_workers_see_shared_lessons_at_once() -> None:
    context = torch.multiprocessing.get_context("fork")
    learning = LearningBudget(TokenBudget(1000)).share_memory()
    asked, answers = context.SimpleQueue(), context.SimpleQueue()
    worker = context.Process(target=fits_in_a_worker, args=(learning, asked, answers))
    worker.start()
    for seen in (True, False):
        asked.put(1)
        assert answers.get() == [seen]
        learning.record_oom(BatchShape.of(8, 100))
        learning.apply()
    asked.put(None)
    worker.join()
    assert pickle.loads(pickle.dumps(learning)).fingerprint == learning.fingerprint
