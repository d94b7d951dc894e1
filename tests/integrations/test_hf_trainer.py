"""The Trainer adapter against the real Trainer: the same updates, books, checkpoints, lengths, refusals."""

from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from dynagroup import ConfigError, MemoryBudget, StateError, TokenBudget
from dynagroup.demo import train_tokenizer
from dynagroup.distributed import SingleProcess
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.integrations.hf import DynagroupTrainer, attach, dynagroup_trainer
from dynagroup.integrations.hf_data import host_order, sample_lengths
from dynagroup.memory import MemoryRegressor
from dynagroup.testing import Allocator
from tests import models
from tests.integrations import toys
from tests.integrations.toys import MODELS, arguments, parameters, trained_on, trainer
from tests.packed.test_training import BUDGET, FLAT, llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
ONLINE = {"mode": "online", "lengths": None}
SAVED = {"save_strategy": "steps", "save_steps": 1}
REFUSED = {
    "auto_find_batch_size=True .*: the budget limits batches already": {
        "auto_find_batch_size": True
    },
    "dispatch_batches=True .* set it to False": {"accelerator_config": {"dispatch_batches": True}},
    "split_batches=True .* set it to False": {"accelerator_config": {"split_batches": True}},
    "dataloader_in_order=False .* True": {
        "dataloader_in_order": False,
        "dataloader_num_workers": 1,
    },
    "batch_rebalance' cannot be combined with dynagroup": {
        "train_sampling_strategy": "batch_rebalance"
    },
    "`weigh` must be 'tokens', 'labels', 'samples' or a function": {"config": {"weigh": "words"}},
    "`updates` must be one of": {"config": {"updates": "some"}},
    "needs updates='preserved'": {"config": {"updates": "free", "samples_per_update": 4}},
}


class Recorder(TrainerCallback):
    """Epochs as callbacks read them; ``samples``: those that each update's model learns from."""

    def __init__(self):
        self.epochs, self.samples = [], {}

    def on_step_end(self, args, state, control, **kwargs):
        self.epochs.append(state.epoch)

    @property
    def sizes(self):
        return [len(update) for update in self.samples.values()]


class Looker(TrainerCallback):
    """Counts the training data in the middle of training, as a callback may."""

    looked = 0

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            self.looked = len(list(self.run.get_train_dataloader()))


def recorded(tmp_path, callbacks=(), resume=None, **changes):
    recorder = Recorder()
    run = trainer("causal", tmp_path, fits=True, callbacks=[recorder, *callbacks], **changes)
    for callback in callbacks:
        callback.run = run
    recorder.samples = trained_on(run, toys.samples("causal", changes.get("count", 96)))
    run.train(resume_from_checkpoint=resume)
    return run, recorder


def two_of_three(row):
    return len(row["input_ids"]) % 2


