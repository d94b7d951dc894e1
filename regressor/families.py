"""The model families whose memory is simulated: how each builds a config from six sizes, and one real model's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf

__all__ = ["FAMILIES", "Family", "Sizes", "VisionLanguage", "random_sizes"]

WINDOW = 1 << 20  # sliding windows are opened wide: inside one, memory is a polynomial


@dataclass(frozen=True)
class Sizes:
    """Hidden size, layers, heads, kv heads, feed-forward width, vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int


@dataclass(frozen=True)
class Family:
    """``kind``: "decoder", "encoder", "seq2seq", "speech" or "vision"."""

    build: Callable[[Sizes], Any]
    known: Sizes
    kind: str = "decoder"
    grouped: bool = True
    """Whether key/value heads may be fewer than heads."""


def _usual(config: type, **more: Any) -> Callable[[Sizes], Any]:
    def build(s: Sizes) -> Any:
        names = {
            "hidden_size": s.hidden,
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "intermediate_size": s.ffn,
            "vocab_size": s.vocabulary,
            "max_position_embeddings": 16384,
        }
        return config(**{**names, **more})

    return build


def _encoder(config: type, **more: Any) -> Callable[[Sizes], Any]:
    def build(s: Sizes) -> Any:
        return config(
            hidden_size=s.hidden,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            intermediate_size=s.ffn,
            vocab_size=s.vocabulary,
            max_position_embeddings=16386,
            **more,
        )

    return build


def _bart_like(config: type, **more: Any) -> Callable[[Sizes], Any]:
    def build(s: Sizes) -> Any:
        return config(
            d_model=s.hidden,
            encoder_layers=s.layers,
            decoder_layers=s.layers,
            encoder_attention_heads=s.heads,
            decoder_attention_heads=s.heads,
            encoder_ffn_dim=s.ffn,
            decoder_ffn_dim=s.ffn,
            vocab_size=s.vocabulary,
            max_position_embeddings=16384,
            **more,
        )

    return build


