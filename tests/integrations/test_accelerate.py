"""The Accelerate adapter against the real Accelerate; and small adapters of other frameworks, as a user calls them."""

import importlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import datasets
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers import Trainer

from dynagroup import (
    ConfigError,
    LengthAwareBatchSampler,
    OnlineDataLoader,
    PlannedDataLoader,
    TokenBudget,
)
from dynagroup.errors import BudgetError
from dynagroup.integrations.accelerate import prepare
from dynagroup.integrations.sentence_transformers import batches_that_fit
from dynagroup.testing import assert_conserves
from tests.integrations import toys
from tests.integrations.toys import arguments, parameters

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)
ROWS = toys.samples("classifier", 48)
LABELS = ["a", None, "a"] * 16


def loader(online=False, budget=160, **how):
    how = {"collate_fn": toys.collate, "samples_per_update": 12, "weigh": "samples", **how}
    if online:
        return OnlineDataLoader(ROWS, TokenBudget(budget), shuffle=True, kinds=LABELS, **how)
    return PlannedDataLoader(ROWS, toys.lengths(ROWS), TokenBudget(budget), kinds=LABELS, **how)


def train(steps, accelerator, model, optimizer, epochs=(0, 1), stop=None):
    updates = 0
    for epoch in epochs:
        steps.set_epoch(epoch)
        for step in steps:
            assert {LABELS[i] for i in step.indices} <= {step.kind}
            with steps.local_until_update(model, step):
                accelerator.backward(model(**step.batch).loss * step.loss_scale)
            if step.ends_update:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
                if updates == stop:
                    return


def run(online, budget=160, **settings):
    accelerator = Accelerator(cpu=True)
    model = toys.classifier()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    steps = prepare(accelerator, loader(online, budget))
    train(steps, accelerator, model, optimizer, **settings)
    return accelerator, model, optimizer, steps


def agreeing():
    """Parameters of updates in one batch a rank, and of updates in several."""
    whole = parameters(run(False, budget=10**6)[1])
    results = {}
    for online in (False, True):
        results[f"accelerate, online={online}"] = [whole, parameters(run(online)[1])]
    return results


@pytest.mark.parametrize("online", [False, True])
def test_a_state_saved_within_an_epoch_resumes_exactly(tmp_path, online):
    whole = parameters(run(online)[1])
    accelerator, *_ = run(online, stop=6)
    accelerator.save_state(tmp_path)
    accelerator, model, optimizer, steps = run(online, epochs=())
    accelerator.load_state(tmp_path)
    train(steps, accelerator, model, optimizer, epochs=(1,))
    assert (parameters(model) - whole).abs().max() < 1e-12


def stateful(num_workers):
    AcceleratorState._reset_state(True)
    configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    sampler = LengthAwareBatchSampler(toys.lengths(ROWS), 160, shuffle=True, world_size=1)
    loader = DataLoader(range(48), batch_sampler=sampler, collate_fn=tuple, num_workers=num_workers)
    return accelerator, prepare(accelerator, loader)


@pytest.fixture(scope="module")
def four_epochs():
    _, loader = stateful(num_workers=0)
    return [list(loader) for _ in range(4)]


