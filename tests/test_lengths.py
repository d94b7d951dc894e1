"""Lengths: everything legal becomes int32, everything else is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynagroup.errors import ConfigError
from dynagroup.lengths import as_streams, measure_lengths


@given(st.lists(st.integers(0, 2**31 - 1)), st.sampled_from([list, np.array, torch.tensor, tuple]))
def test_whole_numbers_survive_unchanged(values: list[int], container):
    tokens = as_streams(container(values))["tokens"]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == values


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64, np.float32, np.float64])
def test_any_numeric_type_of_whole_numbers_is_taken(dtype):
    assert as_streams(np.array([0, 3, 200], dtype))["tokens"].tolist() == [0, 3, 200]


def test_int32_is_not_copied():
    lengths = np.arange(5, dtype=np.int32)
    assert as_streams(lengths)["tokens"] is lengths


def test_no_samples_and_zero_lengths_are_legal():
    assert as_streams([])["tokens"].tolist() == []
    assert as_streams([0, 0])["tokens"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("bad", "shown"),
    [
        (-1, "-1"),
        (2.5, "2.5"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (2**31, "2147483648"),
        (2**70, str(2**70)),
        (None, "None"),
        ("7", "'7'"),
    ],
)
def test_what_is_no_length_is_named_with_its_index_and_value(bad, shown):
    with pytest.raises(ConfigError) as error:
        as_streams(
            {"tokens": [1, 2, 3], "patches": np.array([1, 2, bad], dtype=object if isinstance(bad, str) else None)}
        )
    assert "lengths['patches'][2]" in str(error.value)
    assert f"is {shown}" in str(error.value)


def test_truth_values_are_no_lengths():
    with pytest.raises(ConfigError, match=r"\['tokens'\]\[0\].*True"):
        as_streams(np.array([True, False]))


def test_streams_of_unequal_length_name_the_first_missing_sample():
    with pytest.raises(ConfigError, match=r"'patches'\] has 2 samples.*'tokens'\] has 3: sample 2 is missing"):
        as_streams({"tokens": [1, 2, 3], "patches": [1, 2]})


def test_the_first_of_streams_with_other_names_is_what_is_called_tokens():
    streams = as_streams({"source": [3, 4], "target": [1, 2]})
    assert {name: values.tolist() for name, values in streams.items()} == {"tokens": [3, 4], "target": [1, 2]}
    with pytest.raises(ConfigError, match="`lengths` has no stream"):
        as_streams({})


def test_max_length_is_a_length_of_text_alone():
    measured = measure_lengths(
        [{"t": 300, "p": 5000}], length_of=lambda s: {"tokens": s["t"], "patches": s["p"]}, max_length=128
    )
    assert {name: values.tolist() for name, values in measured.items()} == {"tokens": [128], "patches": [5000]}


@pytest.mark.parametrize("values", [[[1, 2], [3]], [[1, 2], [3, 4]], 5])
def test_one_number_a_sample(values):
    with pytest.raises(ConfigError, match="one number a sample.*measure_lengths"):
        as_streams(values)
