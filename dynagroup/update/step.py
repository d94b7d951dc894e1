"""What a training loop receives (one batch with its exact loss weight), and counts of what a loader has done."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np

from dynagroup.budget.base import Budget, is_packed, padded_streams
from dynagroup.distributed import SingleProcess, World
from dynagroup.shapes import TOKENS, BatchShape, primary, round_up
from dynagroup.update.loss_weight import Share, Weigh, loss_scale, weigher

B = TypeVar("B")
SHOWN_IN = {
    "source": "input_ids",
    "target": "labels",
    TOKENS: "input_ids",
}  # stream -> field name in transformers


@dataclass(frozen=True, slots=True)
class Step(Generic[B]):
    """One batch of this rank; every other rank has a batch in the same step.

    Args:
        batch: what the user's ``collate_fn`` returned, unchanged.
        indices: dataset indices of the samples in ``batch`` (for iterable datasets, their numbers in order of arrival).
        samples: number of samples in this batch, and in the whole update on all ranks.
        weight: loss weight of this batch (by default its label tokens), and of the whole update on all ranks.
        loss_scale: float, factor for the batch's *mean* loss, see :func:`dynagroup.update.loss_weight.loss_scale`.
        ends_update: True: run the optimizer after this batch; False: keep gradients local (``no_sync``).
        idle: True: this rank had no samples left, and runs the batch with weight 0 so that collectives match.
        kind: with ``kinds``, the label of all samples in ``batch``; else None.
        filled: True: with ``shapes``, samples of weight 0 may follow those of ``indices`` in ``batch``.

    >>> from dynagroup import PlannedDataLoader, TokenBudget
    >>> loader = PlannedDataLoader("abcd", [3, 9, 2, 8], TokenBudget(18), shuffle=False, weigh="samples", collate_fn=list)
    >>> step = next(iter(loader))
    >>> step.batch, list(step.indices), step.loss_scale, step.ends_update
    (['b', 'd'], [1, 3], 1.0, True)
    """

    batch: B
    indices: Sequence[int]
    samples: Share
    weight: Share
    loss_scale: float
    ends_update: bool
    idle: bool = False
    kind: Any = None
    filled: bool = False

    def map(self, fn: Callable[[B], Any]) -> "Step[Any]":
        """Returns this step with ``fn`` applied to its batch, e.g. to move the batch to a device."""
        return replace(self, batch=fn(self.batch))


def loss_scales(
    update: Sequence[Step[Any]], weigh: Mapping[str, Weigh], world: World | None = None
) -> list[dict[str, float]]:
    """Returns factors for several mean losses, each with a weight of its own, for each step of an update. Call it on all
    ranks, once an update: ``for update in loader.updates()``.

    Args:
        update: all steps of one update on this rank.
        weigh: dict from the name of a loss to the weight of a batch: "tokens", "labels", "samples" or a function.
        world: ranks that share the data, ``loader.world``; None: this process alone.

    >>> batches = [{"labels": np.array([[-100, 1, 2]])}, {"labels": np.array([[-100, 3, -100]])}]
    >>> update = [Step(batch, [0], Share(1, 2), Share(1, 2), 0.5, True) for batch in batches]
    >>> loss_scales(update, {"intent": "samples", "slots": "labels"})[0]["intent"]
    0.5
    """
    world = SingleProcess() if world is None else world
    scales: list[dict[str, float]] = [{} for _ in update]
    for name, weight in weigh.items():
        weight_of = weigher(weight)
        weights = [0.0 if s.idle else weight_of(s.batch, len(s.indices)) for s in update]
        [total] = world.all_sum([sum(weights)])
        for scale, own in zip(scales, weights, strict=True):
            scale[name] = loss_scale(Share(own, total), world.size)
    return scales


def width_of(
    batch: Any, num_samples: int, stream: str, streams: Iterable[str] = (TOKENS,)
) -> int | None:
    """Returns the padded length of a stream in a collated batch. It is read from the field of that name, or of
    transformers' name for it (``input_ids`` for the primary one of ``streams``). None: there is no such field."""
    shapes = (
        shape
        for shape in _shapes_shown(batch, stream, streams)
        if len(shape) == 2 and shape[0] == num_samples
    )
    return next((int(shape[1]) for shape in shapes), None)


def total_of(batch: Any, stream: str, streams: Iterable[str] = (TOKENS,)) -> int | None:
    """Returns the tokens of a stream in a packed batch; None: no field shows them."""
    shapes = _shapes_shown(batch, stream, streams)
    return next(
        (
            int(shape[-1])
            for shape in shapes
            if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
        ),
        None,
    )


def _shapes_shown(batch: Any, stream: str, streams: Iterable[str]) -> Iterator[tuple[int, ...]]:
    if not (isinstance(batch, Mapping) or hasattr(batch, "keys")):
        return
    usual = SHOWN_IN.get(stream, SHOWN_IN[TOKENS] if stream == primary(streams) else stream)
    for field_name in dict.fromkeys((stream, usual)):
        with suppress(TypeError, KeyError, AttributeError):
            yield tuple(batch[field_name].shape)


def shown(batch: Any, num_samples: int, streams: Sequence[str], *, packed: bool) -> dict[str, int]:
    """Returns the tokens of each padded stream that a collated batch has: per row, or in total if it is packed."""
    found = (
        total_of(batch, n, streams) if packed else width_of(batch, num_samples, n, streams)
        for n in streams
    )
    return {name: tokens for name, tokens in zip(streams, found, strict=True) if tokens is not None}


