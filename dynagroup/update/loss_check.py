"""The split test: a few samples run as one batch and each alone, and their gradients are compared.

A batch that is cut in parts trains the same only if the gradients of the parts add up to that of the whole. Whether they
do, and by which weights, is a property of the user's loss. So it is measured on the user's own model and loss, before
the first update. Losses themselves cannot tell: in an untrained model all samples have nearly the same loss."""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from dynagroup.distributed import SingleProcess, World, on_all_ranks
from dynagroup.errors import AlignmentError, ConfigError
from dynagroup.shapes import BatchShape, primary
from dynagroup.update.filling import Collate, FillingCollator
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_weight import Share, Weigh, count_label_tokens, weigher
from dynagroup.update.step import Step
from dynagroup.validation import warn_user

LossOf: TypeAlias = Callable[[Step[Any]], Any]
Chosen: TypeAlias = Weigh | Mapping[str, Weigh] | None  # None: the user has chosen no `weigh`

MEANS = ("tokens", "labels", "samples")
RULES = {
    "sum": "sums over the items of the update",
    "tokens": "means by label tokens, without each sample's first",
    "labels": "means by label tokens",
    "samples": "means by samples",
    "weigh": "the given `weigh`",
}
# Largest relative difference of gradients. That of rules that hold is 3e-7. A term that does not add up passes if it is
# smaller than this: one that balances the experts of a large model does, that of a tiny Mixtral (1.1e-3 to 2.3e-3) not.
EXACT = 1e-3
HALF = 2e-2  # the same in half precision, where that of rules that hold is 3e-3
CLEARLY = 10  # times closer, and a later rule is better than one that also holds
NUM_ELEMENTS = 1 << 20  # most elements of the gradient that are compared
NUM_MOVED = 1 << 20  # most elements of tensors that are moved during the test
MOVED = 0.01  # how far, relative to their size
NUM_READ = 64  # samples of which some are chosen
NUM_DRAWS = 16  # random maskings, of which the first with a label of a first token is used
READ = "read and collate a few samples"
NUM_TOGETHER = 8  # most samples in one batch
WAYS_OUT = (
    "pass `weigh`: a function from a batch to the number by which its loss is divided (with class "
    "weights: their sum over the samples), or a dict of weights for several losses; or divide the "
    "loss by num_items_in_batch (Trainer) or step.samples.total. If the loss compares samples of a "
    "batch with each other, counts padding, or draws random numbers, train without dynagroup, or say "
    "`weigh` and accept it"
)
COUNTS_FILLING = (
    ". Or the loss counts the rows of weight 0 that `shapes` adds: average it over the rows that "
    "have a label other than -100, or leave `shapes` out"
)
PADDING = (
    "; if each is padded as in the batch, they do add up. So padding changes the result of a sample, in "
    "batches of any tool: a mask is missing, the loss counts padding, or a layer normalises over a "
    "whole row (wav2vec2 with feat_extract_norm='group'). Pass the attention mask, average over what "
    "is not padding, or use such a model with samples of one length"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Some samples as one batch, and each of them as a batch of its own."""

    together: object
    alone: Sequence[object]
    # the same without the rows of weight 0 that `shapes` adds: so they are weighed
    plain: Sequence[object]
    is_filled: bool = False  # whether there are such rows


def check_loss(
    model: torch.nn.Module,
    loss_of: LossOf,
    samples: StepLoader[Any] | Sequence[Any],
    weigh: Any = "auto",
    *,
    collate_fn: Collate | None = None,
    world: World | None = None,
) -> Any:
    """Tests on the model and loss that will be trained how losses of batches add up. Call it on every rank before the first
    update; the Trainer and Lightning adapters do so themselves. Nothing is changed.

    A few samples (those with fewest and with most labels, and one of each class) run as one batch and each alone, without
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
    chosen: Chosen = None if weigh == "auto" else weigh
    if isinstance(samples, StepLoader):
        return check_loader(model, loss_of, samples, chosen)
    world = world or SingleProcess()
    collated = partial(
        pieces_of, samples.__getitem__, range(len(samples)), collate_fn or default_collate
    )
    pieces = on_all_ranks(world, collated, READ)
    losses = _losses_by_rule(loss_of, chosen)
    return split_test(model, losses, pieces, chosen, world=world)


def check_loader(
    model: torch.nn.Module,
    loss_of: LossOf,
    loader: StepLoader[Any],
    weigh: Chosen = None,
    *,
    pieces: Pieces | None = None,
    is_half: bool = False,
) -> Any:
    """Like :func:`check_loss`, for the weights of a loader. ``pieces``: the samples to run, if it reads a stream."""
    chosen = loader.weigh if weigh is None else weigh
    if chosen == "tokens":
        chosen = None  # the default of loaders
    if pieces is None:
        pieces = pieces_of_loader(loader)
    losses = _losses_by_rule(loss_of, chosen)
    rule = split_test(model, losses, pieces, chosen, world=loader.world, is_half=is_half)
    if chosen is None and rule in ("labels", "samples"):
        raise ConfigError(
            f"the loader has weigh='tokens', but losses of batches add up as {RULES[rule]}; "
            f"make the loader with weigh={rule!r}"
        )
    return rule


def _losses_by_rule(loss_of: LossOf, weigh: Chosen) -> dict[str, LossOf]:
    rules = ("sum", *MEANS) if weigh is None else ("sum", "weigh")
    return dict.fromkeys(rules, loss_of)


def split_test(
    model: torch.nn.Module,
    losses: Mapping[str, LossOf],
    pieces: Pieces | None,
    weigh: Chosen,
    *,
    world: World,
    is_half: bool = False,
) -> Any:
    """Finds the rule by which gradients of samples alone add up to that of the same samples together. All ranks must call
    it, and get the same.

    Args:
        losses: the loss for each rule, a key of ``RULES``. Rules are tried in this order, and the gradient of the samples
            together is that of the first loss.
        weigh: what the user has chosen. With a dict, ``losses["weigh"]`` returns a mapping of losses.
        is_half: the model runs in half precision.

    Returns what weighs batches from now on: a rule, or the ``weigh`` that was chosen. None: the samples cannot show it.
    Raises ConfigError if no rule holds; if ``weigh`` was chosen, it warns."""
    tensors = [tensor for tensor in model.parameters() if tensor.requires_grad]
    cannot_run = pieces is None or not tensors
    if world.all_max([int(cannot_run)])[0] or pieces is None:
        return None
    if min(tensor.itemsize for tensor in tensors) < 4:
        is_half = True
    limit = HALF if is_half else EXACT
    with _moved([] if _is_sharded(model) else tensors):
        if not isinstance(weigh, Mapping):
            return _SplitTest(model, tensors, pieces, weigh, world, limit).result(losses)
        results = []
        for name, weigh_of_one in weigh.items():
            test = _SplitTest(model, tensors, pieces, weigh_of_one, world, limit)
            one_loss = partial(_one_of_several, losses["weigh"], weigh, name)
            results.append(test.result({"weigh": one_loss}))
        return None if None in results else weigh


def _one_of_several(
    losses_of: LossOf, weigh: Mapping[str, Weigh], name: str, step: Step[Any]
) -> torch.Tensor:
    losses = losses_of(step)
    check_losses(losses, weigh)
    return losses[name]


def untested(reason: str, weigh: Chosen) -> Chosen:
    """Returns the ``weigh`` that the user has chosen, with a warning that it was not tested. ConfigError: none was."""
    message = f"cannot test how losses of batches add up ({reason[:300]})"
    if weigh is None:
        raise ConfigError(f"{message}; say `weigh`, the weight of a batch's loss")
    warn_user(f"{message}; `weigh` is taken as it is")
    return weigh


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finding:
    """The rule that holds (None: none does), and relative differences; without any, the samples could not show it."""

    rule: str | None = None
    differences: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None  # why no loss could be computed


@dataclass(frozen=True, slots=True)
class _SplitTest:
    """Compares gradients of one loss, by several rules."""

    model: torch.nn.Module
    tensors: list[torch.nn.Parameter]  # whose gradients are compared
    pieces: Pieces
    weigh: Weigh | None
    world: World
    limit: float  # largest relative difference of a rule that holds

    def result(self, losses: Mapping[str, LossOf]) -> Any:
        """Returns what weighs batches, see :func:`split_test`."""
        # Losses may ask the model whether it trains. But a model that trains may drop something out by itself.
        with _without_dropout(self.model, trains=True):
            finding = self._find(losses)
        if finding.rule is None and not self._is_reproducible(losses, finding):
            with _without_dropout(self.model, trains=False):
                further = self._find(losses)
            if further.rule is not None:
                finding = further
        if finding.rule is None:
            return self._without_rule(finding, losses)
        _log.info("losses are weighed by this rule: %s", RULES[finding.rule])
        return self.weigh if finding.rule == "weigh" else finding.rule

    def _is_reproducible(self, losses: Mapping[str, LossOf], finding: _Finding) -> bool:
        """Returns whether the gradient of the whole is the same with other random numbers, while the model trains."""
        if finding.failure is not None or not finding.differences:
            return False
        first_loss = next(iter(losses.values()))
        differs = True
        with _without_dropout(self.model, trains=True), suppress(Exception):  # the user's loss
            gradients = [
                self._gradient(first_loss, self.pieces.together, None, seed) for seed in (0, 1)
            ]
            differs = not torch.equal(*gradients)
        return not self.world.all_max([int(differs)])[0]

    def _without_rule(self, finding: _Finding, losses: Mapping[str, LossOf]) -> Any:
        if finding.failure is not None:
            return untested(finding.failure, self.weigh)
        if not finding.differences:
            return None
        figures = [f"{RULES[rule]}: {value:.2%} off" for rule, value in finding.differences.items()]
        problem = (
            "gradients of a few samples, each alone, do not add up to the gradient of these samples "
            f"in one batch ({'; '.join(figures)})"
        )
        if self._is_by_padding(losses):
            problem += PADDING
        further_cause = COUNTS_FILLING if self.pieces.is_filled else ""
        if self.weigh is None:
            raise ConfigError(
                f"the loss depends on how an update is cut: {problem}; {WAYS_OUT}{further_cause}"
            )
        warn_user(
            "`weigh` does not fit the loss, which depends on how an update is cut: "
            f"{problem}{further_cause}"
        )
        return self.weigh

    def _is_by_padding(self, losses: Mapping[str, LossOf]) -> bool:
        """Returns whether a rule holds if each sample alone is padded as in the batch; all ranks find the same."""
        pieces = self.pieces
        num_samples = len(pieces.alone)
        has_rows = _is_one_row_a_sample(pieces.together, num_samples)
        if self.world.all_max([int(not has_rows)])[0]:
            return False
        as_padded = [_rows_taken(pieces.together, [row]) for row in range(num_samples)]
        test = replace(self, pieces=replace(pieces, alone=as_padded))
        with _without_dropout(self.model, trains=True):  # as when no rule was found
            return test._find(losses).rule is not None

    def _find(self, losses: Mapping[str, LossOf]) -> _Finding:
        """Tries one rule after another; all ranks find the same."""
        first_loss = next(iter(losses.values()))
        gradient_together = cache(self._gradient_together)
        gradients_alone = cache(self._gradients_alone)
        differences: dict[str, float] = {}
        failure: str | None = None
        for rule, loss_of in losses.items():
            squares = None
            error = None
            try:
                weights = self._normalized_weights(rule)
                if weights is not None:
                    squares = _squares(
                        gradient_together(first_loss), gradients_alone(loss_of), weights
                    )
            except Exception as caught:  # the loss is the user's code
                error = caught
            difference, failure_now = self._of_all_ranks(squares, error)
            failure = failure or failure_now
            if difference is None:
                continue
            if math.isnan(difference):
                return _Finding()
            differences[rule] = difference
            if rule == "sum" and difference <= self.limit:
                break
        rule = _rule_that_holds(differences, self.limit)
        return _Finding(
            rule=rule, differences=differences, failure=None if differences else failure
        )

    def _of_all_ranks(
        self, squares: tuple[float, float] | None, error: Exception | None
    ) -> tuple[float | None, str | None]:
        """Returns the difference relative to the whole over all ranks, because each may have a part of a gradient, and why a
        rank could not compute it. nan: the gradient of the whole shows nothing. Infinity: a sample alone has none.
        ConfigError, AlignmentError: this or another rank raised a ConfigError."""
        is_refused = isinstance(error, ConfigError)
        flags = [squares is None, error is not None, is_refused]
        apart, length, num_without, num_failed, num_refused = self.world.all_sum(
            [*(squares or (0.0, 0.0)), *map(int, flags)]
        )
        if error is not None and is_refused:
            raise error
        if num_refused:
            raise AlignmentError("another rank refused the loss; see its error")
        if error is not None:
            return None, f"{type(error).__name__}: {error}"
        if num_without:
            return None, "it failed on another rank; see its log" if num_failed else None
        if length == 0 or not math.isfinite(length):
            return math.nan, None
        return math.sqrt(apart / length) if math.isfinite(apart) else math.inf, None

    def _normalized_weights(self, rule: str) -> list[float] | None:
        """Returns what each sample alone weighs, of 1 in all; None: there is nothing to count. Losses that are sums have
        no weights, so each counts once."""
        if rule == "sum":
            return [1.0] * len(self.pieces.plain)
        weights = self._weights(self.weigh if rule == "weigh" else rule)
        total = sum(weights)
        return [weight / total for weight in weights] if total else None

    def _weights(self, weigh: Any) -> list[float]:
        """Returns the weight of each sample alone; no weights: batches have no labels."""
        weight_of = weigher(weigh)
        try:
            return [weight_of(batch, 1) for batch in self.pieces.plain]
        except ConfigError:
            return []

    def _gradient_together(self, loss_of: LossOf) -> torch.Tensor:
        return self._gradient(loss_of, self.pieces.together, None)

    def _gradients_alone(self, loss_of: LossOf) -> list[torch.Tensor]:
        alone = self.pieces.alone
        return [self._gradient(loss_of, batch, place) for place, batch in enumerate(alone)]

    def _gradient(
        self, loss_of: LossOf, batch: object, place: int | None, seed: int = 0
    ) -> torch.Tensor:
        """Returns elements of the gradient of a loss: of the sample at ``place``, or None: of all samples together."""
        ones = [1.0] * len(self.pieces.alone)
        weights = self._weights("tokens" if self.weigh is None else self.weigh)
        samples = _share(ones, place)
        step = Step(
            batch=batch,
            indices=range(int(samples.local)),
            samples=samples,
            weight=_share(weights or ones, place),
            loss_scale=1.0,
            ends_update=True,
        )
        with random_numbers(seed), torch.enable_grad(), _no_sync(self.model):
            loss = loss_of(step)
            if _is_sharded(self.model):
                gradients = _by_backward(self.model, self.tensors, loss)
            else:
                gradients = torch.autograd.grad(loss, self.tensors, allow_unused=True)
        return _elements(self.tensors, gradients)


def _squares(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float]
) -> tuple[float, float]:
    """Returns the squared norms of (weighted sum of parts - whole), and of the whole."""
    difference = -whole
    for part, weight in zip(parts, weights, strict=True):
        if weight != 0:
            difference = difference + weight * part
    return float(difference.square().sum()), float(whole.square().sum())


