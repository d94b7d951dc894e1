"""Batches filled to few shapes: gradients are those of the samples alone, and what cannot be filled is refused."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dynagroup import (
    BudgetError,
    ConfigError,
    OnlineDataLoader,
    PlannedDataLoader,
    ShapeLadder,
    TokenBudget,
    preflight,
)
from dynagroup.oom import preflight as flight
from dynagroup.testing import Allocator, run_ranks
from dynagroup.update.filling import FillingCollator
from tests.online.helpers import lengths_of

LENGTHS, WORDS = lengths_of(60, seed=3, top=30), 12


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(
            1, WORDS, (LENGTHS[index],), generator=torch.Generator().manual_seed(index)
        )


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": ids.masked_fill(ids == 0, -100),
    }


class Model(torch.nn.Module):
    """Tokens see the mean of those before them, and padding behind them is not seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(WORDS, 6), torch.nn.Linear(6, WORDS)
        self.double()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        states = self.embed(input_ids) * attention_mask[..., None]
        states = states.cumsum(1) / attention_mask.cumsum(1).clamp(min=1)[..., None]
        return torch.nn.functional.cross_entropy(
            self.head(states[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
        )


def gradient(model: Model) -> torch.Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("num_shapes", [1, 4])
def test_gradients_are_those_of_the_samples_alone(ranks: int, num_shapes: int) -> None:
    model, texts = Model(), Texts()
    own = [
        copy.deepcopy(model) for _ in range(ranks)
    ]  # made here: ranks are threads, and a seed is the process's

    def run(world: Any) -> list[torch.Tensor]:
        how: dict[str, Any] = {
            "samples_per_update": 16,
            "shapes": num_shapes,
            "collate_fn": collate,
            "world": world,
        }
        loader, model = PlannedDataLoader(Texts(), LENGTHS, TokenBudget(90), **how), own[world.rank]
        found = []
        for update in loader.updates():
            for step in update:
                (model(**step.batch) * step.loss_scale).backward()
            found.append(
                (gradient(model), [i for step in update if not step.idle for i in step.indices])
            )
        return found

    for parts in zip(*run_ranks(ranks, run), strict=True):
        model(**collate([texts[i] for _, indices in parts for i in indices])).backward()
        averaged = torch.stack([part for part, _ in parts]).mean(0)
        torch.testing.assert_close(averaged, gradient(model), rtol=1e-8, atol=1e-12)


class Named:
    """A collate function that gives this batch."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.tokenizer = batch, SimpleNamespace(pad_token_id=9)

    def __call__(self, samples: list[Any]) -> Any:
        return self.batch


def test_literal_filled_batches() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 9]])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids < 9).long(),
        "labels": ids,
        "label": torch.tensor([1, 0]),
    }
    batch |= {"names": ["a", "b"], "speed": 3, "x": torch.ones(2, 3)}
    ladder = ShapeLadder([5, 5, 5], 15, 1)
    made = FillingCollator(Named(batch), ladder, {"x": None})([0, 1])
    assert made["input_ids"].tolist() == [[1, 2, 3, 9, 9], [4, 5, 9, 9, 9], [1, 2, 3, 9, 9]]
    assert made["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert made["labels"].tolist() == [[1, 2, 3, -100, -100], [4, 5, 9, -100, -100], [-100] * 5]
    assert made["label"].tolist() == [1, 0, -100]
    assert (made["names"], made["speed"], tuple(made["x"].shape)) == (["a", "b", "a"], 3, (3, 3))
    pad = lambda batch, count, ladder: (count, ladder.shape_for(count, batch.shape[1]))  # noqa: E731
    assert FillingCollator(Named(ids), ladder, pad)([0, 1]) == (2, (3, 5))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(2, 3), "only a mapping can be padded to few shapes, not a Tensor; give `pad`"),
        (
            {"input_ids": torch.ones(2, 3), "seen": torch.ones(2, 3)},
            "'seen' is as wide as the tokens, but has no padding",
        ),
        (
            {"input_ids": torch.ones(2, 3), "labels": torch.ones(2)},
            "to the field 'labels' .2,. of 2 samples",
        ),
        (
            {"input_ids": torch.ones(2, 3), "pixel_values": torch.ones(5, 3)},
            "to the field 'pixel_values' .5, 3. of 2 samples",
        ),
        ({"ids": torch.ones(2, 3)}, "cannot find the length of 'tokens' in any field of the batch"),
        (
            {"input_ids": torch.ones(2, 6)},
            r"has \[6\] tokens after collating, more than any of the shapes \[\(3, 5\)\]",
        ),
    ],
)
def test_what_cannot_be_filled_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FillingCollator(Named(batch), ShapeLadder([5, 5, 5], 15, 1))([0, 1])


def test_filling_counts_as_padding() -> None:
    how: dict[str, Any] = {
        "samples_per_update": 16,
        "shapes": 4,
        "weigh": lambda batch: len(batch["input_ids"]),
    }
    steps = [
        *(loader := PlannedDataLoader(Texts(), LENGTHS, TokenBudget(90), collate_fn=collate, **how))
    ]
    assert all(step.weight == step.samples for step in steps), (
        "`weigh` gets the batch before rows are added"
    )
    shown = sum(step.batch["input_ids"].numel() for step in steps)
    assert loader.stats.padded_tokens == shown == loader.plan_of(0).statistics["padded_tokens"]
    assert loader.stats.real_tokens == sum(LENGTHS)
    assert np.isclose(loader.stats.padding, 1 - sum(LENGTHS) / shown)


@pytest.mark.parametrize("shapes", [3, None])
@pytest.mark.parametrize("make", ["planned", "online"])
def test_each_shape_is_run_beforehand_and_nothing_has_changed(
    shapes: int | None, make: str
) -> None:
    how: dict[str, Any] = {"collate_fn": collate, "samples_per_update": 16, "shapes": shapes}
    loader: Any = PlannedDataLoader(Texts(), LENGTHS, TokenBudget(90), **how)
    if make == "online":
        loader = OnlineDataLoader(
            Texts(), TokenBudget(90), length_of=len, length_hint=LENGTHS, **how
        )
    model, met = Model(), []
    model.register_buffer("seen", torch.zeros(1))
    model(**collate([Texts()[0]])).backward()
    before = {
        "gradient": model.head.bias.grad.clone(),
        "random": torch.get_rng_state(),
        "place": loader.state_dict(),
    }

    def compute_loss(model: Model, batch: Any) -> torch.Tensor:
        met.append(tuple(batch["input_ids"].shape))
        model.seen += torch.rand(1)
        return model(**batch)

    found = preflight(model, loader, compute_loss)
    assert met == found == sorted(found, key=lambda shape: -shape[0] * shape[1])
    assert (
        (set(found) == set(loader.budget.shapes))
        if shapes
        else max(length for _, length in found) == max(LENGTHS)
    )
    torch.testing.assert_close(model.head.bias.grad, before["gradient"], rtol=0, atol=0)
    assert model.seen.item() == 0
    assert torch.equal(torch.get_rng_state(), before["random"])
    assert loader.state_dict() == before["place"]
    if shapes and make == "planned":
        assert {tuple(step.batch["input_ids"].shape) for step in loader} <= set(found)


def test_of_many_samples_some_are_looked_at_and_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "SAMPLED", 4)
    lengths, ids = np.full(1000, 3), torch.ones(30, 2)
    lengths[777] = 30
    data, how = [ids[:n] for n in lengths], {"weigh": "samples", "collate_fn": lambda rows: rows[0]}
    loader = PlannedDataLoader(data, lengths, TokenBudget(30), **how)
    assert preflight(torch.nn.Linear(2, 1), loader, lambda model, batch: model(batch).sum()) == [
        (10, 3),
        (1, 30),
    ]


def test_a_shape_that_runs_out_of_memory_is_named_beforehand() -> None:
    loader = PlannedDataLoader(Texts(), LENGTHS, TokenBudget(90), collate_fn=collate, shapes=3)
    Allocator(80).in_forward(model := Model())
    with pytest.raises(
        BudgetError, match=r"a batch of \d+ samples of \d+ tokens, which the budget allows, ran out"
    ):
        preflight(model, loader, lambda model, batch: model(**batch))
    assert model.head.bias.grad is None
