import gc
import weakref
from typing import Any

import pytest
import torch

from dynagroup.errors import BudgetError, ConfigError
from dynagroup.oom import LearningBudget, run_with_oom_retry


def padded(part: dict[str, Any]) -> int:
    return part["attention_mask"].numel()


class Fn:
    """Returns its part; fails above so many samples, or with a 7 in company."""

    def __init__(self, most: int, error: BaseException | None = None) -> None:
        self.most, self.error, self.calls = most, error or MemoryError(), list[Any]()

    def __call__(self, part: list[int]) -> list[int]:
        self.calls.append(part)
        if len(part) > self.most or (7 in part and len(part) > 1):
            raise self.error
        return part


def test_only_the_part_that_failed_is_run_again() -> None:
    fn = Fn(2)
    assert run_with_oom_retry(fn, [1, 2, 3, 7]) == [[1, 2], [3], [7]]
    assert fn.calls == [[1, 2, 3, 7], [1, 2], [3, 7], [3], [7]]


@pytest.mark.parametrize("learned", [None, LearningBudget()], ids=["alone", "learned"])
def test_a_part_that_waits_heeds_what_its_sibling_has_taught(learned: LearningBudget | None) -> None:
    fn = Fn(2)
    assert run_with_oom_retry(fn, [0] * 8, learned=learned) == [[0, 0]] * 4
    assert list(map(len, fn.calls)) == [8, 4, 2, 2, 2, 2]  # six passes: the second half of 4 is not tried whole


def test_a_part_that_waits_and_is_smaller_than_what_failed_is_tried_whole() -> None:
    mask = (torch.arange(9)[None] < torch.tensor([9, 9, 9, 9, 2, 2, 2, 2])[:, None]).long()
    seen: list[tuple[int, ...]] = []

    def fn(part: dict[str, torch.Tensor]) -> int:
        seen.append(tuple(part["attention_mask"].shape))
        if padded(part) > 18:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(part["attention_mask"])

    assert run_with_oom_retry(fn, {"input_ids": mask, "attention_mask": mask}) == [2, 2, 4]
    assert seen == [(8, 9), (4, 9), (2, 9), (2, 9), (4, 2)]


def test_a_failed_attempts_tensors_are_gone_before_the_next_begins() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def deep(x: torch.Tensor) -> torch.Tensor:
        big = x.new_zeros(1000)
        alive.append(weakref.ref(big))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return big[:1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert all(ref() is None for ref in alive)
        kept = x + 1
        alive.append(weakref.ref(kept))
        try:
            return deep(kept).clone()
        except torch.OutOfMemoryError as error:  # a library's own handler: its frames hang on __cause__
            raise RuntimeError("wrapped") from error

    gc.disable()  # the retry itself must collect
    try:
        assert len(run_with_oom_retry(fn, torch.zeros(4))) == 4
    finally:
        gc.enable()


def test_what_cannot_be_cut_further_is_named_with_its_shape() -> None:
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 5 + [0] * 3, [1] * 8])

    def fn(part: dict[str, torch.Tensor]) -> None:
        if padded(part) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 tokens")

    with pytest.raises(BudgetError, match=r"sample 2 does not fit even alone \(input_ids: \(1, 8\).*7 tokens"):
        run_with_oom_retry(fn, {"input_ids": mask, "attention_mask": mask})
    stubborn = Fn(0)
    with pytest.raises(BudgetError, match=r"samples 0, 1, 2, 3 do not fit together"):
        run_with_oom_retry(stubborn, list(range(8)), min_samples=4)
    assert list(map(len, stubborn.calls)) == [8, 4]
    with pytest.raises(ConfigError, match="`min_samples` must be an int of at least 1, but is 0"):
        run_with_oom_retry(Fn(9), [1], min_samples=0)


def test_other_errors_pass_through_at_once() -> None:
    fn = Fn(1, RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"))
    with pytest.raises(RuntimeError, match="INT_MAX"):
        run_with_oom_retry(fn, [1, 2])
    assert fn.calls == [[1, 2]]
