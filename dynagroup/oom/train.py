"""Runs training steps that recover from out-of-memory errors with the same gradients. With ``DistributedDataParallel``
gradients are averaged once, at the end of an update, and not by DDP."""

import copy
import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
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
from dynagroup.oom.split import BatchSplitter, Splitter, longest_of, shape_of
from dynagroup.shapes import BatchShape
from dynagroup.update.loss_weight import Weigh, weigher
from dynagroup.update.step import Step
from dynagroup.validation import check_int

ComputeLoss: TypeAlias = Callable[[Any], torch.Tensor]

BUCKET_BYTES = (
    2**20
)  # smaller gradients are exchanged together; larger ones each alone, without a copy
_SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


@dataclass(frozen=True, slots=True)
class BackwardResult:
    """The detached loss of one whole batch, and the number of parts in which the batch was run."""

    loss: torch.Tensor
    num_parts: int


@dataclass(slots=True)
class Part:
    """Samples ``start`` to ``stop - 1`` of a batch, with everything that is needed to repeat their run exactly."""

    call: int
    batch: Any
    indices: Sequence[int]
    compute_loss: ComputeLoss
    loss_scale: float
    start: int
    stop: int
    share: float = 1.0
    whole: bool = True  # run as it came, with the samples of weight 0 that may fill it
    rng: Any = None
    loss: Any = None

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    def is_filled(self, splitter: Splitter[Any]) -> bool:
        return self.whole and self.num_samples < splitter.num_samples(self.batch)

    def samples(self, splitter: Splitter[Any]) -> Any:
        """Returns this part's samples as a batch, from which the user's function may take fields out."""
        batch = self.batch if self.whole else splitter.take(self.batch, self.start, self.stop)
        return copy.copy(batch) if self.whole and not isinstance(batch, torch.Tensor) else batch

    def shape(self, splitter: Splitter[Any]) -> BatchShape:
        return shape_of(samples := self.samples(splitter), splitter.num_samples(samples))

    def cut(
        self, splitter: Splitter[Any], weigh: Callable[[Any, int], float] | None
    ) -> "list[Part]":
        """Splits the part into two halves, whose weights add up to its weight; a filled one only loses its filling."""
        both = (
            [(self.start, self.stop)] if self.is_filled(splitter) else halves(self.start, self.stop)
        )
        parts: list[Part] = [
            replace(self, start=a, stop=b, whole=False, rng=None, loss=None) for a, b in both
        ]
        if weigh is not None:
            weights = [weigh(half.samples(splitter), half.num_samples) for half in parts]
            for half, weight in zip(parts, weights, strict=True):
                half.share = self.share * weight / sum(weights) if weight else 0.0
            parts = [
                half for half in parts if half.share
            ] or parts  # without any labels, gradients are 0 and not None
        parts[0].rng = self.rng
        return parts


