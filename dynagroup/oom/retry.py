"""Run again in halves: only the part that failed, and only after the failed attempt has let go of its memory."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import is_out_of_memory
from dynagroup.errors import BudgetError
from dynagroup.oom.fields import describe, shape_of
from dynagroup.oom.split import BatchSplitter, Splitter
from dynagroup.shapes import BatchShape
from dynagroup.validation import check_int

__all__ = ["Outcome", "attempt", "free_memory", "give_up", "halves", "run_ranges", "run_with_oom_retry"]

B = TypeVar("B")
T = TypeVar("T")

_log = logging.getLogger(__name__)
_BACKENDS = ("cuda", "xpu", "mps", "npu")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What one attempt came to: a value, or the text of the out-of-memory error that ended it."""

    value: T | None
    error: str | None = None


def attempt(run: Callable[[], T], retry_on: Callable[[BaseException], bool] = is_out_of_memory) -> Outcome[T]:
    """Run it. After an out-of-memory error nothing of the attempt is left alive when this returns.

    Frames hold a failed attempt's tensors, the traceback holds the frames, and the exception being handled holds the
    traceback: so the frames are cleared, the ``except`` block is left, and only then is memory collected.
    Any other error passes through.
    """
    try:
        return Outcome(run())
    except Exception as error:
        if not retry_on(error):
            raise
        message = f"{type(error).__name__}: {error}"
        _clear_frames(error)
    free_memory()
    return Outcome(None, message)


def _clear_frames(error: BaseException | None) -> None:
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        waiting += [link.__cause__, link.__context__]


def free_memory() -> None:
    """Collect garbage, then hand the caching allocators' unused blocks back, on every device type in use."""
    import torch

    gc.collect()
    for name in _BACKENDS:
        backend = getattr(torch, name, None)
        if backend is None or not backend.is_available():
            continue
        if getattr(backend, "is_initialized", lambda: True)():
            backend.empty_cache()


def halves(start: int, stop: int) -> list[tuple[int, int]]:
    """A range of samples as two, the first the larger by at most one.

    >>> halves(0, 5)
    [(0, 3), (3, 5)]
    """
    middle = start + (stop - start + 1) // 2
    return [(start, middle), (middle, stop)]


def run_with_oom_retry(
    fn: Callable[[B], T],
    batch: B,
    *,
    split: Splitter[B] | None = None,
    min_samples: int = 1,
    retry_on: Callable[[BaseException], bool] = is_out_of_memory,
    learned: LearningBudget | None = None,
    indices: Sequence[int] = (),
) -> list[T]:
    """``fn(batch)``, in parts where the whole does not fit; the parts' results in input order.

    ``fn`` must leave nothing behind when it fails: a forward pass or ``generate`` qualifies, a backward pass does not
    (it may have added to ``.grad`` before it failed; use :class:`~dynagroup.oom.OomSafeBackward`). Only a part that
    failed is run again, in halves; what succeeded is kept. A part that still waits and is no smaller than what has failed
    is cut before it is run. ``fn`` sees parts as the splitter makes them, so it should return something per sample that you
    can put together.

    Args:
        split: how to count and cut a batch; default: :class:`~dynagroup.oom.BatchSplitter`.
        min_samples: a part of fewer than twice as many samples is not cut any more.
        retry_on: which errors count as out of memory.
        learned: a budget to teach, also for later batches; what it has learned not to fit is cut before it fails.
        indices: dataset indices of the samples, to name them in messages.

    Raises:
        BudgetError: a part that cannot be cut further failed; names the samples and their shapes.

    >>> def double(batch):
    ...     if len(batch) > 2:
    ...         raise MemoryError("three do not fit")
    ...     return [2 * x for x in batch]
    >>> run_with_oom_retry(double, [1, 2, 3, 4, 5])
    [[2, 4], [6], [8, 10]]
    """
    check_int("min_samples", min_samples)
    lesson = learned if learned is not None else LearningBudget()
    failure, seconds = None, time.perf_counter()
    if not lesson.has_learned:
        outcome = attempt(lambda: fn(batch), retry_on)
        if outcome.error is None:
            return [outcome.value]  # type: ignore[list-item]
        failure, seconds = outcome.error, time.perf_counter() - seconds
    splitter = split if split is not None else BatchSplitter()
    num_samples = splitter.num_samples(batch)

    def shape(start: int, stop: int) -> BatchShape:
        return shape_of(splitter.take(batch, start, stop), stop - start)

    def failed(start: int, stop: int, message: str, seconds: float) -> None:
        _log.warning(
            "out of memory at %s; going on in halves. %s", describe(splitter.take(batch, start, stop)), message
        )
        lesson.record_oom(shape(start, stop), wasted_s=seconds)

    def run(start: int, stop: int) -> T:
        value = fn(splitter.take(batch, start, stop))
        if lesson.has_learned:
            lesson.record_pass(shape(start, stop))
        return value

    if failure is not None:
        failed(0, num_samples, failure, seconds)
        if num_samples < 2 * min_samples:
            give_up(batch, splitter, 0, num_samples, failure, indices)
    parts = run_ranges(
        run,
        [(0, num_samples)] if failure is None else halves(0, num_samples),
        min_samples=min_samples,
        retry_on=retry_on,
        failed=failed,
        allowed=lambda start, stop: bool(lesson.allows(shape(start, stop))[0]),
        hopeless=lambda start, stop, message: give_up(batch, splitter, start, stop, message, indices),
    )
    return [value for _, _, value in parts]


