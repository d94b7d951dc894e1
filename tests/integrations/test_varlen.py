"""Packed attention gives what the model's own attention gives; packed collation; what both refuse, and `dynagroup check`."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.check import QUESTIONS, check_model, shallow
from dynagroup.integrations.packing import check_packing, packing_collator
from dynagroup.integrations.varlen import NAME, kernel, one_by_one, use_varlen_attention
from tests import models

LENGTHS = (7, 1, 4, 12)
SIZES: dict[str, Any] = {
    "width": 32,
    "inner": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
    "num_key_value_heads": 2,
}
MIXTURE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
NO_HEAD_DIM = ("Phimoe", "ModernBert", "LayoutLM", "Bloom")
ENCODERS = ("ModernBert", "LayoutLM")
WINDOWS = ("sliding_window", "local_attention")
QUERIES_AND_KEYS = ("q_proj", "k_proj", "Wqkv")
ALIKE: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 1},
    "Qwen3": {},
    "Gemma": {},
    "Mistral": {"sliding_window": 3},
    "Gemma3Text": {"sliding_window": 3},
    "Cohere2": {"sliding_window": 3},
    "Olmoe": MIXTURE,
    "ModernBert": {"local_attention": 6},
}
GEMMA2 = {"attn_logit_softcapping": 1.0, "sliding_window": 3}
LLAMA4 = {"attention_chunk_size": 3, "intermediate_size_mlp": 32, **MIXTURE}
UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma2": (GEMMA2, "`softcap`, which packed attention does not support"),
    "GptOss": ({"sliding_window": 3, **MIXTURE}, "`s_aux`, which"),
    "Llama4Text": (LLAMA4, "cannot use packed .* unequal"),
    # Only its masks know the window.
    "Phimoe": ({"sliding_window": 3, **MIXTURE}, "cannot use packed attention"),
    "LayoutLM": ({}, "`attention_mask`, which packed attention does not support"),
    # It does not use transformers' AttentionInterface.
    "Bloom": ({}, "cannot use packed .* unequal"),
}


def build(name: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    settings = {**SIZES, **changes}
    if name not in NO_HEAD_DIM:
        settings["head_dim"] = 16
    config = models.config(getattr(transformers, f"{name}Config"), **settings)
    auto: Any = transformers.AutoModelForCausalLM
    if name in ENCODERS:
        auto = transformers.AutoModelForMaskedLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    if "num_experts" not in changes:  # experts know no float64
        model = model.double()
    for key, weight in model.named_parameters():
        if any(word in key for word in QUERIES_AND_KEYS):
            weight.data = 0.6 * torch.randn_like(weight)  # scores as large as a trained model's
    return model


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 64, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": row.tolist()} for row in rows]


def packed(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    del batch["labels"]
    return batch


def logits_alone(model: Any) -> torch.Tensor:
    """Logits of each sample alone, one after the other."""
    rows = [torch.tensor([sample["input_ids"]]) for sample in samples()]
    return torch.cat([model(input_ids=row).logits for row in rows], dim=1)


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits.square().mean().backward()
    named = model.named_parameters()
    return {key: weight.grad for key, weight in named if weight.grad is not None}


@pytest.mark.parametrize("name", ALIKE)
def test_answers_and_gradients_are_those_of_the_models_own_attention_on_each_sample_alone(
    name: str,
) -> None:
    """To about 1e-5, because many norms, and eager softmax, are of float32."""
    model = build(name, ALIKE[name])
    expected = logits_alone(model)
    expected_gradients = gradients(model, expected)
    logits = use_varlen_attention(model)(**packed(samples())).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    our_gradients = gradients(model, logits)
    for key, gradient in expected_gradients.items():
        atol = 1e-5 * float(gradient.abs().max() + 1e-3)
        torch.testing.assert_close(our_gradients[key], gradient, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("name", ALIKE)
def test_windows_longer_than_any_sample_are_no_reason_to_refuse(name: str) -> None:
    long = dict(ALIKE[name])
    for key in WINDOWS:
        if key in long:
            long[key] *= 1000
    model = use_varlen_attention(build(name, long))
    assert model.config._attn_implementation == NAME


def configs_of(model: Any) -> list[str]:
    return [str(part.config) for part in model.modules() if hasattr(part, "config")]


def windows_of(model: Any) -> list[Any]:
    return [getattr(part, "sliding_window", None) for part in model.modules()]


@pytest.mark.parametrize("name", UNLIKE)
def test_what_an_architecture_adds_to_attention_is_refused_and_nothing_changes(name: str) -> None:
    changes, message = UNLIKE[name]
    model = build(name, changes)
    configs = configs_of(model)
    windows = windows_of(model)
    with pytest.raises(ConfigError, match=message):
        use_varlen_attention(model)
    assert model.config._attn_implementation == "eager"
    assert configs_of(model) == configs
    assert windows_of(model) == windows


def test_a_config_that_only_names_packed_attention_is_tested_too() -> None:
    use_varlen_attention(build("Llama", {}))  # the name is known from now on
    model = build("Gemma2", GEMMA2)
    model.config._attn_implementation = NAME
    with pytest.raises(ConfigError, match="`softcap`"):
        packing_collator(model)


def empty_llama() -> Any:
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(models.llama())


def image_classifier() -> Any:
    config = transformers.ViTConfig(**VISION, image_size=8, patch_size=4)
    return transformers.ViTForImageClassification(config)


@pytest.mark.parametrize("make", [partial(torch.nn.Linear, 2, 2), empty_llama, image_classifier])
def test_what_cannot_be_compared_is_refused(make: Any) -> None:
    model = make()
    message = f"cannot compare .* {type(model).__name__}'s own on two samples"
    with pytest.raises(ConfigError, match=message):
        use_varlen_attention(model)


def test_rows_without_borders_are_one_sample_each() -> None:
    model = build("Llama", {})
    rows = torch.arange(1, 13).reshape(3, 4)
    expected = model(input_ids=rows).logits
    logits = use_varlen_attention(model)(input_ids=rows).logits
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def varlen_llama() -> Any:
    return use_varlen_attention(build("Llama", {}))


EIGHT = torch.arange(1, 9)[None]
BLOCKS = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
NO_MASKS = "`attention_mask`, which packed attention does not support"
DROPPED = [
    ({"attention_mask": torch.tensor([[1] * 6 + [0] * 2])}, "cannot run a padded batch"),
    ({"attention_mask": BLOCKS}, NO_MASKS),
    ({"softcap": 1.0}, "`softcap`, which"),
    (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
        "must say where its samples begin",
    ),
]


@pytest.mark.parametrize(("batch", "message"), DROPPED)
def test_what_would_be_dropped_without_a_word_is_refused(
    varlen_llama: Any, batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        varlen_llama(input_ids=EIGHT, **batch)


def test_generation_with_a_cache_is_refused(varlen_llama: Any) -> None:
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        varlen_llama.generate(EIGHT, max_new_tokens=2, do_sample=False, use_cache=True)


def test_images_that_look_ahead_are_refused() -> None:
    """As Gemma 3's: its masks let the tokens of one image see each other."""
    model = use_varlen_attention(build("Gemma3Text", {"sliding_window": 3}))
    images = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    embedded = model.get_input_embeddings()(torch.arange(1, 7)[None])
    create_mask = partial(
        transformers.masking_utils.create_causal_mask, model.config, embedded, None, None
    )
    with pytest.raises(ConfigError, match="cannot let some tokens attend to later ones"):
        create_mask(block_sequence_ids=images)
    assert create_mask() is None


