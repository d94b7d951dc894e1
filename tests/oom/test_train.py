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
from tests.models import Allocator, fails_in_backward

Batch = dict[str, torch.Tensor]
VOCAB = 23
PLACES = {
    "forward": "transformer.h.0",
    "third layer": "transformer.h.2",
    "start of backward": "lm_head",
    "backward": "transformer.h.1",
    "end of backward": "transformer.wte",  # by then most buckets are sent
}
STEPS = 6
ACCUMULATION = 2
SAMPLES = 6
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


def batch_of(seed: int, num_samples: int = SAMPLES) -> Batch:
    """Right padded; every third sample has no label to learn from."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 13, (num_samples,), generator=generator)
    mask = (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long()
    ids = torch.randint(1, VOCAB, mask.shape, generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    labels[::3] = -100
    labels[1, 1] = 5  # but the batch always has one
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over next-token labels, in float64 (transformers' own casts logits to float32)."""
    predicted = logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=-100)


def mean_loss(model: Any, batch: Batch) -> torch.Tensor:
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return next_token_loss(output.logits, batch["labels"])


def batches_of(step: int, rank: int) -> list[Batch]:
    return [batch_of(1000 * step + 10 * rank + k) for k in range(ACCUMULATION)]


def num_labels(batch: Batch) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def loss_scales(step: int, size: int) -> list[list[float]]:
    """[rank][micro-batch]: so that DDP's mean over ranks is the mean over all labels of the update."""
    counts = np.array([list(map(num_labels, batches_of(step, rank))) for rank in range(size)])
    return (counts * size / counts.sum()).tolist()


def trained(model: Any, backward: Any, ranks: Iterable[int], size: int) -> torch.Tensor:
    """Parameters after all steps; ``backward(batch, scale, ends)`` of each micro-batch of these ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        scales = loss_scales(step, size)
        for rank in ranks:
            for k, batch in enumerate(batches_of(step, rank)):
                backward(batch, scales[rank][k], k == ACCUMULATION - 1)
        optimizer.step()
        optimizer.zero_grad()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def train_plainly(size: int) -> torch.Tensor:
    """What all of this must come to: one process, every rank's batches, nothing fails."""
    model = small_model()

    def backward(batch: Batch, scale: float, ends: bool) -> None:
        (mean_loss(model, batch) * scale / size).backward()

    return trained(model, backward, range(size), size)


def train_with_failures(
    place: str, limit: float, rank: int = 0, size: int = 1, **options: Any
) -> tuple[Any, Any, int]:
    """The same training in which a batch above ``limit`` tokens fails at ``place``. Returns parameters and failures."""
    model = small_model()
    allocator = Allocator(limit)
    layer = model.get_submodule(PLACES[place])
    if "backward" in place:
        allocator.in_backward(layer)
    else:
        allocator.in_forward(layer)
    wrapped = DistributedDataParallel(model) if size > 1 else model
    backward = OomSafeBackward(wrapped, **options)

    def loss_of(batch: Batch) -> torch.Tensor:
        return mean_loss(wrapped, batch)

    def run_batch(batch: Batch, scale: float, ends: bool) -> None:
        backward(loss_of, batch, loss_scale=scale, ends_update=ends)

    return trained(model, run_batch, [rank], size), backward, len(allocator.failures)


@pytest.fixture(scope="module")
def untroubled() -> torch.Tensor:
    return train_plainly(1)


@pytest.mark.parametrize("place", PLACES)
def test_parameters_are_those_of_a_run_that_never_failed(
    place: str, untroubled: torch.Tensor
) -> None:
    final, backward, num_failures = train_with_failures(place, limit=48, learned=Forgetful())
    assert num_failures > 5
    assert backward.learned.report.num_ooms == num_failures
    assert (final - untroubled).abs().max() < 1e-8
    assert untroubled.abs().max() > 0.1


class Linear(torch.nn.Module):
    """One weight vector, so gradients can be computed by hand; fails above a limit of samples."""

    def __init__(self, limit: float, features: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(features, dtype=torch.float64))
        self.allocator = Allocator(limit)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.allocator.claim(len(x))
        return x @ self.weight

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).mean()


def guarded(model: torch.nn.Module, **options: Any) -> OomSafeBackward:
    return OomSafeBackward(model, weigh="samples", **options)


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
def test_parts_and_batches_that_wait_heed_what_failed_before_them_in_the_update(size: int) -> None:
    """Ranks learn together, at the vote; until then each heeds what failed on itself. Gradients are exact either way."""
    x = torch.arange(16, dtype=torch.float64).reshape(8, 2)

    def run(world: Any) -> tuple[list[int], list[float], Any]:
        model = Linear(limit=2)
        backward = guarded(model, world=world)
        first = backward(model.mean, x, ends_update=False, loss_scale=0.5)
        second = backward(model.mean, x, ends_update=True, loss_scale=0.5)
        assert first.num_parts == second.num_parts == 4
        if size > 1:
            assert world.num_exchanges == 1, "one vote an update"
        return model.allocator.claims, model.weight.grad.tolist(), backward.learned.limit

    ranks = run_ranks(size, run)
    assert ranks == [ranks[0]] * size
    claims, gradient, _ = ranks[0]
    assert claims == [8, 4, 2, 2, 2, 2] + [2, 2, 2, 2]
    assert gradient == x.mean(0).tolist()


