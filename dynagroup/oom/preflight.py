"""Runs the largest batches before training, so that an out-of-memory error comes in the first seconds, on all ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.budget.learning import BACKOFF
from dynagroup.device import is_out_of_memory
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, BudgetError, ConfigError
from dynagroup.oom.retry import clear_frames, free_memory
from dynagroup.oom.train import class_names, find_ddp, local_gradients
from dynagroup.plan.batches import longest_of, maxima_of
from dynagroup.shapes import BatchShape, IntArray, Streams, largest_within
from dynagroup.update.filling import Shape
from dynagroup.update.loader import StepLoader
from dynagroup.update.loss_check import random_numbers

NUM_LENGTHS = 4  # lengths to try, each with as many samples as fit
SAMPLED = 1 << 16  # most samples whose lengths are read
MESSAGE_BYTES = 1000  # of an error message that ranks exchange


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A batch to run: one sample, repeated."""

    sample: int
    """Number of the sample in the loader's examples."""
    shape: Shape
    """(samples, tokens per stream) of the batch."""
    seen: BatchShape
    """The batch as the budget sees it (K = 1); the sample is repeated as often as this has samples."""

    @property
    def num_copies(self) -> int:
        return int(self.seen.num_samples[0])


# Ranks exchange results after each batch. With DDP a batch runs without DDP's own exchange, so no rank waits for one
# that failed. With FSDP ranks exchange data within a pass, and run the same shapes, so they fail at the same place; if
# one fails alone, the others wait in that exchange until it times out, and then all raise the same error.
def preflight(
    model: Any, loader: StepLoader[Any], compute_loss: Callable[[Any, Any], torch.Tensor]
) -> list[Shape]:
    """Runs the largest batches of training, forward and backward, most expensive first, so that an out-of-memory error
    comes in the first seconds and a compiled model is compiled. Call it on every rank, before training.

    Gradients, buffers and random states are restored, and the loader does not advance. If a batch runs out of memory on
    one rank, a :class:`~dynagroup.LearningBudget` learns it on all ranks, and a smaller batch is run.

    Args:
        model: the model as it is trained: in DDP or FSDP, compiled, on its device; not in DeepSpeed.
        loader: the training loader. With ``shapes``, one batch of each shape is run; else up to four batches, each of one
            length (the longest among them) and of as many samples as fit.
        compute_loss: function (model, batch) -> loss, a scalar tensor.

    Returns:
        list of (samples, tokens per sample) of each batch that passed, in the order of running; one count per stream.

    Raises BudgetError on all ranks if a batch ran out of memory and the budget cannot learn from it: it is no
    LearningBudget, ``shapes`` or FSDP is used, or the batch is one sample. The message names shape, bytes and the
    budget to set. ConfigError for DeepSpeed, whose gradients cannot be restored.
    AlignmentError if another rank failed.

    >>> from dynagroup import PlannedDataLoader, TokenBudget
    >>> loader = PlannedDataLoader(torch.eye(6), [1, 2, 2, 4, 4, 4], TokenBudget(8), weigh="samples")
    >>> layer = torch.nn.Linear(6, 1)
    >>> preflight(layer, loader, lambda model, batch: model(batch).sum()), layer.weight.grad
    ([(4, 2), (2, 4)], None)
    """
    if any("DeepSpeedEngine" in class_names(module) for module in model.modules()):
        raise ConfigError(
            "`preflight` does not run a DeepSpeedEngine, because ZeRO keeps gradients that cannot be restored; "
            "instead train for a few updates on the longest samples, in a run of its own"
        )
    learner = loader.budget.learner
    has_few_shapes = loader.budget.ladder is not None
    try:
        ddp = find_ddp(model)
    except ConfigError:  # with FSDP no rank can run alone, so none can run a smaller batch
        ddp = None
        learner = None
    lengths, read, collate = loader.examples()

    def run(trial: Trial) -> None:
        with local_gradients(ddp):
            batch = collate([read(trial.sample)] * trial.num_copies, trial.shape)
            compute_loss(model, batch).backward()

    passed: list[Shape] = []
    waiting = _trials(lengths, loader)
    with _unchanged(model), random_numbers(0):
        while waiting:
            trial = waiting.pop(0)
            if not has_few_shapes and _is_within(trial.shape, passed):
                continue
            failure = _failure(partial(run, trial), loader.world, trial, loader.budget)
            _drop_gradients(model)
            if failure is None:
                passed.append(trial.shape)
                continue
            if learner is None or has_few_shapes or trial.num_copies == 1:
                raise BudgetError(failure)
            learner.record_oom(trial.seen, num_retries=0)
            learner.apply(loader.world)
            waiting = _trials(lengths, loader)
    return passed


def _is_within(shape: Shape, passed: Sequence[Shape]) -> bool:
    """Returns whether a larger batch has passed."""
    return any(np.less_equal(shape, larger).all() for larger in passed)


