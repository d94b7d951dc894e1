"""Is a Trainer's loss a mean over its batch, or a sum divided by the items of the whole update? The loss itself is asked."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Any

from dynagroup.device import is_out_of_memory
from dynagroup.distributed import World
from dynagroup.errors import ConfigError
from dynagroup.oom.split import Splitter

__all__ = ["is_a_mean"]

NOTED = ("_metrics", "_stored_metrics")
"""Where TRL's losses note figures of each batch: two more forward passes must not count there."""


# What: the loss for one item, and for two, on the same batch without gradients, dropout or other randomness.
# Why right: a sum divided by the number of items halves, a mean stays; auxiliary terms are small beside a sum over one item.
#   Heads that take ``**kwargs`` and drop the number (transformers#47688, open), and ``compute_loss`` of a subclass that
#   returns a mean, look alike from outside: the Trainer takes both for sums, and they would count once a batch.
# Cost: two forward passes, once a run. Collective: all ranks take the same answer, or raise alike.
def is_a_mean(trainer: Any, model: Any, batch: Any, world: World, splitter: Splitter[Any] | None = None) -> bool | None:
    """Whether the loss stays a mean over its batch although it is told the number of items; None if this batch cannot tell.

    Args:
        splitter: halves a batch that runs out of memory here; None: running out of memory is an error.

    Raises:
        ConfigError: the loss cannot be asked, or neither halves nor stays. Names ``loss_is_scaled_for_ga``.
    """
    error: Exception | None = None
    halves = stays = unclear = False
    try:
        one, two = _losses(trainer, model, batch, splitter)
        if math.isfinite(one) and math.isfinite(two) and one and two:
            halves, stays = one / two > 1.5, abs(one / two - 1.0) < 0.1
            unclear = not halves and not stays
    except Exception as caught:  # noqa: BLE001 - the other ranks must hear of it before it is raised
        error = caught
    failed, unclear, halves, stays = (bool(v) for v in world.all_max([error is not None, unclear, halves, stays]))
    if error is not None and is_out_of_memory(error):
        raise error
    if failed or (unclear and not halves):
        raise ConfigError(
            f"whether the loss of {type(trainer).__name__} is a mean over its batch cannot be found out by computing it for "
            f"one item and for two ({error or 'it neither halves nor stays'}); say it: set the class attribute "
            "`loss_is_scaled_for_ga` to False (a mean over its batch) or True (divided by num_items_in_batch)"
        ) from error
    return None if not halves and not stays else not halves


def _losses(trainer: Any, model: Any, batch: Any, splitter: Splitter[Any] | None) -> tuple[float, float]:
    try:
        inputs = trainer._prepare_inputs(batch)
        with _nothing_left_behind(trainer, model):
            return _loss(trainer, model, inputs, 1), _loss(trainer, model, inputs, 2)
    except Exception as error:
        size = splitter.num_samples(batch) if splitter is not None else 1
        if splitter is None or size < 2 or not is_out_of_memory(error):
            raise
    return _losses(trainer, model, splitter.take(batch, 0, size // 2), splitter)


def _loss(trainer: Any, model: Any, inputs: Any, count: int) -> float:
    import torch

    # Both losses draw the same random numbers, and training draws those it would have drawn.
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), trainer.compute_loss_context_manager():
        items = torch.tensor(count, device=trainer.args.device)
        return float(trainer.compute_loss(model, {**inputs}, num_items_in_batch=items))


@contextlib.contextmanager
def _nothing_left_behind(trainer: Any, model: Any) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    noted = {name: copy.deepcopy(vars(trainer)[name]) for name in NOTED if name in vars(trainer)}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        vars(trainer).update(noted)
