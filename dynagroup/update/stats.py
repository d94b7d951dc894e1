"""What a loader did, in counts that add up over ranks and epochs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from dynagroup.distributed import World
from dynagroup.plan.work import Work
from dynagroup.update.moments import Moments

__all__ = ["LoaderStats"]

ENOUGH_UPDATES = 20


@dataclass(slots=True)
class LoaderStats:
    """Counts of one rank since its loader was made. Two of them add up and can be subtracted: what happened since
    ``before = loader.stats.copy()`` is ``loader.stats - before``; what all ranks did is ``loader.stats.merged(loader.world)``.

    >>> (LoaderStats(steps=2, real_tokens=30, padded_tokens=40) + LoaderStats(steps=2, padded_tokens=10)).real_share
    0.6
    >>> print(LoaderStats(steps=3, samples=8, updates=2, real_tokens=30, padded_tokens=40, batch_sizes=Counter({1: 1, 7: 1})))
    8 samples in 3 steps (0 idle) and 2 updates; batches of 1 to 7 samples, 25% padding; waited 0.0 s for workers
    """

    steps: int = 0
    """Steps taken, idle ones included."""
    idle_steps: int = 0
    """Steps on which this rank had no samples left."""
    samples: int = 0
    updates: int = 0
    """Updates whose last step was taken."""
    update_samples: int = 0
    """Samples of those updates, over all ranks."""
    batch_sizes: Counter[int] = field(default_factory=Counter)
    """How many batches had so many samples; idle steps not counted."""
    real_tokens: int = 0
    """Tokens of the samples."""
    padded_tokens: int = 0
    """Tokens that the device multiplied, idle steps not counted."""
    padded_squares: int = 0
    """The same tokens, each times its sample's padded length: what attention costs."""
    row_highest: int = 0
    """Padded tokens of the fullest rank, summed over sampled steps (one an exchange)."""
    row_total: int = 0
    """Padded tokens of all ranks over the same steps, divided by the number of ranks."""
    splits: int = 0
    """Batches that came of splitting planned or collated ones."""
    merges: int = 0
    """Planned batches that came out smaller after processing and were joined to another of their window."""
    oversize: int = 0
    """Samples that did not fit even alone and were emitted by themselves."""
    left_samples: int = 0
    """Samples that ``uneven="stop"`` left behind."""
    exchanges: int = 0
    """Exchanges with the other ranks."""
    exchanged_bytes: int = 0
    """Bytes that this rank gave to all-reduces."""
    wait_s: float = 0.0
    """Seconds that the main process waited for workers."""
    exchange_s: float = 0.0
    """Seconds that the main process spent in exchanges, waiting for other ranks included."""
    times: Moments = field(default_factory=Moments, repr=False)
    """How long the loop took with updates of which shapes; see :attr:`work`."""

    def __str__(self) -> str:
        rare = {
            "split": self.splits,
            "joined": self.merges,
            "too large even alone": self.oversize,
            "left": self.left_samples,
        }
        return (
            f"{self.samples:,} samples in {self.steps:,} steps ({self.idle_steps:,} idle) and {self.updates:,} updates; batches "
            f"of {self.smallest_batch:,} to {self.largest_batch:,} samples, {self.padding:.0%} padding; "
            f"waited {self.wait_s:.1f} s for workers" + "".join(f"; {n:,} {what}" for what, n in rare.items() if n)
        )

    @property
    def real_share(self) -> float:
        """Real tokens over padded tokens, in [0, 1]."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else 1.0

    @property
    def row_imbalance(self) -> float:
        """How much more padded tokens the fullest rank of a step has than the mean rank: 0.0 is none."""
        return self.row_highest / self.row_total - 1.0 if self.row_total else 0.0

    @property
    def work(self) -> Work | None:
        """The price of a step and the crossover of attention that the loop's own times suggest, after 20 updates of padded
        batches; None before, and where batches do not differ enough to tell. It is never used by itself: a plan would depend
        on the machine's mood. Hand it to the next run: ``work=loader.stats.work``."""
        if self.times.num_updates < ENOUGH_UPDATES:
            return None
        products = self.times.products
        return Work.from_moments(products[:3, :3], products[:3, 3])

    @property
    def batches(self) -> int:
        """Steps with samples."""
        return self.steps - self.idle_steps

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding, in [0, 1]."""
        return 1.0 - self.real_share

    @property
    def samples_per_update(self) -> float:
        """Samples of an update over all ranks, on average."""
        return self.update_samples / self.updates if self.updates else 0.0

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest batch; 0 where there was none."""
        return min(self.batch_sizes, default=0)

    @property
    def largest_batch(self) -> int:
        """Samples of the largest batch; 0 where there was none."""
        return max(self.batch_sizes, default=0)

    def count_step(
        self, samples: int, *, real_tokens: int = 0, padded_tokens: int = 0, padded_squares: int = 0, idle: bool = False
    ) -> None:
        """Note that a step was taken."""
        self.steps += 1
        if idle:
            self.idle_steps += 1
            return
        self.samples += samples
        self.batch_sizes[samples] += 1
        self.real_tokens += real_tokens
        self.padded_tokens += padded_tokens
        self.padded_squares += padded_squares

    def count_update(self, samples: int) -> None:
        """Note that the last step of an update of so many samples, over all ranks, was taken."""
        self.updates += 1
        self.update_samples += samples

    def copy(self) -> LoaderStats:
        """What it is now."""
        return self + LoaderStats()

    def __add__(self, other: LoaderStats) -> LoaderStats:
        return LoaderStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, before: LoaderStats) -> LoaderStats:
        return LoaderStats(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})

    def merged(self, world: World) -> LoaderStats:
        """The sum over ranks. Collective: every rank calls it."""
        names = [f.name for f in fields(self) if f.name not in ("batch_sizes", "times")]
        [largest] = world.all_max([self.largest_batch])
        sizes = [self.batch_sizes[size] for size in range(largest + 1)]
        times = self.times.to_list()
        found = world.all_sum([*times, *(getattr(self, name) for name in names), *sizes])
        summed_times, found = Moments.from_list(found[: len(times)]), found[len(times) :]
        summed: dict[str, Any] = {
            name: value if name.endswith("_s") else int(value) for name, value in zip(names, found, strict=False)
        }
        counted = {size: int(count) for size, count in enumerate(found[len(names) :]) if count}
        return LoaderStats(**summed, batch_sizes=Counter(counted), times=summed_times)
