"""Configurations of small models: every family described by one set of words; a tokenizer of a few words, and texts of many
lengths. What a test compares must not differ by chance, so nothing is dropped out unless asked. Models are imported where
they are made: that takes seconds, in each process."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, T5Config

from dynagroup import testing

USUAL = {
    "vocab": ["vocab_size"],
    "width": ["hidden_size"],
    "layers": ["num_hidden_layers"],
    "heads": ["num_attention_heads"],
    "inner": ["intermediate_size"],
    "dropout": [],
}
NAMES: dict[Any, dict[str, list[str]]] = {
    BertConfig: {"dropout": ["hidden_dropout_prob", "attention_probs_dropout_prob"]},
    GPT2Config: {
        "width": ["n_embd"],
        "layers": ["n_layer"],
        "heads": ["n_head"],
        "inner": ["n_inner"],
        "dropout": ["resid_pdrop", "embd_pdrop", "attn_pdrop"],
    },
    T5Config: {
        "width": ["d_model"],
        "layers": ["num_layers"],
        "heads": ["num_heads"],
        "inner": ["d_ff"],
        "dropout": ["dropout_rate"],
    },
    BartConfig: {
        "width": ["d_model"],
        "layers": ["encoder_layers", "decoder_layers"],
        "dropout": ["dropout"],
        "heads": ["encoder_attention_heads", "decoder_attention_heads"],
        "inner": ["encoder_ffn_dim", "decoder_ffn_dim"],
    },
}
WORDS = [f"w{i}" for i in range(26)]
TEXTS = [" ".join(np.random.default_rng(i).choice(WORDS, size=1 + (7 * i) % 13)) for i in range(40)]


def config(
    kind: type[Any],
    *,
    vocab: int = 64,
    width: int = 16,
    layers: int = 2,
    heads: int = 2,
    inner: int | None = None,
    dropout: float = 0.0,
    **more: Any,
) -> Any:
    """A configuration of ``kind``; ``inner`` is a layer's width inside, by default twice its ``width``. ``more`` are its own."""
    names = {**USUAL, **NAMES.get(kind, {})}
    values = {
        "vocab": vocab,
        "width": width,
        "layers": layers,
        "heads": heads,
        "inner": 2 * width if inner is None else inner,
        "dropout": dropout,
    }
    settings = {}
    for word, value in values.items():
        settings.update(dict.fromkeys(names[word], value))
    return kind(**settings, **more)


llama = partial(config, LlamaConfig)
bert = partial(config, BertConfig)
# its layer norms and softmax stay in float64
gpt2 = partial(config, GPT2Config, bos_token_id=0, eos_token_id=0)
t5 = partial(config, T5Config, d_kv=8, decoder_start_token_id=0)
bart = partial(config, BartConfig)


def sharp(model: Any) -> Any:
    """So that greedy choices have no ties and differ between samples."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data *= 8
    return model


def shapes_seen(model: Any) -> list[tuple[int, ...]]:
    """Those of ``input_ids`` in each of the model's forward passes from now on."""
    seen: list[tuple[int, ...]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if "input_ids" in kwargs:
            seen.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def word_tokenizer(words: list[str], pad: str, bos: str, eos: str, unk: str) -> Any:
    """Of whole words: ids 0 to 3 are the special ones."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([pad, bos, eos, unk, *words])}
    raw = Tokenizer(WordLevel(vocabulary, unk_token=unk))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )


def small_tokenizer() -> Any:
    return word_tokenizer(WORDS, "[PAD]", "[BOS]", "[EOS]", "[UNK]")


def small_llama() -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(6)
    config = llama(vocab=30, layers=3, inner=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return sharp(LlamaForCausalLM(config).eval())


def save_encoder(
    folder: Path, *, max_seq_length: int = 256, pooling: str = "pooling_mode_mean_tokens"
) -> Any:
    """A small BERT in a folder as sentence-transformers lays it out; returns the model."""
    from transformers import BertModel

    torch.manual_seed(0)
    model = BertModel(bert(vocab=30, inner=16)).eval()
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": path}
        for kind, path in kinds.items()
    ]
    (folder / "1_Pooling").mkdir()
    pooling_config = {"word_embedding_dimension": 16, "pooling_mode_cls_token": False}
    pooling_config[pooling] = True
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_seq_length},
        "1_Pooling/config.json": pooling_config,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    return model


def adapted(model: Any, config: Any, *names: str) -> Any:
    """The model with adapters of this kind; the first is active."""
    import peft

    first, *others = names or ["default"]
    # peft asks transformers by an old name
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = peft.get_peft_model(model, config, adapter_name=first)
        for name in others:
            model.add_adapter(name, config)
        model.set_adapter(first)
    return model.eval()


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, allocator: Allocator, size: int) -> torch.Tensor:
        ctx.allocator = allocator
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.allocator.claim(ctx.size)
        return gradients[0], None, None


def fails_in_backward(x: torch.Tensor, allocator: Allocator, size: int) -> torch.Tensor:
    """``x``; its backward pass claims ``size``."""
    return _FailInBackward.apply(x, allocator, size)  # type: ignore[return-value]


class Allocator(testing.Allocator):
    def in_backward(self, module: torch.nn.Module) -> Callable[[], None]:
        """Fail when the gradient of ``module``'s output arrives: later layers have theirs already."""

        def marked(hidden: torch.Tensor) -> torch.Tensor:
            size = hidden.shape[0] * hidden.shape[1]
            return fails_in_backward(hidden, self, size)

        def hook(_module: torch.nn.Module, _args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled():
                return output
            if isinstance(output, tuple):
                hidden, *others = output
                return (marked(hidden), *others)
            return marked(output)

        return module.register_forward_hook(hook).remove