SAME = {
    "clipped": ({"max_grad_norm": 0.3}, {}),
    "shapes": ({}, {"config": {"shapes": 3}}),
    "preflight": ({}, {"config": {"preflight": True}}),
    "online": ({}, {"config": ONLINE, "dataloader_num_workers": 1}),
    "kind_of": ({}, {"config": {**ONLINE, "kind_of": two_of_three}}),
    "kinds": ({}, {"config": {"kinds": [None, "a", "a"] * 32}}),
    "library loss": ({"exact_loss": False}, {}),
    "packed": ({}, {"config": {"budget": BUDGET}}),
    "label smoothing": ({"exact_loss": False, "label_smoothing_factor": 0.1}, {}),
}
CASES = [(kind, "clipped") for kind in MODELS]
CASES += [(kind, "shapes") for kind in MODELS if kind != "seq2seq"]  # it has two lengths
CASES += [
    ("causal", name)
    for name in ("preflight", "online", "kind_of", "kinds", "packed", "library loss")
]
CASES += [("seq2seq", "label smoothing")]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_parameters_are_those_of_fixed_batches(kind, name, tmp_path):
    """Few shapes: filled rows weigh nothing, and the model meets three."""
    found, (both, ours) = [], SAME[name]
    for fits in (False, True):
        changes = {
            "exact_loss": kind != "classifier",
            "max_grad_norm": 0.0,
            "max_steps": 8,
            "logging_steps": 4,
            **both,
        }
        changes |= {"model": llama("sdpa")} if name == "packed" else {}
        run = trainer(kind, tmp_path, fits=fits, **changes, **(ours if fits else {}))
        run.data_collator = FLAT if name == "packed" and fits else run.data_collator
        before = parameters(run.model)
        if name == "label smoothing":
            run.model_accepts_loss_kwargs = True
        shapes = models.shapes_seen(run.model)
        run.train()
        found.append((parameters(run.model), run.state.log_history))
    if name == "packed":
        with pytest.warns(UserWarning, match="predictions of packed batches are one row a batch"):
            run.predict(run.train_dataset)
    (fixed, fixed_logs), (ours, our_logs) = found
    assert (fixed - ours).abs().max() < (
        1e-5 if name == "library loss" else 1e-8
    )  # the library's is of float32
    assert (fixed - before).abs().max() > (1e-3 if name == "clipped" else 1e-2), (
        "nothing was trained"
    )
    assert name != "packed" or our_logs[0]["padding"] == 0
    assert our_logs[0]["loss"] == pytest.approx(fixed_logs[0]["loss"], rel=1e-5)
    assert our_logs[-2]["epoch"] == fixed_logs[-2]["epoch"]
    assert name != "clipped" or max(log.get("grad_norm", 0.0) for log in our_logs) > 0.3, (
        "nothing was clipped"
    )
    if name == "shapes":
        assert len({*shapes}) <= 3 + 1, "besides the unfilled samples of the split test"
        assert len({*shapes} & set(run.update_loader.budget.shapes)) > 1


