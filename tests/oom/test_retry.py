from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup.errors import BudgetError, ConfigError
from dynagroup.oom import LearningBudget, run_with_oom_retry
from tests.oom.fixtures import collecting_garbage_is_quick as collecting_garbage_is_quick


def padded(mask: torch.Tensor) -> int:
    return mask.shape[0] * mask.shape[1]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    limit=st.integers(9, 60),
    left=st.booleans(),
)
def test_results_come_in_input_order_and_no_part_exceeds_what_fits(lengths: list[int], limit: int, left: bool) -> None:
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, mask.shape[1] - length if left else 0 : None if left else length] = 1
    ids = torch.arange(mask.numel()).reshape(mask.shape) * mask
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "sample": list(range(len(lengths))),
    }
    passed: list[list[int]] = []

    def fn(part: dict[str, Any]) -> list[tuple[int, int]]:
        if padded(part["attention_mask"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        passed.append(part["sample"])
        assert part["input_ids"].shape == part["attention_mask"].shape
        return list(zip(part["sample"], part["input_ids"].sum(1).tolist(), strict=True))

    results = [row for part in run_with_oom_retry(fn, batch) for row in part]
    assert results == list(zip(range(len(lengths)), batch["input_ids"].sum(1).tolist(), strict=True))
    assert [s for part in passed for s in part] == list(range(len(lengths)))  # what passed was never run again


def test_only_the_part_that_failed_is_run_again() -> None:
    calls: list[list[int]] = []

    def fn(part: list[int]) -> list[int]:
        calls.append(part)
        if len(part) > 2 or 7 in part and len(part) > 1:
            raise MemoryError
        return part

    assert run_with_oom_retry(fn, [1, 2, 3, 7]) == [[1, 2], [3], [7]]
    assert calls == [[1, 2, 3, 7], [1, 2], [3, 7], [3], [7]]


@pytest.mark.parametrize("learned", [None, LearningBudget()], ids=["alone", "learned"])
def test_a_part_that_waits_heeds_what_its_sibling_has_taught(learned: LearningBudget | None) -> None:
    sizes: list[int] = []

    def fn(part: list[int]) -> list[int]:
        sizes.append(len(part))
        if len(part) > 2:
            raise MemoryError
        return part

    assert run_with_oom_retry(fn, list(range(8)), learned=learned) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes == [8, 4, 2, 2, 2, 2]  # six passes: the second half of 4 is not tried whole


def test_a_part_that_waits_and_is_smaller_than_what_failed_is_tried_whole() -> None:
    widths = [9, 9, 9, 9, 2, 2, 2, 2]
    mask = (torch.arange(9)[None] < torch.tensor(widths)[:, None]).long()
    seen: list[tuple[int, ...]] = []

    def fn(part: dict[str, torch.Tensor]) -> int:
        seen.append(tuple(part["attention_mask"].shape))
        if padded(part["attention_mask"]) > 18:
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


def test_a_sample_that_does_not_fit_alone_is_named_with_its_shape() -> None:
    batch = {
        "input_ids": torch.ones(3, 8),
        "attention_mask": torch.tensor([[1] * 2 + [0] * 6, [1] * 5 + [0] * 3, [1] * 8]),
    }

    def fn(part: dict[str, torch.Tensor]) -> None:
        if padded(part["attention_mask"]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 tokens")

    with pytest.raises(
        BudgetError, match=r"sample 2 of the batch does not fit even alone \(input_ids: \(1, 8\).*truncate.*7 tokens"
    ):
        run_with_oom_retry(fn, batch)


def test_min_samples_stops_cutting() -> None:
    sizes: list[int] = []

    def fn(part: list[int]) -> None:
        sizes.append(len(part))
        raise MemoryError

    with pytest.raises(BudgetError, match=r"samples 0 to 3 of the batch do not fit together"):
        run_with_oom_retry(fn, list(range(8)), min_samples=4)
    assert sizes == [8, 4]
    with pytest.raises(ConfigError, match="`min_samples` must be an int of at least 1, but is 0"):
        run_with_oom_retry(fn, [1], min_samples=0)


def test_other_errors_pass_through_at_once() -> None:
    calls = []

    def fn(part: list[int]) -> None:
        calls.append(part)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_with_oom_retry(fn, [1, 2])
    assert len(calls) == 1


def test_nested_retries_do_not_split_what_an_inner_one_has_given_up() -> None:
    calls = []

    def inner(part: list[int]) -> None:
        calls.append(part)
        raise MemoryError

    with pytest.raises(BudgetError):
        run_with_oom_retry(lambda part: run_with_oom_retry(inner, part), [1, 2])
    assert calls == [[1, 2], [1]]


def test_what_counts_as_out_of_memory_can_be_widened() -> None:
    def fn(part: list[int]) -> list[int]:
        if len(part) > 1:
            raise RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements")
        return part

    assert run_with_oom_retry(fn, [1, 2], retry_on=lambda e: "INT_MAX" in str(e)) == [[1], [2]]
