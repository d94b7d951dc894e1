"""What a loader did, in counts that add up over ranks and epochs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dynagroup.world import World

__all__ = ["LoaderStats"]


@dataclass(slots=True)
class LoaderStats:
    """Counts since the loader was made; add two to merge them over ranks.

    >>> (LoaderStats(steps=2, real_tokens=30, padded_tokens=40) + LoaderStats(steps=2, padded_tokens=10)).real_share
    0.6
    """

    steps: int = 0
    """Steps taken, idle ones included."""
    idle_steps: int = 0
    """Steps on which this rank had no samples left."""
    samples: int = 0
    real_tokens: int = 0
    """Tokens of the samples."""
    padded_tokens: int = 0
    """Tokens that the device multiplied, idle steps not counted."""
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

    @property
    def real_share(self) -> float:
        """Real tokens over padded tokens, in [0, 1]."""
        return self.real_tokens / self.padded_tokens if self.padded_tokens else 1.0

    @property
    def row_imbalance(self) -> float:
        """How much more padded tokens the fullest rank of a step has than the mean rank: 0.0 is none."""
        return self.row_highest / self.row_total - 1.0 if self.row_total else 0.0

    def __add__(self, other: LoaderStats) -> LoaderStats:
        return LoaderStats(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, with the derived shares."""
        return {**asdict(self), "real_share": self.real_share, "row_imbalance": self.row_imbalance}

    def merged(self, world: World) -> LoaderStats:
        """The sum over ranks. Collective: every rank calls it."""
        scale = {f.name: 1_000_000 if f.name.endswith("_s") else 1 for f in fields(self)}
        found = world.all_sum([round(getattr(self, name) * unit) for name, unit in scale.items()])
        summed: dict[str, Any] = {
            name: value / unit if unit > 1 else value for (name, unit), value in zip(scale.items(), found, strict=True)
        }
        return LoaderStats(**summed)
