"""Calls and generation that run out of memory are run again in parts, with the output of the whole."""

import copy
import gc
import weakref
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

VOCAB, PAD, EOS = 31, 0, 2
SMALL: Any = {
    "vocab": VOCAB,
    "layers": 3,
    "inner": 16,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": 1,
}


OWN: Any = {
    "max_position_embeddings": 64,
    "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, Any, Any, int]] = {
    "llama": ("LlamaForCausalLM", models.llama(**SMALL), lambda m: m.model.layers, 6),
    "gpt2": (
        "GPT2LMHeadModel",
        models.gpt2(**{**SMALL, "inner": 64}, n_positions=64),
        lambda m: m.transformer.h,
        3,
    ),
    "t5": ("T5ForConditionalGeneration", models.t5(**SMALL), lambda m: m.encoder.block, 3),
    "bart": (
        "BartForConditionalGeneration",
        models.bart(**SMALL, **OWN),
        lambda m: m.model.encoder.layers,
        4,
    ),
}
LENGTHS = [3, 11, 5, 12, 2, 7, 9]
OF_CONFIG: Any = {"max_new_tokens": 6, "num_beams": 2, "pad_token_id": PAD, "eos_token_id": EOS}
CONFIG = transformers.GenerationConfig(**OF_CONFIG, decoder_start_token_id=PAD)


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Allocator, dict[str, torch.Tensor]]:
    """A random model that ends at different lengths, an allocator in its third layer, and a padded batch."""
    return build(request.param)


def build(name: str = "llama") -> tuple[Any, Allocator, dict[str, torch.Tensor]]:
    kind, config, blocks, seed = FAMILIES[name]
    torch.manual_seed(seed)
    model = models.sharp(getattr(transformers, kind)(copy.deepcopy(config)).eval())
    allocator = Allocator(float("inf"))
    allocator.in_forward(blocks(model)[2])
    generator = torch.Generator().manual_seed(1)
    mask = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        left = not model.config.is_encoder_decoder
        mask[row, -length:] = left
        mask[row, :length] |= not left
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator).where(
        mask.bool(), torch.tensor(PAD)
    )
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
        (50, {"generation_config": CONFIG}),
    ],
    ids=str,
)
def test_the_output_is_the_unsplit_one_token_for_token(
    case: Any, limit: int, kwargs: dict[str, Any]
) -> None:
    rows = (
        1 if case[0].config.is_encoder_decoder else kwargs.get("num_beams", 1)
    )  # encoders run before beams part
    whole, got = with_limit(case, limit * rows, **kwargs)
    assert torch.equal(got.output, whole)
    if "pad_token_id" in kwargs:
        case[1].limit = float("inf")
        plain = case[0].generate(**case[2], max_new_tokens=30)[
            :, 0 if case[0].config.is_encoder_decoder else 12 :
        ]
        assert len({int((row == PAD).sum()) for row in plain}) > 1, (
            "samples end at different lengths"
        )


def test_without_a_failure_the_output_is_generates_own_and_what_cannot_be_honoured_is_refused() -> (
    None
):
    model, allocator, batch = build()
    output, num_splits = generate_with_oom_retry(model, batch, max_new_tokens=4)
    assert num_splits == 0
    assert torch.equal(output, model.generate(**batch, max_new_tokens=4))
    own = {"max_new_tokens": 4, "attention_mask": batch["attention_mask"]}
    assert torch.equal(generate_with_oom_retry(model, batch["input_ids"], **own).output, output)
    assert not allocator.failures
    model, allocator, batch = build()
    for name in (
        "streamer",
        "return_dict_in_generate",
        "past_key_values",
        "prefix_allowed_tokens_fn",
    ):
        with pytest.raises(
            ConfigError, match=f"`{name}` does not work when a batch may run in parts"
        ):
            generate_with_oom_retry(model, batch, **{name: True})
    assert not allocator.claims


def padded(part: dict[str, Any]) -> int:
    return part["attention_mask"].numel()