@pytest.mark.parametrize("mode", ["offline", "workers", "online", "scheduled"])
def test_a_resumed_run_ends_with_the_same_parameters(mode, tmp_path):
    """In epoch 0, at its end, in epoch 1, at the end; with dropout, random processing, and updates whose size was changed."""
    scheduled = {"samples_per_update": toys.doubling(6, 2)} if mode == "scheduled" else {}
    config = {**(ONLINE if mode in ("online", "scheduled") else {}), **scheduled}

    def run(folder, resume=None):
        found = trainer(
            "causal",
            tmp_path / folder,
            fits=True,
            model=toys.with_dropout(toys.causal_lm()),
            exact_loss=True,
            max_steps=5,
            count=48,
            dataloader_num_workers=int(mode == "workers"),
            config=config,
            callbacks=[Resize(3, 20)] * bool(scheduled),
            **SAVED,
        )
        if mode != "online":
            found.data_collator = toys.collate_noisily
        found.train(resume_from_checkpoint=resume)
        return found

    whole = run("whole")
    for step in (1, 3, 4, 5) if mode == "offline" else (4,):
        resumed = run(f"resumed{step}", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert torch.equal(parameters(resumed.model), parameters(whole.model)), (
            f"resumed after update {step}"
        )
        assert (resumed.state.epoch, resumed.state.global_step) == (whole.state.epoch, 5)
        assert resumed.update_loader.cursor == whole.update_loader.cursor


def test_checkpoints_of_others_are_refused_and_an_epoch_can_begin_anew(tmp_path):
    changes = {"max_steps": 4, "count": 48, **SAVED}
    for fits in (False, True):
        trainer("causal", tmp_path / str(fits), fits=fits, **changes).train()
    fixed, ours = (str(tmp_path / str(fits) / "checkpoint-2") for fits in (False, True))
    with pytest.raises(
        StateError, match="saved by a Trainer without dynagroup.*ignore_data_skip=True"
    ):
        trainer("causal", tmp_path, fits=True, **changes).train(resume_from_checkpoint=fixed)
    with pytest.raises(StateError, match="num_samples was 48 then, is 64 now"):
        trainer("causal", tmp_path, fits=True, **{**changes, "count": 64}).train(
            resume_from_checkpoint=ours
        )
    for checkpoint in (fixed, ours):
        run, recorder = recorded(tmp_path, resume=checkpoint, ignore_data_skip=True, **changes)
        run.update_loader.set_epoch(0)
        first = [
            sorted(i for step in update for i in step.indices)
            for update in run.update_loader.updates()
        ]
        assert list(map(sorted, recorder.samples.values())) == first[:2]


class Inside(TrainerCallback):  # saves as transformers does when a machine is taken away (SIGTERM)
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.run._save_checkpoint(self.run.model, None)


def test_a_checkpoint_inside_an_update_has_the_samples_before_it_or_is_refused(tmp_path):
    with pytest.raises(StateError, match="checkpoint-2 is inside an update; save later, or set"):
        recorded(tmp_path, [Inside()], max_steps=4)
    how = {"max_steps": 4, "enable_jit_checkpoint": True}
    whole, rest = (
        recorded(tmp_path, resume=resume, callbacks=[Inside()] * (not resume), **how)[1].samples
        for resume in (None, str(tmp_path / "checkpoint-2"))
    )
    assert rest == {update: whole[update] for update in (2, 3)}


ONLINE_POOLS = {**ONLINE, "grouping": 2}


@pytest.mark.parametrize(
    "config", [{}, {"updates": "free"}, {"grouping": 2}, ONLINE_POOLS], ids=str
)
def test_every_sample_is_trained_on_once_an_epoch(tmp_path, config):
    """A callback that looks at the data in the middle of training changes nothing."""
    looker = Looker()
    run, recorder = recorded(
        tmp_path, [looker], max_steps=-1, num_train_epochs=2, count=70, config=config
    )
    assert looker.looked
    assert run.state.epoch == pytest.approx(2)
    assert run.update_loader.stats.updates == run.state.global_step
    if "grouping" in config:
        assert recorder.sizes == [16, 16, 16, 16, 6] * 2
    seen = [i for update in recorder.samples.values() for i in update]
    assert sorted(seen[:70]) == sorted(seen[70:]) == list(range(70))
    assert recorder.epochs[-1] == 2.0
    assert run.state.max_steps == run.state.global_step == len(recorder.samples)
    assert set(run.lr_scheduler.get_last_lr()) == {0.0}, "the schedule ends with the run"


@pytest.mark.parametrize("config", [{}, ONLINE], ids=["offline", "online"])
def test_epochs_and_figures_are_logged_and_read_as_they_are(config, tmp_path):
    counted = {"include_num_input_tokens_seen": "non_padding"}
    run, recorder = recorded(tmp_path, max_steps=30, logging_steps=3, config=config, **counted)
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in logs[:3]] == [0.5, 1.0, 1.5]
    assert recorder.epochs == pytest.approx([(k + 1) / 6 for k in range(30)])
    for entry in logs:
        assert 0 < entry["padding"] < 0.5
        assert entry["tokens_per_s"] > 0
        assert entry["samples_per_update"] == 16
    assert run.state.num_input_tokens_seen == run.update_loader.stats.real_tokens
    assert run.state.total_flos > 0


def test_evaluation_early_stopping_and_the_best_checkpoint(tmp_path):
    run = trainer(
        "causal",
        tmp_path,
        fits=True,
        max_steps=12,
        eval_dataset=toys.samples("causal", 8, seed=1),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        learning_rate=0.0,
        metric_for_best_model="eval_loss",
        callbacks=[EarlyStoppingCallback(2)],
    )
    run.train()
    assert run.state.global_step == 6, "the loss never improves after the first evaluation"
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")


class Resize(TrainerCallback):
    """After ``step`` updates they hold ``samples``."""

    def __init__(self, step, samples):
        self.step, self.samples = step, samples

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == self.step:
            assert train_dataloader.set_samples_per_update(self.samples) == self.step


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        (
            {"config": {"samples_per_update": toys.doubling(8, 3)}},
            [8] * 3 + [16] * 4 + [8] + [16] * 6,
        ),
        ({"callbacks": [Resize(2, 32)]}, [16, 16] + [32] * 5),
        ({"callbacks": [Resize(2, 4)], "num_train_epochs": 1}, [16, 16] + [4] * 16),
        (
            {"callbacks": [Resize(2, 32)], "max_steps": 12},
            [16, 16] + [32] * 10,
        ),  # past the epochs that it began with
    ],
    ids=["scheduled", "grown", "shrunk", "grown, so many steps"],
)
def test_the_size_of_updates_changes_and_no_sample_is_lost(changes, sizes, tmp_path):
    run, recorder = recorded(tmp_path, **{"max_steps": -1, "num_train_epochs": 2, **changes})
    assert recorder.sizes == sizes
    assert run.state.max_steps == run.state.global_step == len(sizes)
    assert recorder.epochs[-1] == sum(sizes) / 96


