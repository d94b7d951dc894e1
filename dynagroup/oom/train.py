"""Runs training steps that recover from out-of-memory errors with the same gradients. With ``DistributedDataParallel``
gradients are averaged once, at the end of an update, and not by DDP."""

import copy
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel

from dynagroup.budget.learning import COST_UNIT, NO_COST, LearningBudget
from dynagroup.device import is_out_of_memory
from dynagroup.distributed import DistributedWorld, SingleProcess, World
from dynagroup.errors import AlignmentError, BudgetError, ConfigError
from dynagroup.oom.retry import attempt, halves
from dynagroup.oom.take import BatchSplitter, Splitter, describe, longest_of, shape_of
from dynagroup.shapes import BatchShape
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.step import Step
from dynagroup.validation import check_int

ComputeLoss: TypeAlias = Callable[[Any], torch.Tensor]

# Smaller gradients are exchanged together; larger ones each alone, without a copy.
BUCKET_BYTES = 2**20
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """The detached loss of one whole batch, and the number of parts in which the batch was run."""

    loss: torch.Tensor
    num_parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of :class:`OomSafeBackward`: a whole batch, and how it is run."""

    batch: Any
    indices: Sequence[int]
    compute_loss: ComputeLoss
    loss_scale: float
    splitter: Splitter[Any]


@dataclass(slots=True, kw_only=True)
class Part:
    """Samples ``start`` to ``stop - 1`` of a call's batch, with everything that is needed to repeat their run exactly."""

    call: Call
    start: int
    stop: int
    share: float = 1.0
    """Of the batch's weight."""
    is_whole: bool = True
    """Whether it is run as it came, with the samples of weight 0 that may fill it."""
    random_states: list[Any] | None = None
    """Before the first attempt; None: it was not tried yet."""
    loss: Any = None

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def is_filled(self) -> bool:
        """Whether samples of weight 0 follow the part's own."""
        return self.is_whole and self.num_samples < self.call.splitter.num_samples(self.call.batch)

    def samples(self) -> Any:
        """Returns this part's samples as a batch, from which the user's function may take fields out."""
        batch = self.call.batch
        if not self.is_whole:
            return self.call.splitter.take(batch, self.start, self.stop)
        return batch if isinstance(batch, torch.Tensor) else copy.copy(batch)

    def shape(self) -> BatchShape:
        samples = self.samples()
        return shape_of(samples, self.call.splitter.num_samples(samples))

    def cut(self, weigh: Callable[[Any, int], float] | None) -> "list[Part]":
        """Splits the part into two halves, whose weights add up to its weight; a filled one only loses its filling."""
        ranges = halves(self.start, self.stop)
        if self.is_filled:
            ranges = [(self.start, self.stop)]
        parts = []
        for start, stop in ranges:
            parts.append(
                Part(call=self.call, start=start, stop=stop, share=self.share, is_whole=False)
            )
        if weigh is not None:
            weights = [weigh(part.samples(), part.num_samples) for part in parts]
            for part, weight in zip(parts, weights, strict=True):
                part.share = self.share * weight / sum(weights) if weight else 0.0
            # If no part has any label, all stay, because gradients are then 0 and not None.
            parts = [part for part in parts if part.share] or parts
        parts[0].random_states = self.random_states
        return parts

    def first_index(self) -> int:
        """Returns the dataset index of the part's first sample; if unknown, its place in the batch."""
        if len(self.call.indices) > self.start:
            return int(self.call.indices[self.start])
        return self.start


@dataclass(frozen=True)
class Verdict:
    """A sample that does not fit even alone."""

    index: int
    tokens: int


