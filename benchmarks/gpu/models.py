"""Models of real sizes from their configs, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from benchmarks.gpu.machine import Machine

__all__ = ["SIZES", "build", "config_of", "lora"]

SIZES: dict[str, dict[str, int]] = {
    # Qwen/Qwen2.5-0.5B and -1.5B; SmolLM2-135M: hidden, layers, heads, kv heads, feed-forward, vocabulary of their cards
    "135M": {"hidden": 576, "layers": 30, "heads": 9, "kv": 3, "ffn": 1536, "vocabulary": 49152},
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "ffn": 4864, "vocabulary": 151936},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv": 2, "ffn": 8960, "vocabulary": 151936},
}
DRY = {"hidden": 32, "layers": 1, "heads": 2, "kv": 1, "ffn": 32, "vocabulary": 64}


def config_of(name: str, *, dry: bool) -> Any:
    s = DRY if dry else SIZES[name]
    return hf.Qwen2Config(
        vocab_size=s["vocabulary"], hidden_size=s["hidden"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"], intermediate_size=s["ffn"], max_position_embeddings=32768, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def build(name: str, machine: Machine, *, attention: str = "sdpa", train: bool = True) -> Any:
    torch.manual_seed(0)
    config = config_of(name, dry=machine.dry)
    with machine.device:
        model = hf.AutoModelForCausalLM.from_config(config, dtype=machine.dtype, attn_implementation="sdpa")
    if attention == "varlen":
        from dynagroup.integrations.varlen import use_varlen_attention

        use_varlen_attention(model)
    return model.train(train)


def lora(model: Any) -> Any:
    """Rank 16 on the attention and feed-forward projections, as common recipes have it."""
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
