"""What fits: the law of all budgets, what each counts by hand, what is refused; and limits that are learned."""

import json
import math
import pickle
import re
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
    ShapeLadder,
    StateError,
)
from dynagroup.budget.base import AdditiveCap, AllOf, Budget, padded_tokens
from dynagroup.budget.memory import parsed_bytes, predicted_memory
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
    lengths = [64, 63, 63, 63, 63]
    plan = LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1).plan
    assert not len(plan.oversize)
    peaks = [line for line in plan.report().splitlines() if "predicted peak" in line]
    assert len(peaks) == 1
    assert peaks[0].endswith(" 100.0%, 90.0%")
    bound = budget.bind({"tokens": np.array([64])})
    assert bound.predicted(BatchShape.of(5, 64)) > 1


SIZES = [("24G", 24e9), ("24 gb", 24e9), ("24Gi", 24 * 2**30), ("1.5T", 1.5e12), ("512M", 512e6)]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_sizes_may_leave_out_the_word_for_bytes(text: str, size: float) -> None:
    assert parsed_bytes(text) == size


def whole_memory(batch_size: int, longest: Any = None) -> MemoryBudget:
    return MemoryBudget(batch_size, longest=longest, model=PaddedTokens(), headroom=1.0)


def bytes_for(limit: int) -> Budget:
    return MemoryBudget.from_bytes(limit, model=Bytes(), headroom=1.0)


def fits(budget: Budget, num_samples: Any, longest: Any, total: Any = None) -> list[bool]:
    shapes = BatchShape.of(num_samples, longest, total)
    return budget.fits(shapes).tolist()


TOKENS = TokenBudget(64)
TO_EIGHT = TokenBudget(64, pad_to_multiple_of=8)
PACKED = TokenBudget(64, layout="packed")
PACKED_TO_EIGHT = TokenBudget(64, layout="packed", pad_to_multiple_of=8)
PATCHES = AdditiveCap("patches", 10)


def test_padding_counts() -> None:
    assert fits(TO_EIGHT, [4, 4, 8], [16, 17, 8]) == [True, False, True]


def test_padding_of_two_streams_counts() -> None:
    budget = TokenBudget(80, pad_to_multiple_of=8)
    longest = {"tokens": 17, "target": [16, 17, 8]}
    assert fits(budget, 2, longest) == [True, False, True]


def test_a_packed_batch_counts_the_sum_of_its_lengths() -> None:
    assert fits(PACKED, 4, 60, total=[64, 65]) == [True, False]


def test_an_empty_sample_counts_as_one_token() -> None:
    assert fits(TOKENS, [64, 65], 0) == [True, False]


def test_tokens_are_counted_in_64_bits() -> None:
    num_samples = [2**40, 2**40, 2**41]
    longest = [2**31 - 1, 2, 2]
    assert fits(TokenBudget(2**41), num_samples, longest) == [False, True, False]


def test_memory_fits_what_takes_no_more_than_the_first_batch() -> None:
    budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.5)
    longest = [100, 100, 100, 101]
    assert fits(budget, [4, 3, 5, 2], longest) == [True, True, False, False]


def test_the_first_batch_is_of_the_longest_length_of_the_data() -> None:
    bound = whole_memory(2).bind({"tokens": np.array([4, 10, 2], np.int32)})
    assert fits(bound, 5, [4, 5]) == [True, False]


def test_a_stream_of_unknown_longest_length_takes_that_of_the_data() -> None:
    lengths = {"tokens": np.array([4], np.int32), "labels": np.array([30], np.int32)}
    bound = whole_memory(2, longest=10).bind(lengths)
    longest = {"tokens": 10, "labels": [30, 31, 20]}
    assert fits(bound, [2, 2, 3], longest) == [True, False, False]


def test_bytes_are_those_of_the_model_and_its_batch() -> None:
    assert fits(bytes_for(4000), [10, 11], 10) == [True, False]


def test_bytes_of_two_streams_add_up() -> None:
    longest = {"tokens": 10, "labels": 10}
    assert fits(bytes_for(2800), [6, 7], longest) == [True, False]