def unplanned(batch: Any, shape: BatchShape, budget: Budget) -> str | None:
    """Returns text that tells how a collated batch differs from its planned shape (K = 1); None: no visible difference."""
    packed, multiple = is_packed(budget, shape.longest), budget.pad_to_multiple_of
    form = (
        "tokens long, but was planned with"
        if packed
        else "tokens wide, but the longest of them was planned with"
    )
    run, names, count = (
        budget.as_run(shape),
        padded_streams(budget, shape.longest),
        int(shape.num_samples[0]),
    )
    if (
        packed
        and count > 1
        and (width := width_of(batch, count, primary(shape.longest), names)) is not None
    ):
        return f"{count} samples were padded to {width} tokens, but planned as packed: use a packing collator, or layout='padded'"
    for stream, tokens in shown(batch, int(run.num_samples[0]), names, packed=packed).items():
        least = shape.total[stream] if packed else shape.longest[stream]
        most = (
            np.maximum(round_up(least, multiple), run.total[stream])
            if packed
            else run.longest[stream]
        )
        if not least[0] <= tokens <= most[0]:
            return f"{count} samples were collated to {tokens} {'' if stream == TOKENS else f'{stream} '}{form} {least[0]}"
    return None


@dataclass(slots=True)
class LoaderStats:
    """Counts of one rank since its loader was made. Counts can be added and subtracted (``loader.stats - before``, with
    ``before = loader.stats.copy()``); ``loader.stats.merged(loader.world)`` adds those of all ranks.

    >>> (LoaderStats(steps=2, real_tokens=30, padded_tokens=40) + LoaderStats(steps=2, padded_tokens=10)).padding
    0.4
    >>> print(LoaderStats(steps=3, samples=8, updates=2, real_tokens=30, padded_tokens=40, batch_sizes=Counter({1: 1, 7: 1})))
    8 samples in 3 steps (0 idle) and 2 updates; batches of 1 to 7 samples, 25% padding; waited 0.0 s for workers
    """

    steps: int = 0  # steps taken, including idle ones
    idle_steps: int = 0  # steps in which this rank had no samples left, or none of the step's kind
    idle_tokens: int = 0  # tokens that the device computed in idle steps
    kind_steps: int = 0  # online: extra steps, because all batches of a step have one kind
    samples: int = 0
    updates: int = 0  # finished updates
    update_samples: int = 0  # samples of the finished updates, over all ranks
    batch_sizes: Counter[int] = field(
        default_factory=Counter
    )  # samples per batch -> batches, without idle ones
    real_tokens: int = 0  # tokens of the samples
    padded_tokens: int = 0  # tokens that the device computed, with padding, without idle steps
    oversize: int = 0  # samples that did not fit even alone, and were each a batch of their own
    wait_s: float = 0.0  # seconds that the main process waited for workers

    def __str__(self) -> str:
        sizes, rare = (
            self.batch_sizes or [0],
            f"; {self.oversize:,} too large even alone" if self.oversize else "",
        )
        idle = f"{self.idle_steps:,} idle" + (
            f", of {self.idle_tokens:,} tokens" if self.idle_tokens else ""
        )
        done = f"{self.samples:,} samples in {self.steps:,} steps ({idle}) and {self.updates:,} updates"
        sized = f"batches of {min(sizes):,} to {max(sizes):,} samples, {self.padding:.0%} padding"
        return f"{done}; {sized}; waited {self.wait_s:.1f} s for workers{rare}"

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding, from 0 to 1."""
        return 1.0 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    def count_step(
        self, samples: int = 0, real_tokens: int = 0, padded_tokens: int = 0, *, idle: bool = False
    ) -> None:
        self.steps += 1
        if idle:
            self.idle_steps += 1
            self.idle_tokens += padded_tokens
            return
        self.samples += samples
        self.batch_sizes[samples] += 1
        self.real_tokens += real_tokens
        self.padded_tokens += padded_tokens

    def count_update(self, samples: int) -> None:
        """Counts a finished update; ``samples``: its samples over all ranks."""
        self.updates += 1
        self.update_samples += samples

    def copy(self) -> "LoaderStats":
        return self + LoaderStats()

    def __add__(self, other: "LoaderStats") -> "LoaderStats":
        return LoaderStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def __sub__(self, before: "LoaderStats") -> "LoaderStats":
        return LoaderStats(
            **{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        )

    def merged(self, world: World) -> "LoaderStats":
        """Returns these counts, added over all ranks; all ranks must call it."""
        names = [f.name for f in fields(self) if f.name != "batch_sizes"]
        [largest] = world.all_max([max(self.batch_sizes, default=0)])
        own = [
            *(getattr(self, name) for name in names),
            *(self.batch_sizes[size] for size in range(largest + 1)),
        ]
        found = world.all_sum(own)
        counts, sizes = found[: len(names)], found[len(names) :]
        summed: Any = {
            n: count if n.endswith("_s") else int(count)
            for n, count in zip(names, counts, strict=True)
        }
        return LoaderStats(
            **summed, batch_sizes=Counter({size: int(n) for size, n in enumerate(sizes) if n})
        )
