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
        self.model, self.automatic_optimization, self.seen, self.kinds = (
            toys.causal_lm(),
            automatic,
            [],
            set(),
        )

    def training_step(self, step, batch_idx):
        self.kinds.add(step.kind)
        assert step.kind is None or {LABELS[i] for i in step.indices} == {step.kind}
        if step.idle or step.indices:  # not in the split test
            self.seen.append((self.current_epoch, [] if step.idle else sorted(step.indices)))
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
        optimizer, total = super().configure_optimizers(), self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 - k / total)]


class Early(lightning.Callback):
    def on_train_batch_end(self, trainer, *args):
        path = Path(trainer.default_root_dir, f"step={trainer.global_step}.ckpt")
        if not path.exists():  # inside the first update, and at the end of each
            trainer.save_checkpoint(path)

    def on_validation_end(self, trainer, *args):  # at an epoch's last batch
        trainer.save_checkpoint(f"{trainer.default_root_dir}/{trainer.current_epoch}.ckpt")


def tokens(batch):
    return float(batch["labels"][:, 1:].ne(-100).sum())


def loader(online=False, budget=160, **how):
    how = {"collate_fn": toys.collate, "samples_per_update": 16, **how}
    if online:
        return OnlineDataLoader(ROWS, TokenBudget(budget), shuffle=True, **how)
    return PlannedDataLoader(ROWS, toys.lengths(ROWS), budget, weigh=tokens, **how)


def fit(tmp_path, module, source, resume=None, callbacks=(), **settings):
    steps = LightningSteps(source)
    settings = {
        "max_epochs": 2,
        "callbacks": [*callbacks, steps],
        "enable_checkpointing": bool(callbacks),
        **settings,
    }
    trainer = lightning.Trainer(**QUIET, default_root_dir=tmp_path, precision="64-true", **settings)
    trainer.fit(module, steps, [0], ckpt_path=resume and tmp_path / resume)
    return trainer


def scheduled(module, schedule):
    optimizer = Module.configure_optimizers(module)
    return [optimizer], [{**schedule, "scheduler": schedule["scheduler"](optimizer, 1)}]


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
        self.before, self.gradients = before, []

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if (self.current_epoch, batch_idx) == (0, self.before) else None

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_an_update_that_is_skipped_leaves_no_gradient_behind(tmp_path):
    fit(tmp_path, whole := Skipping(before=99), loader())
    known = torch.stack(whole.gradients)
    for before in (1, 3):  # inside an update of two batches
        fit(tmp_path, module := Skipping(before), loader())
        assert len(module.gradients) == 3 + before // 2
        assert torch.cdist(torch.stack(module.gradients), known).min(dim=1).values.max() < 1e-12


@pytest.mark.parametrize("automatic", [True, False])
def test_updates_do_not_depend_on_how_they_are_cut(tmp_path, automatic):
    whole, parts = Module(automatic), Module(automatic)
    assert fit(tmp_path, whole, loader(budget=10**6, work=Work(per_step=1e12))).global_step == 6
    assert fit(tmp_path, parts, loader(kinds=LABELS)).global_step == 6
    assert parts.kinds == {*LABELS}
    assert len(parts.seen) > len(whole.seen) == 6
    assert (parameters(whole) - parameters(parts)).abs().max() < 1e-10
    assert (parameters(whole) - parameters(Module())).abs().max() > 1e-2
    by_epoch = [[i for epoch, indices in parts.seen if epoch == e for i in indices] for e in (0, 1)]
    assert [sorted(indices) for indices in by_epoch] == [list(range(48))] * 2
    assert by_epoch[0] != by_epoch[1]


def resumed_and_whole(tmp_path, module, online, step):
    saving = {} if step == 3 else {"every_n_train_steps": step}
    saver = (
        lightning.callbacks.ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, **saving)
        if step not in (0, 4)
        else Early()
    )
    whole, resumed = module(), module()
    fit(tmp_path, whole, loader(online), callbacks=[saver], max_steps=STEPS, max_epochs=4)
    [saved] = tmp_path.glob(f"*step={step}.ckpt")
    how = {"max_steps": STEPS, "max_epochs": 4, "reload_dataloaders_every_n_epochs": int(step == 2)}
    fit(tmp_path, resumed, loader(online), resume=str(saved), **how)
    return whole, resumed


@pytest.mark.parametrize(
    ("module", "online", "at"),
    [(Estimating, False, 2), (Module, True, 3), (Estimating, True, 4), (Module, False, 0)],
)
def test_any_checkpoint_resumes_exactly(tmp_path, module, online, at):
    """Within an epoch, at its end, in the first update; pytorch-lightning#20550: also where the loader was read early."""
    whole, resumed = resumed_and_whole(tmp_path, module, online, at)
    rest = [
        indices for _, indices in resumed.seen
    ]  # Lightning's own epoch numbers differ under max_steps
    assert [indices for _, indices in whole.seen][-len(rest) :] == rest
    assert sum(map(len, rest)) == 16 * (STEPS - at)
    assert (parameters(whole) - parameters(resumed)).abs().max() < 1e-12


