"""Adaptive mixing: each update holds fixed shares of three sources, and the shares follow the loss of each source.

usage: python examples/train_mixture.py
"""

from __future__ import annotations

import torch

from dynagroup import Mixture, PlannedDataLoader, TokenBudget

VOCAB = 20
SOURCES = {"easy": range(100), "hard": range(100, 200), "rare": range(200, 210)}
EVERY = 5  # updates between two changes of the shares


def make_rows() -> list[list[int]]:
    """Rows of the easy source repeat one token; those of the others are random."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(210):
        length = 3 + (7 * number) % 30
        row = torch.full((length,), 1)
        if number >= 100:
            row = torch.randint(1, VOCAB, (length,), generator=generator)
        rows.append(row.tolist())
    return rows


def collate(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], ignore_index=0)


def predicted_tokens(ids: torch.Tensor) -> float:
    return float(ids[:, 1:].ne(0).sum())


def main(epochs: int = 2) -> list[dict[str, int]]:
    """Returns how many samples of each source each update had."""
    torch.manual_seed(0)
    rows = make_rows()
    shares = {"easy": 10, "hard": 5, "rare": 1}
    mixture = Mixture(SOURCES, shares, samples_per_update=16, num_samples=320)
    loader = PlannedDataLoader(
        rows,
        [len(row) for row in rows],
        TokenBudget(200),
        samples_per_update=16,
        sampler=mixture,
        collate_fn=collate,
        weigh=predicted_tokens,
    )
    embedding = torch.nn.Embedding(VOCAB, 16)
    model = torch.nn.Sequential(embedding, torch.nn.Linear(16, VOCAB))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    probes = {name: collate([rows[i] for i in members[:10]]) for name, members in SOURCES.items()}
    counts = []
    for _ in range(epochs):
        for update in loader.updates():
            for step in update:
                (loss_of(model, step.batch) * step.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            indices = [index for step in update for index in step.indices]
            counts.append({name: count(indices, SOURCES[name]) for name in SOURCES})
            if len(counts) % EVERY == 0:
                with torch.no_grad():
                    losses = {name: float(loss_of(model, ids)) for name, ids in probes.items()}
                # Sources with a higher loss get more samples; the rare source keeps its sample.
                mixture.set_shares({"easy": losses["easy"], "hard": losses["hard"], "rare": 0.2})
    return counts


def count(indices: list[int], members: range) -> int:
    return sum(index in members for index in indices)


if __name__ == "__main__":
    for number, of_update in enumerate(main()):
        print(number, of_update)
