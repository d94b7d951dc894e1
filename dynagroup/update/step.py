"""What a training loop receives (one batch with its exact loss weight), and counts of what a loader has done."""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import numpy as np

from dynagroup.budget.base import Budget, is_packed, padded_streams
from dynagroup.distributed import SingleProcess, World
from dynagroup.shapes import TOKENS, BatchShape, primary, round_up
from dynagroup.update.loss_weight import Share, Weigh, loss_scale, weigher

B = TypeVar("B")
# stream -> field name in transformers
SHOWN_IN = {"source": "input_ids", "target": "labels", TOKENS: "input_ids"}


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
    if world is None:
        world = SingleProcess()
    scales: list[dict[str, float]] = [{} for _ in update]
    for name, weight in weigh.items():
        weight_of = weigher(weight)
        weights = []
        for step in update:
            weights.append(0.0 if step.idle else weight_of(step.batch, len(step.indices)))
        [total] = world.all_sum([sum(weights)])
        for scale_of, local in zip(scales, weights, strict=True):
            scale_of[name] = loss_scale(Share(local, total), world.size)
    return scales


def width_of(
    batch: object, num_samples: int, stream: str, streams: Iterable[str] = (TOKENS,)
) -> int | None:
    """Returns the padded tokens of a stream for each sample of a collated batch: the width of its rows; if samples have
    several rows (answers, choices), that of all of them. None: no field shows them."""
    shape = collated_shape(batch, stream, streams)
    has_rows = shape is not None and len(shape) == 2
    return collated_tokens(shape, num_samples, packed=False) if has_rows else None


