"""Packed attention gives what the model's own attention gives; packed collation; what both refuse, and `dynagroup check`."""

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import DataCollatorWithFlattening

from dynagroup.errors import ConfigError
from dynagroup.integrations.check import QUESTIONS, check_model, shallow
from dynagroup.integrations.packing import packing_collator
from dynagroup.integrations.varlen import NAME, kernel, one_by_one, use_varlen_attention
from tests import models

LENGTHS = (7, 1, 4, 12)
SIZES: dict[str, Any] = {
    "width": 32,
    "inner": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
    "head_dim": 16,
}
MIXTURE = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
NO_HEAD_DIM = ("Phimoe", "ModernBert", "LayoutLM", "Bloom")
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
MORE: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma2": (
        {"attn_logit_softcapping": 1.0, "sliding_window": 3},
        "`softcap`, which packed attention does not support",
    ),
    "GptOss": ({"sliding_window": 3, **MIXTURE}, "`s_aux`, which"),
    "Llama4Text": (
        {"attention_chunk_size": 3, "intermediate_size_mlp": 32, **MIXTURE},
        "cannot use packed .* unequal",
    ),
    "Phimoe": (
        {"sliding_window": 3, **MIXTURE},
        "cannot use packed attention",
    ),  # only its masks know the window
    "LayoutLM": ({}, "`attention_mask`, which packed attention does not support"),
    "Bloom": ({}, "cannot use packed .* unequal"),  # does not use transformers' AttentionInterface
}
APART, PACK = "samples are kept apart with ", ": use layout='packed'"
NONE = "not possible for encoder-decoders: use the padded layout, with both lengths"


def built(name: str, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        key: value for key, value in SIZES.items() if key != "head_dim" or name not in NO_HEAD_DIM
    }
    config = models.config(
        getattr(transformers, f"{name}Config"), **{**sizes, "num_key_value_heads": 2, **more}
    )
    encoder = name in ("ModernBert", "LayoutLM")
    auto = transformers.AutoModelForMaskedLM if encoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    if "num_experts" not in more:  # experts know no float64
        model = model.double()
    for key, weight in model.named_parameters():  # scores as large as a trained model's
        if any(word in key for word in ("q_proj", "k_proj", "Wqkv")):
            weight.data = 0.6 * torch.randn_like(weight)
    return model


def samples() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"input_ids": torch.randint(1, 64, (n,), generator=generator).tolist()} for n in LENGTHS
    ]


