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

LENGTHS = lengths_of(60, seed=3, top=30)
WORDS = 12
BUDGET = TokenBudget(90)


class Texts(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, WORDS, (LENGTHS[index],), generator=generator)


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (ids > 0).long()
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def planned(**options: Any) -> Any:
    return PlannedDataLoader(Texts(), LENGTHS, BUDGET, collate_fn=collate, **options)


def online(**options: Any) -> Any:
    return OnlineDataLoader(
        Texts(), BUDGET, collate_fn=collate, length_of=len, length_hint=LENGTHS, **options
    )


class Model(torch.nn.Module):
    """Tokens see the mean of those before them, and padding behind them is not seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(WORDS, 6)
        self.head = torch.nn.Linear(6, WORDS)
        self.double()

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> torch.Tensor:
        states = self.embed(input_ids) * attention_mask[..., None]
        num_seen = attention_mask.cumsum(1).clamp(min=1)
        states = states.cumsum(1) / num_seen[..., None]
        logits = self.head(states[:, :-1]).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


def take_gradient(model: Model) -> torch.Tensor:
    parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def indices_of(update: list[Any]) -> list[int]:
    indices: list[int] = []
    for step in update:
        if not step.idle:
            indices += step.indices
    return indices


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("num_shapes", [1, 4])
def test_gradients_are_those_of_the_samples_alone(ranks: int, num_shapes: int) -> None:
    model = Model()
    texts = Texts()
    # Copied here: ranks are threads, and a seed is the process's.
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def run(world: Any) -> list[tuple[torch.Tensor, list[int]]]:
        loader = planned(samples_per_update=16, shapes=num_shapes, world=world)
        of_rank = copies[world.rank]
        updates = []
        for update in loader.updates():
            for step in update:
                loss = of_rank(**step.batch) * step.loss_scale
                loss.backward()
            updates.append((take_gradient(of_rank), indices_of(update)))
        return updates

    for update_of_ranks in zip(*run_ranks(ranks, run), strict=True):
        gradients, indices = zip(*update_of_ranks, strict=True)
        samples = [texts[index] for index in sum(indices, [])]
        model(**collate(samples)).backward()
        averaged = torch.stack(gradients).mean(0)
        torch.testing.assert_close(averaged, take_gradient(model), rtol=1e-8, atol=1e-12)


class Named:
    """A collate function that gives this batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.tokenizer = SimpleNamespace(pad_token_id=9)

    def __call__(self, samples: list[Any]) -> Any:
        return self.batch


LADDER = ShapeLadder([5, 5, 5], 15, 1)
IDS = torch.tensor([[1, 2, 3], [4, 5, 9]])


def filled(batch: Any, pad: Any = None) -> Any:
    collator = FillingCollator(Named(batch), LADDER, pad)
    return collator([0, 1])


def test_tokens_are_padded_by_their_field() -> None:
    mask = (IDS < 9).long()
    batch = filled({"input_ids": IDS, "attention_mask": mask, "labels": IDS})
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9], [4, 5, 9, 9, 9], [1, 2, 3, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3, -100, -100], [4, 5, 9, -100, -100], [-100] * 5]


def test_what_is_not_of_tokens_gets_rows_alone() -> None:
    label = torch.tensor([1, 0])
    batch = {"input_ids": IDS, "label": label, "names": ["a", "b"], "speed": 3}
    batch["x"] = torch.ones(2, 3)
    batch = filled(batch, pad={"x": None})
    assert batch["label"].tolist() == [1, 0, -100]
    assert batch["names"] == ["a", "b", "a"]
    assert batch["speed"] == 3
    assert batch["x"].shape == (3, 3)


def test_a_function_pads_what_is_no_mapping() -> None:
    def pad(batch: Any, count: int, ladder: ShapeLadder) -> Any:
        return count, ladder.shape_for(count, batch.shape[1])

    assert filled(IDS, pad) == (2, (3, 5))


