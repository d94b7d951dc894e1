"""Models of sound: what is traced is what simulating the whole model says, with lengths in samples or frames."""

from functools import cache
from itertools import product
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
from tests.memory.helpers import bytes_of

# WavLM's own attention
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")
SMALL: Any = {"vocab": 32, "width": 32, "heads": 4}
CONVOLUTIONS: Any = {
    "conv_dim": (16,) * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
TWO_STACKS: Any = {
    "d_model": 32,
    "vocab_size": 64,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}


def with_convolutions(kind: type[Any], **settings: Any) -> Any:
    return models.config(kind, **SMALL, **CONVOLUTIONS, **settings)


def paired(frames: tuple[int, int]) -> tuple[int, dict[str, int]]:
    """Frames with a text of about a ninth as many tokens."""
    num_samples, length = frames
    return num_samples, {"tokens": length, "target": 1 + length // 9}


GROUP = with_convolutions(hf.Wav2Vec2Config)
HUBERT = with_convolutions(hf.HubertConfig)
WAVLM = with_convolutions(hf.WavLMConfig)
WAV2VEC2_BERT = models.config(hf.Wav2Vec2BertConfig, **SMALL)
WHISPER = hf.WhisperConfig(**TWO_STACKS)
SPEECH_TO_TEXT = hf.Speech2TextConfig(**TWO_STACKS)
# samples of the waveform: 320 become a position, so that these are no multiples of it
WAVEFORMS = ((2, 16_000), (3, 55_437), (8, 10_239), (1, 224_111))
FRAMES = ((2, 50), (3, 173), (8, 31), (1, 700))
TEXTS = ((2, 50), (7, 300), (3, 400))
CASES: dict[str, tuple[Any, Any]] = {
    "wav2vec2": (GROUP, WAVEFORMS),
    "hubert": (HUBERT, WAVEFORMS),
    "wavlm": (WAVLM, WAVEFORMS),
    "whisper": (WHISPER, TEXTS),
    "speech to text": (SPEECH_TO_TEXT, tuple(map(paired, FRAMES))),
    "wav2vec2-bert": (WAV2VEC2_BERT, FRAMES),
}


@cache
def memory_of(name: str) -> TracedMemory:
    config, _ = CASES[name]
    return TracedMemory.of(config)


FIRST, *OTHERS = CASES


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_what_was_traced_is_what_the_whole_model_takes(name: str) -> None:
    config, shapes = CASES[name]
    memory = memory_of(name)
    for row in simulate(config, memory.workload, shapes):
        longest = dict(row.longest)
        ratio = bytes_of(memory, row.num_samples, longest) / row.batch_bytes
        assert 0.995 < ratio < 1.1, (row.num_samples, longest)


def ten_seconds_with(attention: Any) -> Any:
    """Bytes of two waveforms of 160,000 samples."""
    workload = Workload.from_model(GROUP, trace=False, attention=attention, dtype="bf16")
    [row] = simulate(GROUP, workload, [(2, 160_000)])
    return row.batch_bytes


def test_flash_attention_keeps_no_scores_of_a_waveform() -> None:
    assert ten_seconds_with("flash") < 0.6 * ten_seconds_with("eager")


@pytest.fixture(scope="module")
def budget() -> MemoryBudget:
    return MemoryBudget.from_bytes("1GB", model=memory_of("wav2vec2"))


def test_a_budget_of_a_model_of_waveforms_allows_what_the_simulation_allows(
    budget: MemoryBudget,
) -> None:
    """Ten seconds are 160,000 samples."""
    most = int(budget.most_samples([160_000])[0])
    fits, fits_not = simulate(GROUP, None, [(most, 160_000), (most + 2, 160_000)])
    assert most > 5
    assert fits.peak_bytes <= 0.9e9
    assert fits_not.peak_bytes > 0.9e9


def test_the_table_of_a_model_of_waveforms_has_lengths_of_sounds(budget: MemoryBudget) -> None:
    """From 128 positions, 2.6 seconds, to 32,768; each of 320 samples."""
    positions = [2**power for power in range(7, 16)]
    assert budget.figures()["longest"] == [320 * num_positions for num_positions in positions]
    assert "a length counts samples of the waveform, 320 to a position" in str(budget)


def test_the_budget_of_samples_is_safe_at_every_length_and_hardly_larger_ones_are_not(
    budget: MemoryBudget,
) -> None:
    most = budget.max_tokens(200_000)
    lengths = np.random.default_rng(0).integers(1, 200_000, 20_000)
    assert fits_all(budget, lengths, most)
    assert not fits_all(budget, lengths, int(1.02 * most))


def fits_all(budget: MemoryBudget, lengths: Any, num_tokens: int) -> bool:
    """Whether batches of so many samples of waveforms fit, whatever their length."""
    num_waveforms = num_tokens // lengths
    are_batches = num_waveforms > 0
    shapes = BatchShape.of(num_waveforms[are_batches], lengths[are_batches])
    return bool(budget.fits(shapes).all())


def test_a_regressor_fitted_to_simulated_waveforms_predicts_others() -> None:
    workload = memory_of("wav2vec2").workload
    shapes = product((1, 4), (16_000, 48_000, 96_000, 160_000))
    regressor = MemoryRegressor.fit(simulate(GROUP, workload, shapes))
    rows = simulate(GROUP, workload, [(2, 120_000), (3, 60_000)])
    sizes: list[Any] = [row.batch_bytes for row in rows]
    baseline = BatchShape.of(2, 120_000)
    [predicted] = regressor.relative(BatchShape.of(3, 60_000), baseline)
    simulated = sizes[1] / sizes[0]
    assert 0.98 < predicted / simulated < 1.1


def test_chance_leaves_nothing_out_of_a_trace() -> None:
    """LayerDrop and SpecAugment decide by random values, which a trace does not have."""
    plain = with_convolutions(hf.Wav2Vec2Config, layerdrop=0.0, apply_spec_augment=False)
    [row] = simulate(GROUP, None, [(2, 16_000)])
    [row_of_plain] = simulate(plain, None, [(2, 16_000)])
    assert row == row_of_plain


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
    config, _ = CASES[name]
    model = as_meta_model(config)
    assert length_in_words(model) == words
