"""Packed batches train what padded fixed batches train: the same samples an update, the same losses and parameters."""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import DataCollatorWithFlattening, LlamaForCausalLM

from benchmarks.data import lengths_of
from dynagroup import AdditiveCap, ConfigError, OnlineDataLoader, PlannedDataLoader, TokenBudget
from dynagroup.integrations.varlen import NAME, use_varlen_attention
from dynagroup.testing import run_ranks
from tests import models
from tests.integrations import toys
from tests.integrations.toys import parameters, trainer
from tests.online.helpers import Tokens
from tests.plan.helpers import uneven_rows

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


FLAT = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
BUDGET = TokenBudget(90, layout="packed")
LEARNING_RATE = 0.05
CASES = [
    ("planned", "eager", None),
    ("planned", "varlen", 3),
    ("online", "sdpa", None),
    ("online", "varlen", 3),
]


def llama(attention: str) -> Any:
    torch.manual_seed(0)
    chosen = "eager" if attention == "varlen" else attention
    config = models.llama(vocab=toys.VOCAB, inner=24, pad_token_id=0, attn_implementation=chosen)
    config.use_cache = False  # with a cache transformers masks nothing between packed samples
    model = LlamaForCausalLM(config).double()
    return use_varlen_attention(model) if attention == "varlen" else model


def summed_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The sum over next-token labels in float64; transformers' own casts logits to float32."""
    labels = batch["labels"]
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"})
    return toys.float64_causal_loss(outputs, labels, 1)