@pytest.mark.parametrize("epochs", [0.3, 2.1])
def test_a_run_has_as_many_updates_as_the_plain_trainers(tmp_path, epochs):
    """2.1 epochs of 10 updates are 21 updates: (2.1 - 2) * 10 is a little more than 1 in floating point."""
    steps = []
    for fits in (False, True):
        how = {
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 1,
            "num_train_epochs": epochs,
        }
        run = trainer("causal", tmp_path, fits=fits, count=20, max_steps=-1, **how)
        run.train()
        steps.append(run.state.global_step)
    assert steps == [run.state.max_steps] * 2 == [int(10 * epochs)] * 2


def test_a_sampler_that_groups_by_length_groups_by_the_update(tmp_path, monkeypatch):
    runs = [
        trainer(
            "causal",
            tmp_path,
            fits=fits,
            train_sampling_strategy="group_by_length",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        )
        for fits in (False, True)
    ]
    hosts, upstream = [], Trainer.get_train_dataloader
    monkeypatch.setattr(
        Trainer, "get_train_dataloader", lambda self: hosts.append(upstream(self)) or hosts[-1]
    )
    for run in runs:
        run.get_train_dataloader()
    assert [host_order(host).batch_size for host in hosts] == [8, 8]
    runs[1]._train_batch_size = 3  # as a search for hyperparameters sets it
    assert runs[1].get_train_dataloader().loader.sizes.schedule == 6


def test_free_updates_and_streams_take_as_many_steps_as_asked(tmp_path):
    run, _ = recorded(
        tmp_path, max_steps=2, config={"updates": "free"}, gradient_accumulation_steps=3
    )
    assert sum(run.update_loader.stats.batch_sizes.values()) == 6
    for config in ({"mode": "offline", "lengths": None}, ONLINE, {**ONLINE, "updates": "free"}):
        run = trainer("causal", tmp_path, fits=True, max_steps=2, config=config)
        run.train_dataset = toys.Stream()
        if "updates" not in config:
            with pytest.raises(
                ConfigError, match=r"mode='online', updates='free'\), and max_steps"
            ):
                run.train()
    run.train()
    assert run.state.global_step == 2


ODD: list[Any] = [
    SequentialSampler,
    lambda data: RandomSampler(data, replacement=True),
    lambda data: RandomSampler(data, num_samples=7),
    lambda _: WeightedRandomSampler([1.0] * 96, 96),
]


@pytest.mark.parametrize("sampler", ODD)
def test_free_updates_keep_the_trainers_sampler_or_refuse_it(tmp_path, monkeypatch, sampler):
    free = trainer("causal", tmp_path, fits=True, config={"updates": "free"})
    free.get_train_dataloader()
    online = trainer("causal", tmp_path, fits=True, config={**ONLINE, "updates": "free"})
    monkeypatch.setattr(Trainer, "_get_train_sampler", lambda self, dataset: sampler(dataset))
    with pytest.raises(
        ConfigError,
        match="updates='free' draws its own order, so the Trainer's .*Sampler would be ignored",
    ):
        free.get_train_dataloader()
    drawn = sorted(i for step in online.get_train_dataloader().loader for i in step.indices)
    assert drawn != [*range(96)] or sampler is SequentialSampler


