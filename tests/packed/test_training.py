"""Packed batches train what padded fixed batches train: the same samples an update, the same losses and parameters."""

from typing import Any

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
BUDGET, LEARNING_RATE = TokenBudget(90, layout="packed"), 0.05
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
    model, rows = llama("sdpa"), toys.samples("causal", 48)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    for update in order:
        batch = toys.collate([rows[i] for i in update])
        loss = summed_loss(model, batch) / (batch["labels"][:, 1:] != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return parameters(model), losses


def packed(
    kind: str, attention: str, shapes: int | None = None
) -> tuple[Any, list[float], Any, float, set[Any]]:
    """A plain loop over packed steps: parameters, losses, which samples made up each update, padding as counted, and what
    a compiled model would be specialised on."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model, rows = llama(attention), toys.samples("causal", 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    how: dict[str, Any] = {"samples_per_update": 16, "shapes": shapes, "collate_fn": FLAT}
    loader: Any = PlannedDataLoader(rows, toys.lengths(rows), BUDGET, **how)
    if kind == "online":
        loader = OnlineDataLoader(
            rows, BUDGET, shuffle=True, length_hint=toys.lengths(rows) if shapes else None, **how
        )
    losses, updates, met = [], [], set()
    for update in loader.updates():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        total, seen = torch.zeros((), dtype=torch.float64), torch.zeros(len(rows))
        for step in update:
            assert step.batch["input_ids"].shape[0] == 1
            assert step.batch["input_ids"].numel() <= BUDGET.max_tokens
            met.add(
                tuple((name, getattr(value, "shape", value)) for name, value in step.batch.items())
            )
            if step.weight.local:
                loss = summed_loss(model, step.batch) / step.weight.local * step.loss_scale / size
                loss.backward()
                total += loss.detach()
                seen[step.indices] += 1
        for value in (total, seen, *(p.grad for p in model.parameters())) if size > 1 else ():
            dist.all_reduce(value)
        optimizer.step()
        losses.append(total.item())
        updates.append(seen.nonzero().flatten().tolist())
        assert seen.sum() == len(updates[-1])
    return parameters(model), losses, updates, loader.stats.padding, met


@pytest.mark.parametrize(("kind", "attention", "shapes"), CASES)
def test_a_plain_loop_on_packed_batches_makes_the_updates_of_fixed_ones(
    kind, attention, shapes
) -> None:
    """With few shapes, totals, borders and the longest sample are always the same few, which is what kernels compile for."""
    ours, losses, updates, padding, met = packed(kind, attention, shapes)
    assert sorted(i for update in updates for i in update) == list(range(48))
    assert [len(update) for update in updates] == [16, 16, 16]
    theirs, fixed_losses = fixed(updates)
    assert losses == pytest.approx(fixed_losses, rel=1e-9)
    assert (ours - theirs).abs().max() < 1e-8
    assert (0 < padding < 0.3 and len(met) <= shapes) if shapes else padding == 0


def test_a_sample_beyond_every_total_comes_alone_and_as_it_is():
    """The hint of an online loader may be wrong: then nothing is lost, and no kernel is told a maximum that is too small."""
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in [5, 9, 3, 200, 7, 8, 120, 4]]
    how: dict[str, Any] = {
        "shapes": 3,
        "length_hint": [6] * len(rows),
        "collate_fn": FLAT,
        "window": 5,
    }
    steps = list(OnlineDataLoader(rows, BUDGET, **how))
    assert sorted(index for step in steps for index in step.indices) == list(range(len(rows)))
    assert {tuple(step.batch["input_ids"].shape) for step in steps if 3 in step.indices} == {
        (1, 200)
    }
    assert all(
        step.batch["cu_seq_lens_q"].diff().max() <= step.batch["max_length_q"] for step in steps
    )


def test_a_cap_of_59_tokens_allows_samples_of_59_that_are_padded_to_60():
    budget = TokenBudget(180, layout="packed", pad_to_multiple_of=3) & AdditiveCap("tokens", 59)
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (59, 30, 29, 1)]
    loader = PlannedDataLoader(rows, [59, 30, 29, 1], budget, shapes=2, collate_fn=FLAT)
    assert (len(loader.plan.oversize), loader.plan.num_steps) == (0, 3)


def test_an_order_that_repeats_short_samples_or_draws_empty_ones_keeps_the_number_of_borders():
    """As many samples as the dataset has short ones fill a total; an order may draw more of them."""
    lengths = [0, 1, 1, 20, 30, 40, 50]
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in lengths]
    order: Any = [0, *[1, 2] * 20, *range(7)]
    how: dict[str, Any] = {
        "samples_per_update": 16,
        "sampler": order,
        "shapes": 2,
        "collate_fn": FLAT,
    }
    steps = list(
        PlannedDataLoader(rows, lengths, TokenBudget(60, layout="packed"), weigh="samples", **how)
    )
    assert sorted(index for step in steps for index in step.indices) == sorted(order)
    assert len({len(step.batch["cu_seq_lens_q"]) for step in steps}) == 1
    how |= {"sampler": None, "shapes": 1, "samples_per_update": 2, "pad": {"once": None}}
    how["collate_fn"] = lambda of: {
        **FLAT(of),
        "once": torch.ones(len(of)),
    }  # as long as the tokens of short samples
    few = PlannedDataLoader(rows[1:4], [1, 1, 20], TokenBudget(60, layout="packed"), **how)
    assert all(step.batch["cu_seq_lens_q"].diff().max() <= 20 for step in few), (
        "filled by no longer samples"
    )
    assert len({step.batch["input_ids"].shape for step in steps}) <= 2


def packed_trainer(folder: Any, collate: Any = FLAT, **config: Any) -> Any:
    how = {"max_steps": 2, "model": llama("sdpa"), "config": {"budget": BUDGET, **config}}
    run = trainer("causal", folder, fits=True, **how)
    run.data_collator = collate
    return run


def test_the_trainer_asks_a_model_before_it_trains_on_packed_samples(tmp_path) -> None:
    """With a cache transformers builds no mask: samples would see each other, and the loss would look healthy."""
    run = packed_trainer(tmp_path)
    run.model.config.use_cache = True
    before = parameters(run.model)
    with pytest.raises(
        ConfigError, match=r"other results for packed samples .* set model.config.use_cache = False"
    ):
        run.train()
    assert run.state.global_step == 0
    assert torch.equal(parameters(run.model), before)
    with pytest.raises(
        ConfigError, match=r"`collate_fn` must pack 138 tokens, .* \(2, 131\); use packing_collator"
    ):
        packed_trainer(tmp_path, toys.collate).train()


def chosen(folder: Any, model: Any, kind: str = "causal", **config: Any) -> Any:
    """A Trainer that has made two updates with an automatic layout."""
    how: dict[str, Any] = {"max_steps": 2, "model": model, "config": config}
    run = trainer(kind, folder, fits=True, **how)
    run.train()
    return run


def test_training_packs_unasked_where_no_result_changes(tmp_path, caplog) -> None:
    """The user's own collator runs on each sample; the loader's batches are rows without padding."""
    packed = chosen(tmp_path, llama("varlen"))
    assert packed.update_loader.budget.layout == "packed"
    assert packed.update_loader.stats.padding == 0
    assert "layout: packed, because attention 'dynagroup_varlen' needs no mask" in caplog.text
    caplog.clear()
    padded = chosen(tmp_path, llama("sdpa"))
    assert padded.update_loader.budget.layout == "padded"
    assert "layout: padded, because attention 'sdpa' needs a mask" in caplog.text
    assert (parameters(packed.model) - parameters(padded.model)).abs().max() < 1e-6
    caplog.clear()
    chosen(tmp_path, llama("sdpa"), layout="padded")
    assert "layout:" not in caplog.text


def noisy(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds a field of the batch that is no row per sample."""
    return {**toys.collate(rows), "token_type_ids": torch.zeros(len(rows), 1, dtype=torch.long)}


@pytest.mark.parametrize("case", ["classes", "fields", "several", "shapes", "loss"])
def test_training_stays_padded_where_packing_might_change_a_result(case, tmp_path) -> None:
    model = use_varlen_attention(llama("sdpa"))
    if case == "classes":
        model = toys.classifier()
        model.config._attn_implementation = NAME
    kind = "classifier" if case == "classes" else "causal"
    config = {"shapes": {"shapes": 2}, "several": {"lengths": {"tokens": [9] * 96, "b": [9] * 96}}}
    how: dict[str, Any] = {"model": model, "config": config.get(case)}
    run = trainer(kind, tmp_path, fits=True, exact_loss=case == "loss", **how)
    if case == "fields":
        run.data_collator = noisy
    assert run.get_train_dataloader().loader.budget.layout == "padded"
    reasons = {
        "classes": "no output per token",
        "fields": "cannot be packed",
        "several": "several lengths",
        "shapes": "need padded batches",
        "loss": "a loss of your own",
    }
    assert run.layout_line.startswith("layout: padded, because ")
    assert reasons[case] in run.layout_line


@pytest.mark.parametrize("options", [{}, {"samples_per_update": 256}], ids=["free", "updates"])
def test_rows_of_learned_epochs_are_equal_work_on_eight_ranks(options: dict[str, Any]) -> None:
    """Law 9 where lengths were seen in the first epoch. A batch of one long sample and one of many short ones may hold as
    many tokens: they must not change places on one rank alone."""
    tokens, cap = lengths_of("python_files", 1024), 65_536
    budget = TokenBudget(cap, layout="packed")

    def run(world: Any) -> list[list[np.ndarray]]:
        how: dict[str, Any] = {
            "collate_fn": len,
            "shuffle": True,
            "window": 128,
            "weigh": "samples",
            **options,
        }
        loader = OnlineDataLoader(Tokens(tokens), budget, world=world, **how)
        return [[np.asarray(step.indices) for step in loader] for _ in range(2)]

    rows = zip(*(epochs[1] for epochs in run_ranks(8, run)), strict=True)
    assert not uneven_rows([list(row) for row in rows], tokens, cap, few=True)
