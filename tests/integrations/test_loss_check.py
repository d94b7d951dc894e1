"""The split test: losses of a user's own train as in one batch, or are refused before the first update."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from dynagroup import ConfigError, PlannedDataLoader, TokenBudget, check_loss, loss_scales
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer
from dynagroup.update.loss_check import pieces_of_loader
from tests.integrations import toys
from tests.packed.test_training import llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def row(number: int) -> dict[str, Any]:
    length = 2 + 7 * number % 40
    ids = [3 + (number * place) % 50 for place in range(length)]
    return {"input_ids": ids, "intent": int(number % 8 == 0)}


ROWS = list(map(row, range(64)))
WEIGHTS = torch.tensor([1.0, 7.0], dtype=torch.float64)
BUDGET = TokenBudget(160)


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(row["input_ids"]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    intent = torch.tensor([row["intent"] for row in rows])
    slots = (ids % 5).masked_fill(ids == 0, -100)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "intent": intent, "labels": slots}


class Tagger(torch.nn.Module):
    """Tags each token and the whole sentence; ``loss_of`` (logits of slots, of intent, batch) is the user's."""

    def __init__(self, loss_of: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=64, intermediate_size=32, **sizes)
        self.encoder = BertModel(config)
        self.intent = torch.nn.Linear(16, 2)
        self.slots = torch.nn.Linear(16, 5)
        self.loss_of = loss_of
        for module in self.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0

    def forward(self, **batch: torch.Tensor) -> dict[str, Any]:
        ids = batch["input_ids"]
        mask = batch["attention_mask"]
        hidden = self.encoder(ids, attention_mask=mask).last_hidden_state
        loss = self.loss_of(self.slots(hidden), self.intent(hidden[:, 0]), batch)
        if isinstance(loss, dict):
            return {"loss": sum(loss.values()), "losses": loss}
        return {"loss": loss}


def by_tokens(slots, intent, batch):
    return cross_entropy(slots.flatten(0, 1), batch["labels"].flatten())