def test_lengths_are_measured_where_there_is_no_column(tmp_path):
    rows, args = toys.samples("seq2seq", 16), arguments(tmp_path, max_steps=1)
    how = {"train_dataset": rows, "data_collator": toys.collate_seq2seq}
    run = DynagroupTrainer(toys.seq2seq(), args, dynagroup=TokenBudget(4096), **how)
    with_lengths = datasets.Dataset.from_list([{**r, "length": 5} for r in rows])
    for data in (
        rows,
        datasets.Dataset.from_list(rows[::-1]).select(range(15, -1, -1)),
        with_lengths,
    ):
        found = sample_lengths(run, data, name="train_dataset")
        assert found["target"].tolist() == [len(row["labels"]) for row in rows]
        assert found["tokens"].tolist() == (
            [5] * 16 if data is with_lengths else toys.lengths(rows)
        )
    for unknown in ([{"text": "a"}], [["a", "b"]]):
        with pytest.raises(
            ConfigError, match="lengths of train_dataset: .* neither 'length' nor 'input_ids'"
        ):
            sample_lengths(run, unknown, name="train_dataset")
    pairs = datasets.Dataset.from_dict(
        {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1]]}
    )
    assert sample_lengths(run, pairs, name="")["tokens"].tolist() == [6]
    causal = trainer("causal", tmp_path, fits=True)
    for kind in (list, np.asarray, torch.tensor):
        plain = [kind(row["input_ids"]) for row in rows]
        assert sample_lengths(causal, plain, name="")["tokens"].tolist() == toys.lengths(rows)


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_lose_samples_is_refused(tmp_path, message):
    with pytest.raises(ConfigError, match=message):
        trainer("causal", tmp_path, fits=True, **REFUSED[message])


def test_ranks_that_share_samples_are_asked_for_the_ranks_that_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ConfigError, match="ranks share a sample.*world=DistributedWorld"):
        trainer("causal", tmp_path, fits=True)
    trainer("causal", tmp_path, fits=True, config={"world": SingleProcess()})


def test_a_memory_budget_without_a_model_is_told_the_trainers(tmp_path):
    """A regressor that knows nothing stays near the hardest batch: half as many steps again as with a model that is traced."""
    given = [MemoryBudget(4), MemoryBudget(4, model=MemoryRegressor.pretrained())]
    own, careful = (
        trainer("causal", tmp_path, fits=True, config={"budget": budget}) for budget in given
    )
    assert careful.dynagroup.budget == given[1]
    assert 1.5 * len(own.get_train_dataloader().loader) < len(careful.get_train_dataloader().loader)
    how = {"bf16": True, "gradient_checkpointing": True}
    attach(
        other := trainer("causal", tmp_path, fits=False, **how),
        MemoryBudget(4),
        dynagroup_eval=MemoryBudget(8),
    )
    budgets = (own.dynagroup.budget, other.dynagroup.budget, other.dynagroup_eval)
    known = [
        (w.mode, w.autocast, w.gradient_checkpointing)
        for w in (b.model.workload for b in budgets)
        if w.phases
    ]
    assert known == [
        ("train", None, False),
        ("train", "bfloat16", True),
        ("forward", "bfloat16", False),
    ]


def test_what_runs_out_of_memory_before_the_first_update_never_does_again(tmp_path):
    run = trainer(
        "causal",
        tmp_path,
        fits=True,
        config={"preflight": True, "out_of_memory": "retry"},
        max_steps=8,
    )
    allocator, before = Allocator(100), []
    allocator.in_forward(run.model)
    note = {"on_step_begin": lambda *args, **kwargs: before.append(len(allocator.failures))}
    run.add_callback(type("Note", (TrainerCallback,), note)())
    run.train()
    assert before == [len(allocator.failures)] * 8
    assert run.update_loader.budget.learner.report.num_ooms == before[0] > 0


