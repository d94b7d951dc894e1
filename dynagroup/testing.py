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
from dynagroup.shapes import BatchShape, IntArray, Streams, primary

T = TypeVar("T")


class ThreadWorld:
    """The ``World`` of a rank that is a thread of :func:`run_ranks`; ranks exchange vectors in a shared list."""

    def __init__(
        self, rank: int, size: int, barrier: threading.Barrier, vectors: list[Any]
    ) -> None:
        self.rank = rank
        self.size = size
        self.num_exchanges = 0
        self._barrier = barrier
        self._vectors = vectors

    def all_max(self, values: Sequence[int], /) -> list[int]:
        return self._reduce(as_int64(values), np.maximum)

    def all_sum(self, values: Sequence[float], /) -> list[float]:
        return self._reduce(np.asarray(values, np.float64), np.add)

    def exchange(self, vectors: Sequence[IntArray], /) -> list[IntArray]:
        gathered = self._gather([np.array(vector) for vector in vectors])
        return [of_rank[self.rank] for of_rank in gathered]

    def _reduce(self, values: np.ndarray, combine: np.ufunc) -> list[Any]:
        gathered = self._gather(values)
        sizes = [len(vector) for vector in gathered]
        if len(set(sizes)) > 1:
            raise AlignmentError(f"ranks must exchange vectors of equal length, but have {sizes}")
        return combine.reduce(gathered).tolist()

    def _gather(self, values: Any) -> list[Any]:
        """Returns what each rank passes."""
        self.num_exchanges += 1
        self._vectors[self.rank] = values
        try:
            self._barrier.wait()
            gathered = list(self._vectors)
        except threading.BrokenBarrierError as error:
            raise AlignmentError(
                f"rank {self.rank} of {self.size} waited for a rank that has stopped"
            ) from error
        # if a rank fails after this exchange, the next exchange raises
        with suppress(threading.BrokenBarrierError):
            self._barrier.wait()
        return gathered


def run_ranks(
    size: int, function: Callable[[ThreadWorld], T], *, timeout_s: float = 300.0
) -> list[T]:
    """Runs ``function`` on ``size`` ranks at the same time; returns the list of their results.

    If a rank raises an error, the other ranks get AlignmentError, and the first rank's error is raised here.

    >>> run_ranks(3, lambda world: world.all_sum([world.rank, 1]))
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """
    barrier = threading.Barrier(size, timeout=timeout_s)
    vectors: list[Any] = [()] * size
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

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
    for error in errors:
        if not isinstance(error, AlignmentError):
            raise error
    if errors:
        raise errors[0]
    return results


def assert_conserves(batches: Iterable[Iterable[int]], expected: Iterable[int]) -> None:
    """Asserts that the batches of all ranks together contain exactly the expected samples, each as often as expected.

    >>> assert_conserves([[0, 2], [1]], range(3))
    """
    emitted = Counter(int(index) for index in chain.from_iterable(batches))
    wanted = Counter(int(index) for index in expected)
    lost = wanted - emitted
    extra = emitted - wanted
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
    bound = budget.bind(lengths)
    rng = np.random.default_rng(0)
    shape = _random_shapes(lengths, num_shapes, rng)
    longest = shape.longest
    added: dict[str, IntArray] = {}
    for name, values in lengths.items():
        added[name] = rng.integers(0, 1 + 2 * int(values.max(initial=1)), num_shapes)
    total = {name: shape.total[name] + added[name] for name in lengths}
    longest_with_sample = {name: np.maximum(longest[name], added[name]) for name in lengths}
    longest_grown = {name: longest[name] + added[name] for name in lengths}
    with_sample = BatchShape(shape.num_samples + 1, longest_with_sample, total)
    with_longer = BatchShape(shape.num_samples, longest_grown, total)
    is_refused = ~fits_of(bound, shape)
    for larger, change in (
        (with_sample, "a sample was added"),
        (with_longer, "the longest sample grew"),
    ):
        wrong = np.flatnonzero(is_refused & fits_of(bound, larger))
        if len(wrong):
            place = wrong[0]
            longest_here = {name: int(values[place]) for name, values in longest.items()}
            added_here = {name: int(values[place]) for name, values in added.items()}
            raise AssertionError(
                f"{bound.fingerprint} refuses {shape.num_samples[place]} samples with longest "
                f"{longest_here}, but accepts the batch after {change}: {added_here}"
            )
    if len(lengths) == 1:
        _assert_largest_is_true(bound, longest[primary(longest)])


def _random_shapes(lengths: Streams, num_shapes: int, rng: np.random.Generator) -> BatchShape:
    """Draws batch shapes with realistic lengths, of one sample up to a million."""
    magnitude = rng.integers(0, 12, num_shapes)
    num_samples = np.minimum(rng.geometric(0.5**magnitude), 1 << 20).astype(np.int64)
    longest: dict[str, IntArray] = {}
    for name, values in lengths.items():
        longest[name] = rng.choice(values, num_shapes).astype(np.int64)
    total: dict[str, IntArray] = {}
    for name, units in longest.items():
        further_units = (num_samples - 1) * units * rng.random(num_shapes)
        total[name] = (units + further_units).astype(np.int64)
    return BatchShape(num_samples, longest, total)


def _assert_largest_is_true(budget: Budget, tokens: IntArray) -> None:
    table = largest_of(budget, tokens)
    if table is None:
        return
    most = np.minimum(table, UNLIMITED)
    fits_most = budget.fits(BatchShape.of(np.maximum(most, 1), tokens))
    fits_more = budget.fits(BatchShape.of(most + 1, tokens))
    is_wrong = (fits_most != (most >= 1)) | fits_more
    if is_wrong.any():
        place = int(is_wrong.argmax())
        raise AssertionError(
            f"`largest` allows {table[place]} samples of {tokens[place]} tokens, but `fits` disagrees"
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
        """Makes every call of ``module`` claim its inputs' padded tokens; returns a function that stops this. Inputs
        without data, with which memory is traced, claim nothing."""

        def hook(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sizes = []
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and value.ndim > 1 and not value.is_meta:
                    sizes.append(value.shape[0] * value.shape[1])
            if sizes:
                self.claim(max(sizes))

        return module.register_forward_pre_hook(hook, with_kwargs=True).remove
