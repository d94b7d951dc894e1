"""Runs the largest batches before training, so that an out-of-memory error comes in the first seconds, on all ranks."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dynagroup.budget.base import Budget, padded_streams
from dynagroup.budget.learning import BACKOFF
from dynagroup.device import is_out_of_memory
from dynagroup.distributed import World
from dynagroup.errors import AlignmentError, BudgetError, ConfigError
from dynagroup.oom.retry import clear_frames, free_memory
from dynagroup.oom.train import find_ddp, local_gradients
from dynagroup.plan.batches import longest_of, maxima_of
from dynagroup.shapes import BatchShape, Streams, largest_within
from dynagroup.update.filling import Shape
from dynagroup.update.loader import StepLoader

LENGTHS, SAMPLED = (
    4,
    1 << 16,
)  # lengths to try, each with as many samples as fit; most samples whose lengths are read
SAID = 1000  # bytes of an error message that ranks exchange


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
        model: the model as it is trained: in DDP or FSDP, compiled, on its device.
        loader: the training loader. With ``shapes``, one batch of each shape is run; else up to four batches, each of one
            length (the longest among them) and of as many samples as fit.
        compute_loss: function (model, batch) -> loss, a scalar tensor.

    Returns:
        list of (samples, tokens per sample) of each batch that passed, in the order of running; one count per stream.

    Raises BudgetError on all ranks if a batch ran out of memory and the budget cannot learn from it: it is no
    LearningBudget, ``shapes`` or FSDP is used, or the batch is one sample. The message names shape, bytes and the
    budget to set. Raises AlignmentError if another rank failed.

    >>> from dynagroup import PlannedDataLoader, TokenBudget
    >>> loader = PlannedDataLoader(torch.eye(6), [1, 2, 2, 4, 4, 4], TokenBudget(8), weigh="samples")
    >>> layer = torch.nn.Linear(6, 1)
    >>> preflight(layer, loader, lambda model, batch: model(batch).sum()), layer.weight.grad
    ([(4, 2), (2, 4)], None)
    """
    (lengths, read, collate), shown = loader.examples(), list[Shape]()
    learner, few = loader.budget.learner, loader.budget.ladder is not None
    try:
        ddp, final = find_ddp(model), learner is None or few
    except ConfigError:  # with FSDP no rank can run alone
        ddp, final = None, True
    engine = next(
        (m for m in model.modules() if "DeepSpeedEngine" in {c.__name__ for c in type(m).__mro__}),
        None,
    )

    def run() -> None:
        with local_gradients(ddp):
            loss = compute_loss(model, collate([read(sample)] * int(seen.num_samples[0]), shape))
            loss.backward() if engine is None else engine.backward(loss)

    waiting = _shapes_to_run(lengths, loader)
    with _unchanged(model, engine):
        while waiting:
            sample, shape, seen = waiting.pop(0)
            if not few and any(np.less_equal(shape, passed).all() for passed in shown):
                continue  # needs no more memory than a batch that passed
            failure = _failure(run, loader.world, _told(sample, seen, loader.budget))
            _drop_gradients(model, engine)
            if failure is None:
                shown.append(shape)
                continue
            if learner is not None:
                learner.record_oom(seen, num_retries=0)
                learner.apply(loader.world)
            if final or seen.num_samples[0] == 1:
                raise BudgetError(failure)
            waiting = _shapes_to_run(lengths, loader)
    return shown


