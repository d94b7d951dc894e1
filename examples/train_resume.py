"""A classifier that is saved after every few updates, and goes on exactly after the process was killed.

usage: python examples/train_resume.py FOLDER
  FOLDER: of the checkpoint. Kill the program at any time, then start it with the same FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LinearLR
from transformers import BertConfig, BertForSequenceClassification

from dynagroup import PlannedDataLoader, TokenBudget

EPOCHS = 4
SAVE_EVERY = 4
WORDS = ["good", "fine", "great", "nice", "bad", "poor", "awful", "dull", "the", "a", "film"]
NUM_PRAISES = 4


class Reviews(torch.utils.data.Dataset):
    """Texts of 2 to 40 words; the label says whether the first word praises."""

    def __init__(self, num_samples: int = 240) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = []
        for number in range(num_samples):
            length = 2 + (7 * number) % 39
            ids = torch.randint(1, 1 + len(WORDS), (length,), generator=generator)
            self.samples.append((ids, int(ids[0] <= NUM_PRAISES)))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.samples[index]


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    texts = [ids for ids, _ in samples]
    labels = [label for _, label in samples]
    input_ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {
        "input_ids": input_ids,
        "attention_mask": input_ids.ne(0).long(),
        "labels": torch.tensor(labels),
    }


def save(path: Path, **parts: object) -> None:
    """A process that is killed here leaves the former checkpoint whole."""
    new = path.with_suffix(".new")
    torch.save(parts, new)
    new.replace(path)


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    dataset = Reviews()
    lengths = [len(ids) for ids, _ in dataset.samples]
    config = BertConfig(
        vocab_size=1 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    model = BertForSequenceClassification(config)
    loader = PlannedDataLoader(
        dataset,
        lengths,
        TokenBudget(320),
        samples_per_update=16,
        weigh="samples",
        collate_fn=collate,
    )
    num_updates = loader.updates_in(EPOCHS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=num_updates)

    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["random"])  # of the dropout; on a GPU torch.cuda.get_rng_state()

    model.train()
    for epoch in range(loader.epoch, EPOCHS):
        loader.set_epoch(epoch)
        for update in loader.updates():
            mean_loss = 0.0
            for step in update:
                loss = model(**step.batch).loss * step.loss_scale
                loss.backward()
                mean_loss += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            number = scheduler.last_epoch
            if number % SAVE_EVERY == 0:
                save(
                    checkpoint,
                    model=model.state_dict(),
                    optimizer=optimizer.state_dict(),
                    scheduler=scheduler.state_dict(),
                    loader=loader.state_dict(),
                    random=torch.get_rng_state(),
                )
            print(f"update {number} of {num_updates}: loss {mean_loss:.4f}", flush=True)
    torch.save(model.state_dict(), folder / "model.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