def test_a_vision_tower_keeps_its_attention() -> None:
    vision = transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=models.llama(), image_token_id=63
    )
    model = transformers.LlavaForConditionalGeneration(config)
    before = model.config.vision_config._attn_implementation
    use_varlen_attention(model)
    assert before != NAME
    assert model.config.vision_config._attn_implementation == before
    assert model.config.text_config._attn_implementation == NAME


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA devices only")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_gives_what_one_by_one_gives(causal: bool, window: int | None) -> None:
    borders = torch.tensor([0, 7, 8, 24], dtype=torch.int32, device="cuda")
    q = torch.randn(24, 4, 32, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(24, 2, 32, device="cuda", dtype=torch.bfloat16)
    v = torch.randn_like(k)
    outputs = kernel(q, k, v, borders, 16, causal=causal, scale=0.3, window=window)
    expected = one_by_one(q, k, v, borders, causal=causal, scale=0.3, window=window)
    torch.testing.assert_close(outputs, expected, rtol=2e-2, atol=2e-2)


def llama(*, use_cache: bool = False) -> transformers.LlamaForCausalLM:
    config = models.llama(attn_implementation="sdpa", use_cache=use_cache)
    return transformers.LlamaForCausalLM(config)


def roberta() -> Any:
    config = models.config(transformers.RobertaConfig, pad_token_id=1)
    return use_varlen_attention(transformers.RobertaForMaskedLM(config))


def test_a_model_that_keeps_samples_apart_is_given_its_collator() -> None:
    model = llama().train()
    batch = packing_collator(model)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100]]
    assert "cu_seq_lens_q" not in batch
    assert model.training


