"""``map_batches`` on real ranks after a kill, its iterator, and the memory of results that go to a file."""

import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import ConfigError, iter_map, map_batches
from tests.torchrun import on_ranks

ITEMS = list(range(60))
LENGTHS = [1 + (7 * index) % 13 for index in ITEMS]
BUDGET = 26


class Squares:
    """Writes down the items that it gets; kills its process at call number ``last``."""

    fingerprint = "squares"

    def __init__(self, folder: Path, last: int | None = None) -> None:
        self._log = folder / f"seen.{os.getpid()}"
        self._last = last
        self._num_calls = 0

    def __call__(self, batch: list[int]) -> list[int]:
        self._num_calls += 1
        if self._num_calls == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        with self._log.open("a") as file:
            file.write("".join(f"{item}\n" for item in batch))
        return [item * item for item in batch]


def squares(folder: Path, last: int | None = None) -> list[int]:
    function = Squares(folder, last)
    return map_batches(function, ITEMS, LENGTHS, BUDGET, output=folder / "out.jsonl")


def squares_of_a_rank(folder: Path) -> list[int]:
    torch.distributed.init_process_group("gloo")
    return squares(folder)


def items_seen(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.glob("seen.*")]
    return [int(line) for line in "".join(texts).splitlines()]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork, of Python 3.12
def test_two_ranks_go_on_where_a_killed_process_was(tmp_path: Path) -> None:
    killed = multiprocessing.get_context("fork").Process(target=squares, args=(tmp_path, 6))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    before = items_seen(tmp_path)
    assert 0 < len(before) < len(ITEMS)
    expected = [item * item for item in ITEMS]
    assert on_ranks(2, squares_of_a_rank, tmp_path) == [expected, expected]
    assert sorted(items_seen(tmp_path)) == ITEMS, "finished items are not run again"


def test_the_iterator_yields_each_batch_as_it_ends_and_leaves_out_what_is_skipped() -> None:
    calls: list[int] = []

    def square(batch: list[int]) -> list[int]:
        calls.append(len(batch))
        return [item * item for item in batch]

    results = iter_map(square, ITEMS, LENGTHS, BUDGET, skip=range(0, 60, 2), progress=False)
    first, _ = next(results)
    assert LENGTHS[first] == 13
    assert len(calls) == 1, "the other batches have not run yet"
    rest = dict(results)
    assert sorted([first, *rest]) == list(range(1, 60, 2))
    assert all(result == index * index for index, result in rest.items())
    with pytest.raises(ConfigError, match="`skip` must have indices from 0 to 59, but has 60"):
        next(iter_map(square, ITEMS, LENGTHS, BUDGET, skip=[60]))


@pytest.mark.parametrize("ending", ["jsonl", "npy"])
def test_memory_is_bounded_if_results_stay_in_their_file(ending: str, tmp_path: Path) -> None:
    num_items = 1_000
    output = tmp_path / f"results.{ending}"

    def function(batch: list[int]) -> Any:
        if ending == "jsonl":
            return [f"{item:8}" * 2_500 for item in batch]
        return [np.full(5_000, item, np.float32) for item in batch]

    def run(load: bool) -> Any:
        items = list(range(num_items))
        lengths = [1 + item % 7 for item in items]
        return map_batches(function, items, lengths, 28, output=output, load=load, progress=False)

    tracemalloc.start()
    assert run(load=False) is None
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert output.stat().st_size > 19_900_000
    assert peak < 3_000_000, "a batch has at most 28 results of 20,000 bytes"
    results = run(load=True)
    assert len(results) == num_items
    assert list(results[13]) == list(function([13])[0])


def test_results_that_go_nowhere_are_refused() -> None:
    with pytest.raises(ConfigError, match="`load` is False, so results go nowhere"):
        map_batches(list, ITEMS, LENGTHS, BUDGET, load=False)


def test_a_npy_file_takes_vectors_of_one_width(tmp_path: Path) -> None:
    def vectors(batch: list[int]) -> Any:
        return [np.zeros(1 + item % 2, np.float32) for item in batch]

    message = "result 1 has 2 numbers, but result 0 has 1; .*ending .jsonl"
    with pytest.raises(ConfigError, match=message):
        map_batches(vectors, ITEMS, LENGTHS, BUDGET, output=tmp_path / "v.npy", progress=False)


def test_results_of_numpy_and_torch_are_stored(tmp_path: Path) -> None:
    def run(name: str, convert: Any) -> Any:
        def function(batch: list[int]) -> Any:
            return convert(np.array(batch, np.float32))

        return map_batches(function, ITEMS, LENGTHS, BUDGET, output=tmp_path / name)

    assert run("numbers.jsonl", lambda batch: batch) == ITEMS
    assert run("rows.jsonl", lambda batch: batch[:, None]) == [[item] for item in ITEMS]
    assert run("dicts.jsonl", lambda batch: [{"x": x} for x in batch])[3] == {"x": 3.0}
    of_torch = run("v.npy", lambda batch: torch.tensor(batch[:, None], requires_grad=True))
    assert of_torch.tolist() == [[item] for item in ITEMS]
    halves = run("h.npy", lambda batch: torch.tensor(batch[:, None]).bfloat16())
    assert halves.tolist() == [[item] for item in ITEMS]
    with pytest.raises(ConfigError, match=r"one vector per item, .* the shape \(1, 1\)"):
        run("m.npy", lambda batch: batch[:, None, None])
    with pytest.raises(ConfigError, match="a result contains <object object .* JSON cannot store"):
        run("o.jsonl", lambda batch: [object() for _ in batch])
    with pytest.raises(ConfigError, match="returned None for 2 items; it must return one result"):
        run("n.jsonl", lambda batch: None)


def test_items_may_be_a_column_or_a_dataset_but_no_stream() -> None:
    pandas = pytest.importorskip("pandas")
    datasets = pytest.importorskip("datasets")
    column = pandas.Series(["a", "bb"], index=[5, 6])
    rows = datasets.Dataset.from_dict({"text": ["a", "bb"]})
    assert map_batches(list, column, [1, 2], 9, progress=False) == ["a", "bb"]
    assert map_batches(list, rows, [1, 2], 9, progress=False) == [{"text": "a"}, {"text": "bb"}]
    with pytest.raises(
        ConfigError, match="`items` must be a list or one column, but is .* generator"
    ):
        map_batches(list, (item for item in ITEMS), LENGTHS, BUDGET)  # pyright: ignore
