"""The Trainer adapter against the real Trainer: the same updates, books, checkpoints, lengths, refusals."""

from itertools import chain
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
REFUSED = [
    (
        {"auto_find_batch_size": True},
        "auto_find_batch_size=True .*: the budget limits batches already",
    ),
    (
        {"accelerator_config": {"dispatch_batches": True}},
        "dispatch_batches=True .* set it to False",
    ),
    ({"accelerator_config": {"split_batches": True}}, "split_batches=True .* set it to False"),
    (
        {"dataloader_in_order": False, "dataloader_num_workers": 1},
        "dataloader_in_order=False .* True",
    ),
    (
        {"train_sampling_strategy": "batch_rebalance"},
        "batch_rebalance' cannot be combined with dynagroup",
    ),
    (
        {"config": {"weigh": "words"}},
        "`weigh` must be 'tokens', 'labels', 'samples' or a function",
    ),
    ({"config": {"updates": "some"}}, "`updates` must be one of"),
    (
        {"config": {"updates": "free", "samples_per_update": 4}},
        "needs updates='preserved'",
    ),
]


class Recorder(TrainerCallback):
    """Epochs as callbacks read them; ``samples``: those that each update's model learns from."""

    def __init__(self):
        self.epochs = []
        self.samples = {}

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


UPDATES_OF_ALL = {"exact_loss": True, "max_grad_norm": 0.0, "max_steps": 8, "logging_steps": 4}
LARGEST_NORM = 0.3
LIBRARY_LOSS = {"exact_loss": False}


def both(kind, folder, changes, ours):
    """The same training twice: of fixed batches, and of batches that fit."""
    common = {**UPDATES_OF_ALL, **changes}
    if kind == "classifier":
        common["exact_loss"] = False
    fixed = trainer(kind, folder, fits=False, **common)
    fitting = trainer(kind, folder, fits=True, **common, **ours)
    return fixed, fitting


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def assert_trained_alike(fixed, fitting, *, largest_difference=1e-8, least_change=1e-2):
    """``fixed`` and ``fitting`` begin with the same parameters."""
    before = parameters(fixed.model)
    assert torch.equal(parameters(fitting.model), before)
    fixed.train()
    fitting.train()
    expected = parameters(fixed.model)
    assert (expected - before).abs().max() > least_change, "nothing was trained"
    assert (expected - parameters(fitting.model)).abs().max() < largest_difference
    assert losses(fitting)[0] == pytest.approx(losses(fixed)[0], rel=1e-5)
    last_logs = [run.state.log_history[-2] for run in (fixed, fitting)]
    assert last_logs[0]["epoch"] == last_logs[1]["epoch"]


@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_those_of_fixed_batches_where_gradients_are_clipped(kind, tmp_path):
    fixed, fitting = both(kind, tmp_path, {"max_grad_norm": LARGEST_NORM}, {})
    assert_trained_alike(fixed, fitting, least_change=1e-3)
    norms = [entry.get("grad_norm", 0.0) for entry in fitting.state.log_history]
    assert max(norms) > LARGEST_NORM, "nothing was clipped"


