"""The Trainer adapter against the real Trainer: lengths, books, checkpoints, losses, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
import datasets  # noqa: E402
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainerCallback  # noqa: E402

from dynagroup import ConfigError, StateError, TokenBudget  # noqa: E402
from dynagroup.integrations.config import DynagroupConfig  # noqa: E402
from dynagroup.integrations.hf import DynagroupTrainer, attach, dynagroup_trainer  # noqa: E402
from dynagroup.integrations.hf_data import sample_lengths  # noqa: E402
from dynagroup.update.schedule import adabatch, doubling  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.jobs import arguments, parameters, trainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Recorder(TrainerCallback):
    """What every update's batches were, by the indices that the loader gave them."""

    def __init__(self):
        self.indices, self.rates, self.epochs = [], [], []

    def attach(self, run):
        loader_of, outer = run.get_train_dataloader, self

        def recording():
            loader = loader_of()
            updates = loader.loader.updates

            def record():
                for update in updates():
                    outer.indices.append([i for step in update if not step.idle for i in step.indices])
                    yield update

            loader.loader.updates = record
            return loader

        run.get_train_dataloader = recording
        run.add_callback(self)
        return run

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kwargs):
        self.epochs.append(state.epoch)


def recorded(tmp_path, **changes):
    recorder = Recorder()
    run = recorder.attach(trainer("causal", tmp_path, fits=True, **changes))
    run.train()
    return run, recorder


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_ends_with_the_same_parameters(tmp_path, workers):
    def run(folder, resume=None):
        found = trainer(
            "causal", tmp_path / folder, fits=True, model=toys.with_dropout(toys.causal_lm()), exact_loss=True, max_steps=5,
            count=48, save_strategy="steps", save_steps=1, dataloader_num_workers=workers,
        )  # fmt: skip
        found.data_collator = toys.collate_noisily
        found.train(resume_from_checkpoint=resume)
        return parameters(found.model)

    whole = run("whole")
    for step in (1, 3, 4) if not workers else (4,):  # within epoch 0, at its end, within epoch 1
        resumed = run(f"resumed{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(resumed, whole), f"resumed after update {step}"


def test_a_checkpoint_of_fixed_batches_does_not_say_which_samples_were_used(tmp_path):
    changes = {"max_steps": 3, "count": 48, "save_strategy": "steps", "save_steps": 2}
    trainer("causal", tmp_path, fits=False, **changes).train()
    saved = str(tmp_path / "checkpoint-2")
    with pytest.raises(StateError, match="saved by a Trainer without dynagroup.*ignore_data_skip=True"):
        trainer("causal", tmp_path, fits=True, **changes).train(resume_from_checkpoint=saved)
    run = trainer("causal", tmp_path, fits=True, ignore_data_skip=True, **changes)
    run.train(resume_from_checkpoint=saved)
    assert run.state.global_step == 3


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer("causal", tmp_path / "a", fits=True, **changes).train()
    other = trainer("causal", tmp_path / "b", fits=True, count=80, **changes)
    with pytest.raises(StateError, match="num_samples: 96 then, 80 now"):
        other.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))


@pytest.mark.parametrize("updates", ["preserved", "free"])
def test_every_sample_is_trained_on_once_an_epoch(tmp_path, updates):
    run, recorder = recorded(tmp_path, max_steps=-1, num_train_epochs=2, count=70, config={"updates": updates})
    seen = [i for update in recorder.indices for i in update]
    assert sorted(seen[:70]) == sorted(seen[70:]) == list(range(70))
    assert recorder.epochs[-1] == 2.0
    assert run.state.max_steps == run.state.global_step == len(recorder.indices)
    assert set(run.lr_scheduler.get_last_lr()) == {0.0}, "the schedule ends with the run"


def test_epoch_coverage_and_figures_are_logged(tmp_path):
    run, _ = recorded(tmp_path, max_steps=9, logging_steps=3)
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in logs] == [0.5, 1.0, 1.5]
    assert [entry["train_coverage"] for entry in logs] == [0.5, 1.0, 0.5]
    for entry in logs:
        assert 0 < entry["padding"] < 0.5
        assert entry["tokens_per_s"] > 0
        assert 1 <= entry["smallest_batch"] <= entry["largest_batch"] <= 16
        assert (entry["idle_steps"], entry["samples_per_update"]) == (0, 16)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_callbacks_of_the_user_read_the_epoch_as_it_is(mode, tmp_path):
    """Also those that were given to the Trainer, which stand before what the adapter adds."""
    reader = Recorder()
    trainer(
        "causal", tmp_path, fits=True, max_steps=9, callbacks=[reader], config={"mode": mode, "lengths": None}
    ).train()
    assert reader.epochs == pytest.approx([(k + 1) / 6 for k in range(9)])


