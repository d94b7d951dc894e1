"""The Lightning adapter against the real Lightning."""

import warnings
from pathlib import Path

import pytest
import torch

lightning = pytest.importorskip("lightning.pytorch")
from dynagroup import (  # noqa: E402
    ConfigError,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    StateError,
    TokenBudget,
    Work,
)
from dynagroup.integrations.lightning import LightningSteps, update_loss  # noqa: E402
from dynagroup.testing import assert_conserves  # noqa: E402
from dynagroup.update.planned import PlannedDataLoader  # noqa: E402
from tests.integrations import toys  # noqa: E402
from tests.integrations.toys import parameters  # noqa: E402
from tests.torchrun import on_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = toys.samples("causal", 48)
LABELS = ["a", None, ("b", 2)] * 16
STEPS = 9  # three epochs
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
RUNS = {"offline": (True, False), "online": (True, True), "manual": (False, False)}


class Module(lightning.LightningModule):
    def __init__(self, automatic=True):
        super().__init__()
        self.model = toys.causal_lm()
        self.automatic_optimization = automatic
        self.seen = []
        self.kinds = set()

    def training_step(self, step, batch_idx):
        self.kinds.add(step.kind)
        assert step.kind is None or {LABELS[i] for i in step.indices} == {step.kind}
        if step.idle:
            self.seen.append((self.current_epoch, []))
        elif step.indices:  # not in the split test
            self.seen.append((self.current_epoch, sorted(step.indices)))
        outputs = self.model(step.batch["input_ids"], attention_mask=step.batch["attention_mask"])
        loss = toys.float64_causal_loss(outputs, step.batch["labels"], max(tokens(step.batch), 1))
        if self.automatic_optimization:
            return update_loss(self, step, loss)
        optimizer = self.optimizers()
        self.manual_backward(loss * step.loss_scale)
        if step.ends_update:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, *args): ...

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Estimating(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 - update / total)
        return [optimizer], [schedule]


class Early(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        path = Path(trainer.default_root_dir, f"step={trainer.global_step}.ckpt")
        if not path.exists():  # inside the first update, and at the end of each
            trainer.save_checkpoint(path)

    def on_validation_end(self, trainer, *args):  # at an epoch's last batch
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}.ckpt")


def tokens(batch):
    return float(batch["labels"][:, 1:].ne(-100).sum())


def indices_of(module):
    """Of each step; Lightning's own epoch numbers differ under max_steps."""
    return [indices for _, indices in module.seen]


def samples_of(module, epoch):
    samples = []
    for epoch_of_step, indices in module.seen:
        if epoch_of_step == epoch:
            samples += indices
    return samples


def loader(online=False, budget=160, **how):
    how = {"collate_fn": toys.collate, "samples_per_update": 16, **how}
    if online:
        return OnlineDataLoader(ROWS, TokenBudget(budget), shuffle=True, **how)
    return PlannedDataLoader(ROWS, toys.lengths(ROWS), budget, weigh=tokens, **how)


def fit(tmp_path, module, source, resume=None, callbacks=(), **settings):
    steps = LightningSteps(source)
    settings.setdefault("max_epochs", 2)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path,
        precision="64-true",
        callbacks=[*callbacks, steps],
        enable_checkpointing=bool(callbacks),
        **QUIET,
        **settings,
    )
    checkpoint = None if resume is None else tmp_path / resume
    trainer.fit(module, steps, [0], ckpt_path=checkpoint)
    return trainer


class Summing(Module):
    def training_step(self, step, batch_idx):
        outputs = self.model(step.batch["input_ids"], attention_mask=step.batch["attention_mask"])
        return update_loss(self, step, toys.float64_causal_loss(outputs, step.batch["labels"], 1.0))


def test_a_loss_that_is_a_sum_is_refused_because_means_are_weighed(tmp_path):
    with pytest.raises(ConfigError, match="is a sum over samples or tokens.* divide the loss"):
        fit(tmp_path, Summing(), loader())


class Skipping(Module):
    """Skips the rest of the first epoch before one of its batches, and notes the gradients of all updates."""

    def __init__(self, before):
        super().__init__()
        self.before = before
        self.gradients = []

    def on_train_batch_start(self, batch, batch_idx):
        if self.current_epoch == 0 and batch_idx == self.before:
            return -1
        return None

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(("before", "num_updates"), [(1, 3), (3, 4)])
def test_an_update_that_is_skipped_leaves_no_gradient_behind(tmp_path, before, num_updates):
    """Skipped inside an update of two batches."""
    whole = Skipping(before=99)
    fit(tmp_path, whole, loader())
    module = Skipping(before)
    fit(tmp_path, module, loader())
    assert len(module.gradients) == num_updates
    distances = torch.cdist(torch.stack(module.gradients), torch.stack(whole.gradients))
    assert distances.min(dim=1).values.max() < 1e-12


