"""How many files of the package one journey passes: what a reader has to open to follow it.

Goals: 14 for a sampler's first batch, 20 for a planned loader's first step, 22 for an online one's. The numbers below
only go down.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dynagroup
from dynagroup import LengthAwareBatchSampler, OnlineDataLoader, PlannedDataLoader, TokenBudget, embed_dataset
from tests.models import TEXTS, small_llama, small_tokenizer

PACKAGE = Path(dynagroup.__file__).parent
LENGTHS = [3 + (7 * i) % 40 for i in range(64)]
BUDGET = TokenBudget(100)
HOW: dict[str, Any] = {"weigh": "samples", "collate_fn": list}


def files_of(journey: Callable[[], Any]) -> set[str]:
    """Files of the package in which something is called meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        journey()
    finally:
        sys.setprofile(None)
    return {Path(name).relative_to(PACKAGE).as_posix() for name in found if Path(name).is_relative_to(PACKAGE)}


JOURNEYS: list[tuple[Callable[[], Any], int]] = [
    (lambda: LengthAwareBatchSampler(LENGTHS, BUDGET, shuffle=True), 14),
    (lambda: PlannedDataLoader(LENGTHS, LENGTHS, BUDGET, samples_per_update=16, **HOW), 20),
    (lambda: PlannedDataLoader(LENGTHS, LENGTHS, BUDGET, **HOW), 20),
    (lambda: OnlineDataLoader([{"input_ids": [1] * n} for n in LENGTHS], BUDGET, shuffle=True, **HOW), 22),
]


@pytest.mark.parametrize(("make", "most"), JOURNEYS)
def test_a_first_step_passes_few_files(make: Callable[[], Any], most: int) -> None:
    next(iter(make()))  # what is imported when first needed
    passed = files_of(lambda: next(iter(make())))
    assert len(passed) <= most, sorted(passed)


def test_embedding_to_a_file_passes_few_files(tmp_path: Path) -> None:
    given: Any = (small_llama(), small_tokenizer(), TEXTS)
    embed = lambda name: embed_dataset(*given, budget=BUDGET, output=tmp_path / name, progress=False)  # noqa: E731
    embed("first.npy")
    passed = files_of(lambda: embed("second.npy"))
    assert len(passed) <= 24, sorted(passed)