class Looker(TrainerCallback):
    """Counts the training data in the middle of training, as a callback may."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            assert len(list(self.run.get_train_dataloader())) == 6


def test_a_loader_that_a_callback_asks_for_changes_nothing(tmp_path):
    def run(folder, callbacks=(), resume=None):
        looker = Looker()
        found = trainer(
            "causal", tmp_path / folder, fits=True, exact_loss=True, max_steps=8, save_strategy="steps", save_steps=4,
            callbacks=[looker] if callbacks else [],
        )  # fmt: skip
        looker.run = found
        found.train(resume_from_checkpoint=resume)
        return found

    whole, looked_at = run("whole"), run("looked_at", callbacks=True)
    resumed = run("resumed", resume=str(tmp_path / "looked_at" / "checkpoint-4"))
    assert whole.state.epoch == looked_at.state.epoch == resumed.state.epoch
    assert looked_at.update_loader.stats.updates == 8
    for found in (looked_at, resumed):
        assert torch.equal(parameters(found.model), parameters(whole.model))


@pytest.mark.parametrize("counting", ["non_padding", "all"])
def test_tokens_seen_are_counted_over_the_whole_update(tmp_path, counting):
    changes = {"max_steps": 6, "include_num_input_tokens_seen": counting}
    run = trainer("causal", tmp_path, fits=True, **changes)
    run.train()
    stats = run.update_loader.stats
    expected = stats.real_tokens if counting == "non_padding" else stats.padded_tokens
    assert run.state.num_input_tokens_seen == expected
    assert run.state.total_flos > 0


def test_evaluation_early_stopping_and_the_best_checkpoint(tmp_path):
    run = trainer(
        "causal", tmp_path, fits=True, max_steps=12, eval_dataset=toys.samples("causal", 8, seed=1), eval_strategy="steps",
        eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True, learning_rate=0.0,
        metric_for_best_model="eval_loss", callbacks=[EarlyStoppingCallback(2)],
    )  # fmt: skip
    run.train()
    assert run.state.global_step == 6, "the loss never improves after the first evaluation"
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")


def test_updates_follow_a_schedule(tmp_path):
    schedule = doubling(8, milestones=(3,))
    run, recorder = recorded(tmp_path, max_steps=-1, num_train_epochs=2, config={"samples_per_update": schedule})
    sizes = [len(update) for update in recorder.indices]
    assert sizes == [8, 8, 8] + [16] * 4 + [8] + [16] * 6
    assert recorder.epochs[7] == 1.0
    assert recorder.epochs[-1] == 2.0
    assert run.state.max_steps == len(sizes)


class Grow(TrainerCallback):
    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == 2:
            self.first = train_dataloader.set_samples_per_update(32)


def test_a_callback_changes_the_update_size_and_no_sample_is_lost(tmp_path):
    grow = Grow()
    run, recorder = recorded(tmp_path, max_steps=-1, num_train_epochs=2, callbacks=[grow])
    sizes = [len(update) for update in recorder.indices]
    assert (grow.first, sizes) == (2, [16, 16, 32, 32, 32, 32, 32])
    assert run.state.max_steps == 7


class Shrink(Grow):
    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == 2:
            train_dataloader.set_samples_per_update(4)


def test_smaller_updates_make_the_run_longer_instead_of_losing_samples(tmp_path):
    run, recorder = recorded(tmp_path, max_steps=-1, num_train_epochs=1, callbacks=[Shrink()])
    assert [len(u) for u in recorder.indices] == [16, 16] + [4] * 16
    assert run.state.global_step == 18


def test_stopping_and_learning_rate_can_count_samples(tmp_path):
    config = {
        "samples_per_update": doubling(8, milestones=(4,)),
        "max_samples": 64,
        "learning_rate_schedule": "samples",
    }
    run, recorder = recorded(tmp_path, max_steps=-1, config=config, lr_scheduler_type="linear", learning_rate=1.0)
    assert [len(u) for u in recorder.indices] == [8, 8, 8, 8, 16, 16]
    assert recorder.rates == [1.0, 56 / 64, 48 / 64, 40 / 64, 32 / 64, 16 / 64]


def test_the_learning_rate_follows_the_update_size(tmp_path):
    used = []

    class Spy(torch.optim.SGD):
        def step(self, *args, **kwargs):
            used.append(self.param_groups[0]["lr"])
            return super().step(*args, **kwargs)

    model = toys.causal_lm()
    config = {"samples_per_update": adabatch(16, interval=2, growth=4, decay=0.5)}
    run = trainer(
        "causal", tmp_path, fits=True, model=model, optimizers=(Spy(model.parameters(), lr=1.0), None), max_steps=4,
        lr_scheduler_type="constant", logging_steps=1, config={**config, "learning_rate_scaling": "sqrt"},
    )  # fmt: skip
    run.train()
    assert used == [1.0, 1.0, 1.0, 1.0]  # half the rate by AdaBatch, twice by the square root of 4
    assert run.optimizer.param_groups[0]["lr"] == 1.0
    assert [e["samples_per_update"] for e in run.state.log_history if "loss" in e] == [16, 16, 64, 64]


def test_the_length_column_is_read_from_train_dataset(tmp_path):
    """FACTS: a Trainer removes the column before it calls its own samplers."""
    rows = toys.samples("causal", 32)
    data = datasets.Dataset.from_list([{**row, "length": 7 * len(row["input_ids"])} for row in rows])
    common = {"train_dataset": data, "data_collator": toys.collate}
    args = arguments(tmp_path, max_steps=1, remove_unused_columns=True)
    run = DynagroupTrainer(toys.causal_lm(), args, dynagroup=TokenBudget(4096), **common)
    loader = run.get_train_dataloader()
    assert "length" not in loader.dataset.column_names
    found = sample_lengths(run, data, name="train_dataset")
    assert found["tokens"].tolist() == [7 * len(row["input_ids"]) for row in rows]
    args = arguments(tmp_path, remove_unused_columns=True, train_sampling_strategy="group_by_length")
    upstream = Trainer(toys.causal_lm(), args, **common).get_train_dataloader().batch_sampler.sampler.lengths
    assert upstream == toys.lengths(rows), "upstream reads the column now"


def test_lengths_are_measured_where_there_is_no_column(tmp_path):
    rows = toys.samples("causal", 32)
    shuffled = datasets.Dataset.from_list(rows).select(range(31, -1, -1))
    for data in (rows[::-1], shuffled):
        run = DynagroupTrainer(
            toys.causal_lm(), arguments(tmp_path, max_steps=1), dynagroup=TokenBudget(512),
            train_dataset=data, data_collator=toys.collate,
        )  # fmt: skip
        assert sample_lengths(run, data, name="train_dataset")["tokens"].tolist() == toys.lengths(rows)[::-1]
        assert run.get_train_dataloader().loader.num_samples == 32


def test_label_smoothing_agrees_with_fixed_batches(tmp_path):
    found = []
    for fits in (False, True):
        run = trainer("seq2seq", tmp_path, fits=fits, label_smoothing_factor=0.1, max_steps=5, exact_loss=False)
        run.model_accepts_loss_kwargs = True
        run.train()
        found.append(parameters(run.model))
    assert (found[0] - found[1]).abs().max() < 1e-8


def test_a_peft_model_agrees_with_fixed_batches(tmp_path):
    peft = pytest.importorskip("peft")
    found = []
    for fits in (False, True):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            toys.causal_lm(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
        ).double()
        run = trainer("causal", tmp_path / str(fits), fits=fits, model=model, exact_loss=True, max_steps=4)
        run.train()
        found.append(parameters(run.model))
    assert (found[0] - found[1]).abs().max() < 1e-8
    assert (tmp_path / "True").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True .*: the budget keeps batches within memory"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True .* set it to False"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True .* set it to False"),
        ({"dataloader_in_order": False, "dataloader_num_workers": 1}, "dataloader_in_order=False .* leave it True"),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "train_sampling_strategy='batch_rebalance' does not go with dynagroup: it forms batches itself, by cost and without "
            "a limit; leave it 'random': dynagroup's batches fit the budget and are balanced over ranks as well",
        ),
    ],
)
def test_combinations_that_would_lose_samples_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer("causal", tmp_path, fits=True, **changes)


def test_tensor_parallelism_needs_to_say_who_shares_data(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ConfigError, match="ranks share a sample.*world=DistributedWorld"):
        trainer("causal", tmp_path, fits=True)


def test_zero3_needs_planned_updates(tmp_path):
    from types import SimpleNamespace

    from dynagroup.integrations.config import refuse_unsupported

    run = trainer("causal", tmp_path, fits=True)
    run.accelerator = SimpleNamespace(
        dataloader_config=run.accelerator.dataloader_config,
        state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3)),
        parallelism_config=None,
    )
    refuse_unsupported(run, run.dynagroup)
    with pytest.raises(ConfigError, match="ZeRO-3 with mode='online' does not go with dynagroup"):
        refuse_unsupported(run, DynagroupConfig(budget=TokenBudget(100), mode="online"))


def test_ignore_data_skip_begins_the_epoch_anew(tmp_path):
    changes = {"max_steps": 10, "save_strategy": "steps", "save_steps": 8}
    trainer("causal", tmp_path / "a", fits=True, **changes).train()
    recorder = Recorder()
    again = recorder.attach(trainer("causal", tmp_path / "b", fits=True, max_steps=10, ignore_data_skip=True))
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-8"))
    whole = again.update_loader
    whole.set_epoch(1)
    assert [sorted(u) for u in recorder.indices[:2]] == [
        sorted(i for step in update for i in step.indices) for update in list(whole.updates())[:2]
    ]


def test_config_errors_name_the_way_out():
    budget = TokenBudget(100)
    with pytest.raises(ConfigError, match="`updates` must be one of"):
        DynagroupConfig(budget=budget, updates="some")
    with pytest.raises(ConfigError, match="needs updates='preserved'"):
        DynagroupConfig(budget=budget, updates="free", samples_per_update=4)
    with pytest.raises(ConfigError, match="`max_samples` must be an int of at least 1"):
        DynagroupConfig(budget=budget, max_samples=0)


def test_seq2seq_trainer_generates_and_saves(tmp_path):
    from transformers import Seq2SeqTrainingArguments

    rows = toys.samples("seq2seq", 32)
    shared = {**arguments(tmp_path, max_steps=2).to_dict(), "accelerator_config": None}
    args = Seq2SeqTrainingArguments(**{**shared, "predict_with_generate": True})
    run = dynagroup_trainer(Seq2SeqTrainer)(
        toys.seq2seq(), args, dynagroup=TokenBudget(160), train_dataset=rows, eval_dataset=rows[:4],
        data_collator=toys.collate_seq2seq,
    )  # fmt: skip
    run.train()
    run.save_model()
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("epochs", [0.3, 1.0, 2.1, 2.25])
def test_a_run_has_as_many_updates_as_the_plain_trainers(tmp_path, epochs):
    """2.1 epochs of 10 updates are 21 updates: (2.1 - 2) * 10 is a little more than 1 in floating point."""
    steps = []
    for fits in (False, True):
        run = trainer("causal", tmp_path, fits=fits, count=20, gradient_accumulation_steps=2,
                      per_device_train_batch_size=1, max_steps=-1, num_train_epochs=epochs)  # fmt: skip
        run.train()
        steps.append(run.state.global_step)
    assert steps[0] == steps[1] == run.state.max_steps
    assert epochs != 2.1 or steps[0] == 21


def test_a_sampler_that_groups_by_length_groups_by_the_update(tmp_path, monkeypatch):
    from dynagroup.integrations.hf_data import host_order

    runs = [trainer("causal", tmp_path, fits=fits, train_sampling_strategy="group_by_length",
                    per_device_train_batch_size=4, gradient_accumulation_steps=2) for fits in (False, True)]  # fmt: skip
    hosts, upstream = [], Trainer.get_train_dataloader
    monkeypatch.setattr(Trainer, "get_train_dataloader", lambda self: hosts.append(upstream(self)) or hosts[-1])
    for run in runs:
        run.get_train_dataloader()
    assert [host_order(host).batch_size for host in hosts] == [8, 8]
    assert runs[1].args.gradient_accumulation_steps == 1


def test_help_explains_every_setting():
    from dataclasses import fields

    for setting in fields(DynagroupConfig):
        assert f"        {setting.name}: " in (DynagroupConfig.__doc__ or ""), setting.name


def test_free_updates_take_as_many_steps_as_asked(tmp_path):
    run = trainer("causal", tmp_path, fits=True, max_steps=2, config={"updates": "free", "accumulation": 3})
    run.train()
    assert run.update_loader.stats.batches == 6
    with pytest.raises(ConfigError, match="`accumulation` .3. needs updates='free'"):
        DynagroupConfig(budget=TokenBudget(100), accumulation=3)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_stream_is_told_the_way_that_exists(tmp_path, mode):
    run = trainer("causal", tmp_path, fits=True, max_steps=2, config={"mode": mode, "lengths": None})
    run.train_dataset = toys.Stream()
    with pytest.raises(
        ConfigError, match=r"DynagroupConfig\(mode='online', updates='free', accumulation=...\), and max_steps"
    ):
        run.train()
    config = {"mode": "online", "updates": "free", "accumulation": 2, "lengths": None}
    run = trainer("causal", tmp_path, fits=True, max_steps=2, config=config)
    run.train_dataset = toys.Stream()
    run.train()
    assert run.state.global_step == 2


def test_a_budget_that_counts_padding_where_there_is_none_is_warned_of(tmp_path):
    from transformers import DataCollatorWithFlattening

    run = trainer("causal", tmp_path, fits=False)
    run.data_collator = DataCollatorWithFlattening()
    with pytest.warns(UserWarning, match="DataCollatorWithFlattening lays samples end to end.*layout='packed'"):
        attach(run, 100)


def updates_of(run):
    run.train()
    return parameters(run.model), run.state.global_step, run.update_loader.stats.batches


def test_attaching_makes_the_trainer_that_the_class_makes(tmp_path):
    changes = {"exact_loss": True, "max_steps": 8, "count": 48}
    made = trainer("causal", tmp_path / "a", fits=True, config={"lengths": None}, **changes)
    attached = trainer("causal", tmp_path / "b", fits=False, **changes)
    attach(attached, 160)
    (expected, *counts), (found, *counted) = updates_of(made), updates_of(attached)
    assert torch.equal(found, expected)
    assert counted == counts
    assert type(attached) is dynagroup_trainer(Trainer)
    assert attached.evaluate(toys.samples("causal", 9)) is not None


def test_attaching_too_late_or_twice_or_in_vain_is_refused_and_changes_nothing(tmp_path):
    trained = trainer("causal", tmp_path, fits=False, max_steps=1)
    trained.train()
    packing = trainer("causal", tmp_path, fits=False, auto_find_batch_size=True)
    for run, message in ((trained, "has made 1 updates"), (packing, "auto_find_batch_size=True does not go with")):
        before, callbacks = run.args, len(run.callback_handler.callbacks)
        with pytest.raises(ConfigError, match=message):
            attach(run, 160)
        assert (type(run), run.args, len(run.callback_handler.callbacks)) == (Trainer, before, callbacks)
    for run in (trainer("causal", tmp_path, fits=True), "a trainer"):
        with pytest.raises(ConfigError, match="must be a Trainer without batches that fit"):
            attach(run, 160)


def test_updates_that_grow_at_run_time_do_not_end_a_run_of_so_many_steps(tmp_path):
    run = trainer("causal", tmp_path, fits=True, max_steps=20, callbacks=[Grow()])
    run.train()
    assert (run.state.global_step, run.state.num_train_epochs) == (20, 4)


def test_an_encoder_decoders_labels_are_measured(tmp_path):
    rows = toys.samples("seq2seq", 16)
    for data in (
        rows,
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list([{**r, "length": 5} for r in rows]),
    ):
        run = DynagroupTrainer(
            toys.seq2seq(), arguments(tmp_path, max_steps=1), dynagroup=TokenBudget(512), train_dataset=data,
            data_collator=toys.collate_seq2seq,
        )  # fmt: skip
        found = sample_lengths(run, data, name="train_dataset")
        assert found["target"].tolist() == [len(row["labels"]) for row in rows]
        assert found["tokens"].tolist() == ([5] * 16 if "length" in data[0] else toys.lengths(rows))
    with pytest.raises(ConfigError, match="train_dataset are not known: it has no column 'length' and no 'input_ids'"):
        sample_lengths(run, [{"text": "a"}], name="train_dataset")
    with pytest.raises(ConfigError, match="train_dataset are not known"):
        sample_lengths(run, [["a", "b"]], name="train_dataset")


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor])
def test_samples_that_are_ids_themselves_are_measured(kind, tmp_path):
    rows = [kind([1 + i % 5] * (1 + 3 * i % 11)) for i in range(16)]

    def collate(samples):
        return toys.collate([{"input_ids": list(map(int, ids)), "labels": list(map(int, ids))} for ids in samples])

    run = DynagroupTrainer(
        toys.causal_lm(),
        arguments(tmp_path, max_steps=1),
        dynagroup=TokenBudget(512),
        train_dataset=rows,
        data_collator=collate,
    )
    assert sample_lengths(run, rows, name="train_dataset")["tokens"].tolist() == [len(row) for row in rows]
    assert run.train().global_step == 1


@pytest.mark.parametrize(("kind", "samples"), [("seq2seq", 16), ("causal", 8)], ids=["T5", "GPT-2"])
def test_one_argument_helps_at_the_trainers_defaults(kind, samples, tmp_path):
    """No accumulation, and a budget that whole updates fit: they are cut where that is faster, and hold the same samples."""
    import numpy as np

    from dynagroup.plan.cost import Work

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 0.9, 256), 16, 2048).astype(int)
    rows = [{"input_ids": [1] * n, "labels": [1] * (n // 4 if kind == "seq2seq" else n)} for n in lengths]
    common = {"train_dataset": rows, "data_collator": toys.collate}
    model = toys.seq2seq() if kind == "seq2seq" else toys.causal_lm()
    args = arguments(tmp_path, gradient_accumulation_steps=1, per_device_train_batch_size=samples, max_steps=1)
    plain = Trainer(model, args, **common).get_train_dataloader()
    ours = DynagroupTrainer(model, args, dynagroup=TokenBudget(samples * 2048 * 2), **common).get_train_dataloader()

    work = Work.of(model, device="cpu")

    def time_of(batches):
        shapes = np.array([batch["input_ids"].shape for batch in batches])
        return sum(work.per_step + n * work.of_lengths([width])[0] for n, width in shapes.tolist())

    torch.manual_seed(0)
    fixed = time_of(plain)
    updates = list(ours)
    assert {step.samples.total for update in updates for step in update} == {samples}
    found = time_of(step.batch for update in updates for step in update)
    assert sum(map(len, updates)) > 1.5 * len(updates), "most updates are several batches"
    assert found < 0.75 * fixed


def test_a_training_ends_with_the_work_that_its_times_suggest(tmp_path):
    made = trainer("causal", tmp_path, fits=True, max_steps=30)
    made.train()
    suggested = [logs for logs in made.state.log_history if "work_per_step" in logs]
    assert len(suggested) == 1
    assert suggested[0]["work_per_step"] >= 0
    short = trainer("causal", tmp_path, fits=True, max_steps=5)
    short.train()
    assert not any("work_per_step" in logs for logs in short.state.log_history)


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_step_is_as_dear_as_the_model_says_unless_the_user_says_otherwise(mode, tmp_path, monkeypatch):
    from dynagroup.integrations import hf, hf_evaluate
    from dynagroup.plan.cost import Work

    used = []
    for module, name in ((hf, "PlannedDataLoader"), (hf, "OnlineDataLoader"), (hf_evaluate, "LengthAwareBatchSampler")):
        made = getattr(module, name)
        note = lambda options: used.append(options.get("plan", options)["work"])  # noqa: E731
        monkeypatch.setattr(module, name, lambda *a, made=made, note=note, **o: note(o) or made(*a, **o))

    def works(model, **plan):
        used.clear()
        config = DynagroupConfig(budget=TokenBudget(256), mode=mode, plan=plan, weigh="samples")
        common = {"train_dataset": toys.samples("causal"), "eval_dataset": toys.samples("causal", 8)}
        run = DynagroupTrainer(model, arguments(tmp_path), dynagroup=config, data_collator=toys.collate, **common)
        run.get_train_dataloader()
        run.get_eval_dataloader()
        return used

    wide = toys.causal_lm()
    wide.config.n_embd, wide.config.n_inner = 1600, None  # GPT-2's largest: its steps cost the least that any do
    assert Work.of(wide).per_step < Work.of(toys.causal_lm()).per_step == 2048
    assert works(wide) == [Work.of(wide, device="cpu")] * 2
    assert Work.of(wide, device="cpu") == Work(per_step=128, crossover=Work.of(wide).crossover)
    assert works(wide, work=Work(per_step=7)) == [Work(per_step=7)] * 2