@pytest.mark.parametrize("automatic", [True, False])
def test_updates_do_not_depend_on_how_they_are_cut(tmp_path, automatic):
    whole = Module(automatic)
    one_batch = loader(budget=10**6, work=Work(per_step=1e12))
    assert fit(tmp_path, whole, one_batch).global_step == 6
    parts = Module(automatic)
    assert fit(tmp_path, parts, loader(kinds=LABELS)).global_step == 6
    assert parts.kinds == set(LABELS)
    assert len(parts.seen) > len(whole.seen) == 6
    assert (parameters(whole) - parameters(parts)).abs().max() < 1e-10
    assert (parameters(whole) - parameters(Module())).abs().max() > 1e-2
    first = samples_of(parts, epoch=0)
    second = samples_of(parts, epoch=1)
    assert sorted(first) == sorted(second) == list(range(48))
    assert first != second


def saver_of(folder, step):
    """Saves a checkpoint at this step: within an epoch, at its end (3), in the first update (0), before validation (4)."""
    if step in (0, 4):
        return Early()
    every = None if step == 3 else step
    return lightning.callbacks.ModelCheckpoint(
        dirpath=folder, save_top_k=-1, every_n_train_steps=every
    )


def resumed_and_whole(tmp_path, module, online, step):
    whole = module()
    limits = {"max_steps": STEPS, "max_epochs": 4}
    fit(tmp_path, whole, loader(online), callbacks=[saver_of(tmp_path, step)], **limits)
    [saved] = tmp_path.glob(f"*step={step}.ckpt")
    if step == 2:
        limits["reload_dataloaders_every_n_epochs"] = 1
    resumed = module()
    fit(tmp_path, resumed, loader(online), resume=str(saved), **limits)
    return whole, resumed


@pytest.mark.parametrize(
    ("module", "online", "at"),
    [(Estimating, False, 2), (Module, True, 3), (Estimating, True, 4), (Module, False, 0)],
)
def test_any_checkpoint_resumes_exactly(tmp_path, module, online, at):
    """Within an epoch, at its end, in the first update; pytorch-lightning#20550: also where the loader was read early."""
    whole, resumed = resumed_and_whole(tmp_path, module, online, at)
    rest = indices_of(resumed)
    assert indices_of(whole)[-len(rest) :] == rest
    assert sum(map(len, rest)) == 16 * (STEPS - at)
    assert (parameters(whole) - parameters(resumed)).abs().max() < 1e-12


LEGS = [({"max_steps": 2}, None), ({"max_steps": 4}, None), ({}, 6), ({}, None)]


@pytest.mark.parametrize("online", [False, True])
def test_an_epoch_that_max_steps_ended_is_finished_before_the_next(tmp_path, online):
    """The last leg goes on from where the second epoch ended."""
    whole = Module()
    fit(tmp_path, whole, loader(online), max_epochs=3)
    legs = []
    saved = None
    for number, (limits, every) in enumerate(LEGS):
        saver = lightning.callbacks.ModelCheckpoint(
            dirpath=tmp_path / str(number), every_n_train_steps=every
        )
        leg = Module()
        source = loader(online)
        fit(tmp_path, leg, source, resume=saved, callbacks=[saver], max_epochs=3, **limits)
        legs.append(indices_of(leg))
        saved = saver.best_model_path
    first, second, third, last = legs
    assert first + second + third == indices_of(whole)
    assert last == third[-len(last) :]
    assert sum(map(len, last)) == 48
    assert (parameters(whole) - parameters(leg)).abs().max() < 1e-12


FIRST = [
    ({"max_epochs": 2}, 3 * 48),
    ({"max_epochs": 3, "max_steps": 4}, 3 * 48),
    ({"resume": "1.ckpt"}, 48),
]


@pytest.mark.parametrize(("first", "num_seen"), FIRST, ids=str)
def test_a_second_fit_goes_on_where_the_first_one_ended(tmp_path, first, num_seen):
    whole = Module()
    fit(tmp_path, whole, loader(), callbacks=[Early()], max_epochs=3)
    module = Module()
    trainer = fit(tmp_path, module, loader(), **first)
    trainer.fit_loop.max_epochs = 3
    trainer.fit_loop.epoch_loop.max_steps = -1
    [steps] = [callback for callback in trainer.callbacks if isinstance(callback, LightningSteps)]
    trainer.fit(module, steps)
    seen = indices_of(module)
    assert seen == indices_of(whole)[-len(seen) :]
    assert sum(map(len, seen)) == num_seen


def test_a_place_that_comes_too_late_is_refused(tmp_path, monkeypatch):
    """As from strategies that restore after optimizers are made."""
    load = LightningSteps.load_state_dict
    states = {}

    def keep(self, state):
        states[self] = state

    def load_late(self, *_):
        if self in states:
            load(self, states[self])

    monkeypatch.setattr(LightningSteps, "load_state_dict", keep)
    monkeypatch.setattr(LightningSteps, "on_train_start", load_late, raising=False)
    message = r"would repeat them .*; use `max_steps` or `loader.num_updates"
    with pytest.raises(StateError, match=message):
        resumed_and_whole(tmp_path, Estimating, False, 4)


def test_a_fast_run_is_no_misuse(tmp_path):
    trainer = fit(tmp_path, Module(), loader(), fast_dev_run=True)
    assert trainer.global_step <= 1


