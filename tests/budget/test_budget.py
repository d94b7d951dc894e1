from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynagroup.budget.base import AdditiveCap, AllOf, Budget, padded_tokens
from dynagroup.budget.learning import LearningBudget
from dynagroup.budget.memory import MemoryBudget
from dynagroup.budget.tokens import TokenBudget, as_budget
from dynagroup.errors import BudgetError, ConfigError
from dynagroup.memory.protocols import PaddedTokens
from dynagroup.plan.sampler import LengthAwareBatchSampler
from dynagroup.shapes import BatchShape
from dynagroup.testing import assert_budget_law
from tests import strategies

LENGTHS = {"tokens": np.array([0, 1, 5, 9, 30, 60], np.int32), "patches": np.array([0, 9, 0, 40, 2, 7], np.int32)}


@settings(max_examples=40)
@given(st.one_of(strategies.budgets, strategies.capped_budgets))
def test_no_budget_accepts_more_after_refusing_less(budget: Budget) -> None:
    assert_budget_law(budget, LENGTHS, num_shapes=300)
    if not isinstance(budget, MemoryBudget) and "patches" not in budget.fingerprint:
        assert_budget_law(budget, {"tokens": LENGTHS["tokens"]}, num_shapes=300)


def test_padded_budget_counts_the_padding_that_collation_adds() -> None:
    budget = TokenBudget(64, pad_to_multiple_of=8)
    assert budget.fits(BatchShape.of([4, 4, 8], longest=[16, 17, 8])).tolist() == [True, False, True]
    assert padded_tokens(BatchShape.of(3, 17), budget).tolist() == [72]


def test_packed_budget_counts_the_sum() -> None:
    budget = TokenBudget(64, layout="packed")
    assert budget.fits(BatchShape.of([4, 4], longest=[60, 60], total=[64, 65])).tolist() == [True, False]


def test_empty_samples_cannot_make_a_batch_infinite() -> None:
    assert TokenBudget(64).fits(BatchShape.of([64, 65], longest=0)).tolist() == [True, False]
    assert TokenBudget(64).largest(np.array([0])).tolist() == [64]  # type: ignore[union-attr]


def test_sequence_length_rule() -> None:
    assert TokenBudget.from_sequence_length(2048, 4) == TokenBudget(16384)


def test_memory_budget_always_accepts_what_is_no_harder_than_its_first_batch() -> None:
    budget = MemoryBudget(4, longest=100, model=PaddedTokens(), headroom=0.5)
    assert budget.fits(BatchShape.of([4, 3, 5, 2, 4], longest=[100, 100, 100, 101, 50])).tolist() == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_memory_budget_takes_its_limit_from_the_data() -> None:
    bound = MemoryBudget(2, model=PaddedTokens(), headroom=1.0).bind({"tokens": np.array([4, 10, 2], np.int32)})
    assert bound.fits(BatchShape.of([5, 5], longest=[4, 5])).tolist() == [True, False]


def test_combined_budgets_need_every_part() -> None:
    both = TokenBudget(100) & AdditiveCap("patches", 10) & TokenBudget(50)
    shape = BatchShape.of([1, 1, 1], {"tokens": [50, 51, 50], "patches": [10, 1, 11]})
    assert both.fits(shape).tolist() == [True, False, False]
    assert both.largest(np.array([10])) is None
    assert (TokenBudget(100) & TokenBudget(50)).largest(np.array([10])).tolist() == [5]  # type: ignore[union-attr]
    assert (TokenBudget(100, pad_to_multiple_of=4) & TokenBudget(50, pad_to_multiple_of=6)).pad_to_multiple_of == 12


