"""The split test: a few samples run as one batch and each alone, and their gradients are compared.

A batch that is cut in parts trains the same only if the gradients of the parts add up to that of the whole. Whether they
do, and by which weights, is a property of the user's loss. So it is measured on the user's own model and loss, before
the first update. Losses themselves cannot tell: in an untrained model all samples have nearly the same loss."""

import logging
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from dynagroup.device import is_out_of_memory
from dynagroup.distributed import SingleProcess, World
from dynagroup.errors import ConfigError
from dynagroup.shapes import BatchShape, primary
from dynagroup.update.filling import FillingCollator
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import Share, count_label_tokens, weigher
from dynagroup.update.step import Step, width_of
from dynagroup.validation import explained, warn_user

LossOf: TypeAlias = Callable[[Step[Any]], Any]

MEANS = ("tokens", "labels", "samples")
SAID = {
    "sum": "sums over the items of the update",
    "tokens": "means by label tokens, without each sample's first",
    "labels": "means by label tokens",
    "samples": "means by samples",
    "weigh": "the given `weigh`",
}
EXACT = 1e-3  # largest relative difference of gradients; that of rules that hold is 3e-7
HALF = 2e-2  # the same in half precision, where that of rules that hold is 3e-3
NUM_ELEMENTS = 1 << 20  # most elements of the gradient that are compared
NUM_READ = 64  # samples of which some are chosen
NUM_DRAWS = 16  # random maskings, of which the first with a label of a first token is used
NUM_TOGETHER = (
    8  # most samples in one batch: those with fewest and with most labels, and one of each class
)
WAYS_OUT = (
    "pass `weigh`: a function from a batch to the number by which its loss is divided (with class "
    "weights: their sum over the samples), or a dict of weights for several losses; or divide the "
    "loss by num_items_in_batch (Trainer) or step.samples.total. If the loss compares samples of a "
    "batch with each other, or counts padding, train without dynagroup, or say `weigh` and accept it"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Some samples as one batch, and each of them as a batch of its own."""

    together: Any
    alone: list[Any]  # as the model gets them, with rows of weight 0 if training adds such rows
    plain: list[Any]  # without these rows, as they are weighed
    filled: Any = None  # all samples and further rows of weight 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to compute a loss, and the rules by which its parts may add up: keys of ``SAID``."""

    loss_of: LossOf
    rules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The rule that holds (None: none does), and relative differences; without any, the samples could not show it."""

    rule: str | None = None
    differences: Mapping[str, float] = field(default_factory=dict)
    is_random: bool = False
    counts_filling: bool = False
    failure: str | None = None  # why the loss could not be tested
    ran_out: bool = False  # because memory ran out

    def weigh(self, weigh: Any, *, is_said: bool) -> Any:
        """Returns what weighs batches from now on; None: the samples could not show it. Warns or raises if no rule holds."""
        if self.rule is not None:
            _log.info("losses are weighed by this rule: %s", SAID[self.rule])
            return weigh if self.rule == "weigh" else self.rule
        if self.failure is not None:
            untested = f"cannot test how losses of batches add up ({self.failure})"
            if not is_said:
                raise ConfigError(f"{untested}; say `weigh`, the weight of a batch's loss")
            warn_user(f"{untested}; `weigh` is taken as it is")
            return weigh
        if not self.differences and not self.counts_filling:
            return None
        parts = [f"{SAID[rule]}: {value:.2%} off" for rule, value in self.differences.items()]
        if self.counts_filling:
            message = (
                "the loss counts the rows of weight 0 that `shapes` adds: average it over the rows "
                "that have a label other than -100, or leave `shapes` out"
            )
            if not is_said:
                raise ConfigError(message)
            warn_user(message)
            return weigh
        reason = ", because the loss draws random numbers" if self.is_random else ""
        differs = (
            "gradients of a few samples, each alone, do not add up to the gradient of these samples "
            f"in one batch{reason} ({'; '.join(parts)})"
        )
        if not is_said:
            raise ConfigError(f"the loss depends on how an update is cut: {differs}; {WAYS_OUT}")
        warn_user(
            f"`weigh` does not fit the loss, which depends on how an update is cut: {differs}"
        )
        return weigh


def check_loss(
    model: torch.nn.Module,
    loss_of: LossOf,
    samples: StepLoader[Any] | Sequence[Any],
    weigh: Any = "auto",
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    world: World | None = None,
) -> Any:
    """Tests on the model and loss that will be trained how losses of batches add up. Call it on every rank before the first
    update; the Trainer and Lightning adapters do so themselves. Nothing is changed.

    A few samples (with fewest and with most labels, and of different classes) run as one batch and each alone, without
    dropout, with the same random numbers. Their gradients may differ by 0.1 % (2 % in half precision).

    Args:
        model: the model as it is trained.
        loss_of: function from a :class:`~dynagroup.Step` to its loss, without ``step.loss_scale``: a tensor, or a dict of
            tensors if ``weigh`` is a dict. ``step.samples.total`` is the number of samples of the whole test.
        samples: a loader of dynagroup; or a list of samples, from which some are chosen.
        weigh: weight of a batch: "tokens", "labels", "samples", a function of a batch, or a dict of these for several
            losses. "auto": that of the loader; without a loader, the first rule that holds.
        collate_fn: function from a list of samples to a batch. A loader has its own.
        world: ranks that call this together. None: those of the loader; without a loader, this process alone.

    Returns:
        The ``weigh`` that holds, or "sum" if gradients of batches add up without weights. None: no sample shows it,
        for example because all labels are -100.

    Raises ConfigError if the loss does not add up by any rule, with the differences. If a ``weigh`` was given and does not
    hold, it warns.

    >>> layer, rows = torch.nn.Linear(2, 1), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    >>> check_loss(layer, lambda step: layer(step.batch).mean(), rows)
    'samples'
    >>> check_loss(layer, lambda step: layer(step.batch).sum() / step.samples.total, rows)
    'sum'
    """
    is_said = not _is(weigh, "auto")
    if isinstance(samples, StepLoader):
        return check_loader(model, loss_of, samples, weigh if is_said else None)
    pieces = pieces_of(samples.__getitem__, range(len(samples)), collate_fn or default_collate)
    way = _way(loss_of, weigh, is_said=is_said)
    finding = split_test(model, [way], pieces, weigh, world=world or SingleProcess())
    return finding.weigh(weigh, is_said=is_said)


def check_loader(
    model: torch.nn.Module,
    loss_of: LossOf,
    loader: StepLoader[Any],
    weigh: Any = None,
    *,
    pieces: Pieces | None = None,
    is_half: bool = False,
) -> Any:
    """Like :func:`check_loss`, for the weights of a loader. ``pieces``: the samples to run, if it reads a stream."""
    weigh = loader.weigh if weigh is None else weigh
    is_said = not _is(weigh, "tokens")  # the default of loaders
    way = _way(loss_of, weigh, is_said=is_said)
    pieces = pieces_of_loader(loader) if pieces is None else pieces
    finding = split_test(model, [way], pieces, weigh, world=loader.world, is_half=is_half)
    found = finding.weigh(weigh, is_said=is_said)
    if not is_said and found in ("labels", "samples"):
        raise ConfigError(
            "the loader has weigh='tokens', but losses of batches add up as "
            f"{SAID[found]}; make the loader with weigh={found!r}"
        )
    return found


def _way(loss_of: LossOf, weigh: Any, *, is_said: bool) -> Way:
    if isinstance(weigh, Mapping):
        return Way(loss_of=loss_of, rules=("weigh",))
    return Way(loss_of=loss_of, rules=("sum", "weigh") if is_said else ("sum", *MEANS))


def split_test(
    model: torch.nn.Module,
    ways: Sequence[Way],
    pieces: Pieces | None,
    weigh: Any,
    *,
    world: World,
    is_half: bool = False,
) -> Finding:
    """Compares gradients of samples together and alone, by the rules of each way in turn, until one holds. The whole is
    computed in the first way. ``is_half``: the model runs in half precision. All ranks must call it, and get the same."""
    tensors = _compared(model)
    can_show = pieces is not None and bool(tensors)
    if world.all_max([int(not can_show)])[0] or pieces is None:
        return Finding()
    is_half = is_half or min(tensor.itemsize for tensor in tensors) < 4
    test = _SplitTest(model, tensors, pieces, weigh, world, HALF if is_half else EXACT)
    finding = Finding()
    for trains in (True, False):
        with _without_dropout(model, trains=trains):
            finding = test.run(ways)
        if not finding.is_random:
            break
    return finding


@dataclass(frozen=True, slots=True)
class _SplitTest:
    model: torch.nn.Module
    tensors: list[torch.nn.Parameter]  # whose gradients are compared
    pieces: Pieces
    weigh: Any
    world: World
    limit: float  # largest relative difference of a rule that holds

    def run(self, ways: Sequence[Way]) -> Finding:
        """Tests all ways, and on all ranks returns the same; also if the user's code fails on one of them."""
        failure: Exception | None = None
        finding = Finding()
        try:
            finding = self._run(ways)
        except ConfigError:
            raise
        except Exception as error:  # the loss is the user's code
            failure = error
            self.world.all_sum([math.nan, math.nan])  # for which the other ranks wait
        ran_out = failure is not None and is_out_of_memory(failure)
        any_failed, any_ran_out = self.world.all_max([int(failure is not None), int(ran_out)])
        if not any_failed:
            return finding
        told = "on another rank" if failure is None else f"{type(failure).__name__}: {failure}"
        return Finding(failure=told[:300], ran_out=bool(any_ran_out))

    def _run(self, ways: Sequence[Way]) -> Finding:
        differences = self._differences(ways)
        if differences and self.pieces.filled is not None:
            whole = self._gradient(ways[0], self.pieces.together, None)
            filled = self._gradient(ways[0], self.pieces.filled, None)
            if self._relative(filled - whole, whole) > self.limit:
                return Finding(counts_filling=True)
        for rule, difference in differences.items():
            if difference <= self.limit:
                return Finding(rule=rule, differences=differences)
        is_random = bool(differences) and self._is_random(ways[0])
        return Finding(differences=differences, is_random=is_random)

    def _differences(self, ways: Sequence[Way]) -> dict[str, float]:
        """Returns the relative difference for each rule, up to the first way with a rule that holds; none: no gradient."""
        found: dict[str, float] = {}
        whole = self._gradient(ways[0], self.pieces.together, None)
        for way in ways:
            parts: list[torch.Tensor] | None = None
            for rule in way.rules:
                weights = self._weights(rule)
                if weights is None:
                    continue
                if parts is None:
                    parts = self._parts(way, is_first=way is ways[0])
                if parts is None:
                    break
                pairs = zip(weights, parts, strict=True)
                added = sum(weight * part for weight, part in pairs)
                found[rule] = self._relative(added - whole, whole)
            if math.inf in found.values():
                return {}
            if any(value <= self.limit for value in found.values()):
                break
        return found

    def _is_random(self, way: Way) -> bool:
        """Returns whether the same batch has another gradient with other random numbers."""
        together = self.pieces.together
        first = self._gradient(way, together, None)
        second = self._gradient(way, together, None, seed=1)
        return self._relative(first - second, first) > self.limit

    def _parts(self, way: Way, *, is_first: bool) -> list[torch.Tensor] | None:
        """Returns the gradients of the samples alone; None: the loss cannot be computed in a further way."""
        try:
            return [
                self._gradient(way, batch, place) for place, batch in enumerate(self.pieces.alone)
            ]
        except (TypeError, ValueError, KeyError, AttributeError):
            if is_first:
                raise
            return None

    def _weights(self, rule: str) -> list[float] | None:
        """Returns the share of each sample alone in the whole; None: batches have nothing to count."""
        plain = self.pieces.plain
        if rule == "sum" or isinstance(self.weigh, Mapping):
            return [1.0] * len(plain)
        try:
            weights = _counted(self.weigh if rule == "weigh" else rule, plain)
        except ConfigError:
            if rule == "weigh":
                raise
            return None
        total = sum(weights)
        return [weight / total for weight in weights] if total else None

    def _gradient(self, way: Way, batch: Any, place: int | None, *, seed: int = 0) -> torch.Tensor:
        """Returns compared elements of the gradient of the loss of one sample; ``place`` None: of all samples together."""
        count = len(self.pieces.alone)
        samples = Share(count if place is None else 1, count)
        step = Step(batch, range(count), samples, self._share(place, samples), 1.0, True)
        with _random_numbers(seed), torch.enable_grad(), _no_sync(self.model):
            loss = self._summed(way.loss_of(step), place)
            if _is_sharded(self.model):
                return _elements(self.tensors, _by_backward(self.model, self.tensors, loss))
            gradients = torch.autograd.grad(loss, self.tensors, allow_unused=True)
        return _elements(self.tensors, gradients)

    def _share(self, place: int | None, samples: Share) -> Share:
        """Returns a step's weight, for losses that divide by it."""
        named = self.weigh if isinstance(self.weigh, str) else "weigh"
        weights = self._weights("tokens" if named == "auto" else named)
        if weights is None or isinstance(self.weigh, Mapping):
            return samples
        return Share(sum(weights) if place is None else weights[place], sum(weights))

    def _summed(self, loss: Any, place: int | None) -> torch.Tensor:
        """Returns one loss; of several losses their sum, each with its own weight in the whole."""
        if not isinstance(self.weigh, Mapping):
            return loss
        check_losses(loss, self.weigh)
        scales = dict.fromkeys(self.weigh, 1.0)
        if place is not None:
            for name, weigh in self.weigh.items():
                weights = _counted(weigh, self.pieces.plain)
                scales[name] = weights[place] / (sum(weights) or 1.0)
        return sum_of(loss, scales)

    def _relative(self, difference: torch.Tensor, whole: torch.Tensor) -> float:
        """Returns how large a difference is beside the whole, over all ranks; infinity: the gradient shows nothing."""
        squares = [float(vector.square().sum()) for vector in (difference, whole)]
        differs, length = self.world.all_sum(squares)
        relative = math.sqrt(differs / length) if length > 0 else math.inf
        return relative if math.isfinite(relative) else math.inf


def sum_of(losses: Mapping[str, Any], scales: Mapping[str, float]) -> Any:
    """Returns the sum of several losses, each multiplied by its scale. A loss of scale 0 adds nothing, also if it is nan."""
    scaled = [
        losses[name] * scale if scale else losses[name].nan_to_num(0.0, 0.0, 0.0) * 0.0
        for name, scale in scales.items()
    ]
    return torch.stack(scaled).sum()


def check_losses(losses: Any, weigh: Mapping[str, Any]) -> None:
    """Raises ConfigError if ``losses`` is not a mapping with the names of ``weigh``."""
    names = sorted(losses) if isinstance(losses, Mapping) else type(losses).__name__
    if names != sorted(weigh):
        raise ConfigError(
            f"`weigh` is a dict for the losses {sorted(weigh)}, but the losses are {names}; return a "
            "mapping with these names (a Trainer's model or compute_loss: as `losses` of its outputs)"
        )


def skips_first_label(model: Any) -> bool:
    """Returns whether a transformers model's own loss leaves out the first label of a sample, as causal models do."""
    device = next(model.parameters()).device
    ids = torch.tensor([[5, 6, 7]], device=device)
    labels = torch.tensor([[0, -100, -100]], device=device)  # a class that every head has
    with suppress(Exception), torch.no_grad(), _without_dropout(model, trains=False):
        loss = float(model(input_ids=ids, labels=labels).loss)
        return math.isnan(loss) or loss == 0.0
    return True


def pieces_of_loader(
    loader: StepLoader[Any], *, skip: int = 0, share: float = 1.0
) -> Pieces | None:
    """Returns samples of a loader that fit into one batch. ``skip``: another number gives other samples; ``share``: only the
    shortest of those with labels are used."""
    lengths, read, collate = loader.examples()
    order = np.argsort(lengths[primary(lengths)], kind="stable")
    budget = loader.budget.held(loader.budget.applied)

    def fits(num_samples: int, places: Any) -> Any:
        longest = {name: values[places] for name, values in lengths.items()}
        return budget.fits(BatchShape.of(np.full(len(places), num_samples), longest))

    pairs = order[fits(2, order)]
    order = pairs if len(pairs) > 1 else order[:2]
    chosen = order[np.unique(np.linspace(0, len(order) - 1, NUM_READ + skip).astype(np.int64))]
    return pieces_of(
        read,
        chosen.tolist(),
        collate,
        fits=lambda number, place: bool(fits(number, [place])[0]),
        kind_of=loader.kind_of_example,
        share=share,
    )


def pieces_of(
    read: Callable[[int], Any],
    places: Sequence[int],
    collate: Callable[[list[Any]], Any],
    *,
    fits: Callable[[int, int], bool] | None = None,
    kind_of: Callable[[int, Any], Any] | None = None,
    share: float = 1.0,
) -> Pieces | None:
    """Reads samples, and returns those that show most about a loss; None: fewer than two have labels."""
    filling = collate if isinstance(collate, FillingCollator) else FillingCollator(collate, None)
    plain = filling.collate_fn or default_collate
    with _random_numbers(0):
        places = [
            places[number] for number in range(0, len(places), max(len(places) // NUM_READ, 1))
        ]
        samples = [read(place) for place in places]
        if kind_of is not None:
            kinds = [kind_of(place, sample) for place, sample in zip(places, samples, strict=True)]
            [(common, _)] = Counter(kinds).most_common(1)
            numbers = [number for number, kind in enumerate(kinds) if kind == common]
            places = [places[number] for number in numbers]
            samples = [samples[number] for number in numbers]
        chosen = _different([plain([sample]) for sample in samples], share)
        while fits is not None and len(chosen) > 2:
            if fits(len(chosen) + 1, max(places[number] for number in chosen)):
                break
            chosen.pop()
        if len(chosen) < 2:
            return None
        kept = [samples[number] for number in chosen]
        together = plain(kept)
    for seed in range(1, NUM_DRAWS):
        with _random_numbers(seed):
            again = plain(kept)
        if _equal(together, again):
            break
        rows = pieces_of_batch(again, len(kept), everything=True)  # masked at random
        if rows is None:
            break
        if any(map(_has_first_label, rows.plain)) or seed == NUM_DRAWS - 1:
            return rows
    batches = [plain([sample]) for sample in kept]
    alone = batches
    filled = None
    if filling.ladder is not None:
        alone = [filling.fill(batch, 1) for batch in batches]
        filled = _filled(filling, together, len(kept))
    return Pieces(together=together, alone=alone, plain=batches, filled=filled)


def _filled(filling: FillingCollator, batch: Any, num_samples: int) -> Any:
    """Fills a padded batch to the smallest shape that adds rows to it; None: there is none."""
    ladder = filling.ladder
    if ladder.layout == "packed" or callable(filling.pad):
        return None
    names = ladder.streams
    widths = [width_of(batch, num_samples, name, names) or math.inf for name in names]
    for shape in sorted(ladder.shapes, key=math.prod):
        fits = all(width <= most for width, most in zip(widths, shape[1:], strict=True))
        if fits and shape[0] > num_samples:
            return filling.fill(batch, num_samples, shape)
    return None


def pieces_of_batch(batch: Any, num_samples: int, *, everything: bool = False) -> Pieces | None:
    """Takes rows of a padded batch apart, as far as it is a mapping of tensors with one row a sample; else None."""
    if not isinstance(batch, Mapping) or num_samples < 2:
        return None
    sizes = {len(value) for value in batch.values() if getattr(value, "ndim", 0)}
    if sizes != {num_samples}:
        return None

    mask: Any = batch.get("attention_mask")
    wide = getattr(mask, "shape", ())[:2]

    def rows(numbers: list[int]) -> dict[str, Any]:
        taken = {}
        used = None if mask is None else int(mask[numbers].any(0).nonzero().max()) + 1
        for name, value in batch.items():
            taken[name] = value[numbers] if getattr(value, "ndim", 0) else value
            if used is not None and getattr(value, "shape", ())[:2] == wide:
                taken[name] = taken[name][:, :used].contiguous()
        return taken

    alone = [rows([number]) for number in range(num_samples)]
    chosen = [*range(num_samples)] if everything else _different(alone)
    if len(chosen) < 2:
        return None
    alone = [alone[number] for number in chosen]
    return Pieces(together=rows(chosen), alone=alone, plain=alone)


def _different(batches: list[Any], share: float = 1.0) -> list[int]:
    """Returns which of the batches of one sample have fewest and most labels, and one of each class. Fewer than two: no
    more have labels."""
    counts = []
    for batch in batches:
        try:
            counts.append(count_label_tokens(batch, shifted=False))
        except ConfigError:
            counts.append(1)
    least = 2 if max(counts) > 1 else 1  # the label of a first token may not count
    labelled = [number for number, count in enumerate(counts) if count >= least]
    labelled = labelled[: max(int(len(labelled) * share), 2)]
    if len(labelled) < 2:
        return []
    labelled.sort(key=counts.__getitem__)
    chosen = [labelled[0], labelled[-1]]
    classes = {_class_of(batches[number]) for number in chosen}
    for place, number in enumerate(labelled):
        kind = _class_of(batches[number])
        if least == 1:
            kind = (*kind, place // NUM_TOGETHER)  # no label tokens: some of each length
        if kind not in classes and len(chosen) < NUM_TOGETHER:
            classes.add(kind)
            chosen.append(number)
    return chosen


def _class_of(batch: Any) -> tuple[Any, ...]:
    """Returns what kinds of samples differ in: the single integers of a batch of one sample, such as its class."""
    fields = batch.items() if isinstance(batch, Mapping) else ()
    single = [
        int(value)
        for _, value in fields
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point()
    ]
    return (_has_first_label(batch), *single)


def _has_first_label(batch: Any) -> bool:
    with suppress(ConfigError):
        return count_label_tokens(batch, shifted=False) != count_label_tokens(batch)
    return False


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(one, Mapping):
        return all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return True


def _counted(weigh: Any, batches: Sequence[Any]) -> list[float]:
    weight_of = weigher(weigh)
    sizes = []
    for batch in batches:
        with explained("`weigh` failed in the split test", ConfigError):
            sizes.append(weight_of(batch, 1))
    return sizes


def _is(weigh: Any, name: str) -> bool:
    return isinstance(weigh, str) and weigh == name


def _compared(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the smallest trained tensor of each layer and head, then further small ones."""
    trained = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    trained.sort(key=lambda named: named[1].numel())
    first: dict[str, torch.nn.Parameter] = {}
    for name, tensor in trained:
        layer = re.match(r".*\.\d+\.", name)
        first.setdefault(layer.group() if layer else name.rpartition(".")[0], tensor)
    chosen = {id(tensor): tensor for tensor in first.values()}
    num_elements = sum(tensor.numel() for tensor in chosen.values())
    for _, tensor in trained:
        num_elements += tensor.numel()
        if num_elements > NUM_ELEMENTS:
            break
        chosen[id(tensor)] = tensor
    return [*chosen.values()]


def _elements(tensors: Sequence[torch.Tensor], gradients: Sequence[Any]) -> torch.Tensor:
    """Returns evenly spaced elements of gradients as one vector, as many of each tensor; unused ones are 0."""
    most = max(NUM_ELEMENTS // len(tensors), 1)
    parts = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        values = torch.zeros_like(tensor) if gradient is None else gradient
        values = _local(values.detach()).flatten()
        values = values.to_dense() if values.is_sparse else values
        parts.append(values[:: -(-values.numel() // most) or 1].float().cpu())
    return torch.cat(parts).double()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def _is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether only a backward pass of the whole model gives gradients, as with FSDP."""
    names = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return bool(names & {"FSDPModule", "FullyShardedDataParallel"})


def _by_backward(model: Any, tensors: Sequence[torch.Tensor], loss: torch.Tensor) -> list[Any]:
    """Returns gradients by a backward pass, after which all ``.grad`` are as before."""
    before = [(tensor, tensor.grad) for tensor in model.parameters()]
    for tensor, _ in before:
        tensor.grad = None
    try:
        loss.backward()
        return [tensor.grad for tensor in tensors]
    finally:
        for tensor, gradient in before:
            tensor.grad = gradient


def _no_sync(model: Any) -> Any:
    """Returns a context in which DDP does not expect a backward pass."""
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return model.no_sync() if is_ddp else nullcontext()


@contextmanager
def _without_dropout(model: torch.nn.Module, *, trains: bool) -> Iterator[None]:
    """Context manager in which no layer drops anything out. ``trains``: the model itself says that it is training, because
    losses may ask it."""
    modes = [(module, module.training) for module in model.modules()]
    inner = getattr(model, "module", model)
    dropouts = []
    try:
        for module, _ in modes:
            is_recurrent = isinstance(module, torch.nn.RNNBase)  # cuDNN needs it to be training
            module.training = is_recurrent or (trains and module in (model, inner))
            if is_recurrent:
                dropouts.append((module, module.dropout))
                module.dropout = 0.0
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, share in dropouts:
            module.dropout = share


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Context manager with random numbers of its own; afterwards all generators continue as before."""
    python = random.getstate()
    numbers = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