def _t5_like(config: type, **more: Any) -> Callable[[Sizes], Any]:
    def build(s: Sizes) -> Any:
        return config(
            d_model=s.hidden,
            num_layers=s.layers,
            num_decoder_layers=s.layers,
            num_heads=s.heads,
            d_kv=max(s.hidden // s.heads, 32),
            d_ff=s.ffn,
            vocab_size=s.vocabulary,
            decoder_start_token_id=0,
            **more,
        )

    return build


def _whisper(s: Sizes) -> Any:
    return hf.WhisperConfig(
        d_model=s.hidden,
        encoder_layers=s.layers,
        decoder_layers=s.layers,
        max_target_positions=16384,
        encoder_attention_heads=s.heads,
        decoder_attention_heads=s.heads,
        encoder_ffn_dim=s.ffn,
        decoder_ffn_dim=s.ffn,
        vocab_size=s.vocabulary,
        pad_token_id=0,
    )


def _llava(s: Sizes) -> Any:
    text = _usual(hf.Qwen2Config)(s)
    vision = hf.SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=max(3, s.layers // 2),
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    )
    return hf.LlavaConfig(text_config=text, vision_config=vision)


class VisionLanguage(torch.nn.Module):
    """A ViT before a language model, as in LLaVA: every sample has one image, whose patches join its tokens.

    Written out because transformers' own models look up where the image tokens are, which needs data.
    """

    def __init__(self, config: Any, text: torch.nn.Module, vision: torch.nn.Module) -> None:
        super().__init__()
        self.config, self.text, self.vision = config, text, vision
        wide, hidden = config.vision_config.hidden_size, config.text_config.hidden_size
        self.project = torch.nn.Sequential(
            torch.nn.Linear(wide, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        ).to(next(text.parameters()).dtype)

    def get_output_embeddings(self) -> Any:
        return self.text.get_output_embeddings()  # type: ignore[operator]

    def forward(
        self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any
    ) -> Any:
        n = len(input_ids)
        size = self.config.vision_config.image_size
        if kwargs.get("past_key_values") is not None and kwargs["past_key_values"].get_seq_length():
            return self.text(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        pixels = torch.zeros(n, 3, size, size, dtype=next(self.parameters()).dtype)
        patches = self.project(self.vision(pixels).last_hidden_state)
        words = self.text.get_input_embeddings()(input_ids)  # type: ignore[operator]
        embeds = torch.cat([patches, words], dim=1)
        more = torch.ones(n, patches.shape[1], dtype=torch.long)
        if labels is not None:
            labels = torch.cat([-100 * more, labels], dim=1)
        mask = torch.cat([more, attention_mask], dim=1)
        return self.text(inputs_embeds=embeds, attention_mask=mask, labels=labels, **kwargs)


B = Sizes
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        lambda s: hf.GPT2Config(
            n_embd=s.hidden,
            n_layer=s.layers,
            n_head=s.heads,
            n_inner=s.ffn,
            vocab_size=s.vocabulary,
            n_positions=16384,
        ),
        B(768, 12, 12, 12, 3072, 50257),
        grouped=False,
    ),
    "llama": Family(_usual(hf.LlamaConfig), B(4096, 32, 32, 8, 14336, 128256)),
    "qwen2": Family(
        _usual(hf.Qwen2Config, tie_word_embeddings=True), B(896, 24, 14, 2, 4864, 151936)
    ),
    "qwen3": Family(_usual(hf.Qwen3Config, head_dim=128), B(2048, 28, 16, 8, 6144, 151936)),
    "mistral": Family(
        _usual(hf.MistralConfig, sliding_window=None), B(4096, 32, 32, 8, 14336, 32768)
    ),
    "gemma": Family(_usual(hf.GemmaConfig, head_dim=256), B(2048, 18, 8, 1, 16384, 256000)),
    "gemma2": Family(
        _usual(hf.Gemma2Config, head_dim=256, sliding_window=WINDOW),
        B(2304, 26, 8, 4, 9216, 256000),
    ),
    "gemma3": Family(
        _usual(hf.Gemma3TextConfig, head_dim=256, sliding_window=WINDOW),
        B(1152, 26, 4, 1, 6912, 262144),
    ),
    "phi": Family(_usual(hf.PhiConfig), B(2560, 32, 32, 32, 10240, 51200), grouped=False),
    "phi3": Family(
        _usual(hf.Phi3Config, pad_token_id=0, sliding_window=None), B(3072, 32, 32, 32, 8192, 32064)
    ),
    "opt": Family(
        lambda s: hf.OPTConfig(
            hidden_size=s.hidden,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            ffn_dim=s.ffn,
            vocab_size=s.vocabulary,
            word_embed_proj_dim=s.hidden,
            max_position_embeddings=16384,
        ),
        B(5120, 40, 40, 40, 20480, 50272),
        grouped=False,
    ),
    "gpt_neox": Family(
        _encoder(hf.GPTNeoXConfig), B(2560, 32, 32, 32, 10240, 50432), grouped=False
    ),
    "bloom": Family(
        lambda s: hf.BloomConfig(
            hidden_size=s.hidden, n_layer=s.layers, n_head=s.heads, vocab_size=s.vocabulary
        ),
        B(1024, 24, 16, 16, 4096, 250880),
        grouped=False,
    ),
    "falcon": Family(
        lambda s: hf.FalconConfig(
            hidden_size=s.hidden,
            num_hidden_layers=s.layers,
            ffn_hidden_size=s.ffn,
            num_attention_heads=s.heads,
            vocab_size=s.vocabulary,
        ),
        B(4544, 32, 71, 71, 18176, 65024),
        grouped=False,
    ),
    "stablelm": Family(_usual(hf.StableLmConfig), B(2048, 24, 32, 32, 5632, 100352)),
    "olmo2": Family(_usual(hf.Olmo2Config), B(4096, 32, 32, 32, 11008, 100352)),
    "cohere": Family(_usual(hf.CohereConfig), B(4096, 32, 32, 8, 14336, 256000)),
    "starcoder2": Family(
        _usual(hf.Starcoder2Config, sliding_window=None), B(3072, 30, 24, 2, 12288, 49152)
    ),
    "granite": Family(_usual(hf.GraniteConfig), B(2048, 40, 32, 8, 8192, 49155)),
    "smollm3": Family(_usual(hf.SmolLM3Config, pad_token_id=0), B(2048, 36, 16, 4, 11008, 128256)),
    "glm4": Family(_usual(hf.Glm4Config, pad_token_id=0), B(4096, 40, 32, 2, 13696, 151552)),
    "mixtral": Family(
        _usual(hf.MixtralConfig, num_local_experts=8), B(2048, 24, 16, 4, 3584, 32000)
    ),
    "qwen3_moe": Family(
        lambda s: _usual(
            hf.Qwen3MoeConfig,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=max(128, s.ffn // 8),
            head_dim=128,
        )(s),
        B(2048, 48, 32, 4, 6144, 151936),
    ),
    "bert": Family(_encoder(hf.BertConfig), B(768, 12, 12, 12, 3072, 30522), "encoder", False),
    "roberta": Family(
        _encoder(hf.RobertaConfig), B(1024, 24, 16, 16, 4096, 50265), "encoder", False
    ),
    "modernbert": Family(
        _encoder(hf.ModernBertConfig, pad_token_id=0),
        B(768, 22, 12, 12, 1152, 50368),
        "encoder",
        False,
    ),
    "electra": Family(
        _encoder(hf.ElectraConfig, embedding_size=128),
        B(1024, 24, 16, 16, 4096, 30522),
        "encoder",
        False,
    ),
    "distilbert": Family(
        lambda s: hf.DistilBertConfig(
            dim=s.hidden,
            n_layers=s.layers,
            n_heads=s.heads,
            hidden_dim=s.ffn,
            vocab_size=s.vocabulary,
            max_position_embeddings=16384,
        ),
        B(768, 6, 12, 12, 3072, 30522),
        "encoder",
        False,
    ),
    "t5": Family(_t5_like(hf.T5Config), B(768, 12, 12, 12, 3072, 32128), "seq2seq", False),
    "mt5": Family(_t5_like(hf.MT5Config), B(1024, 24, 16, 16, 2816, 250112), "seq2seq", False),
    "bart": Family(_bart_like(hf.BartConfig), B(1024, 12, 16, 16, 4096, 50265), "seq2seq", False),
    "marian": Family(_bart_like(hf.MarianConfig), B(512, 6, 8, 8, 2048, 58101), "seq2seq", False),
    "m2m_100": Family(
        _bart_like(hf.M2M100Config), B(1024, 12, 16, 16, 4096, 256206), "seq2seq", False
    ),
    "pegasus": Family(
        _bart_like(hf.PegasusConfig), B(1024, 16, 16, 16, 4096, 96103), "seq2seq", False
    ),
    "whisper": Family(_whisper, B(768, 12, 12, 12, 3072, 51865), "speech", False),
    "llava": Family(_llava, B(2048, 24, 16, 4, 8192, 151936), "vision"),
}


def random_sizes(family: Family, rng: np.random.Generator) -> Sizes:
    """Sizes of a model that does not exist but could, from about 10M to 13B parameters."""
    head = int(rng.choice([32, 64, 64, 64, 96, 128, 128]))
    most = 2048 if family.kind in ("encoder", "seq2seq", "speech") else 5120
    heads = int(np.clip(round(np.exp(rng.uniform(np.log(256), np.log(most))) / head), 2, 64))
    groups = int(rng.choice([g for g in (1, 2, 4, 8) if heads % g == 0])) if family.grouped else 1
    hidden = heads * head
    ffn = 64 * max(1, round(hidden * float(rng.choice([2.0, 2.75, 3.5, 4.0, 5.5, 8.0])) / 64))
    layers = int(np.clip(round(np.exp(rng.uniform(np.log(4), np.log(48)))), 4, 48))
    vocabulary = int(64 * round(np.exp(rng.uniform(np.log(8192), np.log(262144))) / 64))
    return Sizes(hidden, layers, heads, heads // groups, ffn, vocabulary)