REFUSED = [
    ({"accumulate_grad_batches": 2}, "`accumulate_grad_batches` must be 1"),
    ({"limit_train_batches": 1}, "`limit_train_batches` must be 1.0, as 1 may end inside"),
    ({"limit_train_batches": 3}, "`limit_train_batches` must be 1.0, as 3 may end inside"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_end_updates_elsewhere_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Module(), loader(), **settings)


def test_a_scheduler_of_accumulation_is_refused(tmp_path):
    accumulation = lightning.callbacks.GradientAccumulationScheduler({0: 2})
    message = "`accumulate_grad_batches` must be 1, without a scheduler"
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Module(), loader(), callbacks=[accumulation])


class Waiting(Module):
    """Its learning rate changes every second step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 2}]


def test_a_schedule_that_counts_batches_is_refused(tmp_path):
    message = "scheduler's `frequency` in steps must be 1, as Lightning counts batches; let"
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, Waiting(), loader())


def test_too_few_samples_for_an_update_are_refused(tmp_path):
    too_few = loader(samples_per_update=99, drop_last=True)
    with pytest.raises(ConfigError, match="48 samples are too few for one update; use smaller"):
        fit(tmp_path, Module(), too_few, max_steps=1)


def test_errors_of_the_users_module_come_through():
    steps = LightningSteps(loader())
    broken = Module()
    del broken.model
    trainer = lightning.Trainer(**QUIET, callbacks=[steps], enable_checkpointing=False)
    with pytest.raises(ValueError, match="empty parameter list"):
        trainer.fit(broken, steps)


def test_steps_that_are_no_callback_are_refused():
    trainer = lightning.Trainer(**QUIET, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"callbacks=\[steps\]"):
        trainer.fit(Module(), LightningSteps(loader()))


class Unsized(torch.utils.data.DataLoader):
    __len__ = None  # as the page says: Lightning would ask it once, and end later epochs there


class Epochs(Module):
    """Only notes what a plain DataLoader brings."""

    def train_dataloader(self):
        sampler = LengthAwareBatchSampler(
            toys.lengths(ROWS), TokenBudget(70), shuffle=True
        )  # 6 steps, then 7
        return Unsized(range(len(ROWS)), batch_sampler=sampler, collate_fn=list)

    def training_step(self, indices, batch_idx):
        self.seen.append((self.current_epoch, indices))
        return sum(p.sum() for p in self.parameters())  # DDP refuses parameters that are not used


def plain_trainer(folder, **settings):
    return lightning.Trainer(
        devices=2,
        strategy="ddp",
        max_epochs=2,
        enable_checkpointing=False,
        default_root_dir=folder,
        **QUIET,
        **settings,
    )


def on_many_ranks(folder):
    """Of each run: what this rank saw, and its parameters; what a plain loader brings; and what is refused."""
    warnings.simplefilter("ignore")  # Lightning's own, in a process that is not pytest's
    results = {}
    for name, (automatic, online) in RUNS.items():
        module = Module(automatic)
        fit(folder, module, loader(online), devices=2, strategy="ddp")
        results[name] = (module.seen, parameters(module))
    plain = Epochs()
    plain_trainer(folder, use_distributed_sampler=False).fit(plain)
    results["plain"] = plain.seen
    with pytest.raises(ConfigError) as refusal:
        plain_trainer(folder).fit(Epochs())
    results["refused"] = str(refusal.value)
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return on_ranks(2, on_many_ranks, tmp_path_factory.mktemp("ranks"))


def in_epoch(seen, epoch):
    return [indices for epoch_of_step, indices in seen if epoch_of_step == epoch]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_make_the_updates_of_one_process(tmp_path, two_ranks, name):
    automatic, online = RUNS[name]
    alone = Module(automatic)
    fit(tmp_path, alone, loader(online, budget=10**6))
    (first, first_parameters), (second, second_parameters) = (rank[name] for rank in two_ranks)
    assert [epoch for epoch, _ in first] == [epoch for epoch, _ in second], "as many steps"
    for epoch in (0, 1):
        assert_conserves(in_epoch(first + second, epoch), range(48))
    assert (first_parameters - parameters(alone)).abs().max() < 1e-8
    assert (second_parameters - parameters(alone)).abs().max() < 1e-8


@pytest.mark.slow
def test_lightning_tells_a_batch_sampler_its_epoch(two_ranks):
    seen = two_ranks[0]["plain"] + two_ranks[1]["plain"]
    first = in_epoch(seen, 0)
    second = in_epoch(seen, 1)
    assert_conserves(first, range(48))
    assert_conserves(second, range(48))
    assert first != second


@pytest.mark.slow
def test_a_sampler_of_lightnings_around_ours_is_refused_before_samples_are_lost(two_ranks):
    """FACTS: Lightning builds a sampler of its own into any loader unless told not to."""
    for rank in two_ranks:
        assert "lose samples" in rank["refused"]
        assert "(Lightning: use_distributed_sampler=False)" in rank["refused"]