ROWS = torch.ones(2, 3)
REFUSED = [
    (ROWS, "only a mapping can be padded to few shapes, not a Tensor; give `pad`"),
    ({"input_ids": ROWS, "seen": ROWS}, "'seen' is as wide as the tokens, but has no padding"),
    ({"input_ids": ROWS, "labels": torch.ones(2)}, "to the field 'labels' .2,. of 2 samples"),
    (
        {"input_ids": ROWS, "pixel_values": torch.ones(5, 3)},
        "to the field 'pixel_values' .5, 3. of 2 samples",
    ),
    ({"ids": ROWS}, "cannot find the length of 'tokens' in any field of the batch"),
    (
        {"input_ids": torch.ones(2, 6)},
        r"has 6 tokens after collating, more than any of the shapes \[\(3, 5\)\]",
    ),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED)
def test_what_cannot_be_filled_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filled(batch)


def test_filling_counts_as_padding() -> None:
    loader = planned(samples_per_update=16, shapes=4)
    num_tokens = sum(step.batch["input_ids"].numel() for step in loader)
    assert loader.stats.padded_tokens == num_tokens
    assert loader.plan_of(0).statistics["padded_tokens"] == num_tokens
    assert loader.stats.real_tokens == sum(LENGTHS)
    assert np.isclose(loader.stats.padding, 1 - sum(LENGTHS) / num_tokens)


def test_weigh_gets_the_batch_before_rows_are_added() -> None:
    loader = planned(samples_per_update=16, shapes=4, weigh=lambda batch: len(batch["input_ids"]))
    steps = list(loader)
    assert [step.weight for step in steps] == [step.samples for step in steps]


def area(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


@pytest.fixture(params=[3, None])
def num_shapes(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture(params=[planned, online])
def loader(request: pytest.FixtureRequest, num_shapes: int | None) -> Any:
    return request.param(samples_per_update=16, shapes=num_shapes)


@pytest.mark.filterwarnings("ignore:.*of the tokens are padding")
def test_each_shape_is_run_beforehand(loader: Any, num_shapes: int | None) -> None:
    met: list[tuple[int, int]] = []

    def compute_loss(model: Model, batch: Any) -> torch.Tensor:
        met.append(tuple(batch["input_ids"].shape))
        return model(**batch)

    shapes = preflight(Model(), loader, compute_loss)
    assert met == shapes == sorted(shapes, key=area, reverse=True)
    if num_shapes is None:
        assert max(length for _, length in shapes) == max(LENGTHS)
        return
    assert set(shapes) == set(loader.budget.shapes)
    if isinstance(loader, PlannedDataLoader):
        assert {tuple(step.batch["input_ids"].shape) for step in loader} <= set(shapes)


def test_nothing_has_changed_after_shapes_are_run(loader: Any) -> None:
    model = Model()
    model.register_buffer("seen", torch.zeros(1))
    model(**collate([Texts()[0]])).backward()
    gradient = model.head.bias.grad.clone()
    random_state = torch.get_rng_state()
    state = loader.state_dict()

    def compute_loss(model: Model, batch: Any) -> torch.Tensor:
        model.seen += torch.rand(1)
        return model(**batch)

    preflight(model, loader, compute_loss)
    torch.testing.assert_close(model.head.bias.grad, gradient, rtol=0, atol=0)
    assert model.seen.item() == 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loader.state_dict() == state


def test_of_many_samples_some_are_looked_at_and_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flight, "SAMPLED", 4)
    lengths = [3] * 1000
    lengths[777] = 30
    data = [torch.ones(length, 2) for length in lengths]
    loader = PlannedDataLoader(
        data, lengths, TokenBudget(30), weigh="samples", collate_fn=lambda rows: rows[0]
    )
    model = torch.nn.Linear(2, 1)
    shapes = preflight(model, loader, lambda model, batch: model(batch).sum())
    assert shapes == [(10, 3), (1, 30)]


def test_a_shape_that_runs_out_of_memory_is_named_beforehand() -> None:
    model = Model()
    Allocator(80).in_forward(model)
    message = r"a batch of \d+ samples of \d+ tokens, which the budget allows, ran out"
    with pytest.raises(BudgetError, match=message):
        preflight(model, planned(shapes=3), lambda model, batch: model(**batch))
    assert model.head.bias.grad is None
