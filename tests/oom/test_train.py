"""Small models that run out of memory where a test says end with the parameters of models that never did."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from dynagroup import BudgetError, ConfigError, LearningBudget, OomSafeBackward, Share, Step
from dynagroup.testing import run_ranks
from tests import models
from tests.integrations.toys import parameters
from tests.models import Allocator, fails_in_backward

VOCAB = 23
PLACES = {
    "forward": "transformer.h.0",
    "third layer": "transformer.h.2",
    "start of backward": "lm_head",
}
PLACES |= {
    "backward": "transformer.h.1",
    "end of backward": "transformer.wte",
}  # then most buckets are sent
STEPS, ACCUMULATION, SAMPLES = 6, 2, 6
X = torch.arange(10, dtype=torch.float64).reshape(5, 2)


class Forgetful(LearningBudget):
    """Learns nothing, so that every batch fails that can."""

    def record_failed_cost(self, cost: float) -> None:
        pass


def small_model() -> Any:
    """A GPT-2 in float64: its layer norms and softmax stay in float64, unlike Llama's."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    config = models.gpt2(vocab=VOCAB, width=8, layers=4, n_positions=16, use_cache=False)
    return GPT2LMHeadModel(config).double().train()


def batch_of(seed: int, num_samples: int = SAMPLES) -> dict[str, torch.Tensor]:
    """Right padded; every third sample has no label to learn from."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (num_samples,), generator=generator)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    ids = torch.randint(1, VOCAB, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[::3] = -100
    labels[1, 1] = 5  # but the batch always has one
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def mean_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over next-token labels, in float64 (transformers' own casts logits to float32)."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100
    )


def batches_of(step: int, rank: int) -> list[dict[str, torch.Tensor]]:
    return [batch_of(1000 * step + 10 * rank + k) for k in range(ACCUMULATION)]


def loss_scales(step: int, size: int) -> list[list[float]]:
    """[rank][micro-batch]: so that DDP's mean over ranks is the mean over all labels of the update."""
    counts = [
        [int((b["labels"][:, 1:] != -100).sum()) for b in batches_of(step, rank)]
        for rank in range(size)
    ]
    return [[c * size / sum(map(sum, counts)) for c in row] for row in counts]


def trained(model: Any, backward: Any, ranks: Iterable[int], size: int) -> torch.Tensor:
    """Parameters after all steps; ``backward(batch, scale, ends)`` of each micro-batch of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        for rank in ranks:
            for k, (batch, scale) in enumerate(
                zip(batches_of(step, rank), loss_scales(step, size)[rank], strict=True)
            ):
                backward(batch, scale, k == ACCUMULATION - 1)
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def train_plainly(size: int) -> torch.Tensor:
    """What all of this must come to: one process, every rank's batches, nothing fails."""
    model = small_model()
    return trained(
        model,
        lambda b, scale, _: (mean_loss(model, b) * scale / size).backward(),
        range(size),
        size,
    )


def train_with_failures(
    place: str, limit: float, rank: int = 0, size: int = 1, **options: Any
) -> tuple[Any, Any, int]:
    """The same training in which a batch above ``limit`` tokens fails at ``place``. Returns parameters and failures."""
    model, allocator = small_model(), Allocator(limit)
    (allocator.in_backward if "backward" in place else allocator.in_forward)(
        model.get_submodule(PLACES[place])
    )
    wrapped = DistributedDataParallel(model) if size > 1 else model
    backward = OomSafeBackward(wrapped, **options)

    def guarded(batch: Any, scale: float, ends: bool) -> None:
        backward(lambda b: mean_loss(wrapped, b), batch, loss_scale=scale, ends_update=ends)

    return trained(model, guarded, [rank], size), backward, len(allocator.failures)


@pytest.fixture(scope="module")
def untroubled() -> torch.Tensor:
    return train_plainly(1)


@pytest.mark.parametrize("place", PLACES)
def test_parameters_are_those_of_a_run_that_never_failed(
    place: str, untroubled: torch.Tensor
) -> None:
    found, backward, failures = train_with_failures(place, limit=48, learned=Forgetful())
    assert failures > 5
    assert backward.learned.report.num_ooms == failures
    assert (found - untroubled).abs().max() < 1e-8
    assert untroubled.abs().max() > 0.1


class Linear(torch.nn.Module):
    """One weight vector, so gradients can be computed by hand; fails above a limit of samples."""

    def __init__(self, allocator: Allocator, features: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(features, dtype=torch.float64))
        self.allocator = allocator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.allocator.claim(len(x))
        return x @ self.weight


