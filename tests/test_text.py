"""The one-liner gives batches that fit, with every text once, the same with worker processes."""

import pickle
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from dynagroup import ConfigError, TokenBudget, text_dataloader
from tests import models


def words(begin: bool = False, kind: type[Any] = PreTrainedTokenizerFast, **special: str) -> PreTrainedTokenizerFast:
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
    batches = list(text_dataloader(texts, tokenizer, TokenBudget(16, max_samples=6), shuffle=shuffle))
    assert sorted(text for batch in batches for text in seen(batch)) == sorted(texts)
    assert all(batch["input_ids"].numel() <= 16 and len(batch["input_ids"]) <= 6 for batch in batches)
    assert all(batch["input_ids"].dtype == torch.int64 for batch in batches)


TEXTS = numbered([7, 3, 9, 1, 4, 4])


@pytest.mark.parametrize(
    ("texts", "workers"), [(TEXTS, 2), (Dataset.from_dict({"text": TEXTS})["text"], 1), (pd.Series(TEXTS), 0)]
)
def test_workers_and_containers_change_nothing(tokenizer, texts, workers):
    loader = text_dataloader(texts, tokenizer, TokenBudget(18), num_workers=workers, labels=True)
    assert [seen(batch) for batch in loader] == [[TEXTS[i] for i in batch] for batch in loader.batch_sampler]
    assert sorted(i for batch in loader.batch_sampler for i in batch) == list(range(6))
    collate, dataset = pickle.loads(pickle.dumps((loader.collate_fn, loader.dataset)))
    assert collate([dataset[1]])["labels"].tolist() == [[3, 3, 3]], "what workers need can be sent to them"


@pytest.mark.parametrize(("lengths", "budget", "options", "shapes"), [
    ([30, 2], TokenBudget(10), {"max_length": 5}, [(2, 5)]),  # truncated before it is measured
    ([3, 9], TokenBudget(32), {"max_length": 10**30}, [(2, 9)]),  # the limit of a tokenizer that knows none
    ([9, 3, 3], TokenBudget(16, pad_to_multiple_of=8), {}, [(1, 16), (2, 8)]),
    ([5, 1], TokenBudget(10), {"lengths": [9, 9]}, [(1, 5), (1, 1)]),
    ([5] * 40, TokenBudget(20), {"samples_per_update": 8, "rank": 1, "world_size": 2, "timeout": 0}, [(4, 5)] * 5),
])  # fmt: skip
def test_options_decide_the_shapes(tokenizer, lengths, budget, options, shapes):
    loader = text_dataloader(numbered(lengths), tokenizer, budget, **options)
    assert [tuple(batch["input_ids"].shape) for batch in loader] == shapes
    assert len(loader) == len(shapes)


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 8, "shuffle": True}])
def test_few_shapes_are_filled_behind_the_texts(tokenizer, options):
    lengths = [1 + n % 13 for n in range(60)]
    loader = text_dataloader(numbered(lengths), tokenizer, TokenBudget(40), shapes=3, labels=True, **options)
    rows, batches = [row for [row] in loader.batch_sampler.plan.rows], list(loader)
    assert len({tuple(batch["labels"].shape) for batch in batches}) <= 3
    assert sorted(index for row in rows for index in row) == list(range(60))
    for row, batch in zip(rows, batches, strict=True):
        assert batch["attention_mask"][: len(row)].sum(1).tolist() == [lengths[index] for index in row]
        assert (batch["labels"] != -100).sum(1).tolist() == [lengths[index] for index in row] + [0] * (
            len(batch["labels"]) - len(row)
        )


def test_labels_leave_out_padding_and_nothing_else_and_a_model_runs_on_texts_without_any_token(tokenizer):
    batch = next(iter(text_dataloader(["1 0 0", "2"], words(pad_token="0"), TokenBudget(99), labels=True)))
    assert batch["labels"].tolist() == [[3, 2, 2], [4, -100, -100]]  # the word 0 pads too, and is still learned
    model = LlamaForCausalLM(models.llama(vocab=63, layers=1, inner=16))
    for batch in text_dataloader(["", "", "1 2"], tokenizer, TokenBudget(2), labels=True):
        assert model(**batch).logits.shape[:2] == batch["input_ids"].shape


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_texts_that_bring_the_first_token_get_no_second_one(layout):
    tokenizer = words(begin=True, pad_token="[PAD]", bos_token="[BOS]")
    loader = text_dataloader(["[BOS] 1 2", "[BOS] 1", "[BOS] 2 2"], tokenizer, TokenBudget(100, layout=layout))
    [batch] = list(loader)
    assert sorted(i for i in batch["input_ids"].flatten().tolist() if i) == [3, 3, 4, 4, 4, 62, 62, 62]
    assert pickle.loads(pickle.dumps(loader.collate_fn))(["[BOS] 1"])["input_ids"].tolist() == [[62, 3]]


@pytest.mark.parametrize(("texts", "options", "message"), [
    (["1"], {"tokenizer": words()}, "no padding token; set one"),
    (Dataset.from_dict({"text": ["1"]}), {}, "must be a list or one column, but is a whole Dataset"),
    (["1", "2", None], {"lengths": [1, 1, 2]}, "text 2 must be a string, but is None"),
])  # fmt: skip
def test_mistakes_are_named(tokenizer, texts, options, message):
    with pytest.raises(ConfigError, match=message):
        list(text_dataloader(texts, **{"tokenizer": tokenizer, "budget": TokenBudget(3), **options}))