def save_in_second_epoch(folder, num_workers, stop, second_epoch):
    """After so many batches; None: when the epoch is over."""
    accelerator, loader = stateful(num_workers)
    list(loader)
    for number, batch in enumerate(loader, start=1):
        assert batch == second_epoch[number - 1]
        if number == stop:
            accelerator.save_state(folder)
            return
    accelerator.save_state(folder)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("sets_epoch", [False, True], ids=["counted", "set_epoch"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", ["first batch", "last batch", "over"])
def test_torchdatas_loader_goes_on_with_what_remained_after_a_resume(
    tmp_path, four_epochs, num_workers, sets_epoch, stop
):
    """It loads the sampler's state late: accelerate, which counts from 0 again, has set the epoch by then."""
    second_epoch = four_epochs[1]
    num_batches = {"first batch": 1, "last batch": len(second_epoch), "over": None}[stop]
    save_in_second_epoch(tmp_path, num_workers, num_batches, second_epoch)
    accelerator, resumed = stateful(num_workers)
    accelerator.load_state(tmp_path)
    expected = {2: four_epochs[2], 3: four_epochs[3]}
    if stop == "first batch":
        expected = {1: second_epoch[1:], **expected}
    for epoch, batches in expected.items():
        if sets_epoch:
            resumed.set_epoch(epoch)
        assert list(resumed) == batches


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def sampler():
    return LengthAwareBatchSampler(toys.lengths(ROWS), TokenBudget(160))


def test_accumulation_of_accelerates_own_is_refused():
    accumulating = Accelerator(cpu=True, gradient_accumulation_steps=2)
    message = "`gradient_accumulation_steps` must be 1, because `loss_scale` weighs"
    with pytest.raises(ConfigError, match=message):
        prepare(accumulating, loader())


def test_a_loader_of_fixed_batches_is_refused(accelerator):
    with pytest.raises(ConfigError, match="must be dynagroup's, or have"):
        prepare(accelerator, DataLoader(range(4)))


def test_a_data_loader_with_our_sampler_is_prepared_whole(accelerator, sampler):
    plain = DataLoader(ROWS, batch_sampler=sampler, collate_fn=toys.collate)
    prepared = prepare(accelerator, plain)
    assert sum(len(batch["labels"]) for batch in prepared) == 48


def test_batches_that_accelerate_splits_are_refused(accelerator, sampler):
    accelerator.dataloader_config.split_batches = True
    with pytest.raises(ConfigError, match=r"`split_batches` \(True\).*must be False"):
        prepare(accelerator, DataLoader(ROWS, batch_sampler=sampler))


class AxolotlTrainer(Trainer):
    def __init__(self, *args, bench_data_collator=None, eval_data_collator=None, **kwargs):
        super().__init__(*args, **kwargs)


@pytest.fixture
def axolotl(monkeypatch):
    """Axolotl does not install beside this torch; these are the names of its documented interface that the plugin uses."""
    for part in ("", ".core", ".core.trainers", ".integrations", ".integrations.base"):
        module = ModuleType(f"axolotl{part}")
        module.AxolotlTrainer = AxolotlTrainer
        module.BasePlugin = type("BasePlugin", (), {})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield importlib.import_module("dynagroup.integrations.axolotl")
    sys.modules.pop("dynagroup.integrations.axolotl", None)


def test_axolotls_plugin_gives_its_trainer_batches_that_fit(axolotl, tmp_path):
    plugin = axolotl.DynagroupPlugin()
    module, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(sys.modules[module], name)(dynagroup_max_tokens=512)
    config = SimpleNamespace(**keys.model_dump(), sample_packing=False, pad_to_sequence_len=False)
    cls = plugin.get_trainer_cls(config)
    run = cls(
        toys.causal_lm(),
        args=arguments(tmp_path, max_steps=2),
        train_dataset=toys.samples("causal", 40),
        data_collator=toys.collate,
        bench_data_collator=None,
    )
    run.train()
    assert isinstance(run, AxolotlTrainer)
    assert run.update_loader.stats.update_samples == 32
    assert run.update_loader.budget == TokenBudget(512)


@pytest.mark.parametrize("name", ["sample_packing", "rl", "pad_to_sequence_len"])
def test_what_axolotls_plugin_cannot_do_is_refused_where_it_is_used(axolotl, name):
    plugin = axolotl.DynagroupPlugin()
    used = SimpleNamespace(dynagroup_max_tokens=512, **{name: True})
    with pytest.raises(ConfigError, match=name):
        plugin.get_trainer_cls(used)
    unused = SimpleNamespace(dynagroup_max_tokens=None, **{name: True})
    assert plugin.get_trainer_cls(unused) is None


@pytest.mark.filterwarnings("ignore:You are using DynamicBucketingSampler")
@pytest.mark.parametrize("size", [1, 2])
def test_lhotses_own_sampler_makes_batches_that_fit_of_every_cut_once(size):
    pytest.importorskip("lhotse")
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut, dummy_features

    from dynagroup.integrations.lhotse import BudgetConstraint

    seconds = [0.5 + 29 * (i * 37 % 100) / 100 for i in range(100)]
    cuts = [
        dummy_cut(i, duration=s, features=dummy_features(i, duration=s))
        for i, s in enumerate(seconds)
    ]
    bounds, seen = [400, 800, 1600, 3000], []
    for rank in range(size):
        sampler = DynamicBucketingSampler(
            CutSet.from_cuts(cuts),
            duration_bins=bounds[:-1],
            constraint=BudgetConstraint(12_000, bounds),
            shuffle=True,
            buffer_size=50,
            world_size=size,
            rank=rank,
        )
        for batch in sampler:
            frames = [cut.num_frames for cut in batch]
            assert len(frames) * max(frames) <= 12_000
            seen += [cut.id for cut in batch]
    assert sorted(seen) == sorted(cut.id for cut in cuts)
    with pytest.raises(
        ConfigError, match="has no `num_frames`, because it has no features; pass length_of"
    ):
        BudgetConstraint(12_000, bounds).add(cuts[0].drop_features())
    with pytest.raises(ConfigError, match="`bounds` end at 40"):
        BudgetConstraint(80, [8, 40], length_of=int).add(41)
    with pytest.raises(BudgetError, match="a sample of 40 does not fit even alone"):
        BudgetConstraint(30, [8, 40], length_of=int)


def test_sentence_transformers_take_batches_that_fit(monkeypatch):
    texts = [" ".join("w" * (1 + (5 * i) % 23)) for i in range(40)]
    data = datasets.Dataset.from_dict({"a": texts, "b": texts[::-1], "score": [0.5] * 40})
    make = batches_that_fit(
        150, lambda batch, **kwargs: {"input_ids": [text.split() for text in batch]}
    )
    pickle.dumps(batches_that_fit(150, len))  # as TrainingArguments are, into every checkpoint
    sampler = make(
        data, batch_size=8, drop_last=False, valid_label_columns=["score"], generator=None, seed=1
    )
    epochs = [list(sampler) for _ in range(5)]
    assert len({*map(len, epochs)}) == 1, "transformers asks for the number only once"
    assert epochs[0] != (batches := epochs[1])
    assert_conserves(batches, range(40))
    for batch in batches:
        longest = [max(len(data[i][column].split()) for i in batch) for column in ("a", "b")]
        assert len(batch) == 1 or len(batch) * sum(longest) <= 150
    monkeypatch.setattr(
        "dynagroup.integrations.sentence_transformers.rank_and_size", lambda: (0, 2)
    )
    assert [*(ranks := make(data, seed=1))] == [*ranks], (
        "accelerate hides the epoch from ranks that are resumed"
    )
    assert (sampler.batch_size, sampler.drop_last) == (8, False), (
        "read by sentence-transformers if there are several data sets"
    )
    assert getattr(ranks, "batch_size", None) is None, (
        "accelerate would take a number for a fixed size"
    )
    with pytest.raises(AttributeError, match="takes one data set on several ranks"):
        _ = ranks.batch_size
    with pytest.raises(ConfigError, match="must have a text column"):
        make(datasets.Dataset.from_dict({"score": [0.5]}))


@pytest.mark.parametrize("names", [("a", "tokens"), ("tokens", "a"), ("a", "tokens", "tokens_")])
def test_every_text_column_counts_whatever_it_is_called(names):
    texts = [" ".join("w" * (1 + (5 * i) % 23)) for i in range(40)]
    data = datasets.Dataset.from_dict({name: texts[k::2] * 2 for k, name in enumerate(names[:2])})
    for name in names[2:]:
        data = data.add_column(name, texts[: len(data)])
    make = batches_that_fit(
        120, lambda batch, **kwargs: {"input_ids": [text.split() for text in batch]}
    )
    for batch in make(data, batch_size=8):
        longest = [max(len(data[i][column].split()) for i in batch) for column in names]
        assert len(batch) == 1 or len(batch) * sum(longest) <= 120


def test_a_loader_that_accelerate_prepared_cannot_be_taken_over() -> None:
    """On several ranks it holds a part of the batches, in an order that only accelerate keeps alike."""
    prepared = Accelerator(cpu=True).prepare(DataLoader(range(8)))
    with pytest.raises(ConfigError, match="give the one before prepare"):
        OnlineDataLoader.from_dataloader(prepared, TokenBudget(8))
