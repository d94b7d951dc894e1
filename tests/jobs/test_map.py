"""Results of a function over batches are those of one item at a time, in order, whatever fits, fails, dies or shares."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynagroup import BudgetError, ConfigError, StateError, TokenBudget, map_batches
from dynagroup.testing import run_ranks

LENGTHS = [1 + (7 * i) % 13 for i in range(30)]
ITEMS = [f"item {i}" for i in range(30)]


class Killed(BaseException):
    """The process ends here."""


class Upper:
    """Has a result for each item; fails above so many items, and dies after so many calls."""

    fingerprint = "upper"

    def __init__(self, most: int = 99, calls: float = float("inf")) -> None:
        self.most = most
        self.calls_left = calls
        self.seen: list[str] = []

    def __call__(self, batch: list[str]) -> list[str]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Killed
        if len(batch) > self.most:
            raise MemoryError(f"{len(batch)} items do not fit")
        self.seen += batch
        return [item.upper() for item in batch]


ONE_BY_ONE = [item.upper() for item in ITEMS]


@settings(max_examples=60)
@given(
    st.integers(13, 120),
    st.integers(1, 6),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(1, 3),
)
def test_results_are_those_of_one_item_at_a_time_each_once(
    tmp_path_factory: Any, tokens: int, most: int, deaths: list[int], num_ranks: int
) -> None:
    """Under any budget, split, kill, number of ranks."""
    output = tmp_path_factory.mktemp("map") / "out.jsonl"
    how: Any = {"output": output, "progress": False}
    seen: list[str] = []
    for calls in deaths:
        dying = Upper(most, calls)
        try:
            map_batches(dying, ITEMS, LENGTHS, TokenBudget(tokens), **how)
        except Killed:
            pass
        seen += dying.seen
    functions = [Upper(most) for _ in range(num_ranks)]

    def rank(world: Any) -> list[str]:
        function = functions[world.rank]
        return map_batches(function, ITEMS, LENGTHS, TokenBudget(tokens), world=world, **how)

    assert run_ranks(num_ranks, rank) == [ONE_BY_ONE] * num_ranks
    for function in functions:
        seen += function.seen
    if not deaths:
        assert sorted(seen) == sorted(ITEMS)
    assert set(seen) == set(ITEMS)
    assert map_batches(Upper(0), ITEMS, LENGTHS, 13, **how) == ONE_BY_ONE, "a complete file is read"


@pytest.mark.parametrize(("layout", "tokens"), [*itertools.product(["padded", "packed"], [13, 40])])
def test_batches_fit_and_come_longest_first(layout: Any, tokens: int) -> None:
    batches: list[list[int]] = []

    def note(batch: list[int]) -> list[int]:
        batches.append([LENGTHS[index] for index in batch])
        return batch

    indices = list(range(30))
    budget = TokenBudget(tokens, layout=layout)
    assert map_batches(note, indices, LENGTHS, budget, progress=False) == indices
    for lengths in batches:
        padded = len(lengths) * max(lengths)
        assert (padded if layout == "padded" else sum(lengths)) <= tokens
    assert max(LENGTHS) in batches[0]


def test_vectors_go_to_a_file_and_a_collate_function_makes_the_batch(tmp_path: Path) -> None:
    rows = [torch.full((length,), float(length)) for length in LENGTHS]
    pad = torch.nn.utils.rnn.pad_sequence
    found = map_batches(
        lambda batch: batch.sum(dim=0)[:, None].numpy(),
        rows,
        {"frames": LENGTHS},
        60,
        collate_fn=pad,
        output=tmp_path / "sums.npy",
        progress=False,
    )
    np.testing.assert_array_equal(found, np.array(LENGTHS, np.float32)[:, None] ** 2)
    np.testing.assert_array_equal(np.load(tmp_path / "sums.npy"), found)


def test_errors_that_the_user_names_split_a_batch_and_others_pass() -> None:
    class TooLarge(Exception):
        pass

    calls: list[int] = []

    def server(batch: list[str]) -> list[str]:
        calls.append(len(batch))
        if len(batch) > 2:
            raise TooLarge("413")
        return batch

    how: Any = {"progress": False}
    is_too_large = lambda error: isinstance(error, TooLarge)  # noqa: E731
    found = map_batches(server, ITEMS, LENGTHS, 100, is_out_of_memory=is_too_large, **how)
    assert found == ITEMS
    assert max(calls) > 2
    with pytest.raises(TooLarge):
        map_batches(server, ITEMS, LENGTHS, 100, **how)
    longest = LENGTHS.index(13)
    with pytest.raises(
        BudgetError, match=rf"sample {longest} does not fit even alone \(13 tokens\)"
    ):
        map_batches(Upper(0), ITEMS, LENGTHS, 100, **how)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    cases: list[tuple[str, Any]] = [
        ("the function returned 1 results for", {"function": lambda batch: batch[:1]}),
        ("`lengths` has 2 lengths for 30 items", {"lengths": [1, 2]}),
        ("must end in .jsonl or .npy, but is 'x.csv'", {"output": tmp_path / "x.csv"}),
        ("`function` must be a function", {"function": 3}),
        ("`identity` must be a text", {"identity": {1}, "output": tmp_path / "x.jsonl"}),
    ]
    own: Any = {"function": Upper(), "items": ITEMS, "lengths": LENGTHS, "budget": 100}
    for message, options in cases:
        with pytest.raises(ConfigError, match=message):
            map_batches(**{**own, "progress": False, **options})
    output = tmp_path / "out.jsonl"
    assert map_batches(**own, output=output, progress=False) == ONE_BY_ONE
    for options in ({"identity": "v2"}, {"lengths": LENGTHS[::-1]}, {"items": ITEMS[::-1]}):
        with pytest.raises(StateError, match=f"{next(iter(options))} was .* then, is .* now"):
            map_batches(**{**own, **options}, output=output, progress=False)
    assert map_batches(Upper(), [], [], 10, progress=False) == []


def test_an_item_that_a_server_refuses_alone_is_told_with_the_servers_own_error() -> None:
    def server(batch: list[str]) -> list[str]:
        raise ConnectionError("413")

    options: Any = {"progress": False, "is_out_of_memory": lambda error: True}
    with pytest.raises(BudgetError, match="ConnectionError: 413"):
        map_batches(server, ITEMS, LENGTHS, 100, **options)
