"""Runs a batch that failed again in halves, after the failed attempt has released its memory."""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import is_out_of_memory
from dynagroup.errors import BudgetError
from dynagroup.oom.take import B, BatchSplitter, Splitter, describe, shape_of
from dynagroup.shapes import BatchShape
from dynagroup.validation import check_int

T = TypeVar("T")

_log = logging.getLogger(__name__)


def attempt(
    run: Callable[[], T], learned: LearningBudget, *, description: Callable[[], str]
) -> tuple[T | None, str | None]:
    """Returns (``run()``, None), or (None, message) if it ran out of memory, with none of its tensors alive. Other
    errors are raised. ``learned`` records wasted time, but not the cost that failed.

    A failed attempt's tensors are kept alive by its frames, these by the traceback, and that by the handled exception.
    So frames are cleared, and the ``except`` block is left, before memory is collected."""
    started = time.perf_counter()
    try:
        return run(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - started
        clear_frames(error, set())
    free_memory()
    _log.warning("out of memory with %s; running it in parts. %s", description(), message)
    learned.record_waste(wasted_s=seconds)
    return None, message


def clear_frames(error: BaseException | None, seen: set[int]) -> None:
    """Clears the frames of an error and of all errors behind it. ``seen``: ids of errors that are done."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)
    clear_frames(error.__cause__, seen)
    clear_frames(error.__context__, seen)


def free_memory() -> None:
    """Collects garbage, then releases the unused blocks of the accelerator's caching allocator."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()


def halves(start: int, stop: int) -> list[tuple[int, int]]:
    """Splits a range of samples in two; the first half may have one sample more."""
    middle = start + (stop - start + 1) // 2
    return [(start, middle), (middle, stop)]


def run_with_oom_retry(
    fn: Callable[[B], T],
    batch: B,
    *,
    split: Splitter[B] | None = None,
    min_samples: int = 1,
    learned: LearningBudget | None = None,
    indices: Sequence[int] = (),
) -> list[T]:
    """Returns the results of ``fn`` on the batch's parts, in input order; one part if the whole batch fits in memory.

    ``fn`` must leave nothing behind when it fails. A forward pass or ``generate`` leaves nothing; a backward pass may
    add to gradients, so use :class:`~dynagroup.oom.OomSafeBackward` for it. Only a part that failed is run again, in
    halves. A part that is no smaller than a failed one is split before it runs.

    Args:
        split: how to count and split a batch. None: :class:`~dynagroup.oom.BatchSplitter`.
        min_samples: int: a part with fewer than twice this many samples is not split.
        learned: a :class:`LearningBudget` that learns from failures; it splits parts that would fail again.
        indices: dataset indices of the samples, to name them in messages.

    Raises BudgetError if a part that cannot be split further failed; the message names its samples and their shapes.

    >>> def double(batch):
    ...     if len(batch) > 2:
    ...         raise MemoryError("three do not fit")
    ...     return [2 * x for x in batch]
    >>> run_with_oom_retry(double, [1, 2, 3, 4, 5])
    [[2, 4], [6], [8, 10]]
    """
    retry = Retry(
        splitter=split if split is not None else BatchSplitter(),
        learned=learned if learned is not None else LearningBudget(),
        min_samples=min_samples,
    )
    return retry.run(fn, batch, indices)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How a batch that runs out of memory is run in parts."""

    splitter: Splitter[Any]
    learned: LearningBudget = field(default_factory=LearningBudget)
    min_samples: int = 1
    shape: Callable[[Any, int], BatchShape] = shape_of
    """``(part, number of samples)`` -> the shape that decides the part's memory."""
    describe: Callable[[Any], str] = describe
    """A part as text for messages."""

    def __post_init__(self) -> None:
        check_int("min_samples", self.min_samples)

    def run(self, fn: Callable[[Any], T], batch: Any, indices: Sequence[int] = ()) -> list[T]:
        """Returns the results of ``fn`` on the batch's parts, like :func:`run_with_oom_retry`."""
        num_samples = self.splitter.num_samples(batch)
        if len(indices) == 0:
            indices = range(num_samples)
        learned = self.learned
        waiting = [(0, num_samples)]
        results: list[Any] = []
        while waiting:
            start, stop = waiting.pop(0)
            part = batch
            if stop - start < num_samples:
                part = self.splitter.take(batch, start, stop)
            shape = partial(self.shape, part, stop - start)
            is_smallest = stop - start < 2 * self.min_samples
            if not is_smallest and learned.has_learned and not learned.allows(shape())[0]:
                waiting[:0] = halves(start, stop)
                continue
            value, error = attempt(
                partial(fn, part), learned, description=partial(self.describe, part)
            )
            if error is None:
                results.append(value)
                continue
            learned.record_failed_cost(float(learned.cost(shape())[0]))
            if is_smallest:
                raise self._does_not_fit(part, indices[start:stop], error)
            waiting[:0] = halves(start, stop)
        return results

    def _does_not_fit(self, part: Any, indices: Sequence[int], error: str) -> BudgetError:
        names = ", ".join(str(int(index)) for index in indices)
        subject = f"samples {names} do not fit together"
        if len(indices) == 1:
            subject = f"sample {names} does not fit even alone"
        return BudgetError(
            f"{subject} ({self.describe(part)}); truncate or filter out such samples; "
            f"the allocator's message: {error}"
        )
