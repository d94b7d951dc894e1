"""Images and text under two budgets: padded text tokens, and patches, which are concatenated and not padded.

A real image processor runs in the workers; how many image tokens a sample has is known only afterwards. The model is a small
Qwen2-VL with random weights, and the images are generated.

usage: python examples/train_images.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl import Qwen2VLImageProcessorPil

from dynagroup import AdditiveCap, OnlineDataLoader, TokenBudget

VOCAB = 128
IMAGE = 120  # ids of special tokens
VISION_START = 121
VISION_END = 122
PAD = 0
IGNORED = -100  # label of what is not learned


class Pictures(torch.utils.data.Dataset):
    """One image and some text a sample, processed when it is fetched."""

    def __init__(self, num_samples: int = 48) -> None:
        self.num_samples = num_samples
        self.processor = Qwen2VLImageProcessorPil(
            patch_size=14,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        height, width = rng.integers(28, 140, 2)
        image = Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))
        processed = self.processor(images=[image], return_tensors="pt")
        num_image_tokens = int(processed["image_grid_thw"].prod()) // 4
        num_words = int(rng.integers(3, 40))
        text = rng.integers(1, 100, num_words).tolist()
        vision = [VISION_START, *[IMAGE] * num_image_tokens, VISION_END]
        return {
            "input_ids": vision + text,
            "labels": [IGNORED] * len(vision) + text,
            "pixel_values": processed["pixel_values"],
            "image_grid_thw": processed["image_grid_thw"],
        }


def lengths_of(sample: dict[str, Any]) -> dict[str, int]:
    return {"tokens": len(sample["input_ids"]), "patches": len(sample["pixel_values"])}


def padded(rows: list[list[int]], padding: int) -> torch.Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=padding)


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = padded([sample["input_ids"] for sample in samples], PAD)
    pixels = [sample["pixel_values"] for sample in samples]
    grids = [sample["image_grid_thw"] for sample in samples]
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(PAD).long(),
        "mm_token_type_ids": ids.eq(IMAGE).long(),
        "labels": padded([sample["labels"] for sample in samples], IGNORED),
        "pixel_values": torch.cat(pixels),  # patches of all samples, no padding
        "image_grid_thw": torch.cat(grids),
    }


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
    },
}
VISION = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}


def make_model() -> Qwen2VLForConditionalGeneration:
    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=123,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    return Qwen2VLForConditionalGeneration(config)


def main(epochs: int = 2, num_workers: int = 2) -> tuple[list[float], list[tuple[int, int]]]:
    """Losses by update, and (padded tokens, patches) by batch."""
    loader = OnlineDataLoader(
        Pictures(),
        TokenBudget(400) & AdditiveCap("patches", 300),
        collate_fn=collate,
        length_of=lengths_of,
        samples_per_update=16,
        shuffle=True,
        num_workers=num_workers,
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    shapes = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for update in loader.updates():
            total = 0.0
            for step in update:
                loss = model(**step.batch).loss * step.loss_scale
                loss.backward()
                total += loss.item()
                shapes.append((step.batch["input_ids"].numel(), len(step.batch["pixel_values"])))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
    print(" ".join(f"{loss:.3f}" for loss in losses))
    return losses, shapes


if __name__ == "__main__":
    main()
