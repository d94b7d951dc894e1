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
    PreTrainedTokenizerFast,
)
from transformers.models.paddleocr_vl import PaddleOCRVLImageProcessorPil

from dynagroup import AdditiveCap, PlannedDataLoader, Step, TokenBudget

PAD = "[PAD]"
IMAGE = "[IMAGE]"
VISION_START = "[START]"
VISION_END = "[END]"
SPECIAL = [PAD, IMAGE, VISION_START, VISION_END]
WORDS = list("abcdefghijklmnop")
NUM_SAMPLES = 48
MOST_TOKENS = 200
MOST_PATCHES = 80


def text_of(index: int) -> str:
    num_words = 3 + 5 * index % 30
    return " ".join(WORDS[(index + place) % len(WORDS)] for place in range(num_words))


def size_of(index: int) -> tuple[int, int] | None:
    """Height and width of a sample's image; four of five have none."""
    if index % 5:
        return None
    return 40 + 17 * index % 90, 40 + 31 * index % 90


def image_of(index: int) -> Image.Image | None:
    size = size_of(index)
    if size is None:
        return None
    return Image.fromarray(np.full((*size, 3), 9 * index % 255, np.uint8))


class Collate:
    """Turns indices of samples into a batch of the processor, with labels for the words."""

    def __init__(self, processor: PaddleOCRVLProcessor) -> None:
        self.processor = processor

    def __call__(self, indices: list[int]) -> Any:
        texts = []
        images = []
        for index in indices:
            text = text_of(index)
            image = image_of(index)
            if image is not None:
                text = f"{VISION_START} {IMAGE} {VISION_END} {text}"
                images.append(image)
            texts.append(text)
        batch = self.processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        is_special = batch["input_ids"] < len(SPECIAL)
        batch["labels"] = batch["input_ids"].masked_fill(is_special, -100)
        return batch


def make_processor() -> PaddleOCRVLProcessor:
    ids = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, extra_special_tokens={"image_token": IMAGE}
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 12}
    return PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(size=size), tokenizer)


def make_model() -> PaddleOCRVLForConditionalGeneration:
    torch.manual_seed(0)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = {
        **vision,
        "vocab_size": len(SPECIAL + WORDS),
        "head_dim": 16,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=SPECIAL.index(IMAGE),
        vision_start_token_id=SPECIAL.index(VISION_START),
        vision_end_token_id=SPECIAL.index(VISION_END),
        video_token_id=99,
    )
    return PaddleOCRVLForConditionalGeneration(config)


def measure(processor: PaddleOCRVLProcessor) -> dict[str, list[int]]:
    """Tokens and patches of each sample, by the sizes of the images."""
    tokens = []
    patches = []
    for index in range(NUM_SAMPLES):
        num_tokens = len(text_of(index).split())
        num_patches = 0
        size = size_of(index)
        if size is not None:
            num_patches = processor.image_processor.get_number_of_image_patches(*size)
            num_tokens += 2 + num_patches // 4  # start, end, and a token for four patches
        tokens.append(num_tokens)
        patches.append(num_patches)
    return {"tokens": tokens, "patches": patches}


def main(epochs: int = 2) -> tuple[list[float], list[Step]]:
    """Losses by update, and steps."""
    processor = make_processor()
    lengths = measure(processor)
    loader = PlannedDataLoader(
        range(NUM_SAMPLES),
        lengths,
        TokenBudget(MOST_TOKENS) & AdditiveCap("patches", MOST_PATCHES),
        kinds=["image" if num_patches else "text" for num_patches in lengths["patches"]],
        samples_per_update=16,
        collate_fn=Collate(processor),
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    steps = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            steps += update
            total = 0.0
            for step in update:
                loss = model(**step.batch).loss * step.loss_scale
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses, steps


if __name__ == "__main__":
    main()
