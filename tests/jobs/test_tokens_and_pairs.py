"""Pairs of texts, and results for each token: those of one text at a time, in memory and in files."""

from functools import partial
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


def bert(head: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    config = models.bert(vocab=30, inner=16, **options)
    return models.sharp(head(config).eval())


def encoder() -> Any:
    return bert(transformers.BertModel)


def classifier_of_texts() -> Any:
    return bert(transformers.BertForSequenceClassification, num_labels=2)


def classifier_of_tokens(**options: Any) -> Any:
    names = {0: "O", 1: "PER", 2: "LOC"}
    return bert(transformers.BertForTokenClassification, num_labels=3, id2label=names, **options)


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


def spans(entries: Any) -> list[tuple[int, int]]:
    return [(entry["start"], entry["end"]) for entry in entries]


def labels(entries: Any) -> list[str]:
    return [entry["label"] for entry in entries]


def assert_close(arrays: Any, expected: Any) -> None:
    for array, values in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, values, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def logits_of_pairs() -> Any:
    return classified(classifier_of_texts(), PAIRS)


def test_a_pair_has_the_logits_that_it_has_alone(logits_of_pairs: Any) -> None:
    model = classifier_of_texts()
    assert_close(logits_of_pairs, [alone(model, pair).logits[0] for pair in PAIRS])


def test_a_pair_may_be_a_list(logits_of_pairs: Any) -> None:
    as_lists = classified(classifier_of_texts(), [list(pair) for pair in PAIRS])
    np.testing.assert_array_equal(as_lists, logits_of_pairs)


def test_the_order_of_the_texts_of_a_pair_counts(logits_of_pairs: Any) -> None:
    """The pair at the other end of the list has the same two texts."""
    swapped = classified(classifier_of_texts(), [pair[::-1] for pair in PAIRS])
    assert_close(swapped, logits_of_pairs[::-1])
    assert not np.allclose(swapped, logits_of_pairs, atol=1e-2)


def test_lengths_of_pairs_are_those_of_the_joined_texts() -> None:
    lengths = measure_lengths(PAIRS, TOKENIZER)
    expected = [len(TOKENIZER(first, second)["input_ids"]) for first, second in PAIRS]
    assert lengths.tolist() == expected
    with_special_tokens = measure_lengths([("w1 w2", "w3")], TOKENIZER)
    assert with_special_tokens.tolist() == [6]
    assert measure_lengths(PAIRS, TOKENIZER, max_length=9).max() == 9


def test_a_loader_of_pairs_tells_the_two_texts_apart() -> None:
    loader = text_dataloader(PAIRS, TOKENIZER, TokenBudget(200))
    batch = next(iter(loader))
    assert batch["token_type_ids"].unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["w1", ("w1", "w2")], "1 of 2 texts are pairs; give texts or pairs only"),
        ([("w1", "w2", "w3")], "text 0 must be a string"),
        ([("w1", None)], "text 0 must be a string"),
    ],
)
def test_items_are_all_texts_or_all_pairs(texts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        classified(classifier_of_texts(), texts)


def test_pairs_with_types_are_not_packed() -> None:
    loader = text_dataloader(PAIRS, TOKENIZER, TokenBudget(200, layout="packed"))
    with pytest.raises(ConfigError, match="pairs of texts with `token_type_ids` cannot be packed"):
        next(iter(loader))


@pytest.mark.parametrize("ending", [None, ".npy", ".parquet"])
def test_without_pooling_each_text_has_the_states_of_its_tokens(
    ending: str | None, tmp_path: Path
) -> None:
    if ending == ".parquet":
        pytest.importorskip("pyarrow")
    model = encoder()
    output = None if ending is None else tmp_path / f"states{ending}"
    allocator = Allocator(40)
    remove = allocator.in_forward(model.encoder.layer[0])
    arrays = states_of(model, output=output)
    remove()
    assert allocator.failures
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert_close(arrays, [alone(model, text).last_hidden_state[0] for text in TEXTS])
    assert_close(states_of(model, output=output), arrays)


def test_normalized_states_have_length_one() -> None:
    arrays = states_of(encoder(), normalize=True)
    norms = np.linalg.norm(np.concatenate(arrays), axis=1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


def test_numpy_reads_states_and_their_offsets(tmp_path: Path) -> None:
    states = states_of(encoder(), output=tmp_path / "states.npy")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["states.npy", "states.npy.job", "states.offsets.npy"]
    values = np.load(tmp_path / "states.npy", mmap_mode="r")
    offsets = np.load(tmp_path / "states.offsets.npy")
    lengths = [len(array) for array in states]
    assert offsets[0] == 0
    assert np.diff(offsets).tolist() == lengths
    np.testing.assert_array_equal(values[offsets[7] : offsets[8]], states[7])


def test_states_without_their_offsets_are_refused(tmp_path: Path) -> None:
    model = encoder()
    output = tmp_path / "states.npy"
    states_of(model, output=output)
    (tmp_path / "states.offsets.npy").unlink()
    with pytest.raises(StateError, match="states.npy.job was written by another job"):
        states_of(model, output=output)


def test_parquet_has_a_column_of_lists(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    states = states_of(encoder(), output=tmp_path / "states.parquet")
    table = parquet.read_table(tmp_path / "states.parquet")
    [column] = table.to_pydict().values()
    np.testing.assert_allclose(column[7], states[7], rtol=0, atol=1e-6)


@pytest.mark.parametrize("ending", ["npy", "parquet"])
@pytest.mark.parametrize("texts", [[], [""], ["", "w1", ""]])
def test_no_text_and_texts_without_tokens_have_files_too(
    texts: list[str], ending: str, tmp_path: Path
) -> None:
    without_special = small_tokenizer()
    output = tmp_path / f"states.{ending}"
    job = partial(embed_dataset, encoder(), without_special, texts, pooling=None)
    shapes = [array.shape for array in job(output=output, **SMALL)]
    assert shapes == [(len(text.split()), 16) for text in texts]


@pytest.fixture
def pipeline() -> Any:
    model = classifier_of_tokens()
    make = partial(transformers.pipeline, "token-classification", device="cpu")
    return make(model=model, tokenizer=TOKENIZER, ignore_labels=[])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_labels_and_offsets_of_tokens_are_those_of_the_pipeline_of_transformers(
    pipeline: Any, tmp_path: Path
) -> None:
    output = tmp_path / "labels.jsonl"
    results = classified(pipeline.model, TEXTS, return_offsets=True, output=output)
    names = set()
    for text, entries in zip(TEXTS, results, strict=True):
        rows = pipeline(text)
        names.update(labels(entries))
        assert labels(entries) == [row["entity"] for row in rows]
        assert spans(entries) == spans(rows)
        assert [text[start:end] for start, end in spans(entries)] == [row["word"] for row in rows]
        scores = [entry["score"] for entry in entries]
        assert scores == pytest.approx([row["score"] for row in rows], abs=1e-5)
    assert names == {"O", "PER", "LOC"}


def test_few_shapes_change_no_number_of_labels() -> None:
    model = classifier_of_tokens()
    results = classified(model, TEXTS, return_offsets=True)
    of_few_shapes = classified(model, TEXTS, return_offsets=True, shapes=2)
    assert [len(entries) for entries in of_few_shapes] == [len(entries) for entries in results]


@pytest.fixture(scope="module")
def logits_of_tokens() -> list[torch.Tensor]:
    model = classifier_of_tokens()
    return [alone(model, text).logits[0] for text in TEXTS]


def test_ranks_have_the_logits_of_tokens_of_one_text_at_a_time(
    logits_of_tokens: Any, tmp_path: Path
) -> None:
    replicas = [classifier_of_tokens(), classifier_of_tokens()]
    job = partial(classified, items=TEXTS, per_token=True, output=tmp_path / "logits.npy")
    for results in run_ranks(2, lambda world: job(replicas[world.rank], world=world)):
        assert_close(results, logits_of_tokens)


def test_an_iterator_gives_the_logits_of_tokens(logits_of_tokens: Any) -> None:
    job = partial(iter_classify, classifier_of_tokens(), TOKENIZER, TEXTS, per_token=True)
    [(index, logits)] = job(skip=range(1, 40), **SMALL)
    assert index == 0
    assert_close([logits], logits_of_tokens[:1])


def test_truncated_texts_have_the_offsets_of_the_tokens_that_are_left() -> None:
    model = classifier_of_tokens(max_position_embeddings=6)
    [entries] = classified(model, ["w1 w2 w3 w4 w5 w6 w7"], return_offsets=True)
    assert spans(entries) == [(0, 2), (3, 5), (6, 8), (9, 11)]


def test_a_classifier_of_tokens_is_refused_for_texts() -> None:
    with pytest.raises(ConfigError, match="for a classifier of tokens pass per_token=True"):
        classified(classifier_of_tokens(), TEXTS)


def test_a_classifier_of_texts_is_refused_for_tokens() -> None:
    with pytest.raises(ConfigError, match=r"logits \(\d+, 2\) for \d+ texts; .* leave them out"):
        classified(classifier_of_texts(), TEXTS, per_token=True)


def test_logits_of_tokens_are_no_json_lines() -> None:
    with pytest.raises(ConfigError, match="`output` must end in .npy or .parquet"):
        classified(classifier_of_tokens(), TEXTS, per_token=True, output="x.jsonl")


@pytest.mark.parametrize("pooling", [None, "last"])
def test_states_of_tokens_that_no_text_has_are_refused(pooling: Any) -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="FEATURE_EXTRACTION")
    model = models.adapted(encoder(), prompt)
    with pytest.raises(ConfigError, match="it must return one row per token"):
        embed_dataset(model, TOKENIZER, TEXTS, pooling=pooling, **SMALL)