def test_what_fits_a_joined_budget_fits_all_parts() -> None:
    budget = TokenBudget(100) & PATCHES & TokenBudget(50)
    longest = {"tokens": [50, 51, 50], "patches": [10, 1, 11]}
    assert fits(budget, 1, longest) == [True, False, False]


def test_a_cap_holds_beside_a_first_batch() -> None:
    budget = whole_memory(2, longest=7) & PATCHES
    longest = {"tokens": 7, "patches": [5, 6, 1]}
    assert fits(budget, [2, 2, 3], longest) == [True, False, False]


def test_a_cap_is_not_shown_the_padding_of_a_packed_row() -> None:
    budget = PACKED_TO_EIGHT & AdditiveCap("tokens", 20) & AdditiveCap("patches", 9)
    longest = {"tokens": 8, "patches": 5}
    total = {"tokens": [20, 21, 20], "patches": [9, 9, 10]}
    assert fits(budget, [3, 3, 3], longest, total) == [True, False, False]


def test_padded_tokens_by_hand() -> None:
    shape = BatchShape.of(3, 17)
    assert padded_tokens(shape, TO_EIGHT).tolist() == [72]
    assert padded_tokens(shape, PACKED_TO_EIGHT).tolist() == [56]


def test_a_number_and_a_sequence_length_are_budgets() -> None:
    assert as_budget(16384) == TokenBudget(16384)
    assert TokenBudget.from_sequence_length(2048, 4) == TokenBudget(16384)


def test_a_batch_of_empty_samples_holds_at_most_one_for_each_token() -> None:
    assert TOKENS.largest(np.array([0])).tolist() == [64]


def test_the_largest_batch_is_that_of_the_smallest_part() -> None:
    both = TokenBudget(100) & TokenBudget(50)
    assert both.largest(np.array([10])).tolist() == [5]


def test_no_largest_batch_is_known_beside_a_cap() -> None:
    capped_tokens = TokenBudget(100) & PATCHES
    assert capped_tokens.largest(np.array([10])) is None


def test_parts_of_several_paddings_pad_to_a_multiple_of_all() -> None:
    four = TokenBudget(100, pad_to_multiple_of=4)
    six = TokenBudget(50, pad_to_multiple_of=6)
    assert (four & six).pad_to_multiple_of == 12


PARTS = st.tuples(st.integers(1, 200), st.integers(1, 12))


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    parts=st.lists(PARTS, min_size=2, max_size=3),
    layout=strategies.LAYOUTS,
)
@example(lengths=[5] * 8, parts=[(40, 1), (1000, 8)], layout="padded")
@example(lengths=[5] * 3, parts=[(40, 4), (1000, 6)], layout="packed")
def test_combined_budgets_count_what_the_collate_function_pads_to(lengths, parts, layout):
    """It pads to a multiple of all parts: each part holds for that, also one that asks for less padding itself."""
    budgets = []
    for limit, multiple in parts:
        budgets.append(TokenBudget(limit, pad_to_multiple_of=multiple, layout=layout))
    both = AllOf.of(*budgets)
    multiple = both.pad_to_multiple_of
    width = math.ceil(max(lengths) / multiple) * multiple
    num_padded = len(lengths) * width
    if layout == "packed":
        num_padded = math.ceil(sum(lengths) / multiple) * multiple
    least = min(limit for limit, _ in parts)
    shape = BatchShape.of_samples({"tokens": np.array(lengths, np.int32)})
    expected = max(num_padded, len(lengths)) <= least
    assert both.fits(shape).tolist() == [expected]
    if layout == "padded" and width:
        longest = np.array([max(lengths)])
        assert both.largest(longest).tolist() == [least // width]


# Memory


def as_it_is(budget: Budget) -> Budget:
    return budget


def capped(budget: Budget) -> Budget:
    return budget & AdditiveCap("tokens", 99)


@pytest.mark.parametrize("wrap", [as_it_is, LearningBudget, capped])
def test_memory_that_nobody_described_is_what_a_host_knows_of_its_model(wrap: Any) -> None:
    """Before or after lengths are known, within what wraps a budget; a model that was given stays."""
    lengths = {"tokens": LENGTHS["tokens"]}
    described = wrap(MemoryBudget(4, model=PaddedTokens())).bind(lengths).fingerprint
    plain = wrap(MemoryBudget(4))
    assert plain.bind(lengths).fingerprint != described
    known = plain.with_memory(PaddedTokens)
    assert known.bind(lengths).fingerprint == described
    assert plain.bind(lengths).with_memory(PaddedTokens).fingerprint == described
    assert known.with_memory(Bytes).bind(lengths).fingerprint == described


def test_what_a_host_knows_of_memory_changes_no_other_budget() -> None:
    assert TokenBudget(9).with_memory(Bytes) == TokenBudget(9)


def test_what_a_host_knows_of_memory_becomes_the_model() -> None:
    plain = MemoryBudget(4, longest=100, headroom=0.5)
    described = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.5)
    assert plain.with_memory(PaddedTokens) == described


