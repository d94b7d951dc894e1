"""Models of sound: what is traced is what simulating the whole model says, with lengths in samples or frames."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import transformers as hf

from dynagroup import ConfigError, MemoryBudget
from dynagroup.memory import MemoryRegressor, TracedMemory, Workload, simulate
from dynagroup.memory.trace.audio import length_in_words
from dynagroup.memory.trace.model import as_meta_model
from dynagroup.shapes import BatchShape
from tests import models

# WavLM's own attention
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
SMALL: Any = {"vocab": 32, "width": 32, "layers": 4, "heads": 4}
CONVOLUTIONS: Any = {
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
TWO_STACKS: Any = {
    "d_model": 32,
    "vocab_size": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
GROUP = models.config(hf.Wav2Vec2Config, **SMALL, **CONVOLUTIONS)
SPEECH_TO_TEXT = hf.Speech2TextConfig(**TWO_STACKS)
# samples of the waveform: 320 become a position, so that these are no multiples of it
WAVEFORMS = ((2, 16_000), (3, 55_437), (8, 10_239), (1, 224_111))
FRAMES = ((2, 50), (3, 173), (8, 31), (1, 700))
PAIRS = tuple((n, {"tokens": length, "target": 1 + length // 9}) for n, length in FRAMES)
CASES: dict[str, tuple[Any, Any]] = {
    "wav2vec2": (GROUP, WAVEFORMS),
    "hubert": (models.config(hf.HubertConfig, **SMALL, **CONVOLUTIONS), WAVEFORMS),
    "wavlm": (models.config(hf.WavLMConfig, **SMALL, **CONVOLUTIONS), WAVEFORMS),
    "whisper": (hf.WhisperConfig(**TWO_STACKS), ((2, 50), (7, 300), (3, 400))),
    "speech to text": (SPEECH_TO_TEXT, PAIRS),
    "wav2vec2-bert": (models.config(hf.Wav2Vec2BertConfig, **SMALL), FRAMES),
}


@cache
def memory_of(name: str) -> TracedMemory:
    return TracedMemory.of(CASES[name][0], "train")


@pytest.mark.parametrize(
    "name",
    [
        "wav2vec2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "wav2vec2"),
    ],
)
def test_what_was_traced_is_what_the_whole_model_takes(name: str) -> None:
    config, shapes = CASES[name]
    memory = memory_of(name)
    for row in simulate(config, memory.workload, shapes):
        [predicted] = memory.batch_bytes(BatchShape.of(row.num_samples, dict(row.longest)))
        assert 0.995 < predicted / row.batch_bytes < 1.1, (row.num_samples, row.longest)


def test_flash_attention_keeps_no_scores_of_a_waveform() -> None:
    batch_bytes = {}
    for attention in ("eager", "flash"):
        workload = Workload.from_model(GROUP, "train", attention=attention, dtype="bf16")
        [row] = simulate(GROUP, workload, [(2, 160_000)])
        batch_bytes[attention] = row.batch_bytes
    assert batch_bytes["flash"] < 0.6 * batch_bytes["eager"]


def test_a_budget_of_a_model_of_waveforms_allows_what_the_simulation_allows() -> None:
    """Ten seconds are 160,000 samples."""
    budget = MemoryBudget.from_bytes("1GB", model=memory_of("wav2vec2"))
    most = int(budget.most_samples([160_000])[0])
    rows = simulate(GROUP, None, [(most, 160_000), (most + 1, 160_000), (most + 2, 160_000)])
    fits, _, fits_not = [row.static_bytes + (row.batch_bytes or 0) <= 0.9e9 for row in rows]
    assert most > 5
    assert fits
    assert not fits_not


def test_the_table_of_a_model_of_waveforms_has_lengths_of_sounds() -> None:
    """From 128 positions, 2.6 seconds, to 32,768; each of 320 samples. Its budget of samples is safe at every length."""
    budget = MemoryBudget.from_bytes("1GB", model=memory_of("wav2vec2"))
    figures = budget.figures()
    assert figures["longest"] == [320 * 2**power for power in range(7, 16)]
    assert "a length counts samples of the waveform, 320 to a position" in str(budget)
    most_tokens = budget.max_tokens(200_000)
    lengths = np.random.default_rng(0).integers(1, 200_000, 20_000)
    num_samples = most_tokens // lengths
    has_samples = num_samples > 0
    batches = BatchShape.of(num_samples[has_samples], lengths[has_samples])
    assert budget.fits(batches).all()
    too_many = 1.02 * most_tokens // lengths
    beyond = BatchShape.of(too_many[too_many > 0].astype(int), lengths[too_many > 0])
    assert not budget.fits(beyond).all()


def test_a_regressor_fitted_to_simulated_waveforms_predicts_others() -> None:
    workload = memory_of("wav2vec2").workload
    shapes = [(n, length) for n in (1, 4) for length in (16_000, 48_000, 96_000, 160_000)]
    regressor = MemoryRegressor.fit(simulate(GROUP, workload, shapes))
    baseline, other = simulate(GROUP, workload, [(2, 120_000), (3, 60_000)]).rows
    [predicted] = regressor.relative(BatchShape.of(3, 60_000), BatchShape.of(2, 120_000))
    assert other.batch_bytes is not None
    assert baseline.batch_bytes is not None
    assert 0.98 < predicted / (other.batch_bytes / baseline.batch_bytes) < 1.1


def test_chance_leaves_nothing_out_of_a_trace() -> None:
    """LayerDrop and SpecAugment decide by random values, which a trace does not have."""
    plain = models.config(
        hf.Wav2Vec2Config, **SMALL, **CONVOLUTIONS, layerdrop=0.0, apply_spec_augment=False
    )
    [row] = simulate(GROUP, None, [(2, 16_000)])
    assert simulate(plain, None, [(2, 16_000)]).rows == (row,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layout": "packed"}, "'packed' is for texts, but the model reads sound"),
        ({"mode": "generate"}, "'generate' needs a model that decodes"),
    ],
    ids=["packed", "generate"],
)
def test_what_a_model_of_waveforms_cannot_do_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MemoryBudget.from_model(GROUP, "1GB", **settings)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wav2vec2", "; a length counts samples of the waveform, 320 to a position"),
        ("speech to text", "; a length counts frames of features, 4 to a position"),
        ("whisper", ""),  # only the length of its text varies
    ],
)
def test_a_trace_says_what_a_length_counts(name: str, words: str) -> None:
    model = as_meta_model(CASES[name][0])
    assert length_in_words(model) == words
