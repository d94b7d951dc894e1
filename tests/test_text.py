"""Texts in one call: each once, in batches that fit. Lengths: what is legal becomes int32, the rest is refused."""

import math
import pickle
from functools import partial
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
DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "O"]
EDGES = [0, 1, 127, 2048, MOST - 127, MOST, MOST + 1, 2**32, 2**63, 65504.0, -1, 0.5, -0.0, 1e30]
EDGES += [math.inf, -math.inf, math.nan]
CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
NO_ROWS = [([5, 6, 7], 1), (torch.arange(7),), torch.ones(1, 7), [[5, 6, 7]], ["a"], "one", None]
TWO = Dataset.from_dict({"a": ["x"], "b": ["y"]})
NO_LENGTHS = [[[1, 2], [3]], [[1, 2], [3, 4]], 5, torch.ones(3, dtype=torch.bfloat16)]
NO_IDS = [[CHAT], [["a"]], [[[5, 6]]], ["x"], [[1], None]]
SPOKEN = ["one two three", "", "one", "two two two two two", "three one"]
COUNTS = [4, 1, 2, 6, 3]  # a token in front of every text
ROWS = [[1, 2], [], [3]]
TABLE = pd.DataFrame({"text": SPOKEN, "n": range(5)}, index=range(5, 0, -1))
DATA = Dataset.from_dict({"text": SPOKEN, "label": [0, 1, 2, 3, 4]})
HOLDERS: dict[str, tuple[Any, str | None]] = {
    "list": (SPOKEN, None),
    "tuple": (tuple(SPOKEN), None),
    "array": (np.array(SPOKEN), None),
    "mappings": ([{"text": text} for text in SPOKEN], "text"),
    "datasets": (DATA, None),
    "a column": (DATA["text"], None),
    "pandas": (TABLE, "text"),
    "Series": (TABLE["text"], None),
    "pyarrow": (pa.table({"text": SPOKEN}), "text"),
}


def words(
    begin: bool = False, kind: type[Any] = PreTrainedTokenizerFast, **special: str
) -> PreTrainedTokenizerFast:
    """A token a word, which is a number of two more than the word; one in front with ``begin``."""
    numbers = {str(n): n + 2 for n in range(60)}
    raw: Any = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, **numbers, "[BOS]": 62}, "[UNK]"))
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


def seen(batch: dict[str, torch.Tensor]) -> list[str]:
    """The texts of a batch, read back from what is not padding."""
    return [" ".join(str(int(i) - 2) for i in row if i) for row in batch["input_ids"]]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=50), st.booleans())
def test_every_text_once_in_batches_that_fit(tokenizer, lengths, shuffle):
    texts = numbered(lengths)
    batches = list(
        text_dataloader(texts, tokenizer, TokenBudget(16, max_samples=6), shuffle=shuffle)
    )
    assert sorted(text for batch in batches for text in seen(batch)) == sorted(texts)
    assert all(
        batch["input_ids"].numel() <= 16 and len(batch["input_ids"]) <= 6 for batch in batches
    )
    assert all(batch["input_ids"].dtype == torch.int64 for batch in batches)


TEXTS = numbered([7, 3, 9, 1, 4, 4])
COLUMN = Dataset.from_dict({"text": TEXTS})["text"]


@pytest.mark.parametrize(("texts", "workers"), [(TEXTS, 2), (COLUMN, 1), (pd.Series(TEXTS), 0)])
def test_workers_and_containers_change_nothing(tokenizer, texts, workers):
    loader = text_dataloader(texts, tokenizer, TokenBudget(18), num_workers=workers, labels=True)
    assert [seen(batch) for batch in loader] == [
        [TEXTS[i] for i in batch] for batch in loader.batch_sampler
    ]
    assert sorted(i for batch in loader.batch_sampler for i in batch) == list(range(6))
    collate, dataset = pickle.loads(pickle.dumps((loader.collate_fn, loader.dataset)))
    assert collate([dataset[1]])["labels"].tolist() == [[3, 3, 3]], (
        "what workers need can be sent to them"
    )


