"""Measuring: every kind of data gives the lengths that training will see, or an error that names the sample."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dynagroup.errors import ConfigError
from dynagroup.lengths import measure_lengths

TEXTS = ["one two three", "", "one", "two two two two two", "three one"]
WORDS = [3, 0, 1, 5, 2]


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A real fast tokenizer: a word a token, and one special token in front."""
    raw = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "[BOS]": 2, "one": 3, "two": 4, "three": 5}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    raw.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="[BOS] $A", special_tokens=[("[BOS]", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", bos_token="[BOS]")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.mark.parametrize("container", [list, tuple, np.array], ids=str)
def test_texts_are_as_long_as_the_tokenizer_says(tokenizer, container):
    lengths = measure_lengths(container(TEXTS), tokenizer)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [len(tokenizer(text)["input_ids"]) for text in TEXTS] == [n + 1 for n in WORDS]


def test_max_length_truncates(tokenizer):
    assert measure_lengths(TEXTS, tokenizer, max_length=3).tolist() == [3, 1, 2, 3, 3]
    assert measure_lengths([[1] * 9, [1]], max_length=3).tolist() == [3, 1]


def test_samples_that_are_mappings_are_read_at_their_field(tokenizer):
    assert measure_lengths([{"body": t} for t in TEXTS], tokenizer, "body").tolist() == [n + 1 for n in WORDS]
    assert measure_lengths([{"input_ids": [1, 2]}, {"input_ids": []}]).tolist() == [2, 0]
    assert measure_lengths([{"ids": torch.arange(4)}], column="ids").tolist() == [4]


def test_processes_measure_the_same(tokenizer):
    texts = TEXTS * 3
    assert measure_lengths(texts, tokenizer, num_proc=2).tolist() == measure_lengths(texts, tokenizer).tolist()


def test_no_samples_no_lengths(tokenizer):
    for empty in (measure_lengths([], tokenizer), measure_lengths([]), measure_lengths([], length_of=len)):
        assert empty.dtype == np.int32
        assert empty.shape == (0,)


def test_a_datasets_column_of_texts(tokenizer):
    data = Dataset.from_dict({"text": TEXTS, "label": [0, 1, 2, 3, 4]})
    assert measure_lengths(data, tokenizer).tolist() == [n + 1 for n in WORDS]
    assert measure_lengths(data.select([3, 0]), tokenizer, "text").tolist() == [6, 4]
    assert measure_lengths(data["text"], tokenizer).tolist() == [n + 1 for n in WORDS]
    assert measure_lengths(data.select([]), tokenizer).tolist() == []


def test_a_datasets_column_of_ids():
    data = Dataset.from_dict({"input_ids": [[1, 2], [], [3]], "mine": [[1], [1], [1, 2, 3]]})
    assert measure_lengths(data).tolist() == [2, 0, 1]
    assert measure_lengths(data.select([2, 0])).tolist() == [1, 2]
    assert measure_lengths(data, column="mine").tolist() == [1, 1, 3]


def test_datasets_caches_the_lengths(tmp_path):
    Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "data")
    asked: list[int] = []

    class Counting(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **kwargs: Any) -> Any:
            asked.append(len(text))
            return super().__call__(text, **kwargs)

    def measure(max_length: int) -> list[int]:
        asked.clear()
        fresh = Counting(tokenizer_object=copy.deepcopy(word_tokenizer().backend_tokenizer), pad_token="[PAD]")
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


@pytest.mark.parametrize("num_proc", [None, 2])
def test_any_map_style_dataset_with_a_length_function(num_proc):
    lengths = measure_lengths(Squares(), length_of=pixels, num_proc=num_proc)
    assert lengths.tolist() == [i * i for i in range(150)]


def test_a_length_function_may_name_several_streams():
    streams = measure_lengths(Squares(), length_of=lambda s: {"tokens": s["words"], "patches": s["pixels"]})
    assert {name: values.dtype for name, values in streams.items()} == {"tokens": np.int32, "patches": np.int32}
    assert streams["patches"][3] == 9


@pytest.mark.parametrize("bad", [None, 7, b"bytes", ["nested"]])
def test_what_is_no_text_is_named(tokenizer, bad):
    for data in (["fine", "fine", bad], [{"text": "fine"}, {"text": "fine"}, {"text": bad}]):
        with pytest.raises(ConfigError) as error:
            measure_lengths(data, tokenizer, "text" if isinstance(data[0], dict) else None)
        assert f"text 2 must be a string, but is {bad!r}" in str(error.value)


def test_a_missing_text_in_a_late_batch_of_a_dataset_is_named(tokenizer):
    data = Dataset.from_dict({"text": [*["one"] * 1005, None, "two"]})
    with pytest.raises(ConfigError, match="text 1005 must be a string, but is None"):
        measure_lengths(data, tokenizer)


def test_missing_ids_are_named():
    with pytest.raises(ConfigError, match="sample 1 of column 'input_ids' is None"):
        measure_lengths(Dataset.from_dict({"input_ids": [[1], None]}))
    with pytest.raises(ConfigError, match="sample 1 must be a sequence of ids or a mapping with 'input_ids'"):
        measure_lengths([{"input_ids": [1]}, {"other": [1]}])


@pytest.mark.parametrize(
    "sample",
    [
        ([5, 6, 7], 1),
        (torch.arange(7),),
        {"input_ids": torch.ones(1, 7)},
        {"input_ids": [[5, 6, 7]]},
        (np.arange(7), np.arange(7)),
        ["a", "text"],
    ],
    ids=["ids and label", "TensorDataset", "a tokenizer's batch of one", "the same as lists", "two arrays", "texts"],
)
def test_what_is_no_row_of_ids_is_not_counted_as_one(sample):
    """Its len() is 1 or 2, whatever its tokens are."""
    with pytest.raises(
        ConfigError, match="sample 1 must be one row of ids, but is .*; take its ids, or give `length_of`"
    ):
        measure_lengths([[5, 6], sample])


@pytest.mark.parametrize("bad", [-1, 2.5, float("nan")])
def test_a_length_function_that_gives_no_length_is_named(bad):
    with pytest.raises(ConfigError, match=r"\['tokens'\]\[1\] must be a whole number"):
        measure_lengths([0, 1], length_of=lambda sample: bad if sample else 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: measure_lengths("one text", t), "is one str; put it into a list"),
        (lambda t: measure_lengths((x for x in TEXTS), t), "must have a length, but is generator.*OnlineDataLoader"),
        (lambda t: measure_lengths(TEXTS), "sample 0 is a text .*give the `tokenizer`"),
        (lambda t: measure_lengths(TEXTS, t, length_of=len), "give one of them"),
        (lambda t: measure_lengths(TEXTS, t, max_length=0), "`max_length` must be an int of at least 1, but is 0"),
        (lambda t: measure_lengths(TEXTS, t, num_proc=-1), "`num_proc` must be an int of at least 1, but is -1"),
        (lambda t: measure_lengths(Dataset.from_dict({"a": ["x"], "b": ["y"]}), t), r"2 text columns \(\['a', 'b'\]\)"),
        (lambda t: measure_lengths(Dataset.from_dict({"a": ["x"]}), t, "b"), r"one of \['a'\], but is 'b'"),
        (lambda t: measure_lengths(Dataset.from_dict({"a": ["x"]}), column="a"), "holds string, not lists of ids"),
        (
            lambda t: measure_lengths([1, 2], length_of=lambda s: {"tokens": 1} if s == 1 else {"other": 1}),
            "for sample 0, but .* for sample 1",
        ),
    ],
)
def test_messages_say_the_way_out(tokenizer, call, message):
    with pytest.raises(ConfigError, match=message):
        call(tokenizer)