@dataclass(slots=True)
class Update:
    """The update in progress: its finished and waiting parts, and the gradients that existed before it."""

    parameters: list[torch.nn.Parameter]
    before: list[torch.Tensor | None] = field(init=False)
    done: list[Part] = field(default_factory=list)
    waiting: list[Part] = field(default_factory=list)
    num_calls: int = 0
    failed_cost: float = math.inf
    verdict: tuple[int, int] | None = (
        None  # a sample that does not fit even alone: (dataset index if known, tokens)
    )

    def __post_init__(self) -> None:
        self.before = [parameter.grad for parameter in self.parameters]
        self.undo()

    def undo(self) -> None:
        """Drops all gradients of the update; the parts that computed them will run again."""
        for parameter in self.parameters:
            parameter.grad = None
        self.waiting, self.done = self.done + self.waiting, []

    def end(self, *, keep: bool) -> None:
        """Restores ``.grad`` from before the update; with ``keep``, adds the update's gradients to it in place."""
        for parameter, before in zip(self.parameters, self.before, strict=True):
            if not keep:
                parameter.grad = before
            elif before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


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
        self._model, self._ddp = model, find_ddp(model)
        if world is None:
            world = (
                SingleProcess() if self._ddp is None else DistributedWorld(self._ddp.process_group)
            )
        self._world = world
        self.weigh = None if weigh == "sum" else weigher(weigh)
        """The weight of a batch as a function, None for sums; may be set between updates."""
        self._splitter = splitter if splitter is not None else BatchSplitter()
        self._smallest = 2 * check_int("min_samples", min_samples)  # a part that may be split
        self._backward = backward if backward is not None else lambda loss: loss.backward()
        self._device = next(model.parameters()).device
        self._began = False  # True: the latest attempt began its backward pass, which may have added to gradients
        self._update: Update | None = None
        if learned is not None and not isinstance(learned, LearningBudget):
            raise ConfigError(
                f"`learned` must be a LearningBudget (`budget.learner`) or None, but is {learned!r}"
            )
        self.learned = learned if learned is not None else LearningBudget()
        """What out-of-memory errors have taught so far, with its report."""

    def step(self, compute_loss: ComputeLoss, step: Step[Any]) -> BackwardResult:
        """Runs a :class:`~dynagroup.Step` of a loader, with its loss scale. An idle step runs nothing."""
        how: Any = {
            name: getattr(step, name) for name in ("loss_scale", "ends_update", "indices", "idle")
        }
        return self(
            compute_loss, step.batch, num_samples=len(step.indices) if step.filled else None, **how
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
        self._update = update = self._update or Update(
            [p for p in self._model.parameters() if p.requires_grad]
        )
        update.num_calls += 1
        try:
            if not idle:
                stop = self._splitter.num_samples(batch) if num_samples is None else num_samples
                update.waiting.append(
                    Part(update.num_calls, batch, indices, compute_loss, loss_scale, 0, stop)
                )
                self._run_waiting(update)
        except BaseException:  # so that the next call begins a new update
            self._update = None
            update.end(keep=True)
            raise
        if ends_update or (update.verdict is not None and self._world.size == 1):
            self._update = None
            self._finish(update)
        parts = [part for part in update.done if part.call == update.num_calls]
        loss: Any = (
            sum(part.loss * part.share for part in parts)
            if parts
            else torch.zeros((), device=self._device)
        )
        return BackwardResult(loss, len(parts))

    # Gradients after a failure. A failed backward pass has added to some gradients and not to others, and no copy
    # exists. So all gradients of the update are dropped and all its parts run again, each with the random state of its
    # first run: the same sums in the same order give identical gradients. A failed forward pass has added nothing, so
    # only its own batch is split. Cost: the inputs of an update's batches stay in memory until the update ends, and a
    # failed backward pass repeats what the update has run so far.
    def _run_waiting(self, update: Update) -> None:
        """Runs the waiting parts, and splits those that fail. A single sample that fails becomes ``update.verdict``."""
        while update.waiting and update.verdict is None:
            part = update.waiting.pop(0)
            may_fit = part.rng is not None or self._may_fit(
                update, part
            )  # parts that ran are repeated unchanged
            if may_fit and self._attempt(update, part):
                update.done.append(part)
                continue
            if part.num_samples < self._smallest and not part.is_filled(self._splitter):
                index = int(
                    part.indices[part.start] if len(part.indices) > part.start else part.start
                )
                update.verdict = index, longest_of(part.samples(self._splitter))
            else:
                update.waiting[:0] = part.cut(self._splitter, self.weigh)
            if may_fit and self._began and update.verdict is None:
                update.undo()

    def _may_fit(self, update: Update, part: Part) -> bool:
        """Returns False if the part can be split, and learned limits or failures of this update say that it fails."""
        if (
            not (self.learned.has_learned or math.isfinite(update.failed_cost))
            or part.num_samples < self._smallest
        ):
            return True
        shape = part.shape(self._splitter)
        return (
            bool(self.learned.allows(shape)[0])
            and float(self.learned.cost(shape)[0]) < update.failed_cost
        )

    def _attempt(self, update: Update, part: Part) -> bool:
        """Returns whether the part fits in memory. A failure may leave only gradients behind (``_began``)."""
        # The random states that layers use: torch's on the CPU and on one device, Python's and numpy's.
        sources: Any = [
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        for source in (
            [torch] if self._device.type == "cpu" else [torch, getattr(torch, self._device.type)]
        ):
            sources.append((source.get_rng_state, source.set_rng_state))
        if part.rng is None:
            part.rng = [read() for read, _ in sources]
        for (_, restore), state in zip(sources, part.rng, strict=True):
            restore(state)
        self._began = False
        samples, shape = part.samples(self._splitter), partial(part.shape, self._splitter)
        part.loss, error = attempt(partial(self._run, part), samples, self.learned)
        if (
            error is not None
        ):  # recorded when the update ends, on all ranks alike, so that plans stay equal
            update.failed_cost = min(update.failed_cost, float(self.learned.cost(shape())[0]))
        return error is None

    def _run(self, part: Part, samples: Any) -> torch.Tensor:
        with local_gradients(self._ddp):
            loss = part.compute_loss(samples)
            if loss.ndim:
                raise ConfigError(
                    f"`compute_loss` must return a scalar, but returned shape {tuple(loss.shape)}"
                )
            self._began, scale = True, part.loss_scale * part.share
            loss = loss if scale else loss.nan_to_num(0.0, 0.0, 0.0)  # a mean over no labels is nan
            self._backward(loss * scale)
        return loss.detach()

    # Every rank exchanges its result, even after a failure, so no rank waits forever. Gradients are exchanged only when
    # all ranks have all of theirs, so nothing else can fail then. Cost: one small all-reduce, and one of gradients.
    def _finish(self, update: Update) -> None:
        """Ends an update: averages gradients over ranks; or all ranks raise, and restore the gradients from before."""
        held = zip(update.parameters, update.before, strict=True)
        present = [int(p.grad is not None or before is not None) for p, before in held]
        cost = -NO_COST if math.isinf(update.failed_cost) else -int(update.failed_cost * COST_UNIT)
        failed = self._world.rank if update.verdict is not None else -1
        rank, cost, *present = self._world.all_max([failed, cost, *present])
        if cost != -NO_COST:
            self.learned.record_failed_cost(-cost / COST_UNIT)
        update.end(keep=rank < 0)
        if rank >= 0:
            own = (
                update.verdict
                if update.verdict is not None and self._world.rank == rank
                else (-1, -1)
            )
            index, tokens = self._world.all_max(own)
            told = f"sample {index} ({tokens} tokens) does not fit on rank {rank} even alone"
            if self._smallest > 2:
                few = (
                    f"fewer than {self._smallest} samples, from sample {index} on ({tokens} tokens)"
                )
                told = f"{few}, do not fit on rank {rank}, and are not split; reduce `min_samples`"
            raise BudgetError(f"{told}; truncate or filter out such samples")
        if self._ddp is not None:
            used = [p for p, anywhere in zip(update.parameters, present, strict=True) if anywhere]
            group: Any = self._ddp.process_group
            average_gradients(used, group)
            # Works like DDP before a forward pass: copies the buffers of the group's first rank.
            for buffer in self._ddp.modules_buffers if self._ddp.broadcast_buffers else ():
                dist.broadcast(buffer.data, src=dist.get_process_group_ranks(group)[0], group=group)


def find_ddp(model: torch.nn.Module) -> DistributedDataParallel | None:
    """Returns the ``DistributedDataParallel`` in a model, or None. Raises ConfigError for FSDP, DeepSpeed and similar
    classes, with which one rank cannot repeat a step alone."""
    modules = list(model.modules())
    ddp = next((m for m in modules if isinstance(m, DistributedDataParallel)), None)
    for module in modules:
        if _SHARDED & {cls.__name__ for cls in type(module).__mro__}:
            told = f"`model` contains {type(module).__name__}, with which no rank can repeat a step alone"
            raise ConfigError(f"{told}; use DistributedDataParallel, or a plain backward pass")
        if ddp is not None and (
            isinstance(module, SyncBatchNorm) or getattr(module, "static_graph", False)
        ):
            told = f"`model` contains {type(module).__name__}, which exchanges data between ranks in each pass"
            raise ConfigError(f"{told}; use another normalisation, and static_graph=False")
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
    size, kinds = dist.get_world_size(group), dict[Any, list[torch.Tensor]]()
    with torch.no_grad():
        for number, parameter in enumerate(parameters):
            gradient = parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
            if gradient.is_sparse:
                raise ConfigError(
                    "sparse gradients cannot be averaged over ranks; use nn.Embedding(sparse=False)"
                )
            alone = gradient.nbytes >= BUCKET_BYTES
            kinds.setdefault(number if alone else (gradient.dtype, gradient.device), []).append(
                gradient
            )
        try:
            buckets = list(kinds.values())
            whole = [len(bucket) == 1 and bucket[0].is_contiguous() for bucket in buckets]
            packed = [
                b[0] if w else torch.cat([g.reshape(-1) for g in b])
                for w, b in zip(whole, buckets, strict=True)
            ]
            works: list[Any] = [
                dist.all_reduce(flat.div_(size), group=group, async_op=True) for flat in packed
            ]
            for work, flat, bucket in zip(works, packed, buckets, strict=True):
                work.wait()
                if flat is not bucket[0]:
                    for gradient, values in zip(
                        bucket, flat.split([g.numel() for g in bucket]), strict=True
                    ):
                        gradient.copy_(values.view_as(gradient))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            lost = "another rank stopped while gradients were exchanged; see that rank's error"
            raise AlignmentError(f"{lost}: {error}") from error