def collated_tokens(shape: Sequence[int] | None, num_samples: int, *, packed: bool) -> int:
    """Returns the tokens of a collated shape, in total if it is packed, else for each sample; 0: it does not show them."""
    if shape is None:
        return 0
    if packed:
        return math.prod(shape)
    return -(-math.prod(shape) // num_samples) if len(shape) == 2 else 0


def total_of(batch: object, stream: str, streams: Iterable[str] = (TOKENS,)) -> int | None:
    """Returns the tokens of a stream in a packed batch; None: no field shows them."""
    shape = collated_shape(batch, stream, streams)
    if shape is None or (len(shape) == 2 and shape[0] != 1):
        return None
    return shape[-1]


def collated_shape(batch: Any, stream: str, streams: Iterable[str]) -> tuple[int, ...] | None:
    """Returns (rows, width), or (tokens,), of a stream in a collated batch. It is read from the field of that name, or of
    transformers' name for it (``input_ids`` for the primary one of ``streams``). None: there is no such field."""
    if not hasattr(batch, "keys"):
        return None
    fallback = SHOWN_IN[TOKENS] if stream == primary(streams) else stream
    for name in (stream, SHOWN_IN.get(stream, fallback)):
        try:
            shape = tuple(batch[name].shape)
        except (TypeError, KeyError, AttributeError):
            continue
        if len(shape) == 3 and name == "input_ids":  # a row for each choice
            return (shape[0] * shape[1], shape[2])
        if len(shape) in (1, 2):
            return shape
    return None


def has_rows_of_all(batch: Any, collated: Sequence[int], num_samples: int, num_tokens: int) -> bool:
    """Returns False if a padded batch, of this collated (rows, width), lacks tokens of its samples, or has more rows of some
    than of others. A row may hold several samples."""
    num_rows = collated[0]
    if num_rows >= num_samples:
        return num_rows % num_samples == 0
    mask: Any = batch["attention_mask"] if "attention_mask" in batch else None
    if np.shape(mask) != collated:
        return True  # no number shows it
    return int(np.count_nonzero(mask)) >= num_tokens


@dataclass(frozen=True, slots=True)
class Difference:
    """How a collated batch differs from its planned shape."""

    text: str
    fits: bool  # whether the batch fits the budget nevertheless


def unplanned(batch: object, shape: BatchShape, budget: Budget) -> Difference | None:
    """Compares a collated batch with its planned shape (K = 1). None: there is no visible difference."""
    packed = is_packed(budget, shape.longest)
    names = padded_streams(budget, shape.longest)
    num_samples = int(shape.num_samples[0])
    for stream in names:
        collated = collated_shape(batch, stream, names)
        if collated is None or not (packed or len(collated) == 2):
            continue
        total = int(shape.total[stream][0])
        num_rows = int(budget.as_run(shape).num_samples[0])
        has_all_rows = packed or has_rows_of_all(batch, collated, num_rows, total)
        num_tokens = math.prod(collated)
        least, most = _planned_tokens(collated, stream, shape, budget)
        if has_all_rows and least <= num_tokens <= most:
            continue
        size = " x ".join(map(str, collated))
        planned = str(total) if packed else f"{num_samples} x {shape.longest[stream][0]}"
        text = f"{num_samples} samples were collated to {size} {stream}, but planned as {planned}"
        fits = num_tokens <= most or _fits_with(num_tokens, stream, shape, budget)
        return Difference(text, fits)
    return None


def _planned_tokens(
    collated: Sequence[int], stream: str, shape: BatchShape, budget: Budget
) -> tuple[int, int]:
    """Returns the fewest and the most tokens of a stream that a batch of the planned shape has."""
    run = budget.as_run(shape)
    total = int(shape.total[stream][0])
    if is_packed(budget, shape.longest):
        rounded = round_up(shape.total[stream], budget.pad_to_multiple_of)
        return total, int(np.maximum(rounded, run.total[stream])[0])
    num_rows = int(run.num_samples[0])
    most = num_rows * int(run.longest[stream][0])
    if collated[0] != num_rows:
        return total, most
    return num_rows * int(shape.longest[stream][0]), most


def _fits_with(num_tokens: int, stream: str, shape: BatchShape, budget: Budget) -> bool:
    """Returns whether a batch of the planned shape, but with so many tokens of a stream, fits."""
    num_samples = int(shape.num_samples[0])
    longest = dict(shape.longest)
    if not is_packed(budget, longest):
        longest[stream] = np.array([-(-num_tokens // num_samples)])
    total = {**shape.total, stream: np.array([num_tokens])}
    return bool(budget.fits(BatchShape(shape.num_samples, longest, total))[0])


COUNTERS = ("batch_sizes", "memory_percent")  # fields of LoaderStats
MOST_SHARE = 10.0  # of the memory that is told apart


@dataclass(slots=True)
class LoaderStats:
    """Counts of one rank since its loader was made. Counts can be added and subtracted (``loader.stats - before``, with
    ``before = loader.stats.copy()``); ``loader.stats.merged(loader.world)`` adds those of all ranks.

    >>> (LoaderStats(steps=2, real_tokens=30, padded_tokens=40) + LoaderStats(steps=2, padded_tokens=10)).padding
    0.4
    >>> print(LoaderStats(steps=3, samples=8, updates=2, real_tokens=30, padded_tokens=40, batch_sizes=Counter({1: 1, 7: 1})))
    8 samples in 3 steps (0 idle) and 2 updates; batches of 1 to 7 samples, 25% padding; waited 0.0 s for batches
    """

    steps: int = 0  # steps taken, including idle ones
    idle_steps: int = 0  # steps in which this rank had no samples left, or none of the step's kind
    idle_tokens: int = 0  # tokens that the device computed in idle steps
    kind_steps: int = 0  # online: extra steps, because all batches of a step have one kind
    samples: int = 0
    updates: int = 0  # finished updates
    update_samples: int = 0  # samples of the finished updates, over all ranks
    # samples per batch -> batches, without idle ones
    batch_sizes: Counter[int] = field(default_factory=Counter)
    real_tokens: int = 0  # tokens of the samples
    padded_tokens: int = 0  # tokens that the device computed, with padding, without idle steps
    oversize: int = 0  # samples that did not fit even alone, and were each a batch of their own
    # predicted memory in percent of the limit, rounded up -> batches; empty if no budget predicts memory
    memory_percent: Counter[int] = field(default_factory=Counter)
    wait_s: float = 0.0  # seconds that the main process waited for batches

    def __str__(self) -> str:
        sizes = self.batch_sizes or [0]
        idle = f"{self.idle_steps:,} idle"
        if self.idle_tokens:
            idle = f"{idle}, of {self.idle_tokens:,} tokens"
        text = (
            f"{self.samples:,} samples in {self.steps:,} steps ({idle}) and {self.updates:,} updates; "
            f"batches of {min(sizes):,} to {max(sizes):,} samples, {self.padding:.0%} padding; "
            f"waited {self.wait_s:.1f} s for batches"
        )
        if self.memory_percent:
            text = f"{text}; the largest needs {self.predicted_memory:.0%} of the limit"
        if self.oversize:
            text = f"{text}; {self.oversize:,} too large even alone"
        return text

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding, from 0 to 1."""
        return 1.0 - self.real_tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def predicted_memory(self) -> float:
        """Predicted memory of the largest batch as a share of the limit, up to the next percent; 0: not predicted."""
        return max(self.memory_percent, default=0) / 100

    def figures(self, seconds: float) -> dict[str, float]:
        """Returns what a log shows of updates that took so many seconds: samples an update, padding, tokens a second,
        and the predicted memory, if a budget predicts it."""
        figures = {
            "samples_per_update": self.update_samples / max(self.updates, 1),
            "padding": round(self.padding, 4),
            "tokens_per_s": round(self.real_tokens / max(seconds, 1e-9), 1),
        }
        if self.memory_percent:
            figures["predicted_memory"] = self.predicted_memory
        return figures

    def count_memory(self, share: float | None) -> None:
        """Counts the predicted memory of a batch, a share of the limit; None: not predicted."""
        if share is not None:
            self.memory_percent[math.ceil(100 * min(share, MOST_SHARE))] += 1

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
        return self._combined(operator.add, other)

    def __sub__(self, before: "LoaderStats") -> "LoaderStats":
        return self._combined(operator.sub, before)

    def _combined(self, combine: Callable[[Any, Any], Any], other: "LoaderStats") -> "LoaderStats":
        combined = LoaderStats()
        for one in fields(self):
            counts = combine(getattr(self, one.name), getattr(other, one.name))
            setattr(combined, one.name, counts)
        return combined

    def merged(self, world: World) -> "LoaderStats":
        """Returns these counts, added over all ranks; all ranks must call it."""
        names = [one.name for one in fields(self) if one.name not in COUNTERS]
        counts = [getattr(self, name) for name in names]
        counters = [getattr(self, name) for name in COUNTERS]
        largest = world.all_max([max(counter, default=0) for counter in counters])
        for counter, most in zip(counters, largest, strict=True):
            counts += [counter[key] for key in range(most + 1)]
        sums = iter(world.all_sum(counts))
        merged = LoaderStats()
        for name in names:
            total = next(sums)
            setattr(merged, name, total if name == "wait_s" else int(total))
        for name, most in zip(COUNTERS, largest, strict=True):
            totals = {key: int(next(sums)) for key in range(most + 1)}
            setattr(merged, name, +Counter(totals))  # without zeros
        return merged