@pytest.mark.parametrize(
    ("lengths", "budget", "options", "shapes"),
    [
        ([30, 2], TokenBudget(10), {"max_length": 5}, [(2, 5)]),  # truncated before it is measured
        (
            [3, 9],
            TokenBudget(32),
            {"max_length": 10**30},
            [(2, 9)],
        ),  # the limit of a tokenizer that knows none
        ([9, 3, 3], TokenBudget(16, pad_to_multiple_of=8), {}, [(1, 16), (2, 8)]),
        ([5, 1], TokenBudget(10), {"lengths": [9, 9]}, [(1, 5), (1, 1)]),
        (
            [5] * 40,
            TokenBudget(20),
            {"samples_per_update": 8, "rank": 1, "world_size": 2, "timeout": 0},
            [(4, 5)] * 5,
        ),
    ],
)
def test_options_decide_the_shapes(tokenizer, lengths, budget, options, shapes):
    loader = text_dataloader(numbered(lengths), tokenizer, budget, **options)
    assert [tuple(batch["input_ids"].shape) for batch in loader] == shapes
    assert len(loader) == len(shapes)


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 8, "shuffle": True}])
def test_few_shapes_are_filled_behind_the_texts(tokenizer, options):
    lengths = [1 + n % 13 for n in range(60)]
    loader = text_dataloader(
        numbered(lengths), tokenizer, TokenBudget(40), shapes=3, labels=True, **options
    )
    rows, batches = [row for [row] in loader.batch_sampler.plan.rows], list(loader)
    assert len({tuple(batch["labels"].shape) for batch in batches}) <= 3
    assert sorted(index for row in rows for index in row) == list(range(60))
    for row, batch in zip(rows, batches, strict=True):
        assert batch["attention_mask"][: len(row)].sum(1).tolist() == [
            lengths[index] for index in row
        ]
        filled = [0] * (len(batch["labels"]) - len(row))
        assert (batch["labels"] != -100).sum(1).tolist() == [
            lengths[index] for index in row
        ] + filled


def test_labels_leave_out_padding_and_nothing_else_and_a_model_runs_on_texts_without_any_token(
    tokenizer,
):
    batch = next(
        iter(text_dataloader(["1 0 0", "2"], words(pad_token="0"), TokenBudget(99), labels=True))
    )
    assert batch["labels"].tolist() == [
        [3, 2, 2],
        [4, -100, -100],
    ]  # the word 0 pads too, and is still learned
    model = LlamaForCausalLM(models.llama(vocab=63, layers=1, inner=16))
    for batch in text_dataloader(["", "", "1 2"], tokenizer, TokenBudget(2), labels=True):
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["1"], {"tokenizer": words()}, "no padding token; set one"),
        (
            Dataset.from_dict({"text": ["1"]}),
            {},
            "must be a list or one column, but is a whole Dataset",
        ),
    ],
)
def test_mistakes_are_named(tokenizer, texts, options, message):
    with pytest.raises(ConfigError, match=message):
        list(
            text_dataloader(texts, **{"tokenizer": tokenizer, "budget": TokenBudget(3), **options})
        )


def test_the_one_liner_packs(tokenizer) -> None:
    texts = numbered([7, 3, 9, 1, 4, 4, 0])
    loader = text_dataloader(texts, tokenizer, TokenBudget(16, layout="packed"), labels=True)
    seen = []
    for batch in loader:
        borders = packed_borders(batch)
        assert borders is not None
        assert batch["input_ids"].shape == batch["labels"].shape == (1, borders[-1])
        assert borders[-1] <= 16
        ids = batch["input_ids"][0].tolist()
        seen += [
            " ".join(str(i - 2) for i in ids[a:b])
            for a, b in zip(borders[:-1], borders[1:], strict=True)
        ]
    assert sorted(seen) == sorted(text for text in texts if text)
    assert len(loader) == 2
    batch = next(iter(text_dataloader(["", ""], tokenizer, TokenBudget(16, layout="packed"))))
    assert (batch["input_ids"].tolist(), "labels" in batch) == ([[0]], False)


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
    legal = [
        0 <= value <= MOST and value == math.floor(value) for value in array.astype("g").tolist()
    ]
    if all(legal):
        found = as_streams(array)["tokens"]
        assert found.dtype == np.int32
        assert found.tolist() == array.tolist()
    else:
        with pytest.raises(
            ConfigError,
            match=rf"lengths\['tokens'\]\[{legal.index(False)}\] must be a whole number",
        ):
            as_streams(array)


