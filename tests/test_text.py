"""The one-liner gives batches that fit, with every text once, the same with worker processes."""

from __future__ import annotations

import pickle

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dynagroup.budget.tokens import TokenBudget
from dynagroup.errors import ConfigError
from dynagroup.text import text_dataloader
from tests import models

WORDS = [str(n) for n in range(60)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{word: n + 2 for n, word in enumerate(WORDS)}}
    raw = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")


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
    batches = list(text_dataloader(texts, tokenizer, TokenBudget(16, max_samples=6), shuffle=shuffle))
    assert sorted(text for batch in batches for text in seen(batch)) == sorted(texts)
    assert all(batch["input_ids"].numel() <= 16 and len(batch["input_ids"]) <= 6 for batch in batches)
    assert all(batch["input_ids"].dtype == torch.int64 for batch in batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_workers_change_nothing(tokenizer, num_workers):
    texts = numbered([7, 3, 9, 1, 4, 4])
    loader = text_dataloader(texts, tokenizer, TokenBudget(18), num_workers=num_workers, multiprocessing_context=None)
    assert [seen(batch) for batch in loader] == [
        [texts[i] for i in batch] for batch in text_dataloader(texts, tokenizer, TokenBudget(18)).batch_sampler
    ]


def test_a_datasets_column_is_read_by_workers(tokenizer):
    texts = numbered([7, 3, 9, 1])
    column = Dataset.from_dict({"text": texts})["text"]
    batches = list(text_dataloader(column, tokenizer, TokenBudget(18), num_workers=2))
    assert sorted(text for batch in batches for text in seen(batch)) == sorted(texts)


def test_what_workers_need_can_be_sent_to_them(tokenizer):
    loader = text_dataloader(numbered([3, 2]), tokenizer, TokenBudget(18), labels=True)
    collate, dataset = pickle.loads(pickle.dumps((loader.collate_fn, loader.dataset)))
    assert collate([dataset[0]])["labels"].tolist() == [[2, 2, 2]]


def test_longer_texts_are_truncated_before_they_are_measured(tokenizer):
    batches = list(text_dataloader(numbered([30, 2]), tokenizer, TokenBudget(10), max_length=5))
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 5)]


def test_padding_is_rounded_as_the_budget_says(tokenizer):
    budget = TokenBudget(16, pad_to_multiple_of=8)
    shapes = [tuple(b["input_ids"].shape) for b in text_dataloader(numbered([9, 3, 3]), tokenizer, budget)]
    assert shapes == [(1, 16), (2, 8)]


def test_labels_leave_out_padding_and_nothing_else(tokenizer):
    tokenizer_with_shared_pad = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="0", unk_token="[UNK]"
    )
    batch = next(iter(text_dataloader(["1 0 0", "2"], tokenizer_with_shared_pad, TokenBudget(99), labels=True)))
    assert batch["labels"].tolist() == [[3, 2, 2], [4, -100, -100]]  # the word 0 pads too, and is still learned


def test_a_real_model_runs_on_texts_without_any_token(tokenizer):
    model = LlamaForCausalLM(models.llama(vocab=62, layers=1, inner=16))
    for batch in text_dataloader(["", "", "1 2"], tokenizer, TokenBudget(2), labels=True):
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


def test_options_reach_the_sampler_and_the_loader(tokenizer):
    texts = numbered([5] * 40)
    loader = text_dataloader(
        texts, tokenizer, TokenBudget(20), samples_per_update=8, seed=3, rank=1, world_size=2, timeout=0.0
    )
    assert len(loader) == len(list(loader)) == 5
    assert loader.batch_sampler.plan.num_updates == 5  # type: ignore[union-attr]


def test_lengths_measured_before_are_used(tokenizer):
    texts = numbered([5, 1])
    loader = text_dataloader(texts, tokenizer, TokenBudget(10), lengths=[9, 9])
    assert len(loader) == 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_text_that_nobody_can_write_is_named_though_it_was_measured_elsewhere(tokenizer, num_workers):
    loader = text_dataloader(
        ["1", "2", "3 \udc80"], tokenizer, TokenBudget(3), lengths=[1, 1, 2], num_workers=num_workers
    )
    with pytest.raises(ConfigError, match="text 2 has a lone surrogate at character 2"):
        list(loader)


@pytest.mark.parametrize("name", ["batch_size", "sampler", "batch_sampler", "drop_last", "collate_fn"])
def test_what_the_budget_decides_cannot_be_chosen(tokenizer, name):
    with pytest.raises(ConfigError, match=f"`{name}` cannot be chosen here"):
        text_dataloader(["1"], tokenizer, TokenBudget(9), **{name: 1})


def test_an_unknown_option_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="`colour` is an option neither"):
        text_dataloader(["1"], tokenizer, TokenBudget(9), colour="red")


def test_a_tokenizer_that_cannot_pad_is_refused(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no padding token; set one"):
        text_dataloader(["1"], bare, TokenBudget(9))


def test_the_limit_of_a_tokenizer_that_knows_none_is_no_limit(tokenizer):
    texts = numbered([3, 9])
    assert tokenizer.model_max_length > 10**20
    (batch,) = text_dataloader(texts, tokenizer, TokenBudget(32), max_length=tokenizer.model_max_length)
    assert batch["input_ids"].shape == (2, 9)


def test_texts_of_a_series_are_taken_by_position(tokenizer):
    pandas = pytest.importorskip("pandas")
    texts = numbered([3, 1, 4, 1, 5])
    loader = text_dataloader(pandas.Series(texts)[::-1], tokenizer, TokenBudget(10))
    assert sorted(text for batch in loader for text in seen(batch)) == sorted(texts)
    assert all(batch["input_ids"].numel() <= 10 for batch in loader)


def test_a_whole_dataset_is_no_texts(tokenizer):
    with pytest.raises(ConfigError, match="is a whole Dataset; give one column"):
        text_dataloader(Dataset.from_dict({"text": ["1"]}), tokenizer, 10)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_texts_that_bring_the_first_token_get_no_second_one(layout):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[BOS]": 2, "one": 3, "two": 4}
    raw = Tokenizer(WordLevel(vocabulary, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    raw.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 2)])  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", bos_token="[BOS]")
    budget = TokenBudget(100, layout=layout)
    loader = text_dataloader(["[BOS] one two", "one", "two two"], tokenizer, budget, rank=0, world_size=1)
    [batch] = list(loader)
    assert sorted(i for i in batch["input_ids"].flatten().tolist() if i) == [2, 2, 2, 3, 3, 4, 4, 4]
    assert pickle.loads(pickle.dumps(loader.collate_fn))(["[BOS] one"])["input_ids"].tolist() == [[2, 3]]