class Fn:
    """Returns its part; fails above so many samples, or with a 7 in company."""

    def __init__(self, most: int, error: BaseException | None = None) -> None:
        self.most, self.error, self.calls = most, error or MemoryError(), list[Any]()

    def __call__(self, part: list[int]) -> list[int]:
        self.calls.append(part)
        if len(part) > self.most or (7 in part and len(part) > 1):
            raise self.error
        return part


def test_only_the_part_that_failed_is_run_again_and_a_smaller_one_is_tried_whole() -> None:
    fn = Fn(2)
    assert run_with_oom_retry(fn, [1, 2, 3, 7]) == [[1, 2], [3], [7]]
    assert fn.calls == [[1, 2, 3, 7], [1, 2], [3, 7], [3], [7]]
    mask = (torch.arange(9)[None] < torch.tensor([9, 9, 9, 9, 2, 2, 2, 2])[:, None]).long()
    seen: list[tuple[int, ...]] = []

    def fn(part: dict[str, torch.Tensor]) -> int:
        seen.append(tuple(part["attention_mask"].shape))
        if padded(part) > 18:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return len(part["attention_mask"])

    assert run_with_oom_retry(fn, {"input_ids": mask, "attention_mask": mask}) == [2, 2, 4]
    assert seen == [(8, 9), (4, 9), (2, 9), (2, 9), (4, 2)]


@pytest.mark.parametrize("learned", [None, LearningBudget()], ids=["alone", "learned"])
def test_a_part_that_waits_heeds_what_its_sibling_has_taught(
    learned: LearningBudget | None,
) -> None:
    fn = Fn(2)
    assert run_with_oom_retry(fn, [0] * 8, learned=learned) == [[0, 0]] * 4
    assert list(map(len, fn.calls)) == [
        8,
        4,
        2,
        2,
        2,
        2,
    ]  # six passes: the second half of 4 is not tried whole


def test_a_failed_attempts_tensors_are_gone_before_the_next_begins() -> None:
    alive, held = list[weakref.ref[torch.Tensor]](), list[Any]()

    def deep(x: torch.Tensor) -> torch.Tensor:
        big = x.new_zeros(1000)
        alive.append(weakref.ref(big))
        if len(x) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return big[:1]

    def fn(x: torch.Tensor) -> torch.Tensor:
        assert all(ref() is None for ref in alive)
        kept = x + 1
        alive.append(weakref.ref(kept))
        try:
            return deep(kept).clone()
        except (
            torch.OutOfMemoryError
        ) as error:  # a library's own handler: its frames hang on __cause__
            raise RuntimeError("wrapped") from (
                held.append(error) or error
            )  # kept, as by who logs it later

    gc.disable()  # the retry itself must collect
    try:
        assert len(run_with_oom_retry(fn, torch.zeros(4))) == 4
    finally:
        gc.enable()


def test_other_errors_pass_through_and_what_cannot_be_cut_further_is_named_with_its_shape() -> None:
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 5 + [0] * 3, [1] * 8])

    def fn(part: dict[str, torch.Tensor]) -> None:
        if padded(part) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 tokens")

    with pytest.raises(
        BudgetError, match=r"sample 2 does not fit even alone \(input_ids: \(1, 8\).*7 tokens"
    ):
        run_with_oom_retry(fn, {"input_ids": mask, "attention_mask": mask})
    stubborn = Fn(0)
    with pytest.raises(BudgetError, match=r"samples 0, 1, 2, 3 do not fit together"):
        run_with_oom_retry(stubborn, list(range(8)), min_samples=4)
    assert list(map(len, stubborn.calls)) == [8, 4]
    with pytest.raises(ConfigError, match="`min_samples` must be an int of at least 1, but is 0"):
        run_with_oom_retry(Fn(9), [1], min_samples=0)
    fn = Fn(1, RuntimeError("nonzero is not supported for tensors with more than INT_MAX elements"))
    with pytest.raises(RuntimeError, match="INT_MAX"):
        run_with_oom_retry(fn, [1, 2])
    assert fn.calls == [[1, 2]]
