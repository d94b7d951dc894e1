"""A tokenizer of a few words, a small model, and texts of many lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

WORDS = [f"w{i}" for i in range(26)]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, size=1 + (7 * i) % 13)) for i in range(40)]


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


def small_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(6)
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=16, vocab_size=30,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model