def test_a_tokenizer_that_knows_no_limit_truncates_nothing():
    """``tokenizer.model_max_length`` is 10**30 where nobody set it."""
    assert measure_lengths([[1] * 5, [1] * 70], max_length=10**30).tolist() == [5, 70]


TABLE = pd.DataFrame({"text": ["one two", "three"], "ids": [[1, 2], [3]]}, index=[7, 9])


@pytest.mark.parametrize("table", [TABLE, pa.table({"text": ["one two", "three"], "ids": [[1, 2], [3]]})])
def test_a_table_is_measured_by_one_of_its_columns(tokenizer, table):
    assert measure_lengths(table, tokenizer, column="text").tolist() == [3, 2]
    assert measure_lengths(table, column="ids").tolist() == [2, 1]
    assert measure_lengths(table, column="text", length_of=len).tolist() == [7, 5]
    for column in (None, "words"):
        with pytest.raises(
            ConfigError, match=r"a whole .*Table|DataFrame: name with `column` .* one of \['text', 'ids'\]"
        ):
            measure_lengths(table, tokenizer, column=column)


def test_a_series_is_read_in_its_order_whatever_its_labels(tokenizer):
    assert measure_lengths(TABLE["text"], tokenizer).tolist() == [3, 2]
    assert measure_lengths(TABLE["text"], length_of=len).tolist() == [7, 5]


@pytest.mark.parametrize("late", [{"other": "one"}, "one"])
def test_a_sample_without_the_column_is_named(tokenizer, late):
    with pytest.raises(ConfigError, match="sample 1 must be a mapping with 'text', but is .*one"):
        measure_lengths([{"text": "one"}, late], tokenizer, "text")


def test_a_stray_stop_iteration_does_not_shorten_the_lengths() -> None:
    some = iter(range(70))
    with pytest.raises(ConfigError, match="64 of 100 samples were measured"):
        measure_lengths(list(range(100)), length_of=lambda sample: next(some))