def test_packed_attention_is_given_the_borders_of_samples(varlen_llama: Any) -> None:
    batch = packing_collator(varlen_llama)([{"input_ids": [5, 6]}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2]


def test_positions_begin_where_the_model_lets_them() -> None:
    batch = packing_collator(roberta())([{"input_ids": [5, 6]}])
    assert batch["position_ids"].tolist() == [[2, 3]]


@pytest.fixture(scope="module")
def collate_for_bert() -> Any:
    return packing_collator(
        use_varlen_attention(transformers.BertForTokenClassification(models.bert()))
    )


def typed_sample(length: int) -> dict[str, list[int]]:
    types = [0, 1, 1]
    return {"input_ids": [5] * length, "labels": [1] * length, "token_type_ids": types[:length]}


TYPED = [typed_sample(2), typed_sample(0), typed_sample(3)]


def test_labels_of_first_tokens_and_types_are_packed_where_a_model_reads_them(
    collate_for_bert: Any,
) -> None:
    """transformers' collator always drops the first label, and other fields."""
    batch = collate_for_bert(TYPED)
    assert batch["labels"].tolist() == [[1] * 5]
    assert batch["token_type_ids"].tolist() == [[0, 1, 0, 1, 1]]
    assert "labels" not in collate_for_bert([{"input_ids": [5]}])


def test_a_causal_loss_never_reads_the_first_label() -> None:
    batch = packing_collator(llama())(TYPED)
    assert batch["labels"].tolist() == [[-100, 1, -100, 1, 1]]


@pytest.mark.parametrize("field", [{"labels": 3}, {"labels": [1]}])
def test_fields_that_the_model_reads_and_that_have_no_value_a_token_are_refused(
    collate_for_bert: Any, field: dict[str, Any]
) -> None:
    sample = {"input_ids": [5, 6], "labels": [1, 1], **field}
    message = "cannot pack the field '[a-z_]*', which the model reads"
    with pytest.raises(ConfigError, match=message):
        collate_for_bert([sample])


def test_padding_is_refused(collate_for_bert: Any) -> None:
    sample = {"input_ids": [5, 6], "attention_mask": [1, 0]}
    with pytest.raises(ConfigError, match="cannot pack the padding"):
        collate_for_bert([sample])


def mamba() -> Any:
    config = transformers.MambaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4
    )
    return transformers.MambaForCausalLM(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(models.bert())


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(models.t5())


def deepseek() -> Any:
    """Keys are compressed over windows of 4 and 128 tokens, which do not end where a sample does."""
    config = models.config(
        transformers.DeepseekV4Config,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        moe_intermediate_size=8,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
    )
    return transformers.DeepseekV4ForCausalLM(config)


def mini_bert_in_bf16() -> Any:
    """Neighbours change its outputs by 3 to 4 %, in all tokens."""
    config = transformers.BertConfig(
        hidden_size=256,
        num_attention_heads=8,
        num_hidden_layers=4,
        intermediate_size=1024,
        vocab_size=3000,
    )
    return transformers.BertForMaskedLM(config).eval().to(torch.bfloat16)


def chameleon() -> Any:
    """Gives words of images the least number there is, beside which any difference looks small."""
    pictures = {
        "embed_dim": 16,
        "num_embeddings": 8,
        "latent_channels": 16,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
    }
    words = {f"IMGIMG{letter}Z": 10 + place for place, letter in enumerate("ABCDEFGH")}
    words["<image>"] = 5
    config = models.config(
        transformers.ChameleonConfig,
        num_key_value_heads=2,
        vq_config=pictures,
        vocabulary_map=words,
    )
    return transformers.ChameleonForConditionalGeneration(config).eval()


def not_a_number() -> Any:
    model = llama()
    model.model.norm.weight.data[0] = torch.nan
    return model


NO_CACHE = (
    "set model.config.use_cache = False .*, call dynagroup.integrations.varlen.use_varlen_attention"
)
MIXED = "its attention 'sdpa' mixes them; "
NO_NUMBERS = "cannot run two packed samples .*its results are not numbers"
TWO_ROWS = "cannot run two packed samples .*only models that read one row"
REFUSED: dict[str, tuple[Any, str]] = {
    "cache": (partial(llama, use_cache=True), NO_CACHE),
    "BERT": (bert, MIXED),
    "half": (mini_bert_in_bf16, MIXED),
    "blocks": (deepseek, "mixes them; .* or use the padded layout"),
    "Mamba": (mamba, "mixes them; .* or use the padded layout"),
    "masked words": (chameleon, NO_CACHE),
    "no numbers": (not_a_number, NO_NUMBERS),
    "T5": (t5, TWO_ROWS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_ways_out(name: str) -> None:
    make, message = REFUSED[name]
    model = make()
    before = str(model.config)
    with pytest.raises(ConfigError, match=message):
        packing_collator(model)
    assert str(model.config) == before


def test_positions_that_begin_elsewhere_are_refused() -> None:
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    with pytest.raises(ConfigError, match="its positions, or layers"):
        check_packing(roberta(), collate)


def only_ask(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves out the other questions, above all that of memory, which is traced for seconds."""
    for name in QUESTIONS.keys() - set(names):
        monkeypatch.setitem(QUESTIONS, name, lambda model: "not asked")


def test_all_answers_about_llama() -> None:
    assert check_model(models.llama()) == {
        "padding": "changes no answer",
        "loss": "the mean over label tokens",
        "packed": "samples are kept apart with sdpa or use_varlen_attention: use layout='packed'",
        "memory": "can be traced: use MemoryBudget.from_model",
    }


def test_an_encoder_needs_packed_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    only_ask(monkeypatch, "padding", "packed", "memory")
    answers = check_model(models.bert())
    assert answers["memory"].startswith("can be traced")
    assert answers["padding"] == "changes no answer"
    packed = "samples are kept apart with use_varlen_attention: use layout='packed'"
    assert answers["packed"] == packed


def test_an_encoder_decoder_has_a_mean_over_all_labels_and_no_packed_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only_ask(monkeypatch, "loss", "packed")
    answers = check_model(models.t5())
    assert answers["loss"] == "the mean over all labels: weigh='labels'"
    packed = "not possible for encoder-decoders: use the padded layout, with both lengths"
    assert answers["packed"] == packed


def test_memory_of_an_encoder_decoder_can_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    only_ask(monkeypatch, "memory")
    config = models.t5(layers=1)
    assert check_model(config)["memory"].startswith("can be traced")


def test_layers_that_run_along_the_row_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    only_ask(monkeypatch, "packed")
    config = transformers.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=64,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
    )
    assert "not kept apart: use the padded layout" in check_model(config)["packed"]


def test_a_loss_with_a_term_of_its_routers_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    only_ask(monkeypatch, "loss")
    config = models.config(
        transformers.MixtralConfig,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    assert check_model(config)["loss"] == "the mean over label tokens"


def test_a_name_without_a_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries for long
    with pytest.raises(ConfigError, match="no config found for 'no/such'"):
        check_model("no/such")


def test_a_shallow_config_has_one_layer_of_every_kind_and_its_widths() -> None:
    config = transformers.Qwen3NextConfig(num_experts=512, hidden_size=96)
    small = shallow(config)
    assert small.layer_types == config.layer_types[:4]
    assert set(small.layer_types) == set(config.layer_types)
    assert small.num_hidden_layers == 4
    assert small.num_experts == 16
    assert small.hidden_size == 96
    assert config.num_experts == 512


@pytest.mark.parametrize("as_row", [list, torch.tensor])
def test_packed_batches_are_those_of_transformers_own_collator(as_row: Any) -> None:
    """dynagroup only makes them faster, without a Python number for every token."""
    rows = [{"input_ids": as_row([5, 6, 7])}, {"input_ids": as_row([8])}]
    labelled = [{**row, "labels": row["input_ids"] * 1} for row in rows]
    collate = packing_collator(use_varlen_attention(llama()), return_seq_idx=True)
    expected_collate = DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True
    )
    for samples in (rows, labelled):
        batch = collate(samples)
        expected = expected_collate(samples)
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
        assert batch["labels"].tolist() == [[-100, 6, 7, -100]]
