"""Pairs of texts, and results for each token: those of one text at a time, in memory and in files."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from dynagroup import (
    ConfigError,
    StateError,
    TokenBudget,
    classify_dataset,
    embed_dataset,
    iter_classify,
    measure_lengths,
    text_dataloader,
)
from dynagroup.testing import run_ranks
from tests import models
from tests.models import TEXTS, Allocator, small_tokenizer

SMALL: Any = {"budget": TokenBudget(60), "progress": False}
PAIRS = list(zip(TEXTS, TEXTS[::-1], strict=True))
LABELS: Any = {"id2label": {0: "O", 1: "PER", 2: "LOC"}, "num_labels": 3}


def bert_tokenizer() -> Any:
    """Texts stand between [BOS] and [EOS]; the second text of a pair has type 1."""
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[BOS] $A [EOS]",
        pair="[BOS] $A [EOS] $B:1 [EOS]:1",
        special_tokens=[("[BOS]", 1), ("[EOS]", 2)],
    )
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenizer


def bert(head: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return models.sharp(
        getattr(transformers, head)(models.bert(vocab=30, inner=16, **options)).eval()
    )


TOKENIZER = bert_tokenizer()


def alone(model: Any, item: Any) -> Any:
    """The model's output for one text or pair."""
    texts = (item,) if isinstance(item, str) else item
    with torch.no_grad():
        return model(**TOKENIZER(*texts, return_tensors="pt"))


def classified(model: Any, items: Any, **options: Any) -> Any:
    return classify_dataset(model, TOKENIZER, items, **SMALL, **options)


def states_of(model: Any, texts: Any = TEXTS, **options: Any) -> Any:
    return embed_dataset(model, TOKENIZER, texts, pooling=None, **SMALL, **options)


def assert_close(arrays: Any, expected: Any) -> None:
    for array, values in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, values, rtol=1e-4, atol=1e-5)


