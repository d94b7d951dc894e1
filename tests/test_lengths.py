"""Lengths: everything legal becomes int32, everything else is refused by name; measured, they are what training will see."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams, measure_lengths
from tests.test_text import words

MOST = 2**31 - 1
DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "O"]
EDGES = [0, 1, 127, 2048, MOST - 127, MOST, MOST + 1, 2**32, 2**63, 65504.0, -1, 0.5, -0.0, 1e30]
EDGES += [math.inf, -math.inf, math.nan]


@given(st.lists(st.sampled_from(EDGES) | st.integers(0, 70_000), min_size=1, max_size=5), st.sampled_from(DTYPES))
def test_a_number_of_any_type_is_taken_as_it_is_or_refused_by_index(values: list[float], dtype: str):
    try:
        with np.errstate(all="ignore"):
            array = np.array(values, dtype)
    except (OverflowError, ValueError):  # numpy's own refusal of what the type cannot hold
        return
    legal = [0 <= value <= MOST and value == math.floor(value) for value in array.astype("g").tolist()]
    if all(legal):
        found = as_streams(array)["tokens"]
        assert found.dtype == np.int32
        assert found.tolist() == array.tolist()
    else:
        with pytest.raises(ConfigError, match=rf"lengths\['tokens'\]\[{legal.index(False)}\] must be a whole number"):
            as_streams(array)


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor, pd.Series])
def test_whole_numbers_of_any_container_survive_unchanged(container):
    tokens = as_streams(container([0, 7, MOST]))["tokens"]
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [0, 7, MOST])
    assert as_streams(tokens)["tokens"] is tokens, "int32 is not copied"


def test_streams_have_as_many_samples_and_keep_their_names():
    streams = as_streams({"source": [3, 4], "target": [1, 2]})
    assert {name: values.tolist() for name, values in streams.items()} == {"source": [3, 4], "target": [1, 2]}


TEXTS = ["one two three", "", "one", "two two two two two", "three one"]
COUNTS = [4, 1, 2, 6, 3]  # a token in front of every text
ROWS = [[1, 2], [], [3]]
TABLE = pd.DataFrame({"text": TEXTS, "n": range(5)}, index=range(5, 0, -1))
DATA = Dataset.from_dict({"text": TEXTS, "label": [0, 1, 2, 3, 4]})
HOLDERS: dict[str, tuple[Any, str | None]] = {
    "list": (TEXTS, None),
    "tuple": (tuple(TEXTS), None),
    "array": (np.array(TEXTS), None),
    "mappings": ([{"text": text} for text in TEXTS], "text"),
    "datasets": (DATA, None),
    "a column": (DATA["text"], None),
    "pandas": (TABLE, "text"),
    "Series": (TABLE["text"], None),
    "pyarrow": (pa.table({"text": TEXTS}), "text"),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return words(begin=True, pad_token="[PAD]")


@pytest.mark.parametrize("holder", HOLDERS)
def test_texts_are_as_long_as_the_tokenizer_says(tokenizer, holder):
    data, column = HOLDERS[holder]
    lengths = measure_lengths(data, tokenizer, column)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [len(tokenizer(text)["input_ids"]) for text in TEXTS] == COUNTS
    assert measure_lengths(data, tokenizer, column, max_length=3).tolist() == [min(n, 3) for n in COUNTS]


@pytest.mark.parametrize("data", [ROWS, [{"input_ids": row} for row in ROWS], Dataset.from_dict({"input_ids": ROWS})])
def test_rows_of_ids_are_counted(data):
    assert measure_lengths(data).tolist() == [2, 0, 1]
    assert measure_lengths(data, max_length=10**30).tolist() == [2, 0, 1]  # a tokenizer's limit that nobody set
    assert measure_lengths(data, max_length=1).tolist() == [1, 0, 1]
    if isinstance(data, Dataset):  # of another name, and rows chosen
        chosen = data.rename_column("input_ids", "mine").select([2, 0])
        assert measure_lengths(chosen, column="mine").tolist() == [1, 2]


def test_processes_measure_the_same_and_no_samples_have_no_lengths(tokenizer):
    assert measure_lengths(TEXTS * 3, tokenizer, num_proc=2).tolist() == COUNTS * 3
    whole = [measure_lengths([], tokenizer), measure_lengths([]), measure_lengths([], length_of=len)]
    for found in (*whole, as_streams([])["tokens"], measure_lengths(DATA.select([]), tokenizer)):
        assert (found.dtype, found.shape) == (np.int32, (0,))


def test_datasets_caches_the_lengths(tmp_path):
    DATA.save_to_disk(tmp_path / "data")
    asked: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **kwargs: Any) -> Any:
            asked.append(len(text))
            return super().__call__(text, **kwargs)

    def measure(max_length: int) -> list[int]:
        asked.clear()
        fresh = words(True, Counting, pad_token="[PAD]")
        return measure_lengths(load_from_disk(tmp_path / "data"), fresh, max_length=max_length).tolist()

    first = measure(4)
    assert sum(asked) == len(TEXTS) + 1  # one more: the call that settles the tokenizer's truncation
    assert measure(4) == first
    assert sum(asked) == 1
    assert measure(3) != first  # other settings, other cache


class Squares(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": index * index, "words": index}


def pixels(sample: dict[str, Any]) -> int:
    return sample["pixels"]


def test_any_map_style_dataset_with_a_length_function_that_may_name_several_streams():
    for num_proc in (None, 2):
        assert measure_lengths(Squares(), length_of=pixels, num_proc=num_proc).tolist() == [i * i for i in range(150)]
    assert measure_lengths(TABLE["text"], length_of=len).tolist() == list(map(len, TEXTS))
    both = lambda sample: {"words": sample["words"], "patches": sample["pixels"]}  # noqa: E731
    streams = measure_lengths(Squares(), length_of=both, max_length=2)
    assert {name: values.dtype for name, values in streams.items()} == {"words": np.int32, "patches": np.int32}
    assert (streams["words"][3], streams["patches"][3]) == (2, 9)


CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


@pytest.mark.parametrize(("bad", "said"), [
    (None, "text 1005 must be a string, but is None"),
    ("one \ud800 two", r"text 1005 has a lone surrogate at character 4; .*encode\('utf-8', 'replace'\)"),
    (CHAT, r"sample 1005 is a chat .*apply_chat_template\(messages, tokenize=False\) makes a text"),
])  # fmt: skip
def test_what_is_no_text_is_named(tokenizer, bad, said):
    texts: list[Any] = [*["one"] * 1005, bad, "two"]
    for data, column, num_proc in ((texts, None, 2), ([{"text": text} for text in texts], "text", None)):
        with pytest.raises(ConfigError, match=said):
            measure_lengths(data, tokenizer, column, num_proc=num_proc)


NO_ROWS = [([5, 6, 7], 1), (torch.arange(7),), torch.ones(1, 7), [[5, 6, 7]], ["a"], "one", None]


def test_what_is_no_row_of_ids_is_not_counted_as_one():
    """Its len() is 1 or 2, whatever its tokens are: a TensorDataset's sample, ids and label, a tokenizer's batch of one."""
    for row in NO_ROWS:
        for samples in ([[5, 6], row], [{"input_ids": [5, 6]}, {"input_ids": row}]):
            with pytest.raises(ConfigError, match="sample 1 must be one row of ids, .*the `tokenizer` for texts"):
                measure_lengths(samples)


def some_of(count: int) -> Any:
    left = iter(range(count))
    return lambda sample: next(left)


TWO = Dataset.from_dict({"a": ["x"], "b": ["y"]})


NO_LENGTHS = [[[1, 2], [3]], [[1, 2], [3, 4]], 5, torch.ones(3, dtype=torch.bfloat16)]
NO_IDS = [[CHAT], [["a"]], [[[5, 6]]], ["x"], [[1], None]]


@pytest.mark.parametrize(("call", "message"), [
    *((lambda t, bad=bad: as_streams({"tokens": [1, 2, 3], "patches": np.array([1, 2, bad], object)}),
       r"lengths\['patches'\]\[2\] must be a whole number from 0 to") for bad in (None, "7", True, b"7", 1j, 2**70)),
    *((lambda t, values=values: as_streams(values), "one number a sample.*measure_lengths") for values in NO_LENGTHS),
    (lambda t: as_streams({"tokens": [1, 2, 3], "patches": [1, 2]}),
     r"{'tokens': 3, 'patches': 2} samples; each needs a length in every stream"),
    (lambda t: as_streams({}), "or a dict of streams"),
    *((lambda t, values=values: measure_lengths(Dataset.from_dict({"a": values}), column="a"),
       r"not lists of ids; .*apply_chat_template|\[1\] must be .* is nan") for values in NO_IDS),
    (lambda t: measure_lengths([CHAT]), "sample 0 is a chat .*apply_chat_template"),
    (lambda t: measure_lengths("one text", t), "must be a list or one column, but is a whole str"),
    (lambda t: measure_lengths((x for x in TEXTS), t), "but is a whole generator.*OnlineDataLoader"),
    (lambda t: measure_lengths(TABLE, t), "but is a whole DataFrame"),
    (lambda t: measure_lengths(TWO, t), r"2 text columns \(\['a', 'b'\]\)"),
    (lambda t: measure_lengths(TEXTS, t, length_of=len), "pass only one of them"),
    (lambda t: measure_lengths([3, 1], length_of=lambda n: 2.5), r"\['tokens'\]\[0\] must be a whole number"),
    (lambda t: measure_lengths(["tokens", "x"], length_of=lambda name: {name: 1}), "for sample 1"),
    (lambda t: measure_lengths(list(range(100)), length_of=some_of(70)), "64 of 100 samples were measured"),
])  # fmt: skip
def test_messages_say_the_way_out(tokenizer, call, message):
    with pytest.raises(ConfigError, match=message):
        call(tokenizer)