def packed(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(rows)
    return {name: value for name, value in batch.items() if name != "labels"}


@pytest.mark.parametrize("name", ALIKE)
def test_answers_and_gradients_are_those_of_the_models_own_attention_on_each_sample_alone(
    name: str,
) -> None:
    long = {
        key: 1000 * value
        for key, value in ALIKE[name].items()
        if "sliding" in key or "attention" in key
    }
    assert (
        use_varlen_attention(built(name, **{**ALIKE[name], **long})).config._attn_implementation
        == NAME
    )
    model = built(name, **ALIKE[name])
    wanted = torch.cat(
        [model(input_ids=torch.tensor([row["input_ids"]])).logits for row in samples()], dim=1
    )
    wanted.square().mean().backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = use_varlen_attention(model)(**packed(samples())).logits
    found.square().mean().backward()
    torch.testing.assert_close(
        found, wanted, rtol=1e-5, atol=1e-5
    )  # many norms and eager softmax are of float32
    for key, p in model.named_parameters():
        if key in gradients:
            small = 1e-5 * float(gradients[key].abs().max() + 1e-3)
            torch.testing.assert_close(p.grad, gradients[key], rtol=1e-4, atol=small)


@pytest.mark.parametrize("name", MORE)
def test_what_an_architecture_adds_to_attention_is_refused_and_nothing_changes(name: str) -> None:
    more, message = MORE[name]
    model = built(name, **more)
    before = [str(part.config) for part in model.modules() if hasattr(part, "config")]
    windows = [getattr(part, "sliding_window", None) for part in model.modules()]
    with pytest.raises(ConfigError, match=message):
        use_varlen_attention(model)
    assert model.config._attn_implementation == "eager"
    assert [str(part.config) for part in model.modules() if hasattr(part, "config")] == before
    assert [getattr(part, "sliding_window", None) for part in model.modules()] == windows


def test_what_cannot_be_compared_is_refused() -> None:
    use_varlen_attention(built("Llama"))  # the name is known from now on
    model = built("Gemma2", **MORE["Gemma2"][0])
    model.config._attn_implementation = NAME
    with pytest.raises(ConfigError, match="`softcap`"):
        packing_collator(model)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(models.llama())
    images = transformers.ViTForImageClassification(
        transformers.ViTConfig(**VISION, image_size=8, patch_size=4)
    )
    for model in (torch.nn.Linear(2, 2), empty, images):
        with pytest.raises(
            ConfigError, match=f"cannot compare .* {type(model).__name__}'s own on two samples"
        ):
            use_varlen_attention(model)


def test_rows_need_no_borders_and_what_would_be_dropped_without_a_word_is_refused() -> None:
    model, rows = built("Llama"), torch.arange(1, 13).reshape(3, 4)
    wanted = model(input_ids=rows).logits
    torch.testing.assert_close(
        use_varlen_attention(model)(input_ids=rows).logits, wanted, rtol=1e-6, atol=1e-6
    )
    model, ids = use_varlen_attention(built("Llama")), torch.arange(1, 9)[None]
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
    for batch, message in (
        ({"attention_mask": torch.tensor([[1] * 6 + [0] * 2])}, "cannot run a padded batch"),
        ({"attention_mask": mask}, "`attention_mask`, which packed attention does not support"),
        ({"softcap": 1.0}, "`softcap`, which"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
            "must say where its samples begin",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            model(input_ids=ids, **batch)
    with pytest.raises(ConfigError, match="set_attn_implementation"):
        model.generate(ids, max_new_tokens=2, do_sample=False, use_cache=True)


def test_images_that_look_ahead_are_refused_and_a_vision_tower_keeps_its_attention() -> None:
    """As Gemma 3's: its masks let the tokens of one image see each other."""
    model = use_varlen_attention(built("Gemma3Text", sliding_window=3))
    images = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    embedded = model.get_input_embeddings()(torch.arange(1, 7)[None])
    with pytest.raises(ConfigError, match="cannot let some tokens attend to later ones"):
        transformers.masking_utils.create_causal_mask(
            model.config, embedded, None, None, block_sequence_ids=images
        )
    assert transformers.masking_utils.create_causal_mask(model.config, embedded, None, None) is None
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=8, patch_size=4),
        text_config=models.llama(),
        image_token_id=63,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    before = model.config.vision_config._attn_implementation
    use_varlen_attention(model)
    assert model.config.vision_config._attn_implementation == before != NAME
    assert model.config.text_config._attn_implementation == NAME


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA devices only")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_gives_what_one_by_one_gives(causal: bool, window: int | None) -> None:
    borders = torch.tensor([0, 7, 8, 24], dtype=torch.int32, device="cuda")
    q, k, v = (
        torch.randn(24, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
    )
    how = {"causal": causal, "scale": 0.3, "window": window}
    found, wanted = kernel(q, k, v, borders, 16, **how), one_by_one(q, k, v, borders, **how)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def llama(attention: str = "sdpa", **changes: object) -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        models.llama(attn_implementation=attention, **{"use_cache": False, **changes})
    )


def roberta() -> Any:
    config = models.config(transformers.RobertaConfig, pad_token_id=1)
    return use_varlen_attention(transformers.RobertaForMaskedLM(config))


def test_a_model_that_keeps_samples_apart_is_given_its_collator_and_positions_begin_where_it_lets_them() -> (
    None
):
    model = llama().train()
    batch = packing_collator(model)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["labels"].tolist() == [[-100, 6, -100]]
    assert "cu_seq_lens_q" not in batch
    assert model.training
    assert packing_collator(use_varlen_attention(llama()))([{"input_ids": [5, 6]}])[
        "cu_seq_lens_q"
    ].tolist() == [0, 2]
    assert packing_collator(roberta())([{"input_ids": [5, 6]}])["position_ids"].tolist() == [[2, 3]]


def test_labels_of_first_tokens_and_types_are_packed_where_a_model_reads_them() -> None:
    """Only a causal loss never reads the first label. transformers' collator drops it always, and other fields."""
    collate = packing_collator(
        use_varlen_attention(transformers.BertForTokenClassification(models.bert()))
    )
    rows = [
        {"input_ids": [5] * n, "labels": [1] * n, "token_type_ids": [0, 1, 1][:n]}
        for n in (2, 0, 3)
    ]
    batch = collate(rows)
    assert (batch["labels"].tolist(), batch["token_type_ids"].tolist()) == (
        [[1] * 5],
        [[0, 1, 0, 1, 1]],
    )
    assert "labels" not in collate([{"input_ids": [5]}])
    assert packing_collator(llama())(rows)["labels"].tolist() == [[-100, 1, -100, 1, 1]]
    for field in ({"labels": 3}, {"labels": [1]}, {"attention_mask": [1, 0]}):
        with pytest.raises(
            ConfigError, match="cannot pack the field '[a-z_]*', which the model reads"
        ):
            collate([{"input_ids": [5, 6], "labels": [1, 1], **field}])


def mamba() -> Any:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))


def bert(**more: Any) -> Any:
    return transformers.BertForMaskedLM(models.bert(**more))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(models.t5())


def deepseek() -> Any:
    """Keys are compressed over windows of 4 and 128 tokens, which do not end where a sample does."""
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    sizes = {
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = models.config(
        transformers.DeepseekV4Config, layer_types=kinds, moe_intermediate_size=8, **sizes
    )
    return transformers.DeepseekV4ForCausalLM(config)


def mini_bert() -> Any:
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_hidden_layers": 4,
        "intermediate_size": 1024,
    }
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=3000)).eval()


