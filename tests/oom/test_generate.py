import copy
from typing import Any

import pytest
import torch
import transformers

from dynagroup.errors import ConfigError
from dynagroup.oom import LearningBudget
from dynagroup.oom.generate import generate_with_oom_retry
from tests import models
from tests.allocator import Allocator

VOCAB, PAD, EOS = 31, 0, 2
SMALL: Any = {"vocab": VOCAB, "layers": 3, "inner": 16, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 1}


OWN: Any = {"max_position_embeddings": 64, "decoder_start_token_id": EOS, "forced_eos_token_id": None}
# Class, configuration, blocks, and the seed with which samples end at different lengths.
FAMILIES: dict[str, tuple[str, Any, Any, int]] = {
    "llama": ("LlamaForCausalLM", models.llama(**SMALL), lambda m: m.model.layers, 6),
    "gpt2": ("GPT2LMHeadModel", models.gpt2(**{**SMALL, "inner": 64}, n_positions=64), lambda m: m.transformer.h, 3),
    "t5": (
        "T5ForConditionalGeneration", models.t5(**{**SMALL, "decoder_start_token_id": PAD}), lambda m: m.encoder.block, 3,
    ),
    "bart": ("BartForConditionalGeneration", models.bart(**SMALL, **OWN), lambda m: m.model.encoder.layers, 4),
}  # fmt: skip
LENGTHS = [3, 11, 5, 12, 2, 7, 9]


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Allocator, dict[str, torch.Tensor]]:
    """A random model that ends at different lengths, an allocator in its third layer, and a padded batch."""
    return build(request.param)


def build(name: str = "llama") -> tuple[Any, Allocator, dict[str, torch.Tensor]]:
    kind, config, blocks, seed = FAMILIES[name]
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(copy.deepcopy(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # sharp, so that greedy choices have no ties and differ between samples
    allocator = Allocator(float("inf"))
    allocator.in_forward(blocks(model)[2])
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        left = not model.config.is_encoder_decoder
        mask[row, -length:] = left
        mask[row, :length] |= not left
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator).where(mask.bool(), torch.tensor(PAD))
    return model, allocator, {"input_ids": ids, "attention_mask": mask}


def with_limit(case: Any, limit: float, **kwargs: Any) -> tuple[Any, Any]:
    """What the model gives unsplit, and what the retry gives when more than ``limit`` tokens do not fit."""
    model, allocator, batch = case
    whole = model.generate(**batch, **kwargs)
    allocator.limit = limit
    got = generate_with_oom_retry(model, batch, learned=LearningBudget(), **kwargs)
    assert got.num_splits > 0
    assert allocator.failures
    return whole, got


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("limit", "kwargs"),
    [
        (12, {"max_new_tokens": 9}),
        (12, {"max_new_tokens": 9, "num_beams": 3}),
        (40, {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}),
        (25, {"max_length": 20}),
        (25, {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "min_length": 6}),
        (25, {}),
        (25, {"max_new_tokens": 30, "pad_token_id": 7}),
    ],
    ids=str,
)
def test_the_output_is_the_unsplit_one_token_for_token(case: Any, limit: int, kwargs: dict[str, Any]) -> None:
    rows = 1 if case[0].config.is_encoder_decoder else kwargs.get("num_beams", 1)  # encoders run before beams part
    whole, got = with_limit(case, limit * rows, **kwargs)
    assert torch.equal(got.output, whole)
    if "pad_token_id" in kwargs:
        case[1].limit = float("inf")
        plain = case[0].generate(**case[2], max_new_tokens=30)[:, 0 if case[0].config.is_encoder_decoder else 12 :]
        assert len({int((row == PAD).sum()) for row in plain}) > 1, "samples end at different lengths"


CONFIG = transformers.GenerationConfig(max_new_tokens=6, num_beams=2, pad_token_id=PAD, eos_token_id=EOS)


def test_a_generation_config_means_the_same_in_parts() -> None:
    whole, got = with_limit(build(), 50, generation_config=CONFIG)
    assert torch.equal(got.output, whole)


def test_without_a_failure_the_output_is_generates_own() -> None:
    model, allocator, batch = build()
    output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=4)
    assert num_splits == 0
    assert torch.equal(output, model.generate(**batch, max_new_tokens=4))
    own = {"max_new_tokens": 4, "attention_mask": batch["attention_mask"]}
    assert torch.equal(generate_with_oom_retry(model, batch["input_ids"], **own).output, output)
    assert not allocator.failures


def test_what_cannot_be_honoured_in_parts_is_refused_before_anything_runs() -> None:
    model, allocator, batch = build()
    for name in ("streamer", "return_dict_in_generate", "past_key_values", "prefix_allowed_tokens_fn"):
        with pytest.raises(ConfigError, match=f"`{name}` cannot be used if a batch may run in parts"):
            generate_with_oom_retry(model, batch, **{name: True})
    assert not allocator.claims
