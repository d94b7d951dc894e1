"""Rows of "this shape took that much memory", simulated or measured."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dynagroup.errors import ConfigError, StateError
from dynagroup.memory.run import FloatArray
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TOKENS, BatchShape


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peak memory of one batch. If the run went out of memory, ``batch_bytes`` is None and ``oom`` is True."""

    num_samples: int
    longest: Mapping[str, int]
    static_bytes: int
    batch_bytes: int | None
    oom: bool = False
    reserved_bytes: int | None = None
    """The most memory that the allocator had reserved on the device; only if measured."""

    @property
    def peak_bytes(self) -> int | None:
        return None if self.batch_bytes is None else self.static_bytes + self.batch_bytes


_FIELDS = ("num_samples", "static_bytes", "batch_bytes", "oom", "reserved_bytes")


@dataclass(frozen=True, slots=True)
class Measurements:
    """One row per shape, for one workload.

    >>> [row.peak_bytes for row in Measurements((Measurement(2, {"tokens": 64}, 100, batch_bytes=50),), Workload())]
    [150]
    """

    rows: tuple[Measurement, ...]
    workload: Workload
    source: str = "simulated"
    """"simulated" or "measured"."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Hardware, versions, date."""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            sizes = [row.num_samples - 1, row.static_bytes, *row.longest.values()]
            sizes += [] if row.batch_bytes is None else [row.batch_bytes]
            if row.oom != (row.batch_bytes is None) or not all(0 <= size < float("inf") for size in sizes):
                raise ConfigError(f"row {number}: {row} has a size below 0 or not finite, or one where memory ran out")

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def complete(self) -> tuple[Measurement, ...]:
        return tuple(row for row in self.rows if row.batch_bytes is not None)

    def shapes(self) -> BatchShape:
        """Shapes of the complete rows."""
        rows = self.complete
        names = rows[0].longest if rows else {TOKENS: 0}
        return BatchShape.of([r.num_samples for r in rows], {k: [r.longest[k] for r in rows] for k in names})

    def batch_bytes(self) -> FloatArray:
        """Bytes that grow with the batch, for the complete rows: float64 (K,)."""
        return np.array([row.batch_bytes for row in self.complete], dtype=np.float64)

    def to_parquet(self, path: str | Path) -> None:
        """Write the rows, with workload, source and hardware in the file's metadata. Needs pyarrow."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        streams = sorted({name for row in self.rows for name in row.longest})
        sizes = ("static_bytes", "batch_bytes", "peak_bytes", "reserved_bytes")
        table = pa.table({
            "num_samples": [r.num_samples for r in self.rows],
            **{f"longest_{s}": [r.longest.get(s) for r in self.rows] for s in streams},
            **{name: pa.array([getattr(r, name) for r in self.rows], type=pa.int64()) for name in sizes},
            "oom": [r.oom for r in self.rows],
        })  # fmt: skip
        about = {"workload": self.workload.to_json(), "source": self.source, "about": json.dumps(dict(self.about))}
        pq.write_table(table.replace_schema_metadata({f"dynagroup.{k}": v for k, v in about.items()}), path)

    @classmethod
    def from_parquet(cls, path: str | Path) -> "Measurements":
        """Read what :meth:`to_parquet` wrote. StateError: it is damaged, or something else."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(path)
            metadata = table.schema.metadata or {}
            about = {k.decode().removeprefix("dynagroup."): v.decode() for k, v in metadata.items()}
            rows = []
            for values in table.to_pylist():
                longest = {k[8:]: v for k, v in values.items() if k.startswith("longest_") and v is not None}
                rows.append(Measurement(longest=longest, **{name: values[name] for name in _FIELDS}))
            workload = Workload.from_json(about["workload"])
            return cls(tuple(rows), workload, about["source"], json.loads(about["about"]))
        except (pa.ArrowException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"{path} is damaged or no file of measurements ({error!r:.200}); measure again") from error