def test_a_budget_and_its_copy_with_a_known_model_learn_together() -> None:
    budget = LearningBudget(MemoryBudget(4))
    budget.with_memory(PaddedTokens).record_failed_cost(7.0)
    assert budget.limit == 0.9 * 7.0


TOKENS_DRAWN = st.builds(TokenBudget, st.integers(1, 400), pad_to_multiple_of=strategies.PADDINGS)
MEMORY_DRAWN = st.builds(whole_memory, st.integers(1, 6))


@settings(max_examples=40)
@given(
    budget=TOKENS_DRAWN | MEMORY_DRAWN,
    lengths=PAIRS,
    limit=st.integers(1, 300),
    learns=st.booleans(),
)
def test_a_capped_stream_is_not_counted_as_padding(budget, lengths, limit, learns) -> None:
    tokens, patches = np.array(lengths, np.int32).T
    streams = {"tokens": tokens, "patches": patches}
    alone = budget.bind({"tokens": tokens})
    part = LearningBudget(budget) if learns else budget
    both = (part & AdditiveCap("patches", limit)).bind(streams)
    count = np.arange(1, 9)
    longest = int(tokens.max())
    shape = BatchShape.of(count, {"tokens": longest, "patches": 5})
    without_patches = BatchShape.of(count, longest)
    expected = alone.fits(without_patches) & (count * 5 <= limit)
    assert both.fits(shape).tolist() == expected.tolist()
    assert both.cost(shape).tolist() == alone.cost(without_patches).tolist()
    assert_budget_law(both, streams, num_shapes=100)


# What is refused