def test_attaching_makes_the_trainer_that_the_class_makes_and_too_late_twice_or_in_vain_is_refused(
    tmp_path,
):
    changes = {"exact_loss": True, "max_steps": 8, "count": 48}
    made = trainer("causal", tmp_path / "a", fits=True, config={"lengths": None}, **changes)
    attached = trainer("causal", tmp_path / "b", fits=False, **changes)
    attach(attached, 160)
    for run in (made, attached):
        run.train()
    assert torch.equal(parameters(made.model), parameters(attached.model))
    batches = [sum(run.update_loader.stats.batch_sizes.values()) for run in (made, attached)]
    assert batches[0] == batches[1] > 8
    assert type(attached) is dynagroup_trainer(Trainer)
    rows = toys.samples("causal", 9)
    assert attached.evaluate(rows)["eval_loss"] == made.evaluate(rows)["eval_loss"]
    rows += rows[:2]
    assert len(made.predict(rows).label_ids) == 11, "a list may grow"
    (late := trainer("causal", tmp_path, fits=False, max_steps=1)).train()
    alone = trainer("causal", tmp_path, fits=False, auto_find_batch_size=True)
    for run, message in (
        (late, "has made 1 updates"),
        (alone, "auto_find_batch_size=True cannot be combined with"),
    ):
        before, callbacks = run.args, len(run.callback_handler.callbacks)
        with pytest.raises(ConfigError, match=message):
            attach(run, 160)
        assert (type(run), run.args, len(run.callback_handler.callbacks)) == (
            Trainer,
            before,
            callbacks,
        )
    step = {
        "training_step": lambda self, model, inputs, items=None: (
            self.accelerator.backward(self.compute_loss(model, inputs)) or torch.tensor(0.0)
        )
    }
    old = dynagroup_trainer(type("Old", (Trainer,), step))
    with pytest.raises(
        ConfigError, match="training_step of DynagroupOld must weigh the loss: call"
    ):
        old(
            toys.causal_lm(),
            arguments(tmp_path),
            dynagroup=DynagroupConfig(budget=TokenBudget(64), weigh="tokens"),
            train_dataset=rows,
            data_collator=toys.collate,
            compute_loss_func=lambda outputs, labels, num_items_in_batch=None: (
                toys.float64_causal_loss(outputs, labels, (labels[:, 1:] != -100).sum())
            ),
        ).train()
    batches = type("Balanced", (torch.utils.data.BatchSampler,), {})(range(9), 4, False)
    balanced = {
        "get_train_dataloader": lambda self: torch.utils.data.DataLoader(
            self.train_dataset, batch_sampler=batches
        )
    }
    given = {"dynagroup": 64, "train_dataset": rows[:9], "data_collator": toys.collate}
    chosen = dynagroup_trainer(type("Chosen", (Trainer,), balanced))(
        toys.causal_lm(), arguments(tmp_path), **given
    )
    with pytest.raises(
        ConfigError,
        match="must come from torch's BatchSampler, not .*Balanced.*use _get_train_sampler",
    ):
        chosen.train()
    taken = trainer("causal", tmp_path, fits=True)
    for make, *given in ((attach, taken, 160), (attach, "x", 160), (dynagroup_trainer, int)):
        with pytest.raises(ConfigError, match="must be a Trainer without dynagroup"):
            make(*given)


@pytest.mark.parametrize("multiple", [1, 8])
def test_an_automatic_budget_is_the_batch_that_must_fit_today(tmp_path, multiple):
    lengths = np.array([9, 30, 17, 3, 22, 5, 8, 12] * 4)
    rows = [{"input_ids": [3] * n} for n in lengths.tolist()]
    data = datasets.Dataset.from_list(rows)
    collator = DataCollatorForLanguageModeling(
        train_tokenizer(["a word or two"], vocabulary=32), mlm=False, pad_to_multiple_of=multiple
    )
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True
    )
    model = MODELS["causal"]()
    how = {"train_dataset": data, "data_collator": collator}
    run = DynagroupTrainer(model, args, dynagroup="auto", **how)
    assert run.dynagroup.budget == TokenBudget(
        4 * -(-30 // multiple) * multiple, pad_to_multiple_of=multiple
    )
    run.train()
    assert run.update_loader.num_updates == 8
    with pytest.raises(ConfigError, match="`budget='auto'` needs a train_dataset"):
        DynagroupTrainer(model, args, dynagroup="auto", data_collator=collator)
    with pytest.raises(ConfigError, match="`budget='auto'` needs mode='offline'"):
        DynagroupConfig(budget="auto", mode="online")


def test_a_run_says_what_exact_updates_cost(tmp_path, caplog):
    trainer("causal", tmp_path, fits=True, max_steps=1).train()
    exact, stratified = [one.message for one in caplog.records if "fixed batches" in one.message]
    assert exact.startswith("dynagroup: exact updates: padding ")
    assert stratified.startswith("dynagroup: grouping=50: padding ")
    caplog.clear()
    trainer("causal", tmp_path, fits=True, max_steps=1, config={"grouping": 50}).train()
    assert "fixed batches" not in caplog.text
