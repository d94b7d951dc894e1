"""The model families whose memory is simulated: how each builds a config from six sizes, and one real model's sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

__all__ = ["FAMILIES", "Family", "Sizes", "VisionLanguage", "random_sizes"]

TABLE = Path(__file__).parent / "data" / "families.json"


@dataclass(frozen=True)
class Sizes:
    """Hidden size, layers, heads, kv heads, feed-forward width, vocabulary."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def head_at_least_32(self) -> int:
        return max(self.hidden // self.heads, 32)

    @property
    def expert_ffn(self) -> int:
        return max(128, self.ffn // 8)


@dataclass(frozen=True, kw_only=True)
class Family:
    """``kind``: "decoder", "encoder", "seq2seq", "speech" or "vision"."""

    config: str
    """Class of `transformers`; for "vision" that of the language model."""
    arguments: Mapping[str, str]
    """Argument of the config -> attribute of :class:`Sizes`."""
    values: Mapping[str, Any]
    """The config's other arguments. Sliding windows are wide: inside one, memory is a polynomial."""
    known: Sizes
    kind: str
    grouped: bool
    """Whether key/value heads may be fewer than heads."""

    def build(self, sizes: Sizes) -> Any:
        """Returns the config of a model of these sizes."""
        arguments = dict(self.values)
        for argument, name in self.arguments.items():
            arguments[argument] = getattr(sizes, name)
        config = getattr(hf, self.config)(**arguments)
        if self.kind == "vision":
            return _with_vision(config, sizes)
        return config


def _with_vision(text: Any, sizes: Sizes) -> Any:
    vision = hf.SiglipVisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=max(3, sizes.layers // 2),
        num_attention_heads=16,
        image_size=384,
        patch_size=14,
    )
    return hf.LlavaConfig(text_config=text, vision_config=vision)


def _read_families() -> dict[str, Family]:
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    families = {}
    for name, row in table["families"].items():
        families[name] = Family(
            config=row["config"],
            arguments=table["arguments"][row["arguments"]],
            values=row["values"],
            known=Sizes(*row["known"]),
            kind=row["kind"],
            grouped=row["grouped"],
        )
    return families


FAMILIES = _read_families()


class VisionLanguage(torch.nn.Module):
    """A ViT before a language model, as in LLaVA: every sample has one image, whose patches join its tokens.

    Written out because transformers' own models look up where the image tokens are, which needs data.
    """

    def __init__(self, config: Any, text: torch.nn.Module, vision: torch.nn.Module) -> None:
        super().__init__()
        self.config = config
        self.text = text
        self.vision = vision
        wide = config.vision_config.hidden_size
        hidden = config.text_config.hidden_size
        project = torch.nn.Sequential(
            torch.nn.Linear(wide, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden)
        )
        self.project = project.to(next(text.parameters()).dtype)

    def get_output_embeddings(self) -> Any:
        return self.text.get_output_embeddings()  # type: ignore[operator]

    def forward(
        self, input_ids: Any, attention_mask: Any, labels: Any = None, **kwargs: Any
    ) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            return self.text(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        n = len(input_ids)
        size = self.config.vision_config.image_size
        pixels = torch.zeros(n, 3, size, size, dtype=next(self.parameters()).dtype)
        patches = self.project(self.vision(pixels).last_hidden_state)
        words = self.text.get_input_embeddings()(input_ids)  # type: ignore[operator]
        embeds = torch.cat([patches, words], dim=1)
        more = torch.ones(n, patches.shape[1], dtype=torch.long)
        if labels is not None:
            labels = torch.cat([-100 * more, labels], dim=1)
        mask = torch.cat([more, attention_mask], dim=1)
        return self.text(inputs_embeds=embeds, attention_mask=mask, labels=labels, **kwargs)


def random_sizes(family: Family, rng: np.random.Generator) -> Sizes:
    """Sizes of a model that does not exist but could, from about 10M to 13B parameters."""
    head = int(rng.choice([32, 64, 64, 64, 96, 128, 128]))
    widest = 2048 if family.kind in ("encoder", "seq2seq", "speech") else 5120
    heads = int(np.clip(round(_log_uniform(rng, 256, widest) / head), 2, 64))
    groups = 1
    if family.grouped:
        divisors = [divisor for divisor in (1, 2, 4, 8) if heads % divisor == 0]
        groups = int(rng.choice(divisors))
    hidden = heads * head
    ratio = float(rng.choice([2.0, 2.75, 3.5, 4.0, 5.5, 8.0]))
    layers = int(np.clip(round(_log_uniform(rng, 4, 48)), 4, 48))
    return Sizes(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads // groups,
        ffn=64 * max(1, round(hidden * ratio / 64)),
        vocabulary=64 * round(_log_uniform(rng, 8192, 262144) / 64),
    )


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))
