"""Run again in halves: only the part that failed, and only after the failed attempt has let go of its memory."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from dynagroup.budget.learning import LearningBudget
from dynagroup.device import PeakWatch, is_out_of_memory
from dynagroup.errors import BudgetError
from dynagroup.oom.split import BatchSplitter, Splitter, describe, shape_of
from dynagroup.shapes import BatchShape
from dynagroup.validation import check_int

B = TypeVar("B")
T = TypeVar("T")

_log = logging.getLogger(__name__)
_BACKENDS = ("cuda", "xpu", "mps", "npu")


class Outcome(NamedTuple):
    """What one attempt came to: a value, or the text of the out-of-memory error that ended it; and how long it took."""

    value: Any
    error: str | None
    seconds: float


def attempt(run: Callable[[], Any]) -> Outcome:
    """Run it. After an out-of-memory error nothing of the attempt is left alive when this returns; other errors pass through.

    Frames hold a failed attempt's tensors, the traceback holds the frames, and the exception being handled holds the
    traceback: so the frames are cleared, the ``except`` block is left, and only then is memory collected.
    """
    started = time.perf_counter()
    try:
        return Outcome(run(), None, time.perf_counter() - started)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - started
        _clear_frames(error, set())
    free_memory()
    return Outcome(None, message, seconds)


def _clear_frames(error: BaseException | None, seen: set[int]) -> None:
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        _clear_frames(error.__cause__, seen)
        _clear_frames(error.__context__, seen)


def free_memory() -> None:
    """Collect garbage, then hand the caching allocators' unused blocks back, on every device type in use."""
    import torch

    gc.collect()
    for backend in (getattr(torch, name, None) for name in _BACKENDS):
        if backend is not None and backend.is_available() and getattr(backend, "is_initialized", lambda: True)():
            backend.empty_cache()


def halves(start: int, stop: int) -> list[tuple[int, int]]:
    """A range of samples as two, the first the larger by at most one."""
    middle = start + (stop - start + 1) // 2
    return [(start, middle), (middle, stop)]


def run_with_oom_retry(
    fn: Callable[[B], T], batch: B, *,
    split: Splitter[B] | None = None, min_samples: int = 1, learned: LearningBudget | None = None,
    indices: Sequence[int] = (),
) -> list[T]:  # fmt: skip
    """``fn(batch)``, in parts where the whole does not fit; the parts' results in input order.

    ``fn`` must leave nothing behind when it fails: a forward pass or ``generate`` qualifies, a backward pass does not (use
    :class:`~dynagroup.oom.OomSafeBackward`). Only a part that failed is run again, in halves; one that still waits and is no
    smaller than what has failed is cut before it is run.

    Args:
        split: how to count and cut a batch; default: :class:`~dynagroup.oom.BatchSplitter`.
        min_samples: a part of fewer than twice as many samples is not cut any more.
        learned: a budget to teach; what it has learned not to fit is cut before it fails.
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
    splitter = split if split is not None else BatchSplitter()
    learned = learned if learned is not None else LearningBudget()
    return Parts(fn, batch, splitter, learned, min_samples, indices).run_all()


class Parts(Generic[T]):
    """Ranges of a batch's samples, run in order; what fails, or what was learned does not allow when its turn has come, is cut
    in halves."""

    watch: PeakWatch | None = None

    def __init__(
        self, fn: Callable[[Any], T], batch: Any, splitter: Splitter[Any], learned: LearningBudget, min_samples: int,
        indices: Sequence[int],
    ) -> None:  # fmt: skip
        self.fn, self.batch, self.splitter, self.learned = fn, batch, splitter, learned
        self._min_samples, self._indices = check_int("min_samples", min_samples), indices
        self.num_samples = splitter.num_samples(batch)

    def part(self, start: int, stop: int) -> Any:
        whole = stop - start == self.num_samples
        return self.batch if whole else self.splitter.take(self.batch, start, stop)

    def shape(self, start: int, stop: int) -> BatchShape:
        """What its memory grows with."""
        return shape_of(self.part(start, stop), stop - start)

    def run_all(self) -> list[T]:
        """The results of all parts."""
        done: list[T] = []
        waiting = [(0, self.num_samples)]
        while waiting:
            (start, stop), waiting = waiting[0], waiting[1:]
            if not self._allowed(start, stop):
                waiting = halves(start, stop) + waiting
                continue
            outcome = attempt(lambda a=start, b=stop: self.fn(self.part(a, b)))
            if outcome.error is not None:
                waiting = self._failed(start, stop, outcome.error, outcome.seconds) + waiting
                continue
            peak, size = (None, None) if self.watch is None else self.watch.new_peak()
            if self.learned.has_learned or peak is not None:
                self.learned.record_pass(self.shape(start, stop), peak_bytes=peak, device_bytes=size)
            done.append(outcome.value)
        return done

    def _failed(self, start: int, stop: int, error: str, seconds: float) -> list[tuple[int, int]]:
        """Learn from a range that failed; its halves."""
        shown = describe(self.part(start, stop))
        _log.warning("out of memory at %s; going on in halves. %s", shown, error)
        self.learned.record_oom(self.shape(start, stop), wasted_s=seconds)
        if stop - start >= 2 * self._min_samples:
            return halves(start, stop)
        known = self._indices if len(self._indices) else range(self.num_samples)
        names = ", ".join(str(int(i)) for i in known[start:stop])
        alone = stop - start == 1
        who = f"sample {names} does not fit even alone" if alone else f"samples {names} do not fit together"
        raise BudgetError(f"{who} ({shown}); truncate or filter out such samples. The allocator said: {error}")

    def _allowed(self, start: int, stop: int) -> bool:
        smallest = stop - start < 2 * self._min_samples
        return smallest or not self.learned.has_learned or bool(self.learned.allows(self.shape(start, stop))[0])