def _trials(lengths: Streams, loader: StepLoader[Any]) -> list[Trial]:
    """Returns the batches to run, most expensive first."""
    budget = loader.budget.held(loader.budget.applied)
    names = padded_streams(budget, lengths)
    samples = _samples_to_read(lengths, budget)
    units = np.stack([lengths[name][samples].astype(np.int64) for name in names])
    tokens = units.sum(axis=0)
    ladder = budget.ladder
    if ladder is not None:
        shapes = ladder.shapes
    else:
        by_tokens = np.argsort(tokens, kind="stable")
        quantiles = (np.arange(1, NUM_LENGTHS + 1) * len(samples) - 1) // NUM_LENGTHS
        chosen = by_tokens[quantiles]
        most = _most_that_fit(samples[chosen], lengths, budget, loader)
        shapes = list(dict.fromkeys(zip(most, *units[:, chosen].tolist(), strict=True)))

    trials = []
    for shape in shapes:
        holds = np.all(units.T <= shape[1:], axis=1)
        if not holds.any():
            continue
        # of the longest sample that the shape holds
        place = int(np.where(holds, tokens, -1).argmax())
        num_copies = shape[0]
        width = shape[1:]
        if ladder is not None and ladder.layout == "packed":
            num_copies = max(shape[1] // max(tokens[place], 1), 1)
            width = units[:, place]
        seen = BatchShape.of(num_copies, dict(zip(names, width, strict=True)))
        trials.append(Trial(sample=int(samples[place]), shape=shape, seen=seen))
    trials.sort(key=lambda trial: (-budget.cost(trial.seen)[0], -trial.shape[0]))
    return trials


def _samples_to_read(lengths: Streams, budget: Budget) -> IntArray:
    """Returns the numbers of some samples, evenly spread, and of the longest; all samples if shapes are few."""
    num_samples = len(next(iter(lengths.values())))
    stride = max(num_samples // SAMPLED, 1) if budget.ladder is None else 1
    spread = np.arange(0, num_samples, stride)
    longest = longest_of(lengths, budget, spread[:0], maxima_of(lengths))
    return np.union1d(spread, longest)


def _most_that_fit(
    samples: IntArray, lengths: Streams, budget: Budget, loader: StepLoader[Any]
) -> list[int]:
    """Returns how many samples of each length the largest batch of training has."""
    upper = loader.num_samples or len(next(iter(lengths.values())))
    sizes = loader.sizes
    if sizes is not None and isinstance(sizes.schedule, int) and sizes.is_constant:
        upper = min(upper, sizes.schedule)
    longest = {name: values[samples] for name, values in lengths.items()}
    most = largest_within(
        lambda count: budget.fits(BatchShape.of(count, longest)), len(samples), upper
    )
    return most.clip(1).tolist()


def _advice(trial: Trial, budget: Budget) -> str:
    """Returns what ran out of memory, and what to change, as text."""
    units = [int(values[0]) for values in trial.seen.longest.values()]
    way_out = f"truncate or filter out samples as long as sample {trial.sample}"
    if trial.num_copies > 1:
        smaller = int(BACKOFF * trial.num_copies * sum(units))
        layout = "" if budget.layout == "padded" else ', layout="packed"'
        way_out = f"add `& TokenBudget({smaller}{layout})` to the budget"
    tokens = " + ".join(str(unit) for unit in units)
    return (
        f"a batch of {trial.num_copies} samples of {tokens} tokens, which the budget allows, ran out of memory; "
        f"{way_out}"
    )


def _failure(run: Callable[[], None], world: World, trial: Trial, budget: Budget) -> str | None:
    """Runs a batch on all ranks; if any runs out of memory, returns advice with the allocator's message, equal on all.
    Raises all other errors; AlignmentError: another rank raised one."""
    error = None
    message = b""
    try:
        run()
    except Exception as caught:
        error = caught
        if is_out_of_memory(caught):
            clear_frames(caught, set())
            error = BudgetError(
                f"{_advice(trial, budget)}. Rank {world.rank} of {world.size}: {type(caught).__name__}: {caught}"
            )
            message = str(error).encode()[:MESSAGE_BYTES]
    if message:
        free_memory()
    try:
        rank_without_memory, failed_rank = world.all_max(
            [world.rank if message else -1, world.rank if error is not None else -1]
        )
        if rank_without_memory < 0:
            shared = []
        else:
            own = message if rank_without_memory == world.rank else b""
            shared = world.all_max(list(own.ljust(MESSAGE_BYTES)))
    except AlignmentError as lost:
        raise error or lost from None
    if rank_without_memory >= 0:
        return bytes(shared).decode(errors="ignore").strip()
    if error is not None:
        raise error
    if failed_rank >= 0:
        raise AlignmentError(f"rank {failed_rank} failed before training; see its error")
    return None


def _drop_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@contextmanager
def _unchanged(model: torch.nn.Module) -> Iterator[None]:
    """Context manager that starts without gradients and restores gradients and buffers at its end."""
    gradients = []
    for parameter in model.parameters():
        copied = None if parameter.grad is None else parameter.grad.clone()
        gradients.append((parameter, copied))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    _drop_gradients(model)
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