def run_ranges(
    run: Callable[[int, int], T],
    waiting: list[tuple[int, int]],
    *,
    min_samples: int,
    hopeless: Callable[[int, int, str], NoReturn],
    retry_on: Callable[[BaseException], bool] = is_out_of_memory,
    failed: Callable[[int, int, str, float], None] = lambda start, stop, message, seconds: None,
    allowed: Callable[[int, int], bool] = lambda start, stop: True,
) -> list[tuple[int, int, T]]:
    """Run ranges of samples in order, cutting in halves what fails.

    Args:
        failed: is told of each failure and its seconds.
        allowed: nothing known speaks against a range. It is asked when the range's turn has come, because what failed before
            it may have taught something; one that is not is cut without being run.
    """
    done: list[tuple[int, int, T]] = []
    while waiting:
        (start, stop), waiting = waiting[0], waiting[1:]
        if stop - start >= 2 * min_samples and not allowed(start, stop):
            waiting = halves(start, stop) + waiting
            continue
        started = time.perf_counter()
        outcome = attempt(lambda a=start, b=stop: run(a, b), retry_on)
        if outcome.error is None:
            done.append((start, stop, outcome.value))  # type: ignore[arg-type]
            continue
        failed(start, stop, outcome.error, time.perf_counter() - started)
        if stop - start < 2 * min_samples:
            hopeless(start, stop, outcome.error)
        waiting = halves(start, stop) + waiting
    return done


def give_up(
    batch: Any, splitter: Splitter[Any], start: int, stop: int, message: str, indices: Sequence[int] = ()
) -> NoReturn:
    """Raise what is left to say when a part that cannot be cut did not fit."""
    whose = " of the batch" if not len(indices) else ""
    names = [int(i) for i in indices[start:stop]] or list(range(start, stop))
    one = stop - start == 1
    who = f"sample {names[0]}{whose} does" if one else f"samples {_listed(names)}{whose} do"
    alone = "even alone" if one else "together, and `min_samples` forbids cutting further"
    raise BudgetError(
        f"{who} not fit {alone} ({describe(splitter.take(batch, start, stop))}); truncate or filter out such samples, "
        f"or free memory on the device. The allocator said: {message}"
    )


def _listed(names: Sequence[int]) -> str:
    if list(names) == list(range(names[0], names[0] + len(names))):
        return f"{names[0]} to {names[-1]}"
    return ", ".join(map(str, names[:8])) + (", ..." if len(names) > 8 else "")