def test_a_law_breaking_budget_is_caught() -> None:
    class EvenOnly(Budget):
        def fits(self, shape: BatchShape, /) -> np.ndarray:
            return shape.num_samples % 2 == 0

    with pytest.raises(AssertionError, match="but accepts it after a sample"):
        assert_budget_law(EvenOnly(), LENGTHS)

    class LongOnly(TokenBudget):
        def fits(self, shape: BatchShape, /) -> np.ndarray:
            return shape.longest["tokens"] > 10

    with pytest.raises(AssertionError, match="but accepts it after"):
        assert_budget_law(LongOnly(100), LENGTHS)

    class Disagrees(TokenBudget):
        def largest(self, longest: np.ndarray, /) -> np.ndarray:
            return np.full(len(longest), 3)

    with pytest.raises(AssertionError, match="`largest` says 3 samples"):
        assert_budget_law(Disagrees(100), {"tokens": LENGTHS["tokens"]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TokenBudget(0), "`max_tokens` must be an int of at least 1, but is 0"),
        (lambda: TokenBudget(1.5), "`max_tokens` must be an int of at least 1, but is 1.5"),  # type: ignore[arg-type]
        (lambda: TokenBudget(True), "`max_tokens` must be an int of at least 1, but is True"),
        (lambda: TokenBudget(8, max_samples=-1), "`max_samples` must be an int of at least 1, but is -1"),
        (lambda: TokenBudget(8, pad_to_multiple_of=0), "`pad_to_multiple_of` must be an int of at least 1"),
        (lambda: TokenBudget(8, layout="ragged"), "`layout` must be one of 'padded', 'packed', but is 'ragged'"),  # type: ignore[arg-type]
        (lambda: TokenBudget.from_sequence_length(0, 4), "`sequence_length`"),
        (lambda: AdditiveCap("", 4), "`stream` must be the name of a length stream"),
        (lambda: AdditiveCap("patches", float("inf")), "`limit` must be an int of at least 1, but is inf"),  # type: ignore[arg-type]
        (lambda: MemoryBudget(0), "`batch_size` must be an int of at least 1"),
        (lambda: MemoryBudget(4, headroom=1.2), "at most 1, but is 1.2"),
        (lambda: MemoryBudget(4, headroom=0.0), "`headroom` must be greater than 0"),
        (lambda: MemoryBudget(4, longest=0), "`longest` must be an int of at least 1"),
        (lambda: MemoryBudget(4, longest={"tokens": 8, "target": -1}), "`target` must be an int of at least 1"),
        (lambda: MemoryBudget(4, model=object()), "`model` must predict memory, but is object"),
        (lambda: TokenBudget(8) & TokenBudget(8, layout="packed"), "either padded or packed"),
        (lambda: MemoryBudget(4).fits(BatchShape.of(1, 1)), "`longest` is not known"),
        (lambda: TokenBudget(8, streams="tokens"), "`streams` must list names of length streams"),  # type: ignore[arg-type]
        (
            lambda: TokenBudget(8, streams=("labels",)).fits(BatchShape.of(1, 1)),
            "`streams` names 'labels', but lengths",
        ),
        (lambda: as_budget("4096"), "`budget` must be a budget such as TokenBudget(4096)"),  # type: ignore[arg-type]
        (lambda: as_budget(True), "`budget` must be a budget such as TokenBudget(4096)"),
        (lambda: as_budget(TokenBudget), "`budget` must be a budget such as TokenBudget(4096)"),  # type: ignore[arg-type]
        (
            lambda: MemoryBudget(2, longest=7, model=PaddedTokens()).fits(BatchShape.of(1, {"tokens": 1, "labels": 1})),
            "how long the first batch is in 'labels' is not known",
        ),
        (lambda: AdditiveCap("patches", 4).fits(BatchShape.of(1, 1)), "needs the stream 'patches', but lengths have"),
    ],
)
def test_bad_arguments_name_themselves(make: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()  # type: ignore[operator]
    assert message in str(caught.value)


def test_bytes_budget_refuses_a_model_that_leaves_no_room() -> None:
    class Model(PaddedTokens):
        static_bytes = 90

        def batch_bytes(self, shape: BatchShape, /) -> np.ndarray:
            return shape.num_samples * shape.longest["tokens"] * 1.0

    with pytest.raises(BudgetError, match="alone exceeds 90%"):
        MemoryBudget.from_bytes(100, model=Model())
    assert MemoryBudget.from_bytes(200, model=Model()).fits(BatchShape.of([9, 10], longest=10)).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("answer", [True, None, np.ones(3), np.ones((2, 2), bool)])
def test_a_budget_of_the_users_own_answers_for_every_shape(answer):
    class Mine(Budget):
        def fits(self, shape, /):
            return answer

    lengths = np.array([3, 4, 5, 6], np.int32)
    with pytest.raises(ConfigError, match=r"Mine\.fits must answer for all shapes at once"):
        LengthAwareBatchSampler(lengths, Mine())
    with pytest.raises(ConfigError, match=r"Mine\.fits must answer for all shapes at once"):
        assert_budget_law(Mine(), {"tokens": lengths})


def test_a_budget_of_the_users_own_that_asks_arrays_by_if_is_told_what_to_write():
    class Short(Budget):
        def fits(self, shape, /):
            return shape.num_samples <= (4 if shape.longest["tokens"] < 10 else 2)

    class Between(Budget):
        def fits(self, shape, /):
            return shape.num_samples > 0 and shape.num_samples < 9

    class Dear(TokenBudget):
        def cost(self, shape, /):
            return max(shape.num_samples, shape.longest["tokens"])

    class Table(TokenBudget):
        def largest(self, longest, /):
            return longest * 0 + (4 if longest < 10 else 2)

    class Right(Budget):
        def fits(self, shape, /):
            return (shape.num_samples > 0) & (shape.num_samples <= np.where(shape.longest["tokens"] < 10, 4, 2))

    lengths = np.array([3, 40, 5, 6], np.int32)
    wrong = {
        "Short.fits": Short(),
        "Between.fits": Between() & TokenBudget(99),
        "Table.largest": LearningBudget(Table(99)),
    }
    for name, budget in wrong.items():
        with pytest.raises(ConfigError, match=rf"{name} uses `if`.*np\.where"):
            assert LengthAwareBatchSampler(lengths, budget).plan
    learned = LearningBudget(Dear(99))
    learned.record_failed_cost(50.0)
    with pytest.raises(ConfigError, match=r"Dear\.cost uses .*np\.maximum"):
        learned.allows(BatchShape.of([1, 2], 3))
    assert sorted(map(len, LengthAwareBatchSampler(lengths, Right()).plan.batches)) == [1, 3]


def test_an_error_of_the_users_own_budget_stays_what_it_is():
    class Broken(Budget):
        def fits(self, shape, /):
            raise ValueError("no table for this GPU")

    with pytest.raises(ValueError, match="no table for this GPU") as caught:
        LengthAwareBatchSampler(np.array([3, 4]), Broken())
    assert not isinstance(caught.value, ConfigError)


def test_what_a_budget_of_the_users_own_says_is_largest_has_one_number_a_length():
    class Mine(TokenBudget):
        def largest(self, longest, /):
            return 4

    with pytest.raises(ConfigError, match=r"Mine\.largest must answer for all lengths at once"):
        assert LengthAwareBatchSampler(np.array([3, 4]), Mine(99)).plan


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 12)), min_size=2, max_size=3),
    st.sampled_from(["padded", "packed"]),
)
@example([5] * 8, [(40, 1), (1000, 8)], "padded")
@example([5] * 3, [(40, 4), (1000, 6)], "packed")
@pytest.mark.filterwarnings("ignore:.*do not fit the budget even alone")
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
    sampler = LengthAwareBatchSampler(lengths, both, rank=0, world_size=1)
    for batch in sampler:
        widths = [lengths[i] for i in batch]
        made = len(batch) * -(-max(widths) // pad) * pad if layout == "padded" else -(-sum(widths) // pad) * pad
        assert made <= least or len(batch) == 1


def test_a_cap_on_other_units_is_not_shown_the_padding_of_a_packed_row() -> None:
    """The row is padded to a multiple of 8 in tokens; a cap on tokens counts samples as they are, whatever the row adds."""
    both = (
        TokenBudget(64, layout="packed", pad_to_multiple_of=8) & AdditiveCap("tokens", 20) & AdditiveCap("patches", 9)
    )
    shape = BatchShape.of([3, 3, 3], {"tokens": 8, "patches": 5}, {"tokens": [20, 21, 20], "patches": [9, 9, 10]})
    assert both.fits(shape).tolist() == [True, False, False]
    uneven = TokenBudget(24, layout="packed", pad_to_multiple_of=8) & AdditiveCap("patches", 9)
    rows = BatchShape.of([3, 3], {"tokens": 20, "patches": 9}, {"tokens": [24, 25], "patches": [9, 9]})
    assert uneven.fits(rows).tolist() == [True, False]


@pytest.mark.parametrize(("count", "longest", "fits"), [(2**40, 2**31 - 1, False), (2**40, 2, True), (2**41, 2, False)])
def test_counts_whose_tokens_pass_64_bits_do_not_come_round_to_few(count, longest, fits):
    assert TokenBudget(2**41).fits(BatchShape.of(count, longest)).tolist() == [fits]