def test_a_pair_has_the_logits_that_it_has_alone_and_the_order_of_its_texts_counts() -> None:
    model = bert("BertForSequenceClassification", num_labels=2)
    expected = [alone(model, pair).logits[0].tolist() for pair in PAIRS]
    logits = classified(model, PAIRS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    as_lists = classified(model, [list(pair) for pair in PAIRS])
    np.testing.assert_array_equal(as_lists, logits)
    swapped = classified(model, [pair[::-1] for pair in PAIRS])
    np.testing.assert_allclose(swapped, expected[::-1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(swapped, logits, atol=1e-2)


def test_lengths_of_pairs_are_those_of_the_joined_texts() -> None:
    lengths = measure_lengths(PAIRS, TOKENIZER)
    expected = [len(TOKENIZER(first, second)["input_ids"]) for first, second in PAIRS]
    assert lengths.tolist() == expected
    assert measure_lengths([("w1 w2", "w3")], TOKENIZER).tolist() == [6]  # with three special ones
    assert measure_lengths(PAIRS, TOKENIZER, max_length=9).max() == 9
    loader = text_dataloader(PAIRS, TOKENIZER, TokenBudget(200))
    batch = next(iter(loader))
    assert batch["token_type_ids"].unique().tolist() == [0, 1]


def test_texts_and_pairs_are_not_mixed_and_other_items_are_refused() -> None:
    model = bert("BertForSequenceClassification")
    for texts, message in (
        (["w1", ("w1", "w2")], "1 of 2 texts are pairs; give texts or pairs only"),
        ([("w1", "w2", "w3")], "text 0 must be a string"),
        ([("w1", None)], "text 0 must be a string"),
    ):
        with pytest.raises(ConfigError, match=message):
            classified(model, texts)
    with pytest.raises(ConfigError, match="pairs of texts with `token_type_ids` cannot be packed"):
        next(iter(text_dataloader(PAIRS, TOKENIZER, TokenBudget(200, layout="packed"))))


@pytest.mark.parametrize("ending", [None, ".npy", ".parquet"])
def test_without_pooling_each_text_has_the_states_of_its_tokens(
    ending: str | None, tmp_path: Path
) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    model = bert("BertModel")
    output = None if ending is None else tmp_path / f"states{ending}"
    allocator = Allocator(40)
    remove = allocator.in_forward(model.encoder.layer[0])
    arrays = states_of(model, output=output)
    remove()
    assert allocator.failures
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert_close(arrays, [alone(model, text).last_hidden_state[0] for text in TEXTS])
    assert_close(states_of(model, output=output), arrays)
    normal = states_of(model, normalize=True)
    norms = np.linalg.norm(np.concatenate(normal), axis=1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_numpy_reads_the_files_and_pandas_the_lists(tmp_path: Path) -> None:
    model = bert("BertModel")
    arrays = states_of(model, output=tmp_path / "states.npy")
    values = np.load(tmp_path / "states.npy", mmap_mode="r")
    offsets = np.load(tmp_path / "states.offsets.npy")
    assert offsets.tolist() == np.cumsum([0, *map(len, arrays)]).tolist()
    np.testing.assert_array_equal(values[offsets[7] : offsets[8]], arrays[7])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "states.npy",
        "states.npy.job",
        "states.offsets.npy",
    ]
    (tmp_path / "states.offsets.npy").unlink()
    with pytest.raises(StateError, match="states.npy.job was written by another job"):
        states_of(model, output=tmp_path / "states.npy")
    parquet = pytest.importorskip("pyarrow.parquet")
    states_of(model, output=tmp_path / "states.parquet")
    (column,) = parquet.read_table(tmp_path / "states.parquet").to_pydict().values()
    np.testing.assert_allclose(column[7], arrays[7], rtol=0, atol=1e-6)


def test_no_text_and_texts_without_tokens_have_files_too(tmp_path: Path) -> None:
    model = bert("BertModel")
    without_special = small_tokenizer()
    for ending in ("npy", "parquet"):
        for number, texts in enumerate(([], [""], ["", "w1", ""])):
            output = tmp_path / f"{number}.{ending}"
            arrays = embed_dataset(
                model, without_special, texts, pooling=None, output=output, **SMALL
            )
            assert [array.shape for array in arrays] == [(len(text.split()), 16) for text in texts]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_labels_and_offsets_of_tokens_are_those_of_the_pipeline_of_transformers(
    tmp_path: Path,
) -> None:
    model = bert("BertForTokenClassification", **LABELS)
    pipeline = transformers.pipeline(
        "token-classification", model=model, tokenizer=TOKENIZER, ignore_labels=[], device="cpu"
    )
    results = classified(model, TEXTS, return_offsets=True, output=tmp_path / "labels.jsonl")
    filled = classified(model, TEXTS, return_offsets=True, shapes=2)
    assert [len(entries) for entries in filled] == [len(entries) for entries in results]
    assert {entry["label"] for entries in results for entry in entries} == {"O", "PER", "LOC"}
    for text, entries in zip(TEXTS, results, strict=True):
        expected = pipeline(text)
        assert [entry["label"] for entry in entries] == [row["entity"] for row in expected]
        for entry, row in zip(entries, expected, strict=True):
            assert (entry["start"], entry["end"]) == (row["start"], row["end"])
            assert text[entry["start"] : entry["end"]] == row["word"]
            assert entry["score"] == pytest.approx(row["score"], abs=1e-5)


def test_logits_of_tokens_are_those_of_one_text_at_a_time(tmp_path: Path) -> None:
    model = bert("BertForTokenClassification", **LABELS)
    output = tmp_path / "logits.npy"
    copies = [copy.deepcopy(model), copy.deepcopy(model)]

    def rank(world: Any) -> Any:
        return classified(copies[world.rank], TEXTS, per_token=True, output=output, world=world)

    expected = [alone(model, text).logits[0] for text in TEXTS]
    for results in run_ranks(2, rank):
        assert_close(results, expected)
    rows = dict(iter_classify(model, TOKENIZER, TEXTS, per_token=True, skip=range(1, 40), **SMALL))
    assert_close([rows[0]], expected[:1])


def test_truncated_texts_have_the_offsets_of_the_tokens_that_are_left() -> None:
    model = bert("BertForTokenClassification", max_position_embeddings=6, **LABELS)
    (entries,) = classified(model, ["w1 w2 w3 w4 w5 w6 w7"], return_offsets=True)
    assert [(entry["start"], entry["end"]) for entry in entries] == [
        (0, 2),
        (3, 5),
        (6, 8),
        (9, 11),
    ]


def test_a_classifier_of_the_other_kind_is_refused_by_its_logits() -> None:
    tokens = bert("BertForTokenClassification", **LABELS)
    texts = bert("BertForSequenceClassification")
    with pytest.raises(ConfigError, match="for a classifier of tokens pass per_token=True"):
        classified(tokens, TEXTS)
    with pytest.raises(ConfigError, match=r"logits \(\d+, 2\) for \d+ texts; .* leave them out"):
        classified(texts, TEXTS, per_token=True)
    with pytest.raises(ConfigError, match="`output` must end in .npy or .parquet"):
        classified(tokens, TEXTS, per_token=True, output="x.jsonl")


@pytest.mark.parametrize("pooling", [None, "last"])
def test_states_of_tokens_that_no_text_has_are_refused(pooling: Any) -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="FEATURE_EXTRACTION")
    model = models.adapted(bert("BertModel"), prompt)
    with pytest.raises(ConfigError, match="it must return one row per token"):
        embed_dataset(model, TOKENIZER, TEXTS, pooling=pooling, **SMALL)