OPTIONS = {
    "preflight": {"config": {"preflight": True}},
    "online": {"config": ONLINE, "dataloader_num_workers": 1},
    "kind_of": {"config": {**ONLINE, "kind_of": two_of_three}},
    "kinds": {"config": {"kinds": [None, "a", "a"] * 32}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_are_those_of_fixed_batches(name, tmp_path):
    fixed, fitting = both("causal", tmp_path, {}, OPTIONS[name])
    assert_trained_alike(fixed, fitting)


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_filled_rows_weigh_nothing_and_the_model_meets_three_shapes(kind, tmp_path):
    fixed, fitting = both(kind, tmp_path, {}, {"config": {"shapes": 3}})
    shapes = models.shapes_seen(fitting.model)
    assert_trained_alike(fixed, fitting)
    assert len(set(shapes)) <= 3 + 1, "besides the unfilled samples of the split test"
    assert len(set(shapes) & set(fitting.update_loader.budget.shapes)) > 1


def test_the_librarys_loss_is_of_float32(tmp_path):
    fixed, fitting = both("causal", tmp_path, LIBRARY_LOSS, {})
    assert_trained_alike(fixed, fitting, largest_difference=1e-5)


def test_label_smoothing_is_that_of_fixed_batches(tmp_path):
    smoothed = {**LIBRARY_LOSS, "label_smoothing_factor": 0.1}
    fixed, fitting = both("seq2seq", tmp_path, smoothed, {})
    fixed.model_accepts_loss_kwargs = True
    fitting.model_accepts_loss_kwargs = True
    assert_trained_alike(fixed, fitting)


def test_packed_batches_have_no_padding_and_predictions_of_them_are_warned_of(tmp_path):
    fixed = trainer("causal", tmp_path, fits=False, model=llama("sdpa"), **UPDATES_OF_ALL)
    config = {"budget": BUDGET}
    fitting = trainer(
        "causal", tmp_path, fits=True, model=llama("sdpa"), config=config, **UPDATES_OF_ALL
    )
    fitting.data_collator = FLAT
    assert_trained_alike(fixed, fitting)
    assert fitting.state.log_history[0]["padding"] == 0
    with pytest.warns(UserWarning, match="predictions of packed batches are one row a batch"):
        fitting.predict(fitting.train_dataset)


def resumable(folder, mode):
    """Dropout, random processing, and in one mode updates whose size is changed."""
    config = {}
    callbacks = []
    if mode in ("online", "scheduled"):
        config.update(ONLINE)
    if mode == "scheduled":
        config["samples_per_update"] = toys.doubling(6, 2)
        callbacks.append(Resize(3, 20))
    run = trainer(
        "causal",
        folder,
        fits=True,
        model=toys.with_dropout(toys.causal_lm()),
        exact_loss=True,
        max_steps=5,
        count=48,
        dataloader_num_workers=int(mode == "workers"),
        config=config,
        callbacks=callbacks,
        **SAVED,
    )
    if mode != "online":
        run.data_collator = toys.collate_noisily
    return run


# In epoch 0, at its end, in epoch 1, at the end of the run.
STOPS = [("offline", (1, 3, 4, 5)), ("workers", (4,)), ("online", (4,)), ("scheduled", (4,))]


@pytest.mark.parametrize(("mode", "stops"), STOPS)
def test_a_resumed_run_ends_with_the_same_parameters(mode, stops, tmp_path):
    whole = resumable(tmp_path / "whole", mode)
    whole.train()
    for stop in stops:
        resumed = resumable(tmp_path / f"resumed{stop}", mode)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{stop}"))
        message = f"resumed after update {stop}"
        assert torch.equal(parameters(resumed.model), parameters(whole.model)), message
        assert resumed.state.epoch == whole.state.epoch
        assert resumed.state.global_step == 5
        assert resumed.update_loader.cursor == whole.update_loader.cursor


SHORT = {"max_steps": 4, "count": 48, **SAVED}


def checkpoint_of(folder, *, fits):
    trainer("causal", folder, fits=fits, **SHORT).train()
    return str(folder / "checkpoint-2")


def test_a_checkpoint_of_a_trainer_without_dynagroup_is_refused(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "fixed", fits=False)
    message = "saved by a Trainer without dynagroup.*ignore_data_skip=True"
    with pytest.raises(StateError, match=message):
        trainer("causal", tmp_path, fits=True, **SHORT).train(resume_from_checkpoint=checkpoint)


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    checkpoint = checkpoint_of(tmp_path / "ours", fits=True)
    run = trainer("causal", tmp_path, fits=True, **{**SHORT, "count": 64})
    with pytest.raises(StateError, match="num_samples was 48 then, is 64 now"):
        run.train(resume_from_checkpoint=checkpoint)


@pytest.mark.parametrize("fits", [False, True])
def test_an_epoch_can_begin_anew_after_any_checkpoint(fits, tmp_path):
    checkpoint = checkpoint_of(tmp_path / "first", fits=fits)
    run, recorder = recorded(tmp_path, resume=checkpoint, ignore_data_skip=True, **SHORT)
    run.update_loader.set_epoch(0)
    epoch = []
    for update in run.update_loader.updates():
        indices = [list(step.indices) for step in update]
        epoch.append(sorted(sum(indices, [])))
    assert list(map(sorted, recorder.samples.values())) == epoch[:2]


class Inside(TrainerCallback):  # saves as transformers does when a machine is taken away (SIGTERM)
    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.run._save_checkpoint(self.run.model, None)


def test_a_checkpoint_inside_an_update_is_refused(tmp_path):
    with pytest.raises(StateError, match="checkpoint-2 is inside an update; save later, or set"):
        recorded(tmp_path, [Inside()], max_steps=4)


def test_a_checkpoint_on_a_signal_has_the_samples_before_its_update(tmp_path):
    on_signal = {"max_steps": 4, "enable_jit_checkpoint": True}
    _, whole = recorded(tmp_path, [Inside()], **on_signal)
    _, rest = recorded(tmp_path, resume=str(tmp_path / "checkpoint-2"), **on_signal)
    assert rest.samples == {update: whole.samples[update] for update in (2, 3)}


ONLINE_POOLS = {**ONLINE, "grouping": 2}


CONFIGS = [{}, {"updates": "free"}, {"grouping": 2}, ONLINE_POOLS]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
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
    seen = list(chain.from_iterable(recorder.samples.values()))
    assert sorted(seen[:70]) == sorted(seen[70:]) == list(range(70))
    assert recorder.epochs[-1] == 2.0
    assert run.state.max_steps == run.state.global_step == len(recorder.samples)
    assert set(run.lr_scheduler.get_last_lr()) == {0.0}, "the schedule ends with the run"


@pytest.mark.parametrize("config", [{}, ONLINE], ids=["offline", "online"])
def test_epochs_and_figures_are_logged_and_read_as_they_are(config, tmp_path):
    counted = {"include_num_input_tokens_seen": "non_padding"}
    run, recorder = recorded(tmp_path, max_steps=30, logging_steps=3, config=config, **counted)
    assert recorder.epochs == pytest.approx([update / 6 for update in range(1, 31)])
    logs = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in logs[:3]] == [0.5, 1.0, 1.5]
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
        self.step = step
        self.samples = samples

    def on_step_end(self, args, state, control, train_dataloader=None, **kwargs):
        if state.global_step == self.step:
            assert train_dataloader.set_samples_per_update(self.samples) == self.step


TWO_EPOCHS = {"max_steps": -1, "num_train_epochs": 2}
ONE_EPOCH = {"max_steps": -1, "num_train_epochs": 1}
DOUBLING = {"config": {"samples_per_update": toys.doubling(8, 3)}}
SIZES = {
    "scheduled": ({**TWO_EPOCHS, **DOUBLING}, [8] * 3 + [16] * 4 + [8] + [16] * 6),
    "grown": ({**TWO_EPOCHS, "callbacks": [Resize(2, 32)]}, [16] * 2 + [32] * 5),
    "shrunk": ({**ONE_EPOCH, "callbacks": [Resize(2, 4)]}, [16] * 2 + [4] * 16),
    # Past the epochs that it began with.
    "grown, so many steps": (
        {**TWO_EPOCHS, "max_steps": 12, "callbacks": [Resize(2, 32)]},
        [16] * 2 + [32] * 10,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_size_of_updates_changes_and_no_sample_is_lost(name, tmp_path):
    changes, sizes = SIZES[name]
    run, recorder = recorded(tmp_path, **changes)
    assert recorder.sizes == sizes
    assert run.state.max_steps == run.state.global_step == len(sizes)
    assert recorder.epochs[-1] == sum(sizes) / 96


@pytest.mark.parametrize(("epochs", "num_updates"), [(0.3, 3), (2.1, 21)])
def test_a_run_has_as_many_updates_as_the_plain_trainers(tmp_path, epochs, num_updates):
    """2.1 epochs of 10 updates are 21 updates: (2.1 - 2) * 10 is a little more than 1 in floating point."""
    for fits in (False, True):
        run = trainer(
            "causal",
            tmp_path,
            fits=fits,
            count=20,
            max_steps=-1,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
            num_train_epochs=epochs,
        )
        run.train()
        assert run.state.global_step == run.state.max_steps == num_updates


@pytest.fixture
def hosts(monkeypatch):
    """The DataLoaders that the plain Trainer makes from now on."""
    loaders = []
    make = Trainer.get_train_dataloader

    def note(self):
        loaders.append(make(self))
        return loaders[-1]

    monkeypatch.setattr(Trainer, "get_train_dataloader", note)
    return loaders


GROUPED = {
    "train_sampling_strategy": "group_by_length",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
}


@pytest.mark.parametrize("fits", [False, True])
def test_a_sampler_that_groups_by_length_groups_by_the_update(tmp_path, hosts, fits):
    trainer("causal", tmp_path, fits=fits, **GROUPED).get_train_dataloader()
    assert [host_order(host).batch_size for host in hosts] == [8]


def test_the_size_of_updates_follows_a_batch_size_that_is_set_later(tmp_path):
    """As a search for hyperparameters sets it."""
    run = trainer("causal", tmp_path, fits=True, **GROUPED)
    run.get_train_dataloader()
    run._train_batch_size = 3
    assert run.get_train_dataloader().loader.sizes.schedule == 6


def test_free_updates_take_as_many_steps_as_asked(tmp_path):
    free = {"updates": "free"}
    run, _ = recorded(tmp_path, max_steps=2, config=free, gradient_accumulation_steps=3)
    assert sum(run.update_loader.stats.batch_sizes.values()) == 6


def streaming(folder, config):
    run = trainer("causal", folder, fits=True, max_steps=2, config=config)
    run.train_dataset = toys.Stream()
    return run


@pytest.mark.parametrize("config", [{"mode": "offline", "lengths": None}, ONLINE])
def test_a_stream_needs_free_updates_of_mode_online(tmp_path, config):
    with pytest.raises(ConfigError, match=r"mode='online', updates='free'\), and max_steps"):
        streaming(tmp_path, config).train()


def test_a_stream_takes_as_many_steps_as_asked(tmp_path):
    run = streaming(tmp_path, {**ONLINE, "updates": "free"})
    run.train()
    assert run.state.global_step == 2


def test_a_stream_that_accelerate_would_divide_once_more_is_refused(tmp_path, monkeypatch):
    """After ``split_dataset_by_node``, as the page on streams asks, half of the samples would be lost."""
    run = trainer(
        "causal",
        tmp_path,
        fits=True,
        max_steps=2,
        accelerator_config={"dispatch_batches": False},
        config={**ONLINE, "updates": "free"},
    )
    rows = datasets.Dataset.from_list(toys.samples("causal", 8))
    run.train_dataset = rows.to_iterable_dataset(num_shards=4)
    run.get_train_dataloader()
    monkeypatch.setattr(type(run.args), "world_size", 2)
    with pytest.raises(ConfigError, match="divides a stream once more.*; leave it out"):
        run.get_train_dataloader()


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
    message = "updates='free' draws its own order, so the Trainer's .*Sampler would be ignored"
    with pytest.raises(ConfigError, match=message):
        free.get_train_dataloader()
    steps = online.get_train_dataloader().loader
    drawn = sorted(index for step in steps for index in step.indices)
    takes_all_once = drawn == list(range(96))
    assert takes_all_once == (sampler is SequentialSampler)


@pytest.fixture
def seq2seq_run(tmp_path):
    return DynagroupTrainer(
        toys.seq2seq(),
        arguments(tmp_path, max_steps=1),
        dynagroup=TokenBudget(4096),
        train_dataset=toys.samples("seq2seq", 16),
        data_collator=toys.collate_seq2seq,
    )


PAIRS = toys.samples("seq2seq", 16)
REVERSED_TWICE = datasets.Dataset.from_list(PAIRS[::-1]).select(range(15, -1, -1))
WITH_LENGTHS = datasets.Dataset.from_list([{**row, "length": 5} for row in PAIRS])
MEASURED = {
    "list": (PAIRS, toys.lengths(PAIRS)),
    "selected": (REVERSED_TWICE, toys.lengths(PAIRS)),
    "column": (WITH_LENGTHS, [5] * 16),
}


@pytest.mark.parametrize("name", MEASURED)
def test_lengths_are_measured_where_there_is_no_column(seq2seq_run, name):
    data, num_tokens = MEASURED[name]
    measured = sample_lengths(seq2seq_run, data, name="train_dataset")
    assert measured["target"].tolist() == [len(row["labels"]) for row in PAIRS]
    assert measured["tokens"].tolist() == num_tokens


@pytest.mark.parametrize("unknown", [[{"text": "a"}], [["a", "b"]]])
def test_samples_without_a_length_are_refused(seq2seq_run, unknown):
    message = "lengths of train_dataset: .* neither 'length' nor 'input_ids'"
    with pytest.raises(ConfigError, match=message):
        sample_lengths(seq2seq_run, unknown, name="train_dataset")


def test_both_texts_of_a_preference_are_measured(seq2seq_run):
    columns = {"chosen_input_ids": [[1, 2, 3]], "rejected_input_ids": [[1]]}
    measured = sample_lengths(seq2seq_run, datasets.Dataset.from_dict(columns), name="")
    assert measured["tokens"].tolist() == [6]


@pytest.mark.parametrize("as_row", [list, np.asarray, torch.tensor])
def test_rows_of_ids_are_measured(tmp_path, as_row):
    rows = [as_row(row["input_ids"]) for row in PAIRS]
    measured = sample_lengths(trainer("causal", tmp_path, fits=True), rows, name="")
    assert measured["tokens"].tolist() == toys.lengths(PAIRS)


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_would_lose_samples_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        trainer("causal", tmp_path, fits=True, **changes)


def test_ranks_that_share_samples_are_asked_for_the_ranks_that_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "get_tp_size", lambda self: 2)
    with pytest.raises(ConfigError, match="ranks share a sample.*world=DistributedWorld"):
        trainer("causal", tmp_path, fits=True)
    trainer("causal", tmp_path, fits=True, config={"world": SingleProcess()})


def workload_of(budget):
    workload = budget.model.workload
    return workload.mode, workload.autocast, workload.gradient_checkpointing


def test_a_memory_budget_without_a_model_is_told_the_trainers(tmp_path):
    run = trainer("causal", tmp_path, fits=True, config={"budget": MemoryBudget(4)})
    assert workload_of(run.dynagroup.budget) == ("train", None, False)


def test_a_memory_budget_is_told_how_the_trainer_runs(tmp_path):
    how = {"bf16": True, "gradient_checkpointing": True}
    run = trainer("causal", tmp_path, fits=False, **how)
    attach(run, MemoryBudget(4), dynagroup_eval=MemoryBudget(8))
    assert workload_of(run.dynagroup.budget) == ("train", "bfloat16", True)
    assert workload_of(run.dynagroup_eval) == ("forward", "bfloat16", False)


def test_a_memory_budget_with_a_model_keeps_it(tmp_path):
    """A regressor that knows nothing stays near the hardest batch: half as many steps again as with a model that is traced."""
    budget = MemoryBudget(4, model=MemoryRegressor.pretrained())
    careful = trainer("causal", tmp_path, fits=True, config={"budget": budget})
    assert careful.dynagroup.budget == budget
    traced = trainer("causal", tmp_path, fits=True, config={"budget": MemoryBudget(4)})
    num_steps = len(traced.get_train_dataloader().loader)
    assert 1.5 * num_steps < len(careful.get_train_dataloader().loader)


class NoteFailures(TrainerCallback):
    """How often memory had run out when each update began."""

    def __init__(self, allocator):
        self.allocator = allocator
        self.num_before = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.num_before.append(len(self.allocator.failures))


def test_what_runs_out_of_memory_before_the_first_update_never_does_again(tmp_path):
    allocator = Allocator(100)
    note = NoteFailures(allocator)
    config = {"preflight": True, "out_of_memory": "retry"}
    run = trainer("causal", tmp_path, fits=True, config=config, max_steps=8, callbacks=[note])
    allocator.in_forward(run.model)
    run.train()
    num_failures = len(allocator.failures)
    assert num_failures > 0
    assert note.num_before == [num_failures] * 8
    assert run.update_loader.budget.learner.report.num_ooms == num_failures


def test_attaching_makes_the_trainer_that_the_class_makes(tmp_path):
    changes = {"exact_loss": True, "max_steps": 8, "count": 48}
    of_class = trainer("causal", tmp_path / "a", fits=True, config={"lengths": None}, **changes)
    attached = trainer("causal", tmp_path / "b", fits=False, **changes)
    attach(attached, 160)
    assert type(attached) is dynagroup_trainer(Trainer)
    of_class.train()
    attached.train()
    assert torch.equal(parameters(of_class.model), parameters(attached.model))
    num_batches = sum(of_class.update_loader.stats.batch_sizes.values())
    assert num_batches > 8
    assert sum(attached.update_loader.stats.batch_sizes.values()) == num_batches
    rows = toys.samples("causal", 9)
    assert attached.evaluate(rows)["eval_loss"] == of_class.evaluate(rows)["eval_loss"]
    rows += rows[:2]
    assert len(of_class.predict(rows).label_ids) == 11, "a list may grow"


def trained_already(folder):
    run = trainer("causal", folder, fits=False, max_steps=1)
    run.train()
    return run


def with_batch_sizes_of_its_own(folder):
    return trainer("causal", folder, fits=False, auto_find_batch_size=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (trained_already, "has made 1 updates"),
        (with_batch_sizes_of_its_own, "auto_find_batch_size=True cannot be combined with"),
    ],
)
def test_where_attaching_is_refused_nothing_has_changed(tmp_path, make, message):
    run = make(tmp_path)
    args = run.args
    callbacks = list(run.callback_handler.callbacks)
    with pytest.raises(ConfigError, match=message):
        attach(run, 160)
    assert type(run) is Trainer
    assert run.args == args
    assert run.callback_handler.callbacks == callbacks


class Old(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.accelerator.backward(self.compute_loss(model, inputs))
        return torch.tensor(0.0)


def mean_over_tokens(outputs, labels, num_items_in_batch=None):
    num_tokens = (labels[:, 1:] != -100).sum()
    return toys.float64_causal_loss(outputs, labels, num_tokens)


def test_a_training_step_that_does_not_weigh_the_loss_is_refused(tmp_path):
    run = dynagroup_trainer(Old)(
        toys.causal_lm(),
        arguments(tmp_path),
        dynagroup=DynagroupConfig(budget=TokenBudget(64), weigh="tokens"),
        train_dataset=toys.samples("causal", 11),
        data_collator=toys.collate,
        compute_loss_func=mean_over_tokens,
    )
    message = "training_step of DynagroupOld must weigh the loss: call"
    with pytest.raises(ConfigError, match=message):
        run.train()


class Balanced(torch.utils.data.BatchSampler):
    pass


class Chosen(Trainer):
    def get_train_dataloader(self):
        batches = Balanced(range(9), 4, False)
        return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=batches)


def test_batches_of_the_users_own_are_refused(tmp_path):
    run = dynagroup_trainer(Chosen)(
        toys.causal_lm(),
        arguments(tmp_path),
        dynagroup=64,
        train_dataset=toys.samples("causal", 9),
        data_collator=toys.collate,
    )
    message = "must come from torch's BatchSampler, not .*Balanced.*use _get_train_sampler"
    with pytest.raises(ConfigError, match=message):
        run.train()


def test_only_a_trainer_without_dynagroup_is_taken(tmp_path):
    message = "must be a Trainer without dynagroup"
    with pytest.raises(ConfigError, match=message):
        attach(trainer("causal", tmp_path, fits=True), 160)
    with pytest.raises(ConfigError, match=message):
        attach("x", 160)
    with pytest.raises(ConfigError, match=message):
        dynagroup_trainer(int)


def tokenizer():
    return train_tokenizer(["a word or two"], vocabulary=32)


@pytest.mark.parametrize(("multiple", "longest"), [(1, 30), (8, 32)])
def test_an_automatic_budget_is_the_batch_that_must_fit_today(tmp_path, multiple, longest):
    lengths = [9, 30, 17, 3, 22, 5, 8, 12] * 4
    rows = [{"input_ids": [3] * length} for length in lengths]
    collator = DataCollatorForLanguageModeling(tokenizer(), mlm=False, pad_to_multiple_of=multiple)
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=2, report_to=[], use_cpu=True
    )
    run = DynagroupTrainer(
        toys.causal_lm(),
        args,
        dynagroup="auto",
        train_dataset=datasets.Dataset.from_list(rows),
        data_collator=collator,
    )
    assert run.dynagroup.budget == TokenBudget(4 * longest, pad_to_multiple_of=multiple)
    run.train()
    assert run.update_loader.num_updates == 8


