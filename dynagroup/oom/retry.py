"""Runs a batch that failed again in halves, after the failed attempt has released its memory."""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import is_out_of_memory
from dynagroup.errors import BudgetError
from dynagroup.oom.split import B, BatchSplitter, Splitter, describe, shape_of
from dynagroup.shapes import BatchShape
from dynagroup.validation import check_int

T = TypeVar("T")

_log = logging.getLogger(__name__)
_BACKENDS = ("cuda", "xpu", "mps", "npu")


def attempt(
    run: Callable[[Any], T], part: Any, learned: LearningBudget
) -> tuple[T | None, str | None]:
    """Returns (``run(part)``, None), or (None, message) if it ran out of memory, with none of its tensors alive. Other
    errors are raised. ``learned`` records wasted time, but not the cost that failed.

    A failed attempt's tensors are kept alive by its frames, these by the traceback, and that by the handled exception.
    So frames are cleared, and the ``except`` block is left, before memory is collected."""
    started = time.perf_counter()
    try:
        return run(part), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - started
        clear_frames(error, set())
    free_memory()
    _log.warning("out of memory with %s; running it in parts. %s", describe(part), message)
    learned.record_waste(wasted_s=seconds)
    return None, message


def clear_frames(error: BaseException | None, seen: set[int]) -> None:
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        clear_frames(error.__cause__, seen)
        clear_frames(error.__context__, seen)


def free_memory() -> None:
    """Collects garbage, then releases the unused blocks of the caching allocators of all device types in use."""
    gc.collect()
    for backend in (getattr(torch, name, None) for name in _BACKENDS):
        if (
            backend is not None
            and backend.is_available()
            and getattr(backend, "is_initialized", lambda: True)()
        ):
            backend.empty_cache()


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
    splitter = split if split is not None else BatchSplitter()
    return run_parts(
        fn, batch, splitter, learned or LearningBudget(), min_samples=min_samples, indices=indices
    )


def run_parts(
    fn: Callable[[Any], T],
    batch: Any,
    splitter: Splitter[Any],
    learned: LearningBudget,
    *,
    min_samples: int = 1,
    indices: Sequence[int] = (),
    shape: Callable[[Any, int], BatchShape] = shape_of,
) -> list[Any]:
    """Works like :func:`run_with_oom_retry`; ``shape(part, number of samples)`` is the shape that decides its memory."""
    num_samples, smallest = splitter.num_samples(batch), 2 * check_int("min_samples", min_samples)
    done, waiting = [], [(0, num_samples)]
    while waiting:
        start, stop = waiting.pop(0)
        part = batch if stop - start == num_samples else splitter.take(batch, start, stop)
        size, is_smallest = partial(shape, part, stop - start), stop - start < smallest
        if is_smallest or not learned.has_learned or learned.allows(size())[0]:
            value, error = attempt(fn, part, learned)
            if error is None:
                done.append(value)
                continue
            learned.record_failed_cost(float(learned.cost(size())[0]))
            if is_smallest:
                names = ", ".join(
                    str(int(i))
                    for i in (indices if len(indices) else range(num_samples))[start:stop]
                )
                alone = stop - start == 1
                who = (
                    f"sample {names} does not fit even alone"
                    if alone
                    else f"samples {names} do not fit together"
                )
                way_out = f"truncate or filter out such samples; the allocator's message: {error}"
                raise BudgetError(f"{who} ({describe(part)}); {way_out}")
        waiting[:0] = halves(start, stop)
    return done
