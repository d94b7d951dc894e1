"""Texts in one call: each once, in batches that fit. Lengths: what is legal becomes int32, the rest is refused."""

import math
import pickle
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset, load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dynagroup import ConfigError, TokenBudget, measure_lengths, text_dataloader
from dynagroup.files import measure_files
from dynagroup.lengths import as_streams
from dynagroup.oom.take import packed_borders
from tests import models

MOST = 2**31 - 1
DTYPES = "i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8 g O".split()
EDGES: list[float] = [0, 1, 127, 2048, MOST - 127, MOST, MOST + 1, 2**32, 2**63]
EDGES += [65504.0, -1, 0.5, -0.0, 1e30, math.inf, -math.inf, math.nan]
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
NO_ROWS: list[Any] = [([5, 6, 7], 1), (torch.arange(7),), torch.ones(1, 7)]
NO_ROWS += [[[5, 6, 7]], ["a"], "one", None]
SPOKEN = ["one two three", "", "one", "two two two two two", "three one"]
COUNTS = [4, 1, 2, 6, 3]  # a token in front of every text
ROWS = [[1, 2], [], [3]]
TABLE = pd.DataFrame({"text": SPOKEN, "n": range(5)}, index=range(5, 0, -1))
DATA = Dataset.from_dict({"text": SPOKEN, "label": range(5)})
HOLDERS: dict[str, Any] = {"list": SPOKEN, "tuple": tuple(SPOKEN), "array": np.array(SPOKEN)}
HOLDERS |= {"datasets": DATA, "a column": DATA["text"], "Series": TABLE["text"]}
HOLDERS_OF_A_COLUMN: dict[str, Any] = {"pandas": TABLE, "pyarrow": pa.table({"text": SPOKEN})}
HOLDERS_OF_A_COLUMN["mappings"] = [{"text": text} for text in SPOKEN]