def _shapes_to_run(
    lengths: Streams, loader: StepLoader[Any]
) -> list[tuple[int, Shape, BatchShape]]:
    """Returns (sample to repeat, shape, shape for the budget) of each batch to run, most expensive first."""
    budget = loader.budget.held(loader.budget.applied)
    names, ladder = padded_streams(budget, lengths), budget.ladder
    num: Any = len(lengths[names[0]])
    some = np.arange(0, num, max(num // SAMPLED, 1) if ladder is None else 1)
    some = np.union1d(some, longest_of(lengths, budget, some[:0], maxima_of(lengths)))
    units = np.stack([lengths[name][some].astype(np.int64) for name in names])
    tokens = units.sum(axis=0)
    if ladder is not None:
        shapes = ladder.shapes
    else:
        chosen = np.argsort(tokens, kind="stable")[
            (np.arange(1, LENGTHS + 1) * len(some) - 1) // LENGTHS
        ]
        sizes, upper = loader.sizes, loader.num_samples or num
        upper = min(upper, sizes.schedule) if sizes is not None and sizes.is_constant else upper
        asked = lambda count: BatchShape.of(  # noqa: E731
            count, {name: values[some[chosen]] for name, values in lengths.items()}
        )
        most = largest_within(lambda count: budget.fits(asked(count)), len(chosen), upper).clip(1)
        shapes = [*dict.fromkeys(zip(most.tolist(), *units[:, chosen].tolist(), strict=True))]
    totals, found = ladder is not None and ladder.layout == "packed", []
    for shape in shapes:
        if (held := np.all(units.T <= shape[1:], axis=1)).any():
            sample = int(np.where(held, tokens, -1).argmax())
            copies, wide = (
                (shape[1] // max(tokens[sample], 1), units[:, sample])
                if totals
                else (shape[0], shape[1:])
            )
            found.append(
                (
                    int(some[sample]),
                    shape,
                    BatchShape.of(max(copies, 1), dict(zip(names, wide, strict=True))),
                )
            )
    return sorted(found, key=lambda run: (-budget.cost(run[2])[0], -run[1][0]))


def _told(sample: int, seen: BatchShape, budget: Budget) -> str:
    [count], units = seen.num_samples.tolist(), [int(values[0]) for values in seen.longest.values()]
    layout = "" if budget.layout == "padded" else ', layout="packed"'
    smaller = f"add `& TokenBudget({int(BACKOFF * count * sum(units))}{layout})` to the budget"
    way_out = smaller if count > 1 else f"truncate or filter out samples as long as sample {sample}"
    what = f"a batch of {count} samples of {' + '.join(map(str, units))} tokens, which the budget allows"
    return f"{what}, ran out of memory; {way_out}"


def _failure(run: Callable[[], None], world: World, told: str) -> str | None:
    """Runs a batch on all ranks; if any runs out of memory, returns ``told`` and the allocator's message, equal on all."""
    error, said = None, b""
    try:
        run()
    except Exception as caught:
        error = caught
        if is_out_of_memory(caught):
            clear_frames(caught, set())
            error = BudgetError(
                f"{told}. Rank {world.rank} of {world.size}: {type(caught).__name__}: {caught}"
            )
            said = str(error).encode()[:SAID]
    if said:
        free_memory()
    try:
        ran_out, failed = world.all_max(
            [world.rank if said else -1, world.rank if error is not None else -1]
        )
        words = (
            world.all_max([*(said if ran_out == world.rank else b"").ljust(SAID)])
            if ran_out >= 0
            else b""
        )
    except AlignmentError as lost:
        raise error or lost from None
    if ran_out < 0 and (error is not None or failed >= 0):
        raise error or AlignmentError(f"rank {failed} failed before training; see its error")
    return bytes(words).decode(errors="ignore").strip() or None


# ZeRO keeps reduced gradients in its optimizer. Some modes add to them, or keep them for parameters that an update does
# not use. So they are dropped, and passes are counted from 0, as after a step.
def _drop_gradients(model: torch.nn.Module, engine: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if engine is not None:
        engine.optimizer.zero_grad()
        held = vars(engine.optimizer)
        held.get("averaged_gradients", {}).clear()
        if parts := held.get(
            "single_partition_of_fp32_groups"
        ):  # stages 1 and 2; stage 3 counts from zero_grad
            held["micro_step_id"] = -1
        grads = [part.grad for part in parts or held.get("fp32_partitioned_groups_flat", ())]
        for gradient in filter(torch.is_tensor, [*grads, held.get("grad_partitions_flat_buffer")]):
            gradient.zero_()


@contextmanager
def _unchanged(model: torch.nn.Module, engine: Any) -> Iterator[None]:
    """Context manager that starts without gradients and restores gradients, buffers and random states at its end."""
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    drawn = random.getstate(), np.random.get_state()
    held = {} if engine is None else vars(engine)
    counts = {
        name: value for name, value in held.items() if value is None or isinstance(value, int)
    }
    held |= {
        "_is_gradient_accumulation_boundary": True
    }  # each pass as an update's last one, which needs most memory
    _drop_gradients(model, engine)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        held |= counts
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