class AnswersAlways(Budget):
    """A budget of the user's own, which answers the same to all questions."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def fits(self, shape: BatchShape, /) -> Any:
        return self.answer


class LargestIsANumber(TokenBudget):
    def largest(self, longest: Any, /) -> Any:
        return 4


def planned(budget: Any) -> Any:
    lengths = np.array([3, 40, 5, 6], np.int32)
    return LengthAwareBatchSampler(lengths, budget, rank=0, world_size=1).plan


@pytest.mark.parametrize("answer", [True, None, np.ones(3)], ids=repr)
def test_fits_must_answer_for_each_batch(answer: Any) -> None:
    with pytest.raises(ConfigError, match="AnswersAlways.fits` must return"):
        planned(AnswersAlways(answer))


def test_largest_must_answer_for_each_length() -> None:
    message = "LargestIsANumber.largest` must return an array with one number"
    with pytest.raises(ConfigError, match=message):
        planned(LargestIsANumber(99))


SAMPLE = BatchShape.of(1, 1)


def refuses(message: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(message))


def test_tokens_are_at_least_one() -> None:
    with refuses("`max_tokens` must be an int of at least 1, but is 0"):
        TokenBudget(0)


def test_a_layout_is_padded_or_packed() -> None:
    with refuses("`layout` must be one of 'padded', 'packed', but is 'ragged'"):
        TokenBudget(8, layout="ragged")


def test_a_longest_length_is_at_least_one_and_named_by_its_stream() -> None:
    with refuses("`target` must be an int of at least 1"):
        MemoryBudget(4, longest={"tokens": 8, "target": -1})


def test_a_model_is_a_memory_model() -> None:
    with refuses("`model` must be a memory model, but is object"):
        MemoryBudget(4, model=object())


def test_a_limit_in_bytes_needs_a_model_that_predicts_bytes() -> None:
    with refuses("`model` must predict bytes"):
        MemoryBudget.from_bytes(9, model=PaddedTokens())


def test_padded_and_packed_budgets_are_not_joined() -> None:
    with refuses("cannot join padded and packed"):
        TokenBudget(8) & TokenBudget(8, layout="packed")


def test_memory_needs_the_longest_length() -> None:
    with refuses("`longest` is missing"):
        MemoryBudget(4).fits(SAMPLE)


def test_memory_needs_the_longest_length_of_each_stream() -> None:
    pair = BatchShape.of(1, {"tokens": 1, "labels": 1})
    with refuses("the longest length of 'labels' is missing"):
        whole_memory(2, longest=7).fits(pair)


def test_a_truth_value_is_no_budget() -> None:
    with refuses("`budget` must be a budget such as TokenBudget(4096)"):
        as_budget(True)


def test_a_cap_needs_its_stream() -> None:
    with refuses("needs the stream 'patches', but `lengths` has"):
        PATCHES.fits(SAMPLE)


class OnlyEvenNumbers(Budget):
    def fits(self, shape: BatchShape, /) -> Any:
        return shape.num_samples % 2 == 0


class OnlyLongSamples(TokenBudget):
    def fits(self, shape: BatchShape, /) -> Any:
        return shape.longest["tokens"] > 10


class AlwaysThree(TokenBudget):
    def largest(self, longest: Any, /) -> Any:
        return longest * 0 + 3


BROKEN = [
    (OnlyEvenNumbers(), "but accepts the batch after a sample"),
    (OnlyLongSamples(99), "but accepts the batch after"),
    (AlwaysThree(99), "`largest` allows 3 samples"),
]


@pytest.mark.parametrize(("budget", "message"), BROKEN)
def test_a_law_breaking_budget_is_caught(budget: Budget, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_budget_law(budget, {"tokens": LENGTHS["tokens"]})


# Names that the user gave

SENTENCES = {"source": [3, 90], "target": [4, 5]}


def sampler_of(budget: Any, oversize: str = "alone") -> LengthAwareBatchSampler:
    return LengthAwareBatchSampler(SENTENCES, budget, rank=0, world_size=1, oversize=oversize)


class FewSourceTokens(Budget):
    def fits(self, shape: BatchShape, /) -> Any:
        return shape.total["source"] < 93


def test_memory_budgets_know_the_names_that_the_user_gave() -> None:
    bound = MemoryBudget(1, longest=90).bind(as_streams(SENTENCES))
    assert bound.most_samples({"source": 90, "target": 5}) == 1


def test_budgets_of_the_users_own_know_the_names_that_the_user_gave() -> None:
    plan = sampler_of(FewSourceTokens()).plan
    assert len(plan.rows) == 2


def test_errors_know_the_names_that_the_user_gave() -> None:
    message = r"sample 1 \(90 source, 5 target\) does not fit even alone"
    with pytest.raises(BudgetError, match=message):
        sampler_of(50, oversize="error")


def test_warnings_know_the_names_that_the_user_gave() -> None:
    with pytest.warns(UserWarning, match="sample 1 with 90 source, 5 target does not fit"):
        sampler_of(50)


def test_a_missing_stream_is_told_beside_the_names_that_the_user_gave() -> None:
    budget = TokenBudget(100) & AdditiveCap("patches", 5)
    message = r"needs the stream 'patches', but `lengths` has only \['source', 'target'\]"
    with pytest.raises(ConfigError, match=message):
        sampler_of(budget)


def test_reports_know_the_names_that_the_user_gave() -> None:
    report = sampler_of(200).plan.report()
    assert "sample length in 'source', median" in report
    assert "'tokens'" not in report


# Limits that are learned

LONGER = {"tokens": np.array([3, 90, 40, 100, 7], dtype=np.int32)}
IN_BYTES = bytes_for(11_000)
BUDGETS: dict[str, Any] = {
    "none": None,
    "tokens": TokenBudget(1000, pad_to_multiple_of=8, max_samples=30),
    "bytes": IN_BYTES,
    "packed": TokenBudget(1000, layout="packed"),
    "capped": TokenBudget(1000) & AdditiveCap("patches", 50),
}


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@settings(max_examples=25)
@given(failures=st.lists(FAILURES, max_size=30))
def test_what_failed_and_all_that_is_predicted_as_heavy_never_fits_again(
    budget: Any, failures: list[Any]
) -> None:
    learning = LearningBudget(budget)
    bound = learning.bind({**LONGER, "patches": LONGER["tokens"]})
    counts, longest_of_shapes = np.meshgrid(np.arange(1, 13), np.arange(1, 121, 7))
    longest = {"tokens": longest_of_shapes.ravel(), "patches": 1}
    grid = BatchShape.of(counts.ravel(), longest)
    fits_before = np.ones(len(grid), bool)
    if budget is not None:
        fits_before = budget.fits(grid)
    failed = math.inf
    for count, num_tokens in failures:
        shape = BatchShape.of(count, {"tokens": num_tokens, "patches": 1})
        failed = min(failed, learning.cost(shape).item())
        learning.record_oom(shape)
        learning.apply()
        fits_now = learning.fits(grid)
        expected = fits_before & learning.allows(grid)
        assert fits_now.tolist() == expected.tolist()
        too_heavy = learning.cost(grid) >= failed
        assert not fits_now[too_heavy].any()
        assert bound.limit == learning.limit, "what is learned is shared"
    if not isinstance(budget, AllOf):
        assert_budget_law(learning, LONGER, num_shapes=50)


def test_the_limit_is_a_share_of_the_smallest_cost_that_failed() -> None:
    learning = LearningBudget(IN_BYTES)
    for samples in (10, 20):
        learning.record_oom(BatchShape.of(samples, 100))
        allowed = learning.allows(BatchShape.of([8, 9, 10], 100))
        assert allowed.tolist() == [True, True, False]


def test_a_budget_that_learns_counts_capped_streams_neither_in_plans_nor_in_failures() -> None:
    learning = LearningBudget(TokenBudget(1000)) & AdditiveCap("patches", 9000)
    failed = BatchShape.of(8, {"tokens": 100, "patches": 900})
    learning.learner.record_oom(failed)
    learning.learner.apply()
    assert not learning.fits(failed)[0]
    assert not learning.learner.allows(failed)[0]


@pytest.mark.parametrize("costs", [(100, 80), (None, 100)])
def test_plans_follow_only_what_is_applied_and_ranks_the_lowest_of_all(costs: Any) -> None:
    def run(world: Any) -> Any:
        learning = LearningBudget(TokenBudget(1000))
        cost = costs[world.rank]
        if cost is not None:
            learning.record_oom(BatchShape.of(1, cost))
        before = learning.applied
        learning.apply(world)
        return before, learning.limit, learning.applied

    limit = 0.9 * costs[1]
    assert run_ranks(2, run) == [(None, limit, limit)] * 2


@pytest.fixture
def learned() -> LearningBudget:
    """A batch of 8 samples of 100 tokens ran out of memory."""
    budget = LearningBudget(TokenBudget(1000))
    budget.record_oom(BatchShape.of(8, 100), wasted_s=1.5)
    budget.apply()
    return budget


def state_of(budget: LearningBudget) -> Any:
    text = json.dumps(budget.state_dict(), allow_nan=False)
    return json.loads(text)


def test_what_was_learned_goes_through_json(learned: LearningBudget) -> None:
    again = LearningBudget(TokenBudget(1000))
    again.load_state_dict(state_of(learned))
    assert state_of(again) == state_of(learned)
    assert learned.applied == 720
    assert again.applied == 720
    assert str(again.report).startswith("1 out-of-memory errors, 2 parts run again, 1.5 s wasted")


def test_a_state_belongs_to_a_budget(learned: LearningBudget) -> None:
    message = r"budget was .*max_tokens=1000.* then, is .*max_tokens=2000.* now"
    other = LearningBudget(TokenBudget(2000))
    state = state_of(learned)
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)


def test_a_damaged_state_is_refused_and_half_of_nothing_is_taken_over(
    learned: LearningBudget,
) -> None:
    state = state_of(learned)
    other_limits = [1, *state["limits"][1:]]
    damaged = [[], 3, {**state, "limits": other_limits}]
    for key in state:
        damaged.append({**state, key: "x"})
    for wrong in damaged:
        with pytest.raises(StateError):
            learned.load_state_dict(wrong)
    assert state_of(learned) == state


def fits_in_a_worker(learning: LearningBudget, asked: Any, answers: Any) -> None:
    while asked.get() is not None:
        answers.put(learning.fits(BatchShape.of(8, 100)).tolist())


def test_workers_see_shared_lessons_at_once() -> None:
    context = torch.multiprocessing.get_context("fork")
    learning = LearningBudget(TokenBudget(1000)).share_memory()
    asked = context.SimpleQueue()
    answers = context.SimpleQueue()
    worker = context.Process(target=fits_in_a_worker, args=(learning, asked, answers))
    worker.start()
    for seen in (True, False):
        asked.put(1)
        assert answers.get() == [seen]
        learning.record_oom(BatchShape.of(8, 100))
        learning.apply()
    asked.put(None)
    worker.join()


def test_a_budget_of_shared_lessons_is_pickled() -> None:
    learning = LearningBudget(TokenBudget(1000)).share_memory()
    again = pickle.loads(pickle.dumps(learning))
    assert again.fingerprint == learning.fingerprint


def test_a_memory_budget_says_why_a_batch_fits_or_not() -> None:
    budget = whole_memory(4, longest=100)
    assert budget.why(8, 50) == (
        "8 samples of 50 tokens fit: 100.0% of the limit, 100% may be used; 8 would fit"
    )
    assert "9 samples of 50 tokens do not fit" in budget.why(9, 50)


def test_a_memory_budget_of_a_first_batch_knows_no_bytes() -> None:
    budget = whole_memory(4, longest=100)
    with pytest.raises(ConfigError, match="knows no bytes"):
        budget.bytes_of(8, 50)


def test_a_budget_of_ones_own_is_shown_by_its_name_and_settings() -> None:
    class AtMost(Budget):
        def __init__(self, most: int) -> None:
            self.most = most

        def fits(self, shape: BatchShape, /) -> np.ndarray:
            return shape.num_samples <= self.most

    name = AtMost.__qualname__
    assert repr(AtMost(4)) == f"{name}(most=4)"
    tokens = TokenBudget(90)
    assert repr(AtMost(4) & tokens) == f"{name}(most=4) & {tokens!r}"


def test_memory_is_predicted_for_batches_as_a_ladder_pads_them() -> None:
    """The only shape is the hardest batch, four samples of 100 tokens: one of 20 takes as much."""
    memory = whole_memory(4, longest=100)
    ladder = ShapeLadder([100] * 90, memory, num_shapes=1)
    alone = BatchShape.of(1, 20)
    assert predicted_memory(ladder, alone) == [1.0]
    assert predicted_memory(memory, alone) == [0.05]
    assert predicted_memory(TokenBudget(400), alone) is None


def test_a_cap_has_no_subclass_whose_own_fits_a_packed_plan_would_not_ask() -> None:
    with pytest.raises(ConfigError, match="Stricter cannot be a subclass of AdditiveCap"):

        class Stricter(AdditiveCap):
            """A limit that packed plans would ignore."""