def linear(limit: float, **options: Any) -> tuple[Linear, OomSafeBackward]:
    model = Linear(Allocator(limit))
    return model, OomSafeBackward(model, weigh="samples", **options)


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
def test_parts_and_batches_that_wait_heed_what_failed_before_them_in_the_update(size: int) -> None:
    """Ranks learn together, at the vote; until then each heeds what failed on itself. Gradients are exact either way."""
    x = torch.arange(16, dtype=torch.float64).reshape(8, 2)

    def rank(world: Any) -> tuple[list[int], list[float], Any]:
        model, backward = linear(limit=2, world=world)
        for ends in (False, True):
            assert (
                backward(
                    lambda part: model(part).mean(), x, ends_update=ends, loss_scale=0.5
                ).num_parts
                == 4
            )
        assert getattr(world, "num_exchanges", 1) == 1, "one vote an update"
        return model.allocator.claims, model.weight.grad.tolist(), backward.learned.limit

    found = run_ranks(size, rank)
    assert found == [found[0]] * size
    passes, gradient, _ = found[0]
    assert passes == [8, 4, 2, 2, 2, 2] + [2, 2, 2, 2]
    assert gradient == x.mean(0).tolist()


def test_what_has_run_before_is_repeated_as_it_was() -> None:
    """Ten samples pass, eleven fail in backward. The ten cost nearly as much, but cut they would draw other dropout masks."""
    ten, eleven = (torch.ones(n, 2, dtype=torch.float64) for n in (10, 11))
    torch.manual_seed(3)
    drawn = [F.dropout(x, 0.5).sum(0) for x in (ten, eleven[:6], eleven[6:])]
    torch.manual_seed(3)
    model, allocator, drew = Linear(Allocator(11)), Allocator(10), list[Any]()
    backward = OomSafeBackward(model, weigh="samples")

    def loss(part: torch.Tensor) -> torch.Tensor:
        drew.append((random.random(), np.random.rand()))
        return fails_in_backward(model(F.dropout(part, 0.5)).mean(), allocator, len(part))

    assert [backward(loss, ten, ends_update=False).num_parts, backward(loss, eleven).num_parts] == [
        1,
        2,
    ]
    assert (model.allocator.claims, drew[0]) == ([10, 11, 10, 6, 5], drew[2])
    torch.testing.assert_close(model.weight.grad, drawn[0] / 10 + (drawn[1] + drawn[2]) / 11)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("cleared", [True, False])
def test_an_error_that_passes_through_ends_its_update(
    error: type[BaseException], cleared: bool
) -> None:
    """What came before it is not run again when memory runs out later; gradients are those of a plain"""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    limit = Allocator(9)
    remove = limit.in_backward(layers[0])
    backward = OomSafeBackward(layers, weigh="samples")
    loss = lambda x: layers(x[None]).mean()  # noqa: E731

    def gradients_are(*batches: torch.Tensor) -> None:
        wanted = torch.autograd.grad(
            torch.stack([loss(x) for x in batches]).sum(), list(layers.parameters())
        )
        torch.testing.assert_close([p.grad for p in layers.parameters()], [*wanted])

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise error

    loss(X[4:]).backward()  # there before the update
    backward(loss, X[:2], ends_update=False)
    with pytest.raises(error):
        backward(broken, X[2:3], ends_update=False)
    gradients_are(X[4:], X[:2])
    if cleared:
        layers.zero_grad()
    limit.limit = 3
    backward(loss, X[:4])
    assert limit.failures == [4]
    remove()
    gradients_are(*([X[:4]] if cleared else [X[4:], X[:2], X[:4]]))


def test_a_step_of_a_loader_an_idle_one_and_a_sample_that_does_not_fit_alone() -> None:
    model, backward = linear(limit=2)
    step = Step(X, range(5), Share(5, 5), Share(5, 5), loss_scale=2.0, ends_update=False)
    backward.step(lambda x: model(x).mean(), step)
    idle = Step(X, (), Share(0, 5), Share(0, 5), loss_scale=0.0, ends_update=True, idle=True)
    assert backward.step(lambda x: model(x).mean(), idle).num_parts == 0
    torch.testing.assert_close(model.weight.grad, 2 * X.mean(0))
    model, backward = linear(limit=0)
    with pytest.raises(
        BudgetError, match=r"sample 42 \(2 tokens\) does not fit on rank 0 even alone; truncate"
    ):
        backward(lambda x: model(x).mean(), X[:2], indices=[42, 43])
    assert model.weight.grad is None
    model.allocator.limit = 9
    backward(lambda x: model(x).mean(), X)  # the next update is none the worse
    torch.testing.assert_close(model.weight.grad, X.mean(0))


