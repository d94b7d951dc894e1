"""Samples with and without an image, collated by a processor of transformers, where lengths are known from the images' sizes.

No image is opened to plan: the processor says how many patches an image of a size becomes. A batch holds at most so many padded
tokens and so many patches, and has an image for every sample or for none: on all ranks the vision tower runs in the same steps.
The model is a small PaddleOCR-VL with random weights, and the images are generated.

usage: python examples/train_vision_language.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLProcessor,
)
from transformers import PreTrainedTokenizerFast as Fast
from transformers.models.paddleocr_vl import PaddleOCRVLImageProcessorPil

from dynagroup import AdditiveCap, PlannedDataLoader, TokenBudget

PAD, IMAGE, VISION_START, VISION_END = "[PAD]", "[IMAGE]", "[START]", "[END]"
WORDS = [PAD, IMAGE, VISION_START, VISION_END, *"abcdefghijklmnop"]
COUNT, MOST_TOKENS, MOST_PATCHES = 48, 200, 80


def make_processor() -> PaddleOCRVLProcessor:
    raw = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token=PAD)
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = {"pad_token": PAD, "extra_special_tokens": {"image_token": IMAGE}}
    images = PaddleOCRVLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    )
    return PaddleOCRVLProcessor(images, Fast(tokenizer_object=raw, **own))


def text_of(index: int) -> str:
    return " ".join(WORDS[4 + (index + word) % 16] for word in range(3 + 5 * index % 30))


def size_of(index: int) -> tuple[int, int] | None:
    """Height and width of a sample's image; four of five have none."""
    return None if index % 5 else (40 + 17 * index % 90, 40 + 31 * index % 90)


def make_model() -> PaddleOCRVLForConditionalGeneration:
    torch.manual_seed(0)
    shared = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {
        **shared,
        "vocab_size": len(WORDS),
        "head_dim": 16,
        "num_key_value_heads": 1,
        "rope_parameters": rope,
    }
    text |= {"bos_token_id": None, "eos_token_id": None}
    ids: dict[str, Any] = {
        "image_token_id": 1,
        "vision_start_token_id": 2,
        "vision_end_token_id": 3,
        "video_token_id": 99,
    }
    return PaddleOCRVLForConditionalGeneration(
        PaddleOCRVLConfig(text_config=text, vision_config=shared, **ids)
    )


def main(epochs: int = 2) -> tuple[list[float], list[Any]]:
    """Losses by update, and steps."""
    processor = make_processor()

    def collate(indices: list[int]) -> Any:
        images = [
            Image.fromarray(np.full((*size, 3), 9 * i % 255, np.uint8))
            for i in indices
            if (size := size_of(i))
        ]
        prompts = [f"{VISION_START} {IMAGE} {VISION_END} " if size_of(i) else "" for i in indices]
        texts = [prompt + text_of(i) for prompt, i in zip(prompts, indices, strict=True)]
        batch = processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] < 4, -100)
        return batch

    patches = [
        processor.image_processor.get_number_of_image_patches(*s) if (s := size_of(i)) else 0
        for i in range(COUNT)
    ]
    words = [len(text_of(i).split()) + (2 + n // 4 if n else 0) for i, n in enumerate(patches)]
    lengths, kinds = (
        {"tokens": words, "patches": patches},
        ["image" if n else "text" for n in patches],
    )
    budget = TokenBudget(MOST_TOKENS) & AdditiveCap("patches", MOST_PATCHES)
    loader = PlannedDataLoader(
        range(COUNT), lengths, budget, kinds=kinds, samples_per_update=16, collate_fn=collate
    )
    net, losses, steps = make_model(), [], []
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            steps += update
            total = 0.0
            for step in update:
                loss = net(**step.batch).loss * step.loss_scale
                loss.backward()
                total += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses, steps


if __name__ == "__main__":
    main()
