from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import TokenBudget, classify_dataset, embed_dataset, encode
from dynagroup.errors import ConfigError
from tests.oom.texts import TEXTS, save_encoder, small_llama, small_tokenizer


def one_at_a_time(model: Any, limit: int, pick: Any) -> np.ndarray:
    tokenizer = small_tokenizer()
    rows = [tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")["input_ids"] for text in TEXTS]
    return torch.stack([pick(model(input_ids=ids).last_hidden_state[0]) for ids in rows]).detach().numpy()


def test_a_folder_is_pooled_normalised_and_shortened_as_it_says(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, max_seq_length=6)
    vectors = encode(tmp_path, TEXTS, progress=False)
    want = one_at_a_time(model, 6, lambda states: torch.nn.functional.normalize(states.mean(0), dim=0))
    np.testing.assert_allclose(vectors, want, rtol=1e-4, atol=1e-5)
    assert vectors.dtype == np.float32
    first = encode(str(tmp_path), TEXTS, pooling="first", normalize=False, max_length=4, progress=False)
    np.testing.assert_allclose(first, one_at_a_time(model, 4, lambda states: states[0]), rtol=1e-4, atol=1e-5)


def test_a_model_of_which_nothing_is_said_is_pooled_over_all_tokens(tmp_path: Path) -> None:
    model = save_encoder(tmp_path)
    want = one_at_a_time(model, 99, lambda states: states.mean(0))
    loaded = encode(model, TEXTS, tokenizer=small_tokenizer(), progress=False)
    np.testing.assert_allclose(loaded, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="`tokenizer` is needed"):
        encode(model, TEXTS)
    for name in ("modules.json", "sentence_bert_config.json"):
        (tmp_path / name).unlink()
    np.testing.assert_allclose(encode(tmp_path, TEXTS, progress=False), want, rtol=1e-4, atol=1e-5)


def test_what_a_folder_asks_for_and_is_not_run_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, pooling="pooling_mode_max_tokens")
    with pytest.raises(ConfigError, match="pools by .*'max_tokens'"):
        encode(tmp_path, TEXTS)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "3_Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match="puts Dense after its model"):
        encode(tmp_path, TEXTS)


def test_a_causal_model_is_asked_for_its_states_not_for_its_words() -> None:
    model, tokenizer = small_llama(), small_tokenizer()
    vectors = encode(model, TEXTS, tokenizer=tokenizer, pooling="last", progress=False)
    np.testing.assert_allclose(vectors, one_at_a_time(model.model, 99, lambda states: states[-1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        vectors, encode(model.model, TEXTS, tokenizer=tokenizer, pooling="last", progress=False)
    )


def test_models_without_the_output_that_is_needed_are_refused() -> None:
    class Words(torch.nn.Module):
        config = small_llama().config

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"words": input_ids}

    with pytest.raises(ConfigError, match="has `last_hidden_state`, but it has words: give the model without its head"):
        embed_dataset(Words(), small_tokenizer(), TEXTS, budget=TokenBudget(60), progress=False)
    with pytest.raises(ConfigError, match="has `logits`, but it has last_hidden_state.*: give the model with a head"):
        classify_dataset(small_llama().model, small_tokenizer(), TEXTS, progress=False)