@dataclass(slots=True)
class Update:
    """The update in progress: its finished and waiting parts, and the gradients that existed before it."""

    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor | None] = field(init=False)
    done: list[Part] = field(default_factory=list)
    waiting: list[Part] = field(default_factory=list)
    failed_cost: float = math.inf
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        self.before = [parameter.grad for parameter in self.parameters]
        self.undo()

    def undo(self) -> None:
        """Drops all gradients of the update; the parts that computed them will run again."""
        for parameter in self.parameters:
            parameter.grad = None
        self.waiting = self.done + self.waiting
        self.done = []

    def end(self, *, keep: bool) -> None:
        """Restores ``.grad`` from before the update; with ``keep``, adds the update's gradients to it in place."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            gradient = parameter.grad
            if not keep or gradient is None:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before.add_(gradient)


class OomSafeBackward:
    """Runs ``loss.backward()`` in parts when memory runs out, with exact weights.

    Call the object once per batch, with ``ends_update=True`` on the last batch before ``optimizer.step()``. Each rank
    keeps gradients and batches until all parts of the update have run; then gradients are averaged over ranks. A rank
    that runs out of memory repeats only its own work. If a sample does not fit even alone, all ranks raise BudgetError.

    ``compute_loss`` must not exchange data, and must be a mean or sum (no batch normalisation, no contrastive loss).

    Args:
        model: the model, alone or in ``DistributedDataParallel``; FSDP and DeepSpeed raise ConfigError.
        weigh: the weight of a batch, as for loaders; or "sum" for a loss that is a sum, or divided by a fixed number.
        splitter: how to count and split a batch. None: a splitter that trims padding on the right only.
        min_samples: int: a part with fewer than twice this many samples is not split.
        world: ranks that train together. None: those of the model's ``DistributedDataParallel``. Without DDP, you average.
        learned: a :class:`LearningBudget` that learns from failures; it splits batches that would fail again.
        backward: runs the backward pass of a scaled loss, e.g. ``accelerator.backward``. None: ``Tensor.backward``.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> backward = OomSafeBackward(model, weigh="samples")
    >>> backward(lambda x: model(x).mean(), torch.ones(4, 2)).num_parts
    1
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        weigh: Weigh | Literal["sum"] = "tokens",
        splitter: Splitter[Any] | None = None,
        min_samples: int = 1,
        world: World | None = None,
        learned: LearningBudget | None = None,
        backward: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._model = model
        self._ddp = find_ddp(model)
        if world is not None:
            self._world = world
        elif self._ddp is not None:
            self._world = DistributedWorld(self._ddp.process_group)
        else:
            self._world = SingleProcess()
        self.weigh = None if weigh == "sum" else weigher(weigh)
        """The weight of a batch as a function, None for sums; may be set between updates."""
        self._splitter = splitter if splitter is not None else BatchSplitter()
        self._min_samples = check_int("min_samples", min_samples)
        self._backward = backward if backward is not None else torch.Tensor.backward
        self._device = next(model.parameters()).device
        self._backward_began = False  # in the latest attempt, so gradients may have changed
        self._update: Update | None = None
        if learned is not None and not isinstance(learned, LearningBudget):
            raise ConfigError(
                f"`learned` must be a LearningBudget (`budget.learner`) or None, but is {learned!r}"
            )
        self.learned = learned if learned is not None else LearningBudget()
        """What out-of-memory errors have taught so far, with its report."""

    def step(self, compute_loss: ComputeLoss, step: Step[Any]) -> BackwardResult:
        """Runs a :class:`~dynagroup.Step` of a loader, with its loss scale. An idle step runs nothing."""
        return self(
            compute_loss,
            step.batch,
            loss_scale=step.loss_scale,
            ends_update=step.ends_update,
            indices=step.indices,
            idle=step.idle,
            num_samples=len(step.indices) if step.filled else None,
        )

    def __call__(
        self,
        compute_loss: ComputeLoss,
        batch: Any,
        *,
        loss_scale: float = 1.0,
        ends_update: bool = True,
        indices: Sequence[int] = (),
        idle: bool = False,
        num_samples: int | None = None,
    ) -> BackwardResult:
        """Runs ``backward(compute_loss(batch) * loss_scale)`` for one batch, in parts if needed.

        Args:
            indices: dataset indices of the samples, to name them in messages.
            idle: True: the rank has no samples in this step, so nothing is run.
            num_samples: int: samples of weight 0 follow so many others. None: all samples count.

        Raises BudgetError on every rank, at the end of the update, if a sample does not fit even alone; AlignmentError if
        a rank has stopped. Other errors end the update and leave ``.grad`` as without this class."""
        update = self._update
        if update is None:
            update = Update([p for p in self._model.parameters() if p.requires_grad])
            self._update = update
        call = Call(
            batch=batch,
            indices=indices,
            compute_loss=compute_loss,
            loss_scale=loss_scale,
            splitter=self._splitter,
        )
        try:
            if not idle:
                stop = self._splitter.num_samples(batch) if num_samples is None else num_samples
                update.waiting.append(Part(call=call, start=0, stop=stop))
                self._run_waiting(update)
        except BaseException:  # so that the next call begins a new update
            self._update = None
            update.end(keep=True)
            raise
        if ends_update or (update.verdict is not None and self._world.size == 1):
            self._update = None
            self._finish(update)
        loss = torch.zeros((), device=self._device)
        num_parts = 0
        for part in update.done:
            if part.call is call:
                loss = loss + part.loss * part.share
                num_parts += 1
        return BackwardResult(loss, num_parts)

    # Gradients after a failure. A failed backward pass has added to some gradients and not to others, and no copy
    # exists. So all gradients of the update are dropped and all its parts run again, each with the random state of its
    # first run: the same sums in the same order give identical gradients. A failed forward pass has added nothing, so
    # only its own batch is split. Cost: the inputs of an update's batches stay in memory until the update ends, and a
    # failed backward pass repeats what the update has run so far.
    def _run_waiting(self, update: Update) -> None:
        """Runs the waiting parts, and splits those that fail. A single sample that fails becomes ``update.verdict``."""
        while update.waiting and update.verdict is None:
            part = update.waiting.pop(0)
            has_run = part.random_states is not None  # a part that has run is repeated unchanged
            is_tried = has_run or self._may_fit(update, part)
            if is_tried and self._attempt(update, part):
                update.done.append(part)
                continue
            if self._is_smallest(part) and not part.is_filled:
                update.verdict = Verdict(part.first_index(), longest_of(part.samples()))
            else:
                update.waiting[:0] = part.cut(self.weigh)
            if is_tried and self._backward_began and update.verdict is None:
                update.undo()

    def _is_smallest(self, part: Part) -> bool:
        return part.num_samples < 2 * self._min_samples

    def _may_fit(self, update: Update, part: Part) -> bool:
        """Returns False if the part can be split, and learned limits or failures of this update say that it fails."""
        if self._is_smallest(part):
            return True
        if not self.learned.has_learned and math.isinf(update.failed_cost):
            return True
        shape = part.shape()
        is_allowed = bool(self.learned.allows(shape)[0])
        return is_allowed and float(self.learned.cost(shape)[0]) < update.failed_cost

    def _attempt(self, update: Update, part: Part) -> bool:
        """Returns whether the part fits in memory. A failure may leave only gradients behind (``_backward_began``)."""
        if part.random_states is None:
            part.random_states = _random_states(self._device)
        else:
            _restore_random_states(self._device, part.random_states)
        self._backward_began = False
        samples = part.samples()
        part.loss, error = attempt(
            partial(self._run, part, samples),
            self.learned,
            description=partial(describe, samples),
        )
        if error is None:
            return True
        # Recorded when the update ends, on all ranks alike, so that plans stay equal.
        update.failed_cost = min(update.failed_cost, float(self.learned.cost(part.shape())[0]))
        return False

    def _run(self, part: Part, samples: Any) -> torch.Tensor:
        with local_gradients(self._ddp):
            loss = part.call.compute_loss(samples)
            if loss.ndim:
                raise ConfigError(
                    f"`compute_loss` must return a scalar, but returned shape {tuple(loss.shape)}"
                )
            scale = part.call.loss_scale * part.share
            if not scale:  # a mean over no labels is nan
                loss = loss.nan_to_num(0.0, 0.0, 0.0)
            self._backward_began = True
            self._backward(loss * scale)
        return loss.detach()

    # Every rank exchanges its result, even after a failure, so no rank waits forever. Gradients are exchanged only when
    # all ranks have all of theirs, so nothing else can fail then. Cost: one small all-reduce, and one of gradients.
    def _finish(self, update: Update) -> None:
        """Ends an update: averages gradients over ranks; or all ranks raise, and restore the gradients from before."""
        has_gradient = []
        for parameter, before in zip(update.parameters, update.before, strict=True):
            has_gradient.append(int(parameter.grad is not None or before is not None))
        negative_cost = -NO_COST
        if not math.isinf(update.failed_cost):
            negative_cost = -int(update.failed_cost * COST_UNIT)
        failed = -1 if update.verdict is None else self._world.rank
        failed_rank, negative_cost, *has_gradient = self._world.all_max(
            [failed, negative_cost, *has_gradient]
        )
        if negative_cost != -NO_COST:
            self.learned.record_failed_cost(-negative_cost / COST_UNIT)
        update.end(keep=failed_rank < 0)
        if failed_rank >= 0:
            self._raise_verdict(update.verdict, failed_rank)
        if self._ddp is None:
            return
        group: Any = self._ddp.process_group
        used = [p for p, is_used in zip(update.parameters, has_gradient, strict=True) if is_used]
        average_gradients(used, group)
        if self._ddp.broadcast_buffers:  # as DDP does before a forward pass
            first_rank = dist.get_process_group_ranks(group)[0]
            for buffer in self._ddp.modules_buffers:
                dist.broadcast(buffer.data, src=first_rank, group=group)

    def _raise_verdict(self, verdict: Verdict | None, failed_rank: int) -> None:
        """Raises the same BudgetError on all ranks; ``verdict`` is that of this rank."""
        numbers = [-1, -1]
        if verdict is not None and self._world.rank == failed_rank:
            numbers = [verdict.index, verdict.tokens]
        index, tokens = self._world.all_max(numbers)
        if self._min_samples > 1:
            raise BudgetError(
                f"fewer than {2 * self._min_samples} samples, from sample {index} on ({tokens} tokens), do not fit on "
                f"rank {failed_rank}, and are not split; reduce `min_samples`; truncate or filter out such samples"
            )
        raise BudgetError(
            f"sample {index} ({tokens} tokens) does not fit on rank {failed_rank} even alone; "
            "truncate or filter out such samples"
        )