@pytest.mark.parametrize("container", [list, tuple, np.array, torch.tensor, pd.Series])
def test_whole_numbers_of_any_container_survive_unchanged(container):
    tokens = as_streams(container([0, 7, MOST]))["tokens"]
    assert (tokens.dtype, tokens.tolist()) == (np.int32, [0, 7, MOST])
    assert as_streams(tokens)["tokens"] is tokens, "int32 is not copied"


@pytest.fixture(scope="module")
def counting() -> PreTrainedTokenizerFast:
    return words(begin=True, pad_token="[PAD]")


@pytest.mark.parametrize("holder", HOLDERS)
def test_texts_are_as_long_as_the_tokenizer_says(counting, holder):
    data, column = HOLDERS[holder]
    lengths = measure_lengths(data, counting, column)
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [len(counting(text)["input_ids"]) for text in SPOKEN] == COUNTS
    assert measure_lengths(data, counting, column, max_length=3).tolist() == [
        min(n, 3) for n in COUNTS
    ]


@pytest.mark.parametrize(
    "data", [ROWS, [{"input_ids": row} for row in ROWS], Dataset.from_dict({"input_ids": ROWS})]
)
def test_rows_of_ids_are_counted(data):
    assert measure_lengths(data).tolist() == [2, 0, 1]
    assert measure_lengths(data, max_length=10**30).tolist() == [
        2,
        0,
        1,
    ]  # a tokenizer's limit that nobody set
    assert measure_lengths(data, max_length=1).tolist() == [1, 0, 1]
    if isinstance(data, Dataset):  # of another name, and rows chosen
        assert measure_lengths(
            data.rename_column("input_ids", "mine").select([2, 0]), column="mine"
        ).tolist() == [1, 2]


def test_processes_measure_the_same_and_no_samples_have_no_lengths(counting):
    assert measure_lengths(SPOKEN * 3, counting, num_proc=2).tolist() == COUNTS * 3
    whole = [measure_lengths([], counting), measure_lengths([]), measure_lengths([], length_of=len)]
    for found in (*whole, as_streams([])["tokens"], measure_lengths(DATA.select([]), counting)):
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
        return measure_lengths(
            load_from_disk(tmp_path / "data"), fresh, max_length=max_length
        ).tolist()

    first = measure(4)
    assert (
        sum(asked) == len(SPOKEN) + 1
    )  # one more: the call that settles the tokenizer's truncation
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


def test_any_map_style_dataset_with_a_length_function_that_may_name_several_streams():
    for num_proc in (None, 2):
        assert measure_lengths(Squares(), length_of=pixels, num_proc=num_proc).tolist() == [
            i * i for i in range(150)
        ]
    assert measure_lengths(TABLE["text"], length_of=len).tolist() == list(map(len, SPOKEN))
    both = lambda sample: {"words": sample["words"], "patches": sample["pixels"]}  # noqa: E731
    streams = measure_lengths(Squares(), length_of=both, max_length=2)
    assert {name: values.dtype for name, values in streams.items()} == {
        "words": np.int32,
        "patches": np.int32,
    }
    assert (streams["words"][3], streams["patches"][3]) == (2, 9)


@pytest.mark.parametrize(
    ("bad", "num_proc", "said"),
    [
        (None, None, "text 1005 must be a string, but is None"),
        ("one \ud800 two", 2, r"one of the texts 1000 to 1006 .*encode\('utf-8', 'replace'\)"),
        (
            CHAT,
            None,
            r"text 1005 must be .*turn a chat into a text with .*apply_chat_template\(messages, tokenize=False\)",
        ),
    ],
)
def test_what_is_no_text_is_named(counting, bad, num_proc, said):
    texts: list[Any] = [*["one"] * 1005, bad, "two"]
    with pytest.raises(ConfigError, match=said):
        measure_lengths(texts, counting, num_proc=num_proc)
    rows = [{"text": text} for text in texts]
    with pytest.raises(ConfigError, match=said):
        measure_lengths(rows, counting, "text")


def test_what_is_no_row_of_ids_is_not_counted_as_one():
    """Its len() is 1 or 2, whatever its tokens are: a TensorDataset's sample, ids and label, a tokenizer's batch of one."""
    for row in NO_ROWS:
        for samples in ([[5, 6], row], [{"input_ids": [5, 6]}, {"input_ids": row}]):
            with pytest.raises(
                ConfigError,
                match="sample 1 must be one row of token ids .*the `tokenizer` for texts",
            ):
                measure_lengths(samples)


PADDED = [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1], [1] * 6]
CHOICES = [[[5, 6], [7]], [[8], [9, 10, 11]]]


