"""Calls and generation that run out of memory are run again in parts, with the output of the whole."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import transformers

from dynagroup import (
    BudgetError,
    ConfigError,
    LearningBudget,
    generate_with_oom_retry,
    run_with_oom_retry,
)
from tests import models
from tests.models import Allocator

VOCAB = 31
PAD = 0
EOS = 2
SMALL: dict[str, Any] = {
    "vocab": VOCAB,
    "layers": 3,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 1,
}
SETTINGS: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 2, "decoder_start_token_id": PAD}
CONFIG = transformers.GenerationConfig(pad_token_id=PAD, eos_token_id=EOS, **SETTINGS)
LENGTHS = [3, 11, 5, 12, 2, 7, 9]
Case = tuple[Any, Allocator, dict[str, torch.Tensor]]


def llama() -> tuple[Any, Any]:
    """A model, and the layer that runs out of memory."""
    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(models.llama(inner=16, **SMALL))
    return model, model.model.layers[2]


def gpt2() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(models.gpt2(inner=64, n_positions=64, **SMALL))
    return model, model.transformer.h[2]


def t5() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(models.t5(inner=16, **SMALL))
    return model, model.encoder.block[2]


def bart() -> tuple[Any, Any]:
    torch.manual_seed(4)
    config = models.bart(
        inner=16,
        max_position_embeddings=64,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
        **SMALL,
    )
    model = transformers.BartForConditionalGeneration(config)
    return model, model.model.encoder.layers[2]


def padded_batch(pads_left: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in zip(mask, LENGTHS, strict=True):
        if pads_left:
            row[-length:] = 1
        else:
            row[:length] = 1
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator)
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def build(family: Any = llama) -> Case:
    """A random model that ends at different lengths, an allocator in its third layer, and a padded batch."""
    model, layer = family()
    models.sharp(model.eval())
    allocator = Allocator(float("inf"))
    allocator.in_forward(layer)
    return model, allocator, padded_batch(pads_left=not model.config.is_encoder_decoder)


@pytest.fixture(params=[llama, gpt2, t5, bart])
def case(request: pytest.FixtureRequest) -> Case:
    return build(request.param)


OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (12, {"max_new_tokens": 9}),
    (12, {"max_new_tokens": 9, "num_beams": 3}),
    (40, {"max_new_tokens": 9, "num_beams": 3, "num_return_sequences": 2}),
    (25, {"max_length": 20}),
    (25, {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "min_length": 6}),
    (25, {}),
    (25, {"max_new_tokens": 30, "pad_token_id": 7}),
    (50, {"generation_config": CONFIG}),
]


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(("limit", "options"), OPTIONS, ids=str)
def test_the_output_is_the_unsplit_one_token_for_token(
    case: Case, limit: int, options: dict[str, Any]
) -> None:
    """Where more than ``limit`` tokens do not fit."""
    model, allocator, batch = case
    whole = model.generate(**batch, **options)
    if not model.config.is_encoder_decoder:  # encoders run before beams part
        limit *= options.get("num_beams", 1)
    allocator.limit = limit
    result = generate_with_oom_retry(model, batch, learned=LearningBudget(), **options)
    assert result.num_splits > 0
    assert allocator.failures
    assert torch.equal(result.output, whole)


def test_samples_of_these_models_end_at_different_lengths(case: Case) -> None:
    """So that parts have other widths than the whole."""
    model, _, batch = case
    texts = model.generate(**batch, max_new_tokens=30)
    if not model.config.is_encoder_decoder:
        texts = texts[:, max(LENGTHS) :]
    assert len((texts == PAD).sum(dim=1).unique()) > 1


def test_without_a_failure_the_output_is_generates_own() -> None:
    model, allocator, batch = build()
    expected = model.generate(**batch, max_new_tokens=4)
    output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=4)
    assert num_splits == 0
    assert torch.equal(output, expected)
    options = {"max_new_tokens": 4, "attention_mask": batch["attention_mask"]}
    from_ids = generate_with_oom_retry(model, batch["input_ids"], **options)
    assert torch.equal(from_ids.output, expected)
    assert not allocator.failures


WHOLE_ONLY = ["streamer", "return_dict_in_generate", "past_key_values", "prefix_allowed_tokens_fn"]


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_what_cannot_be_honoured_in_parts_is_refused(name: str) -> None:
    model, allocator, batch = build()
    message = f"`{name}` does not work when a batch may run in parts"
    with pytest.raises(ConfigError, match=message):
        generate_with_oom_retry(model, batch, **{name: True})
    assert not allocator.claims


def claim(part: dict[str, torch.Tensor], limit: int) -> None:
    if part["attention_mask"].numel() > limit:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 tokens")


class Identity:
    """Returns its part; fails above so many samples, or with a 7 in company."""

    def __init__(self, limit: int, error: BaseException | None = None) -> None:
        self.limit = limit
        self.error = MemoryError() if error is None else error
        self.calls: list[list[int]] = []

    def __call__(self, part: list[int]) -> list[int]:
        self.calls.append(part)
        if len(part) > self.limit or (7 in part and len(part) > 1):
            raise self.error
        return part


def test_only_the_part_that_failed_is_run_again() -> None:
    fn = Identity(2)
    assert run_with_oom_retry(fn, [1, 2, 3, 7]) == [[1, 2], [3], [7]]
    assert fn.calls == [[1, 2, 3, 7], [1, 2], [3, 7], [3], [7]]


def test_a_part_that_is_smaller_than_what_failed_is_tried_whole() -> None:
    lengths = torch.tensor([9, 9, 9, 9, 2, 2, 2, 2])
    mask = (torch.arange(9)[None] < lengths[:, None]).long()
    shapes: list[tuple[int, ...]] = []

    def num_samples(part: dict[str, torch.Tensor]) -> int:
        shapes.append(tuple(part["attention_mask"].shape))
        claim(part, limit=18)
        return len(part["attention_mask"])

    batch = {"input_ids": mask, "attention_mask": mask}
    assert run_with_oom_retry(num_samples, batch) == [2, 2, 4]
    assert shapes == [(8, 9), (4, 9), (2, 9), (2, 9), (4, 2)]


@pytest.mark.parametrize("learned", [None, LearningBudget()], ids=["alone", "learned"])
def test_a_part_that_waits_heeds_what_its_sibling_has_taught(
    learned: LearningBudget | None,
) -> None:
    """Six passes: the second half of 4 is not tried whole."""
    fn = Identity(2)
    assert run_with_oom_retry(fn, [0] * 8, learned=learned) == [[0, 0]] * 4
    assert list(map(len, fn.calls)) == [8, 4, 2, 2, 2, 2]


def test_a_failed_attempts_tensors_are_gone_before_the_next_begins() -> None:
    """Also where a library wraps the error, so that its frames hang on ``__cause__``, and someone keeps it to log it."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    errors: list[BaseException] = []

    def fails_with_two(x: torch.Tensor) -> torch.Tensor:
        big = x.new_zeros(1000)
        tensors.append(weakref.ref(big))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return big[:1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert all(tensor() is None for tensor in tensors)
        moved = x + 1
        tensors.append(weakref.ref(moved))
        try:
            return fails_with_two(moved).clone()
        except torch.OutOfMemoryError as error:
            errors.append(error)
            raise RuntimeError("wrapped") from error

    gc.disable()  # the retry itself must collect
    try:
        assert len(run_with_oom_retry(fn, torch.zeros(4))) == 4
    finally:
        gc.enable()


def test_a_sample_that_does_not_fit_alone_is_named_with_its_shape() -> None:
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 5 + [0] * 3, [1] * 8])
    batch = {"input_ids": mask, "attention_mask": mask}
    message = r"sample 2 does not fit even alone \(input_ids: \(1, 8\).*7 tokens"
    with pytest.raises(BudgetError, match=message):
        run_with_oom_retry(partial(claim, limit=6), batch)


def test_samples_that_must_stay_together_are_not_cut_further() -> None:
    fn = Identity(0)
    with pytest.raises(BudgetError, match=r"samples 0, 1, 2, 3 do not fit together"):
        run_with_oom_retry(fn, list(range(8)), min_samples=4)
    assert list(map(len, fn.calls)) == [8, 4]


def test_a_part_has_at_least_one_sample() -> None:
    with pytest.raises(ConfigError, match="`min_samples` must be an int of at least 1, but is 0"):
        run_with_oom_retry(Identity(9), [1], min_samples=0)


def test_other_errors_pass_through() -> None:
    error = RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements")
    fn = Identity(1, error)
    with pytest.raises(RuntimeError, match="INT_MAX"):
        run_with_oom_retry(fn, [1, 2])
    assert fn.calls == [[1, 2]]