def words(
    begin: bool = False, kind: type[Any] = PreTrainedTokenizerFast, **special: str
) -> PreTrainedTokenizerFast:
    """A token a word, which is a number of two more than the word; one in front with ``begin``."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[BOS]": 62}
    for n in range(60):
        vocabulary[str(n)] = n + 2
    raw: Any = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if begin:
        raw.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 62)])
    return kind(tokenizer_object=raw, unk_token="[UNK]", **special)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return words(pad_token="[PAD]")


def numbered(lengths: list[int]) -> list[str]:
    """Text n is the word n, so many times."""
    return [" ".join([str(n)] * length) for n, length in enumerate(lengths)]


def text_of(ids: list[int]) -> str:
    """Read back from what is not padding."""
    return " ".join(str(i - 2) for i in ids if i != 0)


def texts_of(batch: dict[str, torch.Tensor]) -> list[str]:
    return [text_of(row) for row in batch["input_ids"].tolist()]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.booleans())
def test_every_text_once_in_batches_that_fit(tokenizer, lengths, shuffle):
    texts = numbered(lengths)
    budget = TokenBudget(16, max_samples=6)
    read_back = []
    for batch in text_dataloader(texts, tokenizer, budget, shuffle=shuffle):
        assert batch["input_ids"].numel() <= 16
        assert len(batch["input_ids"]) <= 6
        assert batch["input_ids"].dtype == torch.int64
        read_back += texts_of(batch)
    assert sorted(read_back) == sorted(texts)


TEXTS = numbered([7, 3, 9, 1, 4, 4])
COLUMN = Dataset.from_dict({"text": TEXTS})["text"]


@pytest.mark.parametrize(("texts", "workers"), [(TEXTS, 2), (COLUMN, 1), (pd.Series(TEXTS), 0)])
def test_workers_and_containers_change_nothing(tokenizer, texts, workers):
    loader = text_dataloader(texts, tokenizer, TokenBudget(18), num_workers=workers)
    batches = list(loader.batch_sampler)
    for batch, indices in zip(loader, batches, strict=True):
        assert texts_of(batch) == [TEXTS[i] for i in indices]
    assert sorted(chain.from_iterable(batches)) == list(range(6))


@pytest.mark.parametrize("texts", [TEXTS, COLUMN, pd.Series(TEXTS)])
def test_what_workers_need_can_be_sent_to_them(tokenizer, texts):
    loader = text_dataloader(texts, tokenizer, TokenBudget(18), labels=True)
    sent = pickle.dumps((loader.collate_fn, loader.dataset))
    collate, dataset = pickle.loads(sent)
    batch = collate([dataset[1]])
    assert batch["labels"].tolist() == [[3, 3, 3]]


def shapes_of(numbers: list[int], tokenizer: Any, budget: Any, **options: Any) -> Any:
    """Those of the batches of texts with so many words."""
    loader = text_dataloader(numbered(numbers), tokenizer, budget, **options)
    shapes = [tuple(batch["input_ids"].shape) for batch in loader]
    assert len(loader) == len(shapes)
    return shapes


def test_texts_are_truncated_before_they_are_measured(tokenizer):
    assert shapes_of([30, 2], tokenizer, TokenBudget(10), max_length=5) == [(2, 5)]


def test_the_limit_of_a_tokenizer_that_knows_none_cuts_nothing(tokenizer):
    assert shapes_of([3, 9], tokenizer, TokenBudget(32), max_length=10**30) == [(2, 9)]


def test_batches_end_at_a_multiple(tokenizer):
    budget = TokenBudget(16, pad_to_multiple_of=8)
    assert shapes_of([9, 3, 3], tokenizer, budget) == [(1, 16), (2, 8)]


def test_known_lengths_are_believed(tokenizer):
    assert shapes_of([5, 1], tokenizer, TokenBudget(10), lengths=[9, 9]) == [(1, 5), (1, 1)]


def test_a_rank_has_its_share_of_each_update(tokenizer):
    shapes = shapes_of(
        [5] * 40,
        tokenizer,
        TokenBudget(20),
        samples_per_update=8,
        rank=1,
        world_size=2,
        timeout=0,
    )
    assert shapes == [(4, 5)] * 5


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 8, "shuffle": True}])
def test_few_shapes_are_filled_behind_the_texts(tokenizer, options):
    lengths = [1 + n % 13 for n in range(60)]
    texts = numbered(lengths)
    options = options | {"shapes": 3, "labels": True}
    loader = text_dataloader(texts, tokenizer, TokenBudget(40), **options)
    rows = [row for [row] in loader.batch_sampler.plan.rows]
    batches = list(loader)
    assert len({tuple(batch["labels"].shape) for batch in batches}) <= 3
    assert sorted(chain.from_iterable(rows)) == list(range(60))
    for row, batch in zip(rows, batches, strict=True):
        expected = [lengths[index] for index in row]
        assert batch["attention_mask"][: len(row)].sum(1).tolist() == expected
        expected += [0] * (len(batch["labels"]) - len(row))
        assert (batch["labels"] != -100).sum(1).tolist() == expected


def test_labels_leave_out_padding_and_nothing_else():
    """The word 0 pads too, and is still learned."""
    tokenizer = words(pad_token="0")
    [batch] = text_dataloader(["1 0 0", "2"], tokenizer, TokenBudget(99), labels=True)
    assert batch["labels"].tolist() == [[3, 2, 2], [4, -100, -100]]


def test_a_model_runs_on_texts_without_any_token(tokenizer):
    model = LlamaForCausalLM(models.llama(vocab=63, layers=1, inner=16))
    for batch in text_dataloader(["", "", "1 2"], tokenizer, TokenBudget(2), labels=True):
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


def test_a_tokenizer_needs_a_padding_token():
    with pytest.raises(ConfigError, match="no padding token; set one"):
        list(text_dataloader(["1"], words(), TokenBudget(3)))


def test_texts_are_one_column(tokenizer):
    with pytest.raises(ConfigError, match="must be a list or one column, but is a whole Dataset"):
        list(text_dataloader(DATA, tokenizer, TokenBudget(3)))


def test_the_one_liner_packs(tokenizer) -> None:
    texts = numbered([7, 3, 9, 1, 4, 4, 0])
    loader = text_dataloader(texts, tokenizer, TokenBudget(16, layout="packed"), labels=True)
    read_back = []
    for batch in loader:
        borders = packed_borders(batch)
        assert borders is not None
        assert batch["input_ids"].shape == (1, borders[-1])
        assert batch["labels"].shape == (1, borders[-1])
        assert borders[-1] <= 16
        ids = batch["input_ids"][0].tolist()
        for start, stop in pairwise(borders):
            assert 0 not in ids[start:stop]
            read_back.append(text_of(ids[start:stop]))
    assert sorted(read_back) == sorted(filter(None, texts))
    assert len(loader) == 2


def test_texts_without_any_token_are_one_token_of_padding(tokenizer) -> None:
    [batch] = text_dataloader(["", ""], tokenizer, TokenBudget(16, layout="packed"))
    assert batch["input_ids"].tolist() == [[0]]
    assert "labels" not in batch


def is_legal(value: float) -> bool:
    return 0 <= value <= MOST and value == math.floor(value)


@given(
    st.lists(st.sampled_from(EDGES) | st.integers(0, 70_000), min_size=1, max_size=5),
    st.sampled_from(DTYPES),
)
def test_a_number_of_any_type_is_taken_as_it_is_or_refused_by_index(
    values: list[float], dtype: str
):
    try:
        with np.errstate(all="ignore"):
            array = np.array(values, dtype)
    except (OverflowError, ValueError):  # numpy's own refusal of what the type cannot hold
        return
    legal = [is_legal(value) for value in array.astype("g").tolist()]
    if all(legal):
        lengths = as_streams(array)["tokens"]
        assert lengths.dtype == np.int32
        assert lengths.tolist() == array.tolist()
        return
    message = rf"lengths\['tokens'\]\[{legal.index(False)}\] must be a whole number"
    with pytest.raises(ConfigError, match=message):
        as_streams(array)


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor, pd.Series])
def test_whole_numbers_of_any_container_survive_unchanged(container):
    tokens = as_streams(container([0, 7, MOST]))["tokens"]
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [0, 7, MOST]
    assert as_streams(tokens)["tokens"] is tokens, "int32 is not copied"


@pytest.fixture(scope="module")
def counting() -> PreTrainedTokenizerFast:
    return words(begin=True, pad_token="[PAD]")


def test_the_tokenizer_puts_a_token_in_front(counting):
    assert [len(counting(text)["input_ids"]) for text in SPOKEN] == COUNTS


@pytest.mark.parametrize("holder", [*HOLDERS, *HOLDERS_OF_A_COLUMN])
def test_texts_are_as_long_as_the_tokenizer_says(counting, holder):
    column = "text" if holder in HOLDERS_OF_A_COLUMN else None
    data = (HOLDERS | HOLDERS_OF_A_COLUMN)[holder]
    lengths = measure_lengths(data, counting, column)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == COUNTS
    truncated = measure_lengths(data, counting, column, max_length=3)
    assert truncated.tolist() == np.minimum(COUNTS, 3).tolist()


@pytest.mark.parametrize(
    "data", [ROWS, [{"input_ids": row} for row in ROWS], Dataset.from_dict({"input_ids": ROWS})]
)
def test_rows_of_ids_are_counted(data):
    assert measure_lengths(data).tolist() == [2, 0, 1]
    assert measure_lengths(data, max_length=1).tolist() == [1, 0, 1]
    limit_that_nobody_set = 10**30
    assert measure_lengths(data, max_length=limit_that_nobody_set).tolist() == [2, 0, 1]


def test_chosen_rows_of_a_named_column_are_counted():
    data = Dataset.from_dict({"mine": ROWS}).select([2, 0])
    assert measure_lengths(data, column="mine").tolist() == [1, 2]


def test_processes_measure_the_same(counting):
    assert measure_lengths(SPOKEN * 3, counting, num_proc=2).tolist() == COUNTS * 3


def test_no_samples_have_no_lengths(counting):
    several = [measure_lengths([]), measure_lengths([], counting), as_streams([])["tokens"]]
    several += [measure_lengths([], length_of=len), measure_lengths(DATA.select([]), counting)]
    for lengths in several:
        assert lengths.dtype == np.int32
        assert lengths.shape == (0,)


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
        data = load_from_disk(tmp_path / "data")
        return measure_lengths(data, fresh, max_length=max_length).tolist()

    first = measure(4)
    # one more: the call that settles the tokenizer's truncation
    assert sum(asked) == len(SPOKEN) + 1
    assert measure(4) == first
    assert sum(asked) == 1
    assert measure(3) != first  # other settings, other cache


def test_measuring_leaves_the_global_random_numbers_alone(counting):
    before = torch.get_rng_state()
    measure_lengths(SPOKEN, counting)
    measure_lengths(ROWS)
    measure_lengths(SPOKEN, length_of=len)
    assert torch.equal(torch.get_rng_state(), before)


class Squares(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 150

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixels": index * index, "words": index}


def pixels(sample: dict[str, Any]) -> int:
    return sample["pixels"]


@pytest.mark.parametrize("num_proc", [None, 2])
def test_any_map_style_dataset_has_a_length_function(num_proc):
    lengths = measure_lengths(Squares(), length_of=pixels, num_proc=num_proc)
    assert lengths.tolist() == [i * i for i in range(150)]


def test_a_series_has_a_length_function():
    assert measure_lengths(TABLE["text"], length_of=len).tolist() == list(map(len, SPOKEN))


def words_and_patches(sample: dict[str, Any]) -> dict[str, int]:
    return {"words": sample["words"], "patches": sample["pixels"]}


def test_a_length_function_may_name_several_streams():
    streams = measure_lengths(Squares(), length_of=words_and_patches, max_length=2)
    assert list(streams) == ["words", "patches"]
    assert streams["words"].dtype == np.int32
    assert streams["words"][3] == 2
    assert streams["patches"].dtype == np.int32
    assert streams["patches"][3] == 9


NO_TEXTS = [(None, None, "text 1005 must be a string, but is None")]
NO_TEXTS += [("one \ud800 two", 2, r"one of the texts 1000 to 1006 .*encode\('utf-8', 'replace'\)")]
CHAT_IS_NO_TEXT = r"text 1005 must be .*turn a chat into a text with .*apply_chat_template\(messages, tokenize=False\)"
NO_TEXTS += [(CHAT, None, CHAT_IS_NO_TEXT)]


@pytest.mark.parametrize(("bad", "num_proc", "message"), NO_TEXTS)
def test_what_is_no_text_is_named(counting, bad, num_proc, message):
    texts: list[Any] = [*["one"] * 1005, bad, "two"]
    with pytest.raises(ConfigError, match=message):
        measure_lengths(texts, counting, num_proc=num_proc)
    rows = [{"text": text} for text in texts]
    with pytest.raises(ConfigError, match=message):
        measure_lengths(rows, counting, "text")


@pytest.mark.parametrize("row", NO_ROWS)
def test_what_is_no_row_of_ids_is_not_counted_as_one(row):
    """Its len() is 1 or 2, whatever its tokens are: a TensorDataset's sample, ids and label, a tokenizer's batch of one."""
    message = "sample 1 must be one row of token ids .*the `tokenizer` for texts"
    with pytest.raises(ConfigError, match=message):
        measure_lengths([[5, 6], row])
    with pytest.raises(ConfigError, match=message):
        measure_lengths([{"input_ids": [5, 6]}, {"input_ids": row}])


PADDED = [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1] * 6]
CHOICES = [[[5, 6], [7]], [[8], [9, 10, 11]]]


def padded_rows(field: str) -> Any:
    kind = int if field == "input_ids" else float
    return [{field: [kind(7)] * 6, "attention_mask": mask} for mask in PADDED]


def as_tensors(row: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values) for name, values in row.items()}


@pytest.mark.parametrize("field", ["input_ids", "input_values"])
def test_what_the_mask_marks_is_counted_and_padding_is_told(field):
    """On either side of a row, in a data set and in samples."""
    rows = padded_rows(field)
    tensors = [as_tensors(row) for row in rows]
    for data in (Dataset.from_list(rows), rows, tensors):
        with pytest.warns(UserWarning, match=f"padded in advance: 39% of '{field}' is padding"):
            lengths = measure_lengths(data)
        assert lengths.tolist() == [3, 2, 6]


@pytest.mark.parametrize("field", ["input_ids", "input_values"])
def test_what_the_mask_marks_is_counted_in_files(field, tmp_path):
    data = Dataset.from_list(padded_rows(field))
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "rows.jsonl")
    for name in ("rows.parquet", "rows.jsonl"):
        with pytest.warns(UserWarning, match=f"padded in advance: 39% of '{field}' is padding"):
            lengths = measure_files(tmp_path / name, column=field, num_proc=1)
        assert lengths.tolist() == [3, 2, 6]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("field", ["input_ids", "input_values"])
def test_a_mask_without_padding_gives_no_warning(field):
    data = Dataset.from_list(padded_rows(field))
    whole = data.map(lambda row: {"attention_mask": [1] * 6})
    assert measure_lengths(whole).tolist() == [6, 6, 6]


@pytest.mark.parametrize("named", [True, False])
def test_several_choices_count_as_they_are_collated(named):
    column = "input_ids" if named else "mine"
    rows = []
    for choices in CHOICES:
        masks = [[1] * len(ids) for ids in choices]
        rows.append({column: choices, "attention_mask": masks})
    for data in (Dataset.from_list(rows), rows):
        assert measure_lengths(data, column=None if named else column).tolist() == [4, 6]


def test_choices_without_a_name_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"sample 0 must be .* number of choices \* longest"):
        measure_lengths(CHOICES)


@pytest.mark.parametrize("bad", [(5, 6, 7), [0.5, 0.25], np.array([0.5])])
def test_samples_that_are_no_ids_are_named_by_their_index(bad):
    with pytest.raises(ConfigError, match="sample 1 must be one row of token ids"):
        measure_lengths([[5], bad])


def test_samples_without_ids_are_named_by_their_index():
    message = r"sample 1 has no 'input_ids' \(it has \['audio'\]\).*length_of"
    with pytest.raises(ConfigError, match=message):
        measure_lengths([{"input_ids": [5]}, {"audio": {"array": [0.5]}}])


@pytest.mark.parametrize("values", [[1, 2.5], np.array([1, 2.5], np.float32), [1, math.nan]])
def test_fractions_are_named_by_their_index(values):
    with pytest.raises(ConfigError, match=r"lengths\['tokens'\]\[1\] must be a whole number"):
        as_streams(values)


def test_fractions_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="multiply all lengths by 100 and round up"):
        as_streams([1, 2.5])


@pytest.mark.parametrize("bad", [None, "7", True, b"7", 1j, 2**70])
def test_what_is_no_length_is_named_by_its_stream_and_index(bad):
    patches = np.array([1, 2, bad], object)
    message = r"lengths\['patches'\]\[2\] must be a whole number from 0 to"
    with pytest.raises(ConfigError, match=message):
        as_streams({"tokens": [1, 2, 3], "patches": patches})


@pytest.mark.parametrize(
    "values", [[[1, 2], [3]], [[1, 2], [3, 4]], 5, torch.ones(3, dtype=torch.bfloat16)]
)
def test_lengths_are_one_number_per_sample(values):
    with pytest.raises(ConfigError, match="one number per sample.*measure_lengths"):
        as_streams(values)


def test_a_sample_has_a_length_in_all_streams():
    message = r"{'tokens': 3, 'patches': 2} samples; each sample needs a length in all"
    with pytest.raises(ConfigError, match=message):
        as_streams({"tokens": [1, 2, 3], "patches": [1, 2]})


def test_streams_are_at_least_one():
    with pytest.raises(ConfigError, match="or a dict by stream name"):
        as_streams({})


@pytest.mark.parametrize("values", [[CHAT], [["a"]], [[[5, 6]]], ["x"], [[1], None]])
def test_a_column_of_no_ids_is_refused_with_the_way_out(values):
    data = Dataset.from_dict({"a": values})
    message = r"lists of token ids, but .*apply_chat_template|\[1\] must be .* is nan"
    with pytest.raises(ConfigError, match=message):
        measure_lengths(data, column="a")


def test_a_chat_is_no_row_of_ids():
    with pytest.raises(ConfigError, match="sample 0 must be .*apply_chat_template"):
        measure_lengths([CHAT])


WHOLE = [("one text", "must be a list or one column, but is a whole str")]
WHOLE += [((text for text in SPOKEN), "but is a whole generator.*OnlineDataLoader")]
WHOLE += [(TABLE, "but is a whole DataFrame")]


@pytest.mark.parametrize(("data", "message"), WHOLE)
def test_what_is_no_list_or_column_is_refused(counting, data, message):
    with pytest.raises(ConfigError, match=message):
        measure_lengths(data, counting)


def test_one_of_several_columns_of_texts_must_be_named(counting):
    data = Dataset.from_dict({"a": ["x"], "b": ["y"]})
    with pytest.raises(ConfigError, match=r"2 text columns \(\['a', 'b'\]\)"):
        measure_lengths(data, counting)


def test_a_tokenizer_and_a_length_function_are_not_both_given(counting):
    with pytest.raises(ConfigError, match="pass only one of them"):
        measure_lengths(SPOKEN, counting, length_of=len)


def test_a_length_function_gives_whole_numbers():
    with pytest.raises(ConfigError, match=r"\['tokens'\]\[0\] must be a whole number"):
        measure_lengths([3, 1], length_of=lambda n: 2.5)


def test_a_length_function_names_the_same_streams_for_all_samples():
    with pytest.raises(ConfigError, match="for sample 1"):
        measure_lengths(["tokens", "x"], length_of=lambda name: {name: 1})