def test_what_has_run_before_is_repeated_as_it_was() -> None:
    """Ten samples pass, eleven fail in backward. The ten cost nearly as much, but cut they would draw other dropout masks."""
    ten = torch.ones(10, 2, dtype=torch.float64)
    eleven = torch.ones(11, 2, dtype=torch.float64)
    torch.manual_seed(3)
    dropped = [F.dropout(x, 0.5).sum(0) for x in (ten, eleven[:6], eleven[6:])]
    torch.manual_seed(3)
    model = Linear(limit=11)
    allocator = Allocator(10)
    randoms = []
    backward = guarded(model)

    def loss_of(part: torch.Tensor) -> torch.Tensor:
        randoms.append((random.random(), np.random.rand()))
        return fails_in_backward(model.mean(F.dropout(part, 0.5)), allocator, len(part))

    assert backward(loss_of, ten, ends_update=False).num_parts == 1
    assert backward(loss_of, eleven).num_parts == 2
    assert model.allocator.claims == [10, 11, 10, 6, 5]
    assert randoms[0] == randoms[2]
    expected = dropped[0] / 10 + (dropped[1] + dropped[2]) / 11
    torch.testing.assert_close(model.weight.grad, expected)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("cleared", [True, False])
def test_an_error_that_passes_through_ends_its_update(
    error: type[BaseException], cleared: bool
) -> None:
    """What came before it is not run again when memory runs out later; gradients are those of plain backwards."""
    layers = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    allocator = Allocator(9)
    remove = allocator.in_backward(layers[0])
    backward = guarded(layers)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return layers(x[None]).mean()

    def assert_gradients_are_of(*batches: torch.Tensor) -> None:
        loss = torch.stack(list(map(loss_of, batches))).sum()
        expected = torch.autograd.grad(loss, list(layers.parameters()))
        gradients = tuple(parameter.grad for parameter in layers.parameters())
        torch.testing.assert_close(gradients, expected)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise error

    loss_of(X[4:]).backward()  # there before the update
    backward(loss_of, X[:2], ends_update=False)
    with pytest.raises(error):
        backward(broken, X[2:3], ends_update=False)
    assert_gradients_are_of(X[4:], X[:2])
    if cleared:
        layers.zero_grad()
    allocator.limit = 3
    backward(loss_of, X[:4])
    assert allocator.failures == [4]
    remove()
    if cleared:
        assert_gradients_are_of(X[:4])
    else:
        assert_gradients_are_of(X[4:], X[:2], X[:4])


def test_a_loaders_step_has_its_scale_and_an_idle_one_runs_nothing() -> None:
    model = Linear(limit=2)
    backward = guarded(model)
    whole = Share(5, 5)
    backward.step(model.mean, Step(X, range(5), whole, whole, loss_scale=2.0, ends_update=False))
    none = Share(0, 5)
    idle = Step(X, (), none, none, loss_scale=0.0, ends_update=True, idle=True)
    assert backward.step(model.mean, idle).num_parts == 0
    torch.testing.assert_close(model.weight.grad, 2 * X.mean(0))


def test_a_sample_that_does_not_fit_alone_is_named_and_the_next_update_is_none_the_worse() -> None:
    model = Linear(limit=0)
    backward = guarded(model)
    message = r"sample 42 \(2 tokens\) does not fit on rank 0 even alone; truncate"
    with pytest.raises(BudgetError, match=message):
        backward(model.mean, X[:2], indices=[42, 43])
    assert model.weight.grad is None
    model.allocator.limit = 9
    backward(model.mean, X)
    torch.testing.assert_close(model.weight.grad, X.mean(0))


@pytest.mark.parametrize(("limit", "num"), [(8, 5), (5, 5), (2, 5), (1, 5), (1, 1)])
def test_parts_of_a_batch_that_is_filled_to_a_shape_have_the_weight_of_its_samples(
    limit: int, num: int
) -> None:
    """The filling is left out first, so a sample that does not fit with it is run alone."""
    model = Linear(limit)
    batch = torch.cat([X[:num], X[:1].expand(8 - num, 2)])
    share = Share(num, num)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x)[:num].mean()

    guarded(model).step(loss_of, Step(batch, range(num), share, share, 1.0, True, filled=True))
    torch.testing.assert_close(model.weight.grad, X[:num].mean(0))