def fixed(order: list[list[int]]) -> tuple[torch.Tensor, list[float]]:
    """One process, padded batches: each update the mean over all its label tokens."""
    model = llama("sdpa")
    rows = toys.samples("causal", 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for update in order:
        batch = toys.collate([rows[index] for index in update])
        num_labels = (batch["labels"][:, 1:] != -100).sum()
        loss = summed_loss(model, batch) / num_labels
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return parameters(model), losses


class PackedRun(NamedTuple):
    parameters: torch.Tensor
    losses: list[float]
    updates: list[list[int]]
    """Which samples made up each update."""
    padding: float
    num_shapes: int
    """Of how many kinds the batches were that a compiled model would be specialised on."""


def packed_loader(kind: str, rows: list[Any], shapes: int | None) -> Any:
    lengths = toys.lengths(rows)
    options: dict[str, Any] = {"samples_per_update": 16, "shapes": shapes, "collate_fn": FLAT}
    if kind == "planned":
        return PlannedDataLoader(rows, lengths, BUDGET, **options)
    hint = None if shapes is None else lengths
    return OnlineDataLoader(rows, BUDGET, shuffle=True, length_hint=hint, **options)


def specialised_on(batch: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((name, getattr(value, "shape", value)) for name, value in batch.items())


def sum_over_ranks(values: list[torch.Tensor]) -> None:
    if dist.is_initialized():
        for value in values:
            dist.all_reduce(value)


def packed(kind: str, attention: str, shapes: int | None = None) -> PackedRun:
    """A plain loop over packed steps."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = llama(attention)
    rows = toys.samples("causal", 48)
    loader = packed_loader(kind, rows, shapes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    updates = []
    kinds = set()
    for update in loader.updates():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total = torch.zeros((), dtype=torch.float64)
        times_seen = torch.zeros(len(rows))
        for step in update:
            assert step.batch["input_ids"].shape[0] == 1
            assert step.batch["input_ids"].numel() <= BUDGET.max_tokens
            kinds.add(specialised_on(step.batch))
            if step.weight.local:
                mean = summed_loss(model, step.batch) / step.weight.local
                loss = mean * step.loss_scale / size
                loss.backward()
                total += loss.detach()
                times_seen[step.indices] += 1
        gradients = [parameter.grad for parameter in model.parameters()]
        sum_over_ranks([total, times_seen, *gradients])
        optimizer.step()
        losses.append(total.item())
        updates.append(times_seen.nonzero().flatten().tolist())
        assert times_seen.sum() == len(updates[-1])
    return PackedRun(parameters(model), losses, updates, loader.stats.padding, len(kinds))


@pytest.mark.parametrize(("kind", "attention", "shapes"), CASES)
def test_a_plain_loop_on_packed_batches_makes_the_updates_of_fixed_ones(
    kind, attention, shapes
) -> None:
    """With few shapes, totals, borders and the longest sample are always the same few, which is what kernels compile for."""
    run = packed(kind, attention, shapes)
    assert sorted(chain.from_iterable(run.updates)) == list(range(48))
    assert [len(update) for update in run.updates] == [16, 16, 16]
    expected, losses = fixed(run.updates)
    assert run.losses == pytest.approx(losses, rel=1e-9)
    assert (run.parameters - expected).abs().max() < 1e-8
    if shapes is None:
        assert run.padding == 0
    else:
        assert 0 < run.padding < 0.3
        assert run.num_shapes <= shapes


def rows_of(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": [1] * length, "labels": [1] * length} for length in lengths]


def indices_of(steps: list[Any]) -> list[int]:
    return sorted(chain.from_iterable(step.indices for step in steps))


def longest_in(batch: dict[str, Any]) -> int:
    return int(batch["cu_seq_lens_q"].diff().max())


def test_a_sample_beyond_every_total_comes_alone_and_as_it_is():
    """The hint of an online loader may be wrong: then nothing is lost, and no kernel is told a maximum that is too small."""
    rows = rows_of([5, 9, 3, 200, 7, 8, 120, 4])
    hint = [6] * len(rows)
    options: dict[str, Any] = {"shapes": 3, "length_hint": hint, "collate_fn": FLAT, "window": 5}
    steps = list(OnlineDataLoader(rows, BUDGET, **options))
    assert indices_of(steps) == list(range(len(rows)))
    [alone] = [step.batch for step in steps if 3 in step.indices]
    assert alone["input_ids"].shape == (1, 200)
    for step in steps:
        assert longest_in(step.batch) <= step.batch["max_length_q"]


def test_a_cap_of_59_tokens_allows_samples_of_59_that_are_padded_to_60():
    budget = TokenBudget(180, layout="packed", pad_to_multiple_of=3) & AdditiveCap("tokens", 59)
    lengths = [59, 30, 29, 1]
    plan = PlannedDataLoader(rows_of(lengths), lengths, budget, shapes=2, collate_fn=FLAT).plan
    assert len(plan.oversize) == 0
    assert plan.num_steps == 3


SIXTY = TokenBudget(60, layout="packed")


def test_an_order_that_repeats_short_samples_or_draws_empty_ones_keeps_the_number_of_borders():
    """As many samples as the dataset has short ones fill a total; an order may draw more of them."""
    lengths = [0, 1, 1, 20, 30, 40, 50]
    order = [0, *[1, 2] * 20, *range(7)]
    loader = PlannedDataLoader(
        rows_of(lengths),
        lengths,
        SIXTY,
        weigh="samples",
        samples_per_update=16,
        sampler=order,
        shapes=2,
        collate_fn=FLAT,
    )
    steps = list(loader)
    assert indices_of(steps) == sorted(order)
    assert len({len(step.batch["cu_seq_lens_q"]) for step in steps}) == 1
    assert len({step.batch["input_ids"].shape for step in steps}) <= 2


def flat_with_a_value_a_sample(rows: list[Any]) -> dict[str, Any]:
    """As long as the tokens of short samples."""
    return {**FLAT(rows), "once": torch.ones(len(rows))}


def test_a_batch_is_filled_by_samples_no_longer_than_the_longest():
    lengths = [1, 1, 20]
    loader = PlannedDataLoader(
        rows_of(lengths),
        lengths,
        SIXTY,
        samples_per_update=2,
        shapes=1,
        collate_fn=flat_with_a_value_a_sample,
        pad={"once": None},
    )
    for step in loader:
        assert longest_in(step.batch) <= 20


def packed_trainer(folder: Any, collate: Any = FLAT) -> Any:
    model = llama("sdpa")
    run = trainer("causal", folder, fits=True, max_steps=2, model=model, config={"budget": BUDGET})
    run.data_collator = collate
    return run


def test_the_trainer_asks_a_model_before_it_trains_on_packed_samples(tmp_path) -> None:
    """With a cache transformers builds no mask: samples would see each other, and the loss would look healthy."""
    run = packed_trainer(tmp_path)
    run.model.config.use_cache = True
    before = parameters(run.model)
    message = r"other results for packed samples .* set model.config.use_cache = False"
    with pytest.raises(ConfigError, match=message):
        run.train()
    assert run.state.global_step == 0
    assert torch.equal(parameters(run.model), before)


def test_the_trainer_refuses_a_collator_that_pads_packed_samples(tmp_path) -> None:
    message = r"`collate_fn` must pack 138 tokens, .* \(2, 131\); use packing_collator"
    with pytest.raises(ConfigError, match=message):
        packed_trainer(tmp_path, toys.collate).train()


def trained(folder: Any, attention: str, **options: Any) -> Any:
    """A Trainer that has made two updates."""
    run = trainer("causal", folder, fits=True, max_steps=2, model=llama(attention), **options)
    run.train()
    return run


def test_training_packs_unasked_where_no_result_changes(tmp_path, caplog) -> None:
    """The user's own collator runs on each sample; the loader's batches are rows without padding."""
    packed = trained(tmp_path, "varlen", config={})
    assert packed.update_loader.budget.layout == "packed"
    assert packed.update_loader.stats.padding == 0
    assert "layout: packed, because attention 'dynagroup_varlen' needs no mask" in caplog.text
    caplog.clear()
    padded = trained(tmp_path, "sdpa", config={})
    assert padded.update_loader.budget.layout == "padded"
    assert "layout: padded, because attention 'sdpa' needs a mask" in caplog.text
    assert (parameters(packed.model) - parameters(padded.model)).abs().max() < 1e-6


def test_a_layout_that_was_asked_for_is_not_explained(tmp_path, caplog) -> None:
    trained(tmp_path, "sdpa", config={"layout": "padded"})
    assert "layout:" not in caplog.text


def with_another_field(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds a field of the batch that is no row per sample."""
    return {**toys.collate(rows), "token_type_ids": torch.zeros(len(rows), 1, dtype=torch.long)}


def assert_stays_padded(run: Any, reason: str) -> None:
    assert run.get_train_dataloader().loader.budget.layout == "padded"
    assert run.layout_line.startswith("layout: padded, because ")
    assert reason in run.layout_line


def varlen_trainer(folder: Any, **options: Any) -> Any:
    """Its model would let samples be packed."""
    model = use_varlen_attention(llama("sdpa"))
    options = {"exact_loss": False, "config": None, **options}
    return trainer("causal", folder, fits=True, model=model, **options)


def test_a_model_without_an_output_per_token_stays_padded(tmp_path) -> None:
    model = toys.classifier()
    use_varlen_attention(llama("sdpa"))  # the name is known from now on
    model.config._attn_implementation = NAME
    options = {"model": model, "config": None, "exact_loss": False}
    run = trainer("classifier", tmp_path, fits=True, **options)
    assert_stays_padded(run, "no output per token")


def test_a_collator_of_unknown_fields_stays_padded(tmp_path) -> None:
    run = varlen_trainer(tmp_path)
    run.data_collator = with_another_field
    assert_stays_padded(run, "cannot be packed")


LENGTHS = {"tokens": [9] * 96, "b": [9] * 96}
PADDED_CASES: list[tuple[dict[str, Any], str]] = [
    ({"config": {"lengths": LENGTHS}}, "several lengths"),
    ({"config": {"shapes": 2}}, "need padded batches"),
    ({"exact_loss": True}, "a loss of your own"),
]


@pytest.mark.parametrize(("options", "reason"), PADDED_CASES)
def test_training_stays_padded_where_packing_might_change_a_result(
    options, reason, tmp_path
) -> None:
    assert_stays_padded(varlen_trainer(tmp_path, **options), reason)


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 256}], ids=["free", "updates"])
def test_rows_of_learned_epochs_are_equal_work_on_eight_ranks(options: dict[str, Any]) -> None:
    """Law 9 where lengths were seen in the first epoch. A batch of one long sample and one of many short ones may hold as
    many tokens: they must not change places on one rank alone."""
    tokens = lengths_of("python_files", 1024)
    budget = TokenBudget(65_536, layout="packed")

    def run(world: Any) -> list[np.ndarray]:
        loader = OnlineDataLoader(
            Tokens(tokens),
            budget,
            world=world,
            collate_fn=len,
            shuffle=True,
            window=128,
            weigh="samples",
            **options,
        )
        list(loader)
        return [np.asarray(step.indices) for step in loader]

    rows = list(map(list, zip(*run_ranks(8, run), strict=True)))
    assert not uneven_rows(rows, tokens, budget.max_tokens, few=True)
