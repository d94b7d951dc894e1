"""Embeddings of a SentenceTransformer are those of its own ``encode``, whatever modules its folder has."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from dynagroup import (
    ConfigError,
    StateError,
    TokenBudget,
    classify_dataset,
    embed_dataset,
    iter_embed,
    measure_lengths,
)
from dynagroup.jobs.sentences import SentenceJob
from dynagroup.testing import run_ranks
from tests import models
from tests.models import TEXTS, Allocator, save_encoder, small_tokenizer

st = pytest.importorskip("sentence_transformers")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SMALL: Any = {"budget": TokenBudget(40), "progress": False}
POOLINGS = ("mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens")


def encoder(folder: Path, **options: Any) -> Any:
    """The first module: a small BERT and its tokenizer, from a folder of transformers."""
    save_encoder(folder / "bert")
    return parts.Transformer(str(folder / "bert"), **options)


def with_pooling(mode: str) -> Callable[[Path], Any]:
    def build(folder: Path) -> Any:
        first = encoder(folder)
        return st.SentenceTransformer(modules=[first, parts.Pooling(16, pooling_mode=mode)])

    return build


def built(folder: Path, *more: Any, **options: Any) -> Any:
    first = encoder(folder)
    modules = [first, parts.Pooling(16, pooling_mode="mean"), *more]
    return st.SentenceTransformer(modules=modules, **options)


def short(folder: Path) -> Any:
    model = built(folder)
    model.max_seq_length = 6
    return model


def with_prompt(folder: Path) -> Any:
    return built(folder, prompts={"query": "w3 w4 "}, default_prompt_name="query")


def without_prompt_in_pooling(folder: Path) -> Any:
    model = with_prompt(folder)
    model.set_pooling_include_prompt(False)
    return model


def static(folder: Path) -> Any:
    words = small_tokenizer().backend_tokenizer
    embedding = parts.StaticEmbedding(words, embedding_dim=8)
    return st.SentenceTransformer(modules=[embedding])


FOLDERS: dict[str, Callable[[Path], Any]] = {
    **{mode: with_pooling(mode) for mode in POOLINGS},
    "normalized": lambda folder: built(folder, parts.Normalize()),
    "dense": lambda folder: built(folder, parts.Dense(16, 5)),
    "shortened": short,
    "truncated": lambda folder: built(folder, truncate_dim=7),
    "prompt": with_prompt,
    "prompt not pooled": without_prompt_in_pooling,
    "static": static,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_are_those_of_its_own_encode(name: str, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path).save(str(tmp_path / "saved"))
    model = st.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    if name == "truncated":
        model.truncate_dim = 7
    vectors = embed_dataset(model, None, TEXTS, **SMALL)
    wanted = model.encode(TEXTS)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-6)
    output = tmp_path / "vectors.npy"
    normal = embed_dataset(model, None, TEXTS, normalize=True, output=output, **SMALL)
    wanted = model.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(normal, wanted, rtol=0, atol=1e-6)


class Copies(TorchDispatchMode):
    """Counts changes of dtype and device, each of which waits for a GPU."""

    num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("output", ["sentence_embedding", "token_embeddings"])
def test_results_of_a_batch_are_copied_together(output: Any, tmp_path: Path) -> None:
    model = built(tmp_path).to(torch.bfloat16)
    per_token = output == "token_embeddings"
    job = SentenceJob(model, TEXTS, {}, normalize=False, per_token=per_token)
    job.plan()
    num_copies = []
    for num_texts in (2, len(TEXTS)):
        with Copies() as copies:
            results = job.run(TEXTS[:num_texts])
        num_copies.append(copies.num_copies)
        wanted = model.encode(TEXTS[:num_texts], output_value=output, convert_to_numpy=False)
        for result, states in zip(results, wanted, strict=True):
            assert result.dtype == np.float32
            np.testing.assert_array_equal(result, states.float().numpy())
    assert num_copies[0] == num_copies[1]


def test_texts_of_similar_length_are_measured_together(tmp_path: Path) -> None:
    model = built(tmp_path)
    wanted = [2, 60] * 300
    texts = [" ".join(["w1"] * num_words) for num_words in wanted]
    padded = []
    preprocess = model.preprocess

    def seen(texts: list[str]) -> Any:
        features = preprocess(texts)
        padded.append(features["input_ids"].numel())
        return features

    model.preprocess = seen
    job = SentenceJob(model, texts, SMALL, normalize=False, per_token=False)
    assert job.plan().lengths["tokens"].tolist() == wanted
    assert sum(padded) < 1.5 * sum(wanted)  # one chunk has both lengths


def test_texts_that_lie_end_to_end_are_counted_in_tokens(tmp_path: Path) -> None:
    """As with flash attention, for which no text is padded."""
    model = built(tmp_path)
    flatten = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)

    def preprocess(texts: list[str]) -> Any:
        rows = model.tokenizer(texts, return_attention_mask=False)["input_ids"]
        return flatten([{"input_ids": row} for row in rows])

    model.preprocess = preprocess
    job = SentenceJob(model, TEXTS, SMALL, normalize=False, per_token=False)
    wanted = measure_lengths(TEXTS, model.tokenizer).tolist()
    assert job.plan().lengths["tokens"].tolist() == wanted


def test_memory_ranks_and_files_change_nothing(tmp_path: Path) -> None:
    model = built(tmp_path)
    wanted = model.encode(TEXTS)
    allocator = Allocator(20)
    remove = allocator.in_forward(model.transformers_model.encoder.layer[0])
    np.testing.assert_allclose(embed_dataset(model, None, TEXTS, **SMALL), wanted, atol=1e-6)
    assert allocator.failures
    remove()
    pairs = dict(iter_embed(model, None, TEXTS, skip={3}, **SMALL))
    assert sorted(pairs) == [index for index in range(len(TEXTS)) if index != 3]

    models_of_ranks = [copy.deepcopy(model), copy.deepcopy(model)]
    output = tmp_path / "out.npy"

    def rank(world: Any) -> np.ndarray:
        return embed_dataset(
            models_of_ranks[world.rank], None, TEXTS, output=output, world=world, **SMALL
        )

    for vectors in run_ranks(2, rank):
        np.testing.assert_allclose(vectors, wanted, atol=1e-6)
    model.max_seq_length = 4
    with pytest.raises(StateError, match="max_seq_length was"):
        embed_dataset(model, None, TEXTS, output=output, **SMALL)


def test_without_pooling_each_text_has_the_vectors_of_its_tokens(tmp_path: Path) -> None:
    model = with_prompt(tmp_path)
    output = tmp_path / "tokens.npy"
    arrays = embed_dataset(model, None, TEXTS, pooling=None, output=output, **SMALL)
    expected = model.encode(TEXTS, output_value="token_embeddings")
    for array, states in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(array, states.numpy(), rtol=0, atol=1e-6)


def test_what_a_model_says_itself_is_refused(tmp_path: Path) -> None:
    model = built(tmp_path)
    per_token: Any = {"pooling": None, "normalize": True}
    for options in ({"pooling": "mean"}, {"max_length": 8}, {"shapes": 2}):
        with pytest.raises(ConfigError, match="SentenceTransformer"):
            embed_dataset(model, None, TEXTS, **options)
    with pytest.raises(ConfigError, match="`normalize` is for one vector per text"):
        embed_dataset(model, None, TEXTS, **per_token)
    with pytest.raises(ConfigError, match=r"text 1 must be a string, but is \('w1', 'w2'\)"):
        embed_dataset(model, None, ["w1", ("w1", "w2")], **SMALL)
    with pytest.raises(ConfigError, match="its own tokenizer and pooling; leave `pooling` out"):
        embed_dataset(model, models.small_tokenizer(), TEXTS)


def test_pairs_have_the_scores_of_a_cross_encoder(tmp_path: Path) -> None:
    config = models.bert(vocab=30, inner=16, num_labels=1)
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    reranker = st.CrossEncoder(str(tmp_path), device="cpu", activation_fn=torch.nn.Identity())
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    logits = classify_dataset(reranker.model, reranker.tokenizer, pairs, **SMALL)
    np.testing.assert_allclose(logits[:, 0], reranker.predict(pairs), rtol=0, atol=1e-6)