# The random states that layers use: Python's and numpy's, torch's on the CPU and on one device.
def _random_states(device: torch.device) -> list[Any]:
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def _restore_random_states(device: torch.device, states: list[Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[3])


def class_names(module: torch.nn.Module) -> set[str]:
    """Returns the names of a module's class and of all its base classes."""
    return {cls.__name__ for cls in type(module).__mro__}


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Returns the ``DistributedDataParallel`` in a model, or None. Raises ConfigError for FSDP, DeepSpeed and similar
    classes, with which one rank cannot repeat a step alone."""
    modules = list(model.modules())
    ddp = next((m for m in modules if isinstance(m, DistributedDataParallel)), None)
    for module in modules:
        if _SHARDED & class_names(module):
            raise ConfigError(
                f"`model` contains {type(module).__name__}, with which no rank can repeat a step alone; "
                "use DistributedDataParallel, or a plain backward pass"
            )
        exchanges = isinstance(module, SyncBatchNorm) or getattr(module, "static_graph", False)
        if ddp is not None and exchanges:
            raise ConfigError(
                f"`model` contains {type(module).__name__}, which exchanges data between ranks in each pass; "
                "use another normalisation, and static_graph=False"
            )
    return ddp


def local_gradients(ddp: DistributedDataParallel | None) -> AbstractContextManager[None]:
    """Returns a context for forward and backward passes in which ranks exchange neither gradients nor buffers."""
    if ddp is None:
        return nullcontext()
    # By default the first forward pass broadcasts buffers, so a rank that repeats it would wait for the others forever.
    ddp.require_forward_param_sync = False
    return ddp.no_sync()


# DDP's own exchange cannot be cancelled: if a rank fails in it, the others wait forever. So this exchange begins when
# every rank has all its gradients. It does not overlap with the backward pass, but large gradients are not copied.
def average_gradients(
    parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None
) -> None:
    """Sets every ``.grad`` to its mean over ranks; missing ones count as zero. ``parameters``: equal on all ranks."""
    with torch.no_grad():
        buckets = _buckets_of(parameters)
        try:
            _average_buckets(buckets, group)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise AlignmentError(
                f"another rank stopped while gradients were exchanged; see that rank's error: {error}"
            ) from error


def _buckets_of(parameters: Sequence[torch.nn.Parameter]) -> list[list[torch.Tensor]]:
    """Returns the gradients by exchange: small ones of one dtype and device together, large ones each alone."""
    buckets: dict[Any, list[torch.Tensor]] = {}
    for number, parameter in enumerate(parameters):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        if gradient.is_sparse:
            raise ConfigError(
                "sparse gradients cannot be averaged over ranks; use nn.Embedding(sparse=False)"
            )
        key: Any = (gradient.dtype, gradient.device)
        if gradient.nbytes >= BUCKET_BYTES:
            key = number
        buckets.setdefault(key, []).append(gradient)
    return list(buckets.values())


def _average_buckets(
    buckets: Sequence[list[torch.Tensor]], group: dist.ProcessGroup | None
) -> None:
    num_ranks = dist.get_world_size(group)
    vectors = []
    works: list[Any] = []
    for bucket in buckets:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            vector = bucket[0]
        else:
            vector = torch.cat([gradient.reshape(-1) for gradient in bucket])
        vectors.append(vector)
    for vector in vectors:
        works.append(dist.all_reduce(vector.div_(num_ranks), group=group, async_op=True))
    for work, vector, bucket in zip(works, vectors, buckets, strict=True):
        work.wait()
        if vector is bucket[0]:
            continue
        sizes = [gradient.numel() for gradient in bucket]
        for gradient, values in zip(bucket, vector.split(sizes), strict=True):
            gradient.copy_(values.view_as(gradient))