def test_an_automatic_budget_needs_data_whose_lengths_are_known(tmp_path):
    with pytest.raises(ConfigError, match="`budget='auto'` needs a train_dataset"):
        DynagroupTrainer(
            toys.causal_lm(), arguments(tmp_path), dynagroup="auto", data_collator=toys.collate
        )
    with pytest.raises(ConfigError, match="`budget='auto'` needs mode='offline'"):
        DynagroupConfig(budget="auto", mode="online")


def test_a_run_says_what_fixed_batches_would_have_cost_and_what_it_costs(tmp_path, caplog):
    trainer("causal", tmp_path, fits=True, max_steps=1).train()
    messages = [record.message for record in caplog.records]
    fixed, exact, stratified = [message for message in messages if "fixed batches" in message]
    assert fixed.startswith("dynagroup: fixed batches: padding ")
    assert " steps for " in fixed
    assert exact.startswith("dynagroup: exact updates (this run): padding ")
    assert stratified.startswith("dynagroup: grouping=50: padding ")
    caplog.clear()
    trainer("causal", tmp_path, fits=True, max_steps=1, config={"grouping": 50}).train()
    messages = [record.message for record in caplog.records if "fixed batches" in record.message]
    assert messages == [fixed, stratified.replace("grouping=50", "grouping=50 (this run)")]
    caplog.clear()
    trainer("causal", tmp_path, fits=True, max_steps=1, config={"grouping": 7}).train()
    messages = [record.message for record in caplog.records if "fixed batches" in record.message]
    assert messages[1].startswith("dynagroup: grouping=7 (this run): padding ")