@pytest.mark.parametrize("field", ["input_ids", "input_values"])
def test_what_the_mask_marks_is_counted_and_padding_is_told(field, tmp_path):
    """On either side of a row, in a data set, in samples and in files."""
    kind = int if field == "input_ids" else float
    rows = [{field: [kind(7)] * 6, "attention_mask": mask} for mask in PADDED]
    data = Dataset.from_list(rows)
    data.to_parquet(tmp_path / "rows.parquet")
    data.to_json(tmp_path / "rows.jsonl")
    tensors = [{name: torch.tensor(values) for name, values in row.items()} for row in rows]
    files = [tmp_path / "rows.parquet", tmp_path / "rows.jsonl"]
    for measure in (
        partial(measure_lengths, data),
        partial(measure_lengths, rows),
        partial(measure_lengths, tensors),
        *(partial(measure_files, file, column=field, num_proc=1) for file in files),
    ):
        with pytest.warns(UserWarning, match=f"padded in advance: 39% of '{field}' is padding"):
            assert measure().tolist() == [3, 2, 6]
    whole = data.map(lambda row: {"attention_mask": [1] * 6})
    assert measure_lengths(whole).tolist() == [6, 6, 6]  # no warning


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


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ((5, 6, 7), "sample 1 must be one row of token ids"),
        ([0.5, 0.25], "sample 1 must be one row of token ids"),
        (np.array([0.5]), "sample 1 must be one row of token ids"),
        (
            {"audio": {"array": [0.5]}},
            r"sample 1 has no 'input_ids' \(it has \['audio'\]\).*length_of",
        ),
    ],
)
def test_samples_that_are_no_ids_are_named_by_their_index(bad, said):
    is_row = isinstance(bad, dict)
    with pytest.raises(ConfigError, match=said):
        measure_lengths([{"input_ids": [5]}, bad] if is_row else [[5], bad])


def test_fractions_are_refused_with_the_way_out():
    for values in ([1, 2.5], np.array([1, 2.5], np.float32), [1, math.nan]):
        with pytest.raises(ConfigError, match=r"lengths\['tokens'\]\[1\] must be a whole number"):
            as_streams(values)
    with pytest.raises(ConfigError, match="multiply all lengths by 100 and round up"):
        as_streams([1, 2.5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (
                lambda t, bad=bad: as_streams(
                    {"tokens": [1, 2, 3], "patches": np.array([1, 2, bad], object)}
                ),
                r"lengths\['patches'\]\[2\] must be a whole number from 0 to",
            )
            for bad in (None, "7", True, b"7", 1j, 2**70)
        ),
        *(
            (lambda t, values=values: as_streams(values), "one number per sample.*measure_lengths")
            for values in NO_LENGTHS
        ),
        (
            lambda t: as_streams({"tokens": [1, 2, 3], "patches": [1, 2]}),
            r"{'tokens': 3, 'patches': 2} samples; each sample needs a length in all",
        ),
        (lambda t: as_streams({}), "or a dict by stream name"),
        *(
            (
                lambda t, values=values: measure_lengths(
                    Dataset.from_dict({"a": values}), column="a"
                ),
                r"lists of token ids, but .*apply_chat_template|\[1\] must be .* is nan",
            )
            for values in NO_IDS
        ),
        (lambda t: measure_lengths([CHAT]), "sample 0 must be .*apply_chat_template"),
        (
            lambda t: measure_lengths("one text", t),
            "must be a list or one column, but is a whole str",
        ),
        (
            lambda t: measure_lengths((x for x in SPOKEN), t),
            "but is a whole generator.*OnlineDataLoader",
        ),
        (lambda t: measure_lengths(TABLE, t), "but is a whole DataFrame"),
        (lambda t: measure_lengths(TWO, t), r"2 text columns \(\['a', 'b'\]\)"),
        (lambda t: measure_lengths(SPOKEN, t, length_of=len), "pass only one of them"),
        (
            lambda t: measure_lengths([3, 1], length_of=lambda n: 2.5),
            r"\['tokens'\]\[0\] must be a whole number",
        ),
        (
            lambda t: measure_lengths(["tokens", "x"], length_of=lambda name: {name: 1}),
            "for sample 1",
        ),
    ],
)
def test_messages_say_the_way_out(counting, call, message):
    with pytest.raises(ConfigError, match=message):
        call(counting)