@pytest.mark.parametrize("online", [False, True])
def test_an_epoch_that_max_steps_ended_is_finished_before_the_next(tmp_path, online):
    whole, legs, saver = Module(), [], Early()
    fit(tmp_path, whole, loader(online), max_epochs=3)
    for limits, every in (({"max_steps": 2}, None), ({"max_steps": 4}, None), ({}, 6), ({}, None)):
        saved = vars(saver).get("best_model_path")
        saver = lightning.callbacks.ModelCheckpoint(
            dirpath=tmp_path / str(len(legs)), every_n_train_steps=every
        )
        fit(
            tmp_path,
            leg := Module(),
            loader(online),
            resume=saved,
            callbacks=[saver],
            max_epochs=3,
            **limits,
        )
        legs.append([indices for _, indices in leg.seen])
    assert sum(legs[:3], []) == [indices for _, indices in whole.seen]
    assert (legs[3], sum(map(len, legs[3]))) == (legs[2][-len(legs[3]) :], 48), (
        "from where the finished epoch ended"
    )
    assert (parameters(whole) - parameters(leg)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "first", [{"max_epochs": 2}, {"max_epochs": 3, "max_steps": 4}, {"resume": "1.ckpt"}], ids=str
)
def test_a_second_fit_goes_on_where_the_first_one_ended(tmp_path, first):
    fit(tmp_path, whole := Module(), loader(), callbacks=[Early()], max_epochs=3)
    trainer = fit(tmp_path, module := Module(), loader(), **first)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 3, -1
    [steps] = [callback for callback in trainer.callbacks if isinstance(callback, LightningSteps)]
    trainer.fit(module, steps)
    seen = [indices for _, indices in module.seen]
    assert seen == [indices for _, indices in whole.seen][-len(seen) :]
    assert sum(map(len, seen)) == (48 if "resume" in first else 3 * 48)


def test_a_place_that_comes_too_late_is_refused(tmp_path, monkeypatch):
    """As from strategies that restore after optimizers are made."""
    restored = LightningSteps.load_state_dict
    late = lambda self, *_: restored(self, self.late) if hasattr(self, "late") else None  # noqa: E731
    monkeypatch.setattr(
        LightningSteps, "load_state_dict", lambda self, state: setattr(self, "late", state)
    )
    monkeypatch.setattr(LightningSteps, "on_train_start", late, raising=False)
    with pytest.raises(
        StateError, match=r"would repeat them .*; use `max_steps` or `loader.num_updates"
    ):
        resumed_and_whole(tmp_path, Estimating, False, 4)


def test_misuse_is_named_and_a_fast_run_is_none(tmp_path):
    fit(tmp_path, Module(), loader(), fast_dev_run=True)
    with pytest.raises(ConfigError, match="`accumulate_grad_batches` must be 1"):
        fit(tmp_path, Module(), loader(), accumulate_grad_batches=2)
    schedule = {"scheduler": torch.optim.lr_scheduler.StepLR, "interval": "step", "frequency": 2}
    waiting = type(
        "Waiting", (Module,), {"configure_optimizers": lambda self: scheduled(self, schedule)}
    )
    with pytest.raises(
        ConfigError,
        match="scheduler's `frequency` in steps must be 1, as Lightning counts batches; let",
    ):
        fit(tmp_path, waiting(), loader())
    with pytest.raises(
        ConfigError, match="`accumulate_grad_batches` must be 1, without a scheduler"
    ):
        fit(
            tmp_path,
            Module(),
            loader(),
            None,
            [lightning.callbacks.GradientAccumulationScheduler({0: 2})],
        )
    for number in (1, 3):
        with pytest.raises(
            ConfigError, match=rf"`limit_train_batches` must be 1.0, as {number} may end inside"
        ):
            fit(tmp_path, Module(), loader(), limit_train_batches=number)
    with pytest.raises(ConfigError, match="48 samples are too few for one update; use smaller"):
        fit(tmp_path, Module(), loader(samples_per_update=99, drop_last=True), max_steps=1)
    steps, broken = LightningSteps(loader()), Module()
    del broken.model
    with pytest.raises(ValueError, match="empty parameter list"):
        lightning.Trainer(**QUIET, callbacks=[steps], enable_checkpointing=False).fit(broken, steps)
    with pytest.raises(ConfigError, match=r"callbacks=\[steps\]"):
        lightning.Trainer(**QUIET, enable_checkpointing=False).fit(Module(), steps)


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


def on_many_ranks(folder):
    warnings.simplefilter("ignore")  # Lightning's own, in a process that is not pytest's
    two, found = {"devices": 2, "strategy": "ddp"}, {}
    for name, (automatic, online) in RUNS.items():
        fit(folder, module := Module(automatic), loader(online), **two)
        found[name] = (module.seen, parameters(module))
    plain = {
        **QUIET,
        **two,
        "max_epochs": 2,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    lightning.Trainer(**plain, use_distributed_sampler=False).fit(module := Epochs())
    try:
        lightning.Trainer(**plain).fit(Epochs())
    except ConfigError as error:
        found["refused"] = str(error)
    return {**found, "plain": module.seen}


@pytest.mark.slow
def test_two_ranks_make_the_updates_of_one_process(tmp_path):
    """FACTS: Lightning builds a sampler of its own into any loader unless told not to; ours says so before samples are lost."""
    ranks = on_ranks(2, on_many_ranks, tmp_path)
    for name, (automatic, online) in RUNS.items():
        fit(tmp_path, alone := Module(automatic), loader(online, budget=10**6))
        seen = [rank[name][0] for rank in ranks]
        assert [epoch for epoch, _ in seen[0]] == [epoch for epoch, _ in seen[1]], (
            "ranks take the same steps"
        )
        for epoch in (0, 1):
            assert_conserves((used for steps in seen for e, used in steps if e == epoch), range(48))
        for rank in ranks:
            assert (rank[name][1] - parameters(alone)).abs().max() < 1e-8
    epochs = [
        [used for rank in ranks for e, used in rank["plain"] if e == epoch] for epoch in (0, 1)
    ]
    for epoch in epochs:
        assert_conserves(epoch, range(48))
    assert epochs[0] != epochs[1], "Lightning tells the sampler its epoch"
    for rank in ranks:
        assert all(
            part in rank["refused"]
            for part in ("lose samples", "(Lightning: use_distributed_sampler=False)")
        )