def _rule_that_holds(differences: Mapping[str, float], limit: float) -> str | None:
    """Returns the first rule that holds, unless a later one is clearly closer."""
    closest = min(differences.values(), default=math.inf)
    for rule, difference in differences.items():
        if difference <= min(limit, CLEARLY * closest):
            return rule
    return None


def _share(weights: Sequence[float], place: int | None) -> Share:
    total = sum(weights)
    return Share(local=total if place is None else weights[place], total=total)


def sum_of(losses: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> torch.Tensor:
    """Returns the sum of several losses, each multiplied by its scale. A loss of scale 0 adds nothing, also if it is nan."""
    scaled = []
    for name, scale in scales.items():
        loss = losses[name] if scale else losses[name].nan_to_num(0.0, 0.0, 0.0)
        scaled.append(loss * scale)
    return torch.stack(scaled).sum()


def check_losses(
    losses: object, weigh: Mapping[str, object], loss: torch.Tensor | None = None
) -> None:
    """Raises ConfigError if ``losses`` is not a mapping with the names of ``weigh``, or if ``loss`` is not their sum."""
    names = sorted(losses) if isinstance(losses, Mapping) else type(losses).__name__
    if names != sorted(weigh):
        raise ConfigError(
            f"`weigh` is a dict for the losses {sorted(weigh)}, but the losses are {names}; return a "
            "mapping with these names (a Trainer's model or compute_loss: as `losses` of its outputs)"
        )
    if loss is None or not isinstance(losses, Mapping):
        return
    loss = loss.detach()
    total = sum(float(torch.as_tensor(one).detach()) for one in losses.values())
    tolerance = HALF if loss.itemsize < 4 else EXACT
    both_are_nan = math.isnan(total) and bool(loss.isnan())
    if not both_are_nan and not math.isclose(float(loss), total, rel_tol=tolerance, abs_tol=1e-6):
        raise ConfigError(
            f"with `weigh` as a dict the sum of `losses` is trained, {total:.6g}, but the loss beside "
            f"them is {float(loss):.6g}; return each of its terms in `losses`, with its factor"
        )


def pieces_of_loader(loader: StepLoader[Any], *, skip: int = 0) -> Pieces | None:
    """Returns samples of a loader that fit into one batch. All ranks must call it. ``skip``: another number gives other
    samples."""
    lengths, read, collate = loader.examples()
    budget = loader.budget.held(loader.budget.applied)
    tokens = lengths[primary(lengths)]
    order = np.argsort(tokens, kind="stable")
    sorted_lengths = {name: values[order] for name, values in lengths.items()}
    candidates = order[:2]
    for num_together in (2, NUM_TOGETHER):
        # the budget may be too large, so short samples are better
        shapes = BatchShape.of(np.full(len(order), num_together), sorted_lengths)
        fitting = order[budget.fits(shapes)]
        if len(fitting) < 2:
            continue
        has_long_and_short = tokens[fitting[-1]] >= 2 * tokens[fitting[0]]
        if num_together == 2 or has_long_and_short:
            candidates = fitting
    places = np.unique(np.linspace(0, len(candidates) - 1, NUM_READ + skip).astype(np.int64))

    def fit(indices: list[int]) -> bool:
        chosen_lengths = {name: values[indices] for name, values in lengths.items()}
        return bool(budget.fits(BatchShape.of_samples(chosen_lengths))[0])

    collated = partial(
        pieces_of,
        read,
        candidates[places].tolist(),
        collate,
        fit=fit,
        kind_of=loader.kind_of_example,
    )
    return on_all_ranks(loader.world, collated, READ)


def pieces_of(
    read: Callable[[int], object],
    indices: Sequence[int],
    collate: Collate,
    *,
    fit: Callable[[list[int]], bool] | None = None,
    kind_of: Callable[[int, Any], Hashable] | None = None,
) -> Pieces | None:
    """Reads samples, and returns those that show most about a loss; None: fewer than two have labels."""
    filling = collate if isinstance(collate, FillingCollator) else FillingCollator(collate, None)
    with random_numbers(0):
        samples = {index: read(index) for index in indices[:: max(len(indices) // NUM_READ, 1)]}
        if kind_of is not None:
            samples = _of_one_kind(samples, kind_of)
        batches = {index: filling.collated([sample]) for index, sample in samples.items()}
        chosen = _different(batches)
        # with few shapes, twice as many must fit, so that there is room for rows of weight 0
        num_copies = 1 if filling.ladder is None else 2
        while fit is not None and len(chosen) > 2 and not fit(chosen * num_copies):
            chosen.pop()
        if not chosen:
            return None
        chosen_samples = [samples[index] for index in chosen]
        together = filling.collated(chosen_samples)
    masked = _masked_at_random(filling, chosen_samples, together)
    if masked is not None:
        return masked
    plain = [batches[index] for index in chosen]
    return Pieces(
        together=filling.fill(together, len(chosen)),
        alone=[filling.fill(batch, 1) for batch in plain],
        plain=plain,
        is_filled=filling.ladder is not None,
    )


def _of_one_kind(
    samples: Mapping[int, object], kind_of: Callable[[int, Any], Hashable]
) -> dict[int, object]:
    """Returns the samples of the most frequent kind."""
    kinds = {index: kind_of(index, sample) for index, sample in samples.items()}
    [(common, _)] = Counter(kinds.values()).most_common(1)
    return {index: sample for index, sample in samples.items() if kinds[index] == common}


def _masked_at_random(
    filling: FillingCollator, samples: list[object], together: object
) -> Pieces | None:
    """Returns the rows of one batch of the samples, if collating them again gives another batch: one that has a label of
    a first token, if possible, because only such a label shows whether it counts. None: the batch is the same."""
    batch: Any = together
    for seed in range(1, NUM_DRAWS):
        with random_numbers(seed):
            batch = filling.collated(samples)
        if _equal(together, batch):
            return None
        if _has_first_label(batch):
            break
    if not _is_one_row_a_sample(batch, len(samples)):
        return None
    return _pieces_of_rows(batch, range(len(samples)))


def pieces_of_batch(batch: Any, num_samples: int) -> Pieces | None:
    """Takes rows of a padded batch apart, as far as it is a mapping of tensors with one row a sample; else None."""
    if num_samples < 2 or not _is_one_row_a_sample(batch, num_samples):
        return None
    alone = {row: _rows_of(batch, [row]) for row in range(num_samples)}
    chosen = _different(alone)
    return _pieces_of_rows(batch, chosen) if chosen else None


def _is_one_row_a_sample(batch: object, num_samples: int) -> bool:
    if not isinstance(batch, Mapping):
        return False
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    return {len(tensor) for tensor in tensors if tensor.ndim} == {num_samples}


def _pieces_of_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> Pieces:
    alone = [_rows_of(batch, [row]) for row in rows]
    return Pieces(together=_rows_of(batch, rows), alone=alone, plain=alone)


def _rows_taken(batch: Any, rows: Sequence[int]) -> dict[str, Any]:
    """Returns rows of a padded batch, as wide as it is."""
    taken = {}
    for name, value in batch.items():
        has_rows = isinstance(value, torch.Tensor) and value.ndim
        taken[name] = value[list(rows)] if has_rows else value
    return taken


def _rows_of(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Returns rows of a padded batch, without columns that are padding in all of them."""
    taken = _rows_taken(batch, rows)
    mask = taken.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return taken
    width = int(mask.any(dim=0).nonzero().max()) + 1
    for name, value in taken.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == mask.shape:
            taken[name] = value[:, :width].contiguous()
    return taken


def _different(batches: Mapping[int, object]) -> list[int]:
    """Returns which of these batches of one sample show most about a loss: those with fewest and with most labels, and one
    of each class. Fewer than two batches have labels: none."""
    num_labels = {index: _num_labels(batch) for index, batch in batches.items()}
    # the label of a first token may not count
    least = 2 if max(num_labels.values(), default=0) > 1 else 1
    labelled = [index for index, count in num_labels.items() if count >= least]
    if len(labelled) < 2:
        return []
    # with equally many labels, samples differ by their tokens only
    labelled.sort(key=lambda index: (num_labels[index], _num_elements(batches[index])))
    chosen = [labelled[0], labelled[-1]]
    for index in _one_of_each_class(batches, labelled):
        if index not in chosen and len(chosen) < NUM_TOGETHER:
            chosen.append(index)
    return chosen


def _one_of_each_class(batches: Mapping[int, object], indices: Sequence[int]) -> list[int]:
    first_of_class: dict[tuple[int, ...], int] = {}
    for index in indices:
        first_of_class.setdefault(_class_of(batches[index]), index)
    return list(first_of_class.values())


def _num_labels(batch: object) -> int:
    try:
        return count_label_tokens(batch, shifted=False)
    except ConfigError:
        return 1


def _num_elements(batch: object) -> int:
    return max((tensor.numel() for tensor in _tensors_of(batch)), default=1)


def _class_of(batch: object) -> tuple[int, ...]:
    """Returns what kinds of samples differ in: the single integers of a batch of one sample, such as its class."""
    single = [tensor for tensor in _tensors_of(batch) if tensor.numel() == 1]
    integers = [int(tensor) for tensor in single if not tensor.is_floating_point()]
    return (int(_has_first_label(batch)), *integers)


def _has_first_label(batch: object) -> bool:
    try:
        return count_label_tokens(batch, shifted=False) != count_label_tokens(batch)
    except ConfigError:
        return False


def _equal(batch: object, other: object) -> bool:
    tensors = _tensors_of(batch)
    others = _tensors_of(other)
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


def _tensors_of(batch: object) -> list[torch.Tensor]:
    """Returns all tensors in nested mappings, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts: Sequence[object] = ()
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif isinstance(batch, (list, tuple)):
        parts = batch
    tensors = []
    for part in parts:
        tensors.extend(_tensors_of(part))
    return tensors


def _elements(
    tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Returns evenly spaced elements of gradients as one vector, as many of each tensor; unused ones are 0."""
    num_of_each = max(NUM_ELEMENTS // len(tensors), 1)
    parts = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        values = torch.zeros_like(tensor) if gradient is None else gradient
        values = values.detach()
        to_local = getattr(values, "to_local", None)  # of a DTensor
        if to_local is not None:
            values = to_local()
        if values.is_sparse:
            values = values.to_dense()
        stride = max(math.ceil(values.numel() / num_of_each), 1)
        parts.append(values.flatten()[::stride].float().cpu())
    return torch.cat(parts).double()


def _is_sharded(model: torch.nn.Module) -> bool:
    """Returns whether only a backward pass of the whole model gives gradients, as with FSDP."""
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in ("FSDPModule", "FullyShardedDataParallel"):
                return True
    return False


def _by_backward(
    model: torch.nn.Module, tensors: Sequence[torch.Tensor], loss: torch.Tensor
) -> list[torch.Tensor | None]:
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


def _no_sync(model: torch.nn.Module) -> AbstractContextManager[object]:
    """Returns a context in which DDP does not expect a backward pass."""
    is_ddp = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    return model.no_sync() if is_ddp else nullcontext()


@contextmanager
def _without_dropout(model: torch.nn.Module, *, trains: bool) -> Iterator[None]:
    """Context manager in which no layer drops anything out. ``trains``: the model itself says that it is training, because
    losses may ask it."""
    outer = (model, getattr(model, "module", model))
    modes = [(module, module.training) for module in model.modules()]
    recurrent = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    dropouts = [module.dropout for module in recurrent]
    try:
        for module, _ in modes:
            module.training = trains and module in outer
        for module in recurrent:  # cuDNN needs them to be training
            module.training = True
            module.dropout = 0.0
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, dropout in zip(recurrent, dropouts, strict=True):
            module.dropout = dropout


@contextmanager
def _moved(tensors: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Context manager in which the smallest tensors, a million elements at most, are moved by about one percent. So terms
    show that are zero before training, such as a distance to a copy of the model."""
    smallest = sorted(tensors, key=torch.Tensor.numel)
    num_elements = np.cumsum([tensor.numel() for tensor in smallest])
    moved = smallest[: int(np.searchsorted(num_elements, NUM_MOVED, side="right"))]
    before = [tensor.detach().clone() for tensor in moved]
    generator = torch.Generator().manual_seed(0)  # ranks with the same tensors move alike
    try:
        with torch.no_grad():
            for tensor in moved:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                size = float(tensor.float().square().mean().sqrt())
                tensor.add_(noise, alpha=MOVED * (size if size > 0 else 1.0))
        yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(moved, before, strict=True):
                tensor.copy_(values)


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Context manager with random numbers of its own; afterwards all generators continue as before."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