@pytest.mark.parametrize(("limit", "num"), [(8, 5), (5, 5), (2, 5), (1, 5), (1, 1)])
def test_parts_of_a_batch_that_is_filled_to_a_shape_have_the_weight_of_its_samples(
    limit: int, num: int
) -> None:
    """The filling is left out first, so a sample that does not fit with it is run alone."""
    model, backward = linear(limit)
    share, filled = Share(num, num), torch.cat([X[:num], X[:1].expand(8 - num, 2)])
    backward.step(
        lambda x: model(x)[:num].mean(),
        Step(filled, range(num), share, share, 1.0, True, filled=True),
    )
    torch.testing.assert_close(model.weight.grad, X[:num].mean(0))


def test_parts_have_at_least_min_samples() -> None:
    model, _ = linear(limit=2)
    backward = OomSafeBackward(model, weigh="samples", min_samples=2)
    assert backward(lambda x: model(x).mean(), X[:4]).num_parts == 2
    model.allocator.limit = 1
    with pytest.raises(
        BudgetError,
        match=r"fewer than 4 samples, from sample 7 on \(2 tokens\).*reduce `min_samples`",
    ):
        backward(lambda x: model(x).mean(), X[:3], indices=[7, 8, 9])


def test_weights_come_from_the_user_the_loss_or_the_tokens_as_loaders_count_them() -> None:
    model = Linear(Allocator(2))
    backward = OomSafeBackward(
        model, weigh="sum", backward=lambda loss: (8 * loss).backward()
    )  # as scalers do
    result = backward(lambda x: model(x).sum() / 5, X)
    torch.testing.assert_close(model.weight.grad, 8 * X.mean(0))
    assert result.num_parts == 3
    model = Linear(Allocator(1))
    backward = OomSafeBackward(model, weigh=lambda batch: float(batch["w"].sum()))
    batch = {"x": X[:2], "w": torch.tensor([1.0, 3.0])}
    result = backward(
        lambda b: (model(b["x"] + 1) * b["w"]).sum() / b["w"].sum(), batch, loss_scale=0.1
    )
    torch.testing.assert_close(model.weight.grad, (X[0] + 1 + 3 * (X[1] + 1)) / 40)
    assert result.loss.item() == 0  # its own, without the scale
    model, batch = Linear(Allocator(1)), {"x": X[:3], "labels": torch.tensor([-100, 4, -100])}
    result = OomSafeBackward(model)(lambda b: model(b["x"])[b["labels"] != -100].mean(), batch)
    assert (result.num_parts, model.weight.grad.tolist()) == (1, X[1].tolist()), (
        "a part without labels adds no NaN"
    )
    result = OomSafeBackward(model)(
        lambda b: model(b["x"])[:0].mean(), {"x": X[:1], "labels": X[:1]}, loss_scale=0.0
    )
    assert (result.loss.item(), model.weight.grad.tolist()) == (0.0, X[1].tolist()), (
        "nor does a batch without labels"
    )
    # The first label of a sample is not predicted: lengths 9 and 4 have 8 and 3 tokens in the mean.
    model = torch.nn.Sequential(torch.nn.Embedding(30, 6), torch.nn.Linear(6, 30)).double()
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.arange(1, 10), torch.arange(3, 7)], batch_first=True
    )
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    def loss_of(part: dict[str, torch.Tensor]) -> torch.Tensor:
        predicted, labels = model(part["input_ids"])[:, :-1], part.pop("labels")[:, 1:]
        return F.cross_entropy(predicted.reshape(-1, 30), labels.reshape(-1), ignore_index=-100)

    whole = torch.autograd.grad(loss_of({**batch}), list(model.parameters()))
    (allocator := Allocator(17)).in_forward(model)
    OomSafeBackward(model)(loss_of, batch)
    assert allocator.failures == [18]
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [*whole], rtol=1e-12, atol=1e-15
    )


class FSDPModule(torch.nn.Linear):
    """Named like those that share their parameters among ranks."""


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Linear(Allocator(1)),
            {"weigh": "bytes"},
            "`weigh` must be 'tokens', 'labels', 'samples' or a function .*'bytes'",
        ),
        (
            Linear(Allocator(2)),
            {},
            "weigh='tokens' or 'labels' needs a field 'labels' in every batch, but this Tensor has none",
        ),
        (Linear(Allocator(2)), {"learned": 3}, "`learned` must be a LearningBudget .* but is 3"),
        (
            FSDPModule(1, 1),
            {},
            "`model` contains FSDPModule, with which no rank can repeat a step alone",
        ),
        (
            Linear(Allocator(9), features=3),
            {},
            "mat1 and mat2|size mismatch|inconsistent",
        ),  # not ours: it passes through
    ],
)
def test_what_cannot_be_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError if "size" in message else ConfigError, match=message):
        OomSafeBackward(model, **options)(lambda x: model(x).mean(), X)
    with pytest.raises(
        ConfigError, match=r"`compute_loss` must return a scalar, but returned shape \(5, 2\)"
    ):
        OomSafeBackward(Linear(Allocator(9)))(lambda x: x, X)