def test_parts_have_at_least_min_samples() -> None:
    model = Linear(limit=2)
    backward = guarded(model, min_samples=2)
    assert backward(model.mean, X[:4]).num_parts == 2
    model.allocator.limit = 1
    message = r"fewer than 4 samples, from sample 7 on \(2 tokens\).*reduce `min_samples`"
    with pytest.raises(BudgetError, match=message):
        backward(model.mean, X[:3], indices=[7, 8, 9])


def test_parts_of_a_sum_have_its_own_weights_and_a_backward_of_the_user_is_called() -> None:
    model = Linear(limit=2)

    def scaled_backward(loss: torch.Tensor) -> None:  # as gradient scalers do
        (8 * loss).backward()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() / 5

    result = OomSafeBackward(model, weigh="sum", backward=scaled_backward)(loss_of, X)
    torch.testing.assert_close(model.weight.grad, 8 * X.mean(0))
    assert result.num_parts == 3


def test_weights_may_be_a_function_of_the_batch() -> None:
    model = Linear(limit=1)

    def weight_of(batch: Batch) -> float:
        return float(batch["w"].sum())

    def loss_of(batch: Batch) -> torch.Tensor:
        return (model(batch["x"] + 1) * batch["w"]).sum() / batch["w"].sum()

    batch = {"x": X[:2], "w": torch.tensor([1.0, 3.0])}
    result = OomSafeBackward(model, weigh=weight_of)(loss_of, batch, loss_scale=0.1)
    torch.testing.assert_close(model.weight.grad, (X[0] + 1 + 3 * (X[1] + 1)) / 40)
    assert result.loss.item() == 0, "its own, without the scale"


def test_a_part_without_labels_adds_no_nan() -> None:
    model = Linear(limit=1)

    def loss_of(batch: Batch) -> torch.Tensor:
        return model(batch["x"])[batch["labels"] != -100].mean()

    batch = {"x": X[:3], "labels": torch.tensor([-100, 4, -100])}
    result = OomSafeBackward(model)(loss_of, batch)
    assert result.num_parts == 1
    assert model.weight.grad.tolist() == X[1].tolist()


def test_a_batch_without_labels_adds_no_nan() -> None:
    model = Linear(limit=1)
    model.weight.grad = X[1].clone()

    def mean_of_none(batch: Batch) -> torch.Tensor:
        return model(batch["x"])[:0].mean()

    batch = {"x": X[:1], "labels": X[:1]}
    result = OomSafeBackward(model)(mean_of_none, batch, loss_scale=0.0)
    assert result.loss.item() == 0.0
    assert model.weight.grad.tolist() == X[1].tolist()


def test_weights_are_label_tokens_but_the_first_as_loaders_count_them() -> None:
    """The first label of a sample is not predicted: lengths 9 and 4 have 8 and 3 tokens in the mean."""
    model = torch.nn.Sequential(torch.nn.Embedding(30, 6), torch.nn.Linear(6, 30)).double()
    rows = [torch.arange(1, 10), torch.arange(3, 7)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    def loss_of(part: Batch) -> torch.Tensor:
        return next_token_loss(model(part["input_ids"]), part.pop("labels"))

    whole = torch.autograd.grad(loss_of({**batch}), list(model.parameters()))
    allocator = Allocator(17)
    allocator.in_forward(model)
    OomSafeBackward(model)(loss_of, batch)
    assert allocator.failures == [18]
    gradients = tuple(parameter.grad for parameter in model.parameters())
    torch.testing.assert_close(gradients, whole, rtol=1e-12, atol=1e-15)


class FSDPModule(torch.nn.Linear):
    """Named like those that share their parameters among ranks."""


REFUSED: list[tuple[torch.nn.Module, dict[str, Any], str]] = [
    (
        Linear(1),
        {"weigh": "bytes"},
        "`weigh` must be 'tokens', 'labels', 'samples' or a function .*'bytes'",
    ),
    (
        Linear(2),
        {},
        "weigh='tokens' or 'labels' needs a field 'labels' in every batch, but this Tensor has none",
    ),
    (Linear(2), {"learned": 3}, "`learned` must be a LearningBudget .* but is 3"),
    (
        FSDPModule(1, 1),
        {},
        "`model` contains FSDPModule, with which no rank can repeat a step alone",
    ),
]


@pytest.mark.parametrize(("model", "options", "message"), REFUSED)
def test_what_cannot_be_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OomSafeBackward(model, **options)(lambda x: model(x).mean(), X)


def test_other_errors_of_a_model_pass_through() -> None:
    model = Linear(limit=9, features=3)
    with pytest.raises(RuntimeError, match="mat1 and mat2|size mismatch|inconsistent"):
        OomSafeBackward(model)(model.mean, X)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    message = r"`compute_loss` must return a scalar, but returned shape \(5, 2\)"
    with pytest.raises(ConfigError, match=message):
        OomSafeBackward(Linear(limit=9))(lambda x: x, X)