def smoothed(slots, intent, batch):
    return cross_entropy(slots.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


def class_weights(slots, intent, batch):
    return cross_entropy(intent, batch["intent"], weight=WEIGHTS)


def two_losses(slots, intent, batch):
    return by_tokens(slots, intent, batch) + cross_entropy(intent, batch["intent"])


def named_losses(slots, intent, batch):
    sentence = cross_entropy(intent, batch["intent"], weight=WEIGHTS)
    return {"intent": sentence, "slots": by_tokens(slots, intent, batch)}


def focal(slots, intent, batch):
    loss = cross_entropy(intent, batch["intent"], reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def mean_of_samples(slots, intent, batch):
    loss = cross_entropy(slots.transpose(1, 2), batch["labels"], reduction="none")
    return (loss.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def distilled(slots, intent, batch):
    teacher = softmax(torch.cos(batch["input_ids"])[..., None] * torch.arange(5), -1)
    mask = batch["attention_mask"][..., None]
    apart = kl_div(log_softmax(slots, -1), teacher, reduction="none")
    return (apart * mask).sum() / mask.sum()


def ctc(slots, intent, batch):
    lengths = batch["attention_mask"].sum(1)
    targets = 1 + batch["input_ids"][:, :1] % 4
    logits = log_softmax(slots, -1).transpose(0, 1)
    ones = torch.ones(len(lengths), dtype=torch.long)
    return torch.nn.functional.ctc_loss(logits, targets, lengths, ones, reduction="sum")


def contrastive(slots, intent, batch):
    return cross_entropy(intent @ intent.T, torch.arange(len(intent)))


def class_weight(batch: Any) -> float:
    return float(WEIGHTS[batch["intent"]].sum())


EXACT = {
    "tokens": (by_tokens, "auto"),
    "smoothed": (smoothed, "auto"),
    "focal": (focal, "auto"),
    "samples": (mean_of_samples, "auto"),
    "distilled": (distilled, "auto"),
    "ctc": (ctc, "auto"),
    "class weights": (class_weights, class_weight),
    "two losses": (named_losses, {"intent": class_weight, "slots": "labels"}),
}


def trained(cls: type, loss_of: Any, folder: Any, size: int, **more: Any) -> torch.Tensor:
    model = Tagger(loss_of).double()
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=16 // size,
        max_steps=4,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    cls(model, args, train_dataset=copy.deepcopy(ROWS), data_collator=collate, **more).train()
    return toys.parameters(model)


@pytest.mark.parametrize("name", EXACT)
def test_the_right_values_are_those_of_one_batch(name, tmp_path):
    loss_of, weigh = EXACT[name]
    config = DynagroupConfig(budget=BUDGET, weigh=weigh)
    one = trained(Trainer, loss_of, tmp_path, 16)
    ours = trained(DynagroupTrainer, loss_of, tmp_path, 4, dynagroup=config)
    assert (one - ours).abs().max() < 1e-9


@pytest.mark.parametrize("loss_of", [class_weights, two_losses, contrastive])
def test_a_loss_that_does_not_add_up_is_refused_or_warned_of(loss_of, tmp_path):
    with pytest.raises(ConfigError, match=r"how an update is cut: .* % off|% off.*pass `weigh`"):
        trained(DynagroupTrainer, loss_of, tmp_path, 4, dynagroup=BUDGET)
    config = DynagroupConfig(budget=BUDGET, weigh="samples")
    with pytest.warns(UserWarning, match=r"`weigh` does not fit the loss.*the given .* off"):
        trained(DynagroupTrainer, loss_of, tmp_path, 4, dynagroup=config)


class Penalized(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + 0.05 * sum((p - 0.1).pow(2).sum() for p in model.parameters())


class PenalizedAndFitting(DynagroupTrainer, Penalized):
    pass


def test_a_penalty_beside_the_loss_counts_once_an_update(tmp_path):
    """Fixed: one batch of sixteen. The library's loss is of float32."""
    fixed = toys.trainer("causal", tmp_path, fits=False, max_steps=4, model=llama("sdpa"))
    fixed.__class__ = Penalized
    fixed.args.gradient_accumulation_steps = 1
    fixed._train_batch_size = 16
    fitting = toys.trainer("causal", tmp_path, fits=True, max_steps=4, model=llama("sdpa"))
    fitting.__class__ = PenalizedAndFitting
    for run in (fixed, fitting):
        run.args.max_grad_norm = 0.0
        run.train()
    difference = toys.parameters(fixed.model) - toys.parameters(fitting.model)
    assert difference.abs().max() < 1e-5


def loader_of(weigh: Any) -> PlannedDataLoader[Any]:
    lengths = [len(row["input_ids"]) for row in ROWS]
    return PlannedDataLoader(
        ROWS,
        lengths,
        BUDGET,
        weigh=weigh,
        samples_per_update=16,
        collate_fn=collate,
        shuffle=False,
    )


@pytest.fixture
def tagger():
    return Tagger(by_tokens).double()


def test_the_public_test_names_what_fits_and_leaves_no_trace(tagger):
    tagger.train()
    tagger.encoder.eval()

    def loss_of(step):
        torch.rand(1)
        return tagger(**step.batch)["loss"]

    modes = [module.training for module in tagger.modules()]
    random_state = torch.get_rng_state()
    loader = loader_of("labels")
    assert check_loss(tagger, loss_of, loader) == "labels"
    assert check_loss(tagger, loss_of, ROWS, collate_fn=collate) == "labels"
    assert [module.training for module in tagger.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in tagger.parameters())
    assert loader.stats.steps == 0


def test_the_public_test_says_which_weigh_a_loader_needs(tagger):
    with pytest.raises(ConfigError, match="make the loader with weigh='labels'"):
        check_loss(tagger, lambda step: tagger(**step.batch)["loss"], loader_of("tokens"))


def test_samples_without_labels_say_nothing(tagger):
    blank = [{**row, "input_ids": [0] * len(row["input_ids"])} for row in ROWS]

    def loss_of(step):
        return tagger(**step.batch)["loss"]

    assert check_loss(tagger, loss_of, blank, collate_fn=collate) is None
    assert check_loss(tagger, loss_of, [], collate_fn=collate) is None


def noisy(slots, intent, batch):
    return (slots * torch.rand_like(slots)).mean()


def test_a_loss_that_draws_random_numbers_is_refused():
    model = Tagger(noisy)
    with pytest.raises(ConfigError, match="depends on how an update is cut.*draws random numbers"):
        check_loss(model, lambda step: model(**step.batch)["loss"], ROWS, collate_fn=collate)


def test_its_samples_fit_into_one_batch():
    rows = [{"input_ids": [1] * n, "labels": n % 7} for n in range(30, 2, -1)]  # longest first
    lengths = [len(row["input_ids"]) for row in rows]
    loader = PlannedDataLoader(rows, lengths, TokenBudget(64), collate_fn=toys.collate)
    pieces = pieces_of_loader(loader)
    assert pieces is not None
    assert 2 < len(pieces.alone)
    assert pieces.together["input_ids"].numel() <= 64


SEVERAL = {"intent": class_weight, "slots": "labels"}


@pytest.fixture
def tagger_of_two():
    return Tagger(named_losses).double()


def test_several_losses_have_weights_of_their_own(tagger_of_two):
    def losses_of(step):
        return tagger_of_two(**step.batch)["losses"]

    loader = loader_of("samples")
    assert check_loss(tagger_of_two, losses_of, loader, SEVERAL) == SEVERAL
    wrong = {"intent": "samples", "slots": "samples"}
    with pytest.warns(UserWarning, match="`weigh` does not fit the loss"):
        check_loss(tagger_of_two, losses_of, loader, wrong)
    with pytest.raises(ConfigError, match="`weigh` is a dict for the losses"):
        check_loss(tagger_of_two, losses_of, loader, {"intent": "samples"})


def take_gradients(model):
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return gradients


def test_several_losses_of_an_update_have_the_gradient_of_one_batch(tagger_of_two):
    loader = loader_of("samples")
    update = next(loader.updates())
    assert len(update) > 1
    for step, scales in zip(update, loss_scales(update, SEVERAL, loader.world), strict=True):
        losses = tagger_of_two(**step.batch)["losses"]
        sum(losses[name] * scale for name, scale in scales.items()).backward()
    gradients = take_gradients(tagger_of_two)
    indices = sum((list(step.indices) for step in update), [])
    tagger_of_two(**collate([ROWS[index] for index in indices]))["loss"].backward()
    expected = take_gradients(tagger_of_two)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("of_batch", [torch.std, lambda outputs: outputs.corrcoef()[0, 1]])
def test_a_loss_that_a_sample_alone_does_not_have_is_refused(of_batch):
    """Spread and correlation of a single sample are nan."""
    layer = torch.nn.Linear(2, 2)
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([4.0, -1.0])]

    def loss_of(step):
        return of_batch(layer(step.batch).T)

    with pytest.raises(ConfigError, match="the loss depends on how an update is cut"):
        check_loss(layer, loss_of, rows)


class TrainsWithAnotherTerm(torch.nn.Linear):
    """Its second term, a sum over the batch, exists in training only."""

    def forward(self, rows):
        outputs = super().forward(rows)
        loss = outputs.mean()
        if self.training:
            loss = loss + outputs.square().sum()
        return loss


def test_a_term_that_only_training_has_is_tested():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), torch.tensor([4.0, -1.0])]
    model = TrainsWithAnotherTerm(2, 1)
    with pytest.raises(ConfigError, match="the loss depends on how an update is cut"):
        check_loss(model, lambda step: model(step.batch), rows)


def test_a_term_that_only_training_has_is_not_said_to_be_due_to_padding():
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    model = TrainsWithAnotherTerm(2, 1)
    with pytest.raises(ConfigError, match="how an update is cut") as refused:
        check_loss(
            model,
            lambda step: model(step.batch["x"]),
            rows,
            collate_fn=lambda rows: {"x": torch.stack(rows)},
        )
    assert "padded" not in str(refused.value)


def test_a_distance_to_the_model_before_training_is_tested_though_it_is_zero():
    torch.manual_seed(0)
    layer = torch.nn.Linear(2, 3)
    reference = copy.deepcopy(layer).requires_grad_(False)
    rows = [
        (torch.tensor([1.0, 2.0]), 0),
        (torch.tensor([3.0, 5.0]), 1),
        (torch.tensor([4.0, 0.0]), 2),
    ]

    def loss_of(step):
        inputs, classes = step.batch
        logits = layer(inputs)
        wanted = softmax(reference(inputs), dim=-1)
        distance = kl_div(log_softmax(logits, dim=-1), wanted, reduction="sum")
        return cross_entropy(logits, classes) + 100 * distance

    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ConfigError, match="the loss depends on how an update is cut"):
        check_loss(layer, loss_of, rows)
    for name, values in layer.state_dict().items():
        assert torch.equal(values, before[name])