def chameleon() -> Any:
    """Gives words of images the least number there is, beside which any difference looks small."""
    pictures = {
        "embed_dim": 16,
        "num_embeddings": 8,
        "latent_channels": 16,
        "base_channels": 32,
        "channel_multiplier": [1, 1],
    }
    words = {
        "<image>": 5,
        **{f"IMGIMG{letter}Z": 10 + place for place, letter in enumerate("ABCDEFGH")},
    }
    config = models.config(
        transformers.ChameleonConfig,
        num_key_value_heads=2,
        vq_config=pictures,
        vocabulary_map=words,
    )
    return transformers.ChameleonForConditionalGeneration(config).eval()


def unusable() -> Any:
    model = llama()
    model.model.norm.weight.data[0] = torch.nan
    return model


VARLEN = "call dynagroup.integrations.varlen.use_varlen_attention"
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "cache": (
        partial(llama, use_cache=True),
        {},
        f"set model.config.use_cache = False .*, {VARLEN}",
    ),
    "BERT": (bert, {}, "its attention 'sdpa' mixes them; "),
    "half": (
        lambda: mini_bert().to(torch.bfloat16),
        {},
        "its attention 'sdpa' mixes them; ",
    ),  # by 3 to 4 %, in all tokens
    "blocks": (deepseek, {}, "mixes them; .* or use the padded layout"),
    "Mamba": (mamba, {}, "mixes them; .* or use the padded layout"),
    "masked words": (chameleon, {}, f"set model.config.use_cache = False .*, {VARLEN}"),
    "no numbers": (unusable, {}, "cannot run two packed samples .*its results are not numbers"),
    "T5": (t5, {}, "cannot run two packed samples .*only models that read one row"),
    "positions": (roberta, {"position_ids_start": 0}, "its positions, or layers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_with_the_ways_out(name: str) -> None:
    make, options, message = REFUSED[name]
    model = make()
    before = str(model.config)
    with pytest.raises(ConfigError, match=message):
        packing_collator(model, **options)
    assert str(model.config) == before


@pytest.mark.parametrize(
    ("config", "answers"),
    [
        (
            models.llama(),
            {
                "loss": "the mean over label tokens",
                "packed": f"{APART}sdpa or use_varlen_attention{PACK}",
            },
        ),
        (
            models.bert(),
            {"padding": "changes no answer", "packed": f"{APART}use_varlen_attention{PACK}"},
        ),
        (models.t5(), {"loss": "the mean over all labels: weigh='labels'", "packed": NONE}),
    ],
    ids=["llama", "bert", "t5"],
)
def test_answers_of_architectures_that_are_known(config, answers):
    found = check_model(config)
    assert answers.items() <= found.items()
    assert found["memory"].startswith("can be traced")


def test_layers_that_run_along_the_row_are_said_and_no_text_model_is_refused(monkeypatch):
    for name in ("padding", "loss", "memory"):
        monkeypatch.setitem(QUESTIONS, name, lambda model: "not asked")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    found = check_model(
        transformers.Mamba2Config(**sizes, num_heads=4, head_dim=16, state_size=8, n_groups=1)
    )
    assert "not kept apart: use the padded layout" in found["packed"]
    monkeypatch.undo()
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4}
    experts = models.config(transformers.MixtralConfig, **sizes, output_router_logits=True)
    assert check_model(experts)["loss"] == "the mean over label tokens"
    with pytest.raises(ConfigError, match="no config found for 'no/such'"):
        check_model("no/such")


def test_a_shallow_config_has_one_layer_of_every_kind_and_its_widths():
    config = transformers.Qwen3NextConfig(num_experts=512, hidden_size=96)
    small = shallow(config)
    assert small.layer_types == config.layer_types[:4]
    assert set(small.layer_types) == set(config.layer_types)
    assert (small.num_hidden_layers, small.num_experts, small.hidden_size) == (4, 16, 96)
    assert config.num_experts == 512


@pytest.mark.parametrize("as_row", [list, torch.tensor])
def test_packed_batches_are_those_of_transformers_own_collator(as_row: Any) -> None:
    """dynagroup only makes them faster, without a Python number for every token."""
    options = {"return_flash_attn_kwargs": True, "return_seq_idx": True, "separator_id": -7}
    rows = [{"input_ids": as_row([5, 6, 7])}, {"input_ids": as_row([8])}]
    labelled = [{**row, "labels": row["input_ids"] * 1} for row in rows]
    collate = packing_collator(llama(), **options)
    expected_collate = DataCollatorWithFlattening(**options)
    for samples in (rows, labelled):
        batch = collate(samples)
        expected = expected_collate(samples)
        torch.testing.assert_close(batch, expected, rtol=0, atol=0)
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8]]
        assert batch["labels"].tolist() == [[-7, 6, 7, -7]]
