"""Tests your own budgets, samplers and loaders with the same checks that dynagroup's tests use. Ranks are threads that
really exchange data, so a test of eight ranks takes milliseconds and needs no launcher."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from dynagroup.budget.base import UNLIMITED, Budget, fits_of, largest_of
from dynagroup.distributed import as_int64
from dynagroup.errors import AlignmentError
from dynagroup.shapes import BatchShape, Streams, primary

T = TypeVar("T")


class ThreadWorld:
    """The ``World`` of a rank that is a thread of :func:`run_ranks`; ranks exchange vectors in a shared list."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, vectors: list[Any]
    ) -> None:
        self.rank, self.size, self.num_exchanges = rank, size, 0
        self._barrier, self._vectors = barrier, vectors

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return self._reduce(as_int64(values), np.maximum)

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return self._reduce(np.asarray(values, np.float64), np.add)

    def _reduce(self, values: np.ndarray, combine: np.ufunc) -> list[Any]:
        self.num_exchanges += 1
        self._vectors[self.rank] = values
        try:
            self._barrier.wait()
            gathered = list(self._vectors)
        except threading.BrokenBarrierError as error:
            raise AlignmentError(
                f"rank {self.rank} of {self.size} waited for a rank that has stopped"
            ) from error
        with suppress(
            threading.BrokenBarrierError
        ):  # a rank failed after this exchange: the next exchange raises
            self._barrier.wait()
        if len({len(vector) for vector in gathered}) > 1:
            raise AlignmentError(
                f"ranks must exchange vectors of equal length, but have {[len(v) for v in gathered]}"
            )
        return combine.reduce(gathered).tolist()


def run_ranks(
    size: int, function: Callable[[ThreadWorld], T], *, timeout_s: float = 300.0
) -> list[T]:
    """Runs ``function`` on ``size`` ranks at the same time; returns the list of their results.

    If a rank raises an error, the other ranks get AlignmentError, and the first rank's error is raised here.

    >>> run_ranks(3, lambda world: world.all_sum([world.rank, 1]))
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    barrier, errors = threading.Barrier(size, timeout=timeout_s), list[BaseException]()
    vectors, results = list[Any]([()] * size), list[Any]([None] * size)

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank, size, barrier, vectors))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, AlignmentError)), errors[0])
    return results


def assert_conserves(batches: Iterable[Iterable[int]], expected: Iterable[int]) -> None:
    """Asserts that the batches of all ranks together contain exactly the expected samples, each as often as expected.

    >>> assert_conserves([[0, 2], [1]], range(3))
    """
    found, wanted = (
        Counter(int(i) for i in chain.from_iterable(batches)),
        Counter(int(i) for i in expected),
    )
    lost, extra = wanted - found, found - wanted
    assert not lost, (
        f"{lost.total()} samples are missing from the batches, the first are {sorted(lost)[:10]}"
    )
    assert not extra, (
        f"{extra.total()} samples are repeated or unexpected, the first are {sorted(extra)[:10]}"
    )


def assert_budget_law(budget: Budget, lengths: Streams, *, num_shapes: int = 2000) -> None:
    """Asserts that a batch that does not fit never fits after a sample grows or is added; checks ``largest``, too.

    Args:
        budget: the budget to test; ``bind`` is called with ``lengths`` first.
        lengths: stream name -> int32 (N,), realistic lengths, from which batch shapes are drawn.
        num_shapes: int, number of pairs of shapes to compare.

    >>> from dynagroup.budget.tokens import TokenBudget
    >>> assert_budget_law(TokenBudget(64), {"tokens": np.arange(50, dtype=np.int32)})
    """
    bound, rng = budget.bind(lengths), np.random.default_rng(0)
    count = np.minimum(rng.geometric(0.5 ** rng.integers(0, 12, num_shapes)), 1 << 20).astype(
        np.int64
    )
    longest = {
        name: rng.choice(values, num_shapes).astype(np.int64) for name, values in lengths.items()
    }
    total = {
        name: (v + (count - 1) * v * rng.random(num_shapes)).astype(np.int64)
        for name, v in longest.items()
    }
    more = {
        name: rng.integers(0, 1 + 2 * int(values.max(initial=1)), num_shapes)
        for name, values in lengths.items()
    }
    grown = {name: total[name] + units for name, units in more.items()}
    fits = fits_of(bound, BatchShape(count, longest, total))
    for larger, what in (
        (
            BatchShape(count + 1, {k: np.maximum(v, more[k]) for k, v in longest.items()}, grown),
            "a sample was added",
        ),
        (
            BatchShape(count, {k: v + more[k] for k, v in longest.items()}, grown),
            "the longest sample grew",
        ),
    ):
        for k in np.flatnonzero(~fits & fits_of(bound, larger))[:1]:
            before, units = (
                {name: int(v[k]) for name, v in found.items()} for found in (longest, more)
            )
            shape = f"{count[k]} samples with longest {before}"
            raise AssertionError(
                f"{bound.fingerprint} refuses {shape}, but accepts the batch after {what}: {units}"
            )
    tokens = longest[primary(longest)]
    table = largest_of(bound, tokens) if len(lengths) == 1 else None
    if table is not None:
        most = np.minimum(table, UNLIMITED)
        fitting = bound.fits(BatchShape.of(np.maximum(most, 1), tokens)) == (most >= 1)
        for k in np.flatnonzero(~fitting | bound.fits(BatchShape.of(most + 1, tokens)))[:1]:
            raise AssertionError(
                f"`largest` allows {table[k]} samples of {tokens[k]} tokens, but `fits` disagrees"
            )


@dataclass
class Allocator:
    """Imitates a device's allocator in tests: ``claim(size)`` raises ``torch.OutOfMemoryError`` above ``limit``.

    >>> from dynagroup import run_with_oom_retry
    >>> embed, allocator = torch.nn.Embedding(9, 2), Allocator(limit=8)
    >>> remove = allocator.in_forward(embed)
    >>> parts = run_with_oom_retry(embed, torch.zeros(4, 4, dtype=torch.long))
    >>> [part.shape[0] for part in parts], allocator.failures
    ([2, 2], [16])
    """

    limit: float
    failures: list[int] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)

    def claim(self, size: int) -> None:
        self.claims.append(size)
        if size > self.limit:
            self.failures.append(size)
            raise torch.OutOfMemoryError(
                f"simulated out of memory: a batch of {size} tokens; {self.limit} fit"
            )

    def in_forward(self, module: torch.nn.Module) -> Callable[[], None]:
        """Makes every call of ``module`` claim its inputs' padded tokens; returns a function that stops this."""

        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [
                v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.ndim > 1
            ]
            self.claim(max(tensor.shape[0] * tensor.shape[1] for tensor in tensors))

        return module.register_forward_pre_hook(hook, with_kwargs=True).remove
