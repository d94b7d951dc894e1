"""A small wav2vec2 with CTC on waveforms of tones, each of which is a letter; a length is a number of samples of the waveform.

The feature extractor normalises with layer norm, and gets a mask. So padding changes no result: see docs/speech.md.

usage: python examples/train_speech.py
"""

from __future__ import annotations

import math
import random

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from dynagroup import PlannedDataLoader, TokenBudget, Work

NUM_SOUNDS = 128
RATE = 4_000  # samples a second
LETTERS = 3
SILENCE = 160  # samples between two letters
MOST_SAMPLES = 6_000  # of waveform, padding counted, in a batch

Sound = tuple[torch.Tensor, list[int]]


def make_sound(number: int) -> Sound:
    """A waveform of 1 to 6 tones of unequal duration, with pauses, and its letters. Letter 0 is CTC's blank."""
    chance = random.Random(number)
    letters = [chance.randint(1, LETTERS) for _ in range(chance.randint(1, 6))]
    parts = [torch.zeros(SILENCE)]
    for letter in letters:
        time = torch.arange(chance.randint(240, 480)) / RATE
        parts.append(torch.sin(2 * math.pi * 300 * letter * time))
        parts.append(torch.zeros(SILENCE))
    return torch.cat(parts), letters


def collate(sounds: list[Sound]) -> dict[str, torch.Tensor]:
    waveforms = [waveform for waveform, _ in sounds]
    labels = [torch.tensor(letters) for _, letters in sounds]
    masks = [torch.ones(len(waveform), dtype=torch.long) for waveform in waveforms]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_values": pad(waveforms, batch_first=True),
        "attention_mask": pad(masks, batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def make_model() -> Wav2Vec2ForCTC:
    """Three convolutions turn 80 samples into a position."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        vocab_size=1 + LETTERS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16, 32),
        conv_kernel=(10, 8, 8),
        conv_stride=(5, 4, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        ctc_loss_reduction="mean",  # over the labels of a sound, then over sounds
        apply_spec_augment=False,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
    )
    return Wav2Vec2ForCTC(config)


def make_loader(sounds: list[Sound], model: Wav2Vec2ForCTC) -> PlannedDataLoader:
    return PlannedDataLoader(
        sounds,
        [len(waveform) for waveform, _ in sounds],
        TokenBudget(MOST_SAMPLES),
        samples_per_update=8,
        work=Work.of(model),
        collate_fn=collate,
        weigh="samples",  # the loss is a mean over sounds
    )


def main(epochs: int = 8) -> tuple[list[float], float]:
    """The loss of each epoch, and the share of padding in the batches."""
    model = make_model()
    loader = make_loader([make_sound(number) for number in range(NUM_SOUNDS)], model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    losses = []
    num_values = 0
    num_true = 0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        updates = []
        for update in loader.updates():
            total = 0.0
            for step in update:
                loss = model(**step.batch).loss * step.loss_scale
                loss.backward()
                total += loss.item()
                num_values += step.batch["attention_mask"].numel()
                num_true += int(step.batch["attention_mask"].sum())
            optimizer.step()
            optimizer.zero_grad()
            updates.append(total)
        losses.append(sum(updates) / len(updates))
    return losses, 1 - num_true / num_values


if __name__ == "__main__":
    losses, padding = main()
    print(" ".join(f"{loss:.3f}" for loss in losses))
    print(f"{padding:.1%} padding")
