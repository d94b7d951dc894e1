"""Holds simulated memory against a real NVIDIA GPU: ``python -m regressor.measure_gpu`` from the repository's root.

Nine models of real sizes, built on the device from their configs with random weights, in bfloat16: training for all of
them, generation (or a plain forward pass, for BERT). Every shape is run twice and the second run's peak counts; the same
shape is simulated. The smallest models come first, and none is begun after ``--minutes`` (25) less what a model may take, so
that a run ends in time; what was left out or failed is printed and written down. The file is rewritten after every model,
so that a run that is stopped keeps what it has.

Needs torch with CUDA and transformers 5.17 or later; not xgboost, datasets or matplotlib. The result is Parquet, with
hardware, driver, versions and date in its metadata, or JSON lines (metadata first) where pyarrow is missing.
``--models gpt2,qwen2`` measures some, for machines that are lent for minutes. ``--dry`` runs all of it on the CPU with tiny
models and made-up counters; its file says so and means nothing.

What it cannot see: several GPUs, real optimizers (their state is added by size, on both sides).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import environment
from dynagroup.device import CudaDevice, Device
from dynagroup.memory import Measurement, Workload, measure, simulate
from dynagroup.memory.trace.model import as_random_model
from dynagroup.plan.plan import format_table
from regressor.families import FAMILIES, Sizes

__all__ = ["Plan", "main", "rows_of", "save"]

OUTPUT = Path(__file__).parent / "data" / "measured.parquet"
MODELS = (
    "gpt2",
    "bert",
    "t5",
    "bart",
    "qwen2",
    "gemma3",
    "qwen3",
    "gpt_neox",
    "llama",
)  # 0.1B to 8B parameters
MINUTES_A_MODEL = 4.0  # no model is begun with less left
TARGET = 0.05
Shapes = Sequence[tuple[int, int]]
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What is run of every model."""

    train: Shapes = (
        *((2, 128), (16, 128), (64, 128), (2, 512), (16, 512)),
        *((4, 1024), (16, 1024), (2, 2048), (8, 2048), (16, 2048)),
    )
    other: Shapes = ((1, 128), (16, 128), (64, 128), (4, 1024), (16, 1024), (16, 2048))
    """Generation and plain forward passes."""
    max_new_tokens: int = 64
    sizes: Sizes | None = None
    """Of all models; None: each one's own."""


DRY = Plan(
    train=((1, 16), (2, 16)),
    other=((1, 16), (2, 16)),
    max_new_tokens=2,
    sizes=Sizes(hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, vocabulary=128),
)


class DryDevice:
    """The CPU, with counters that are made up."""

    device = torch.device("cpu")

    def reset(self) -> None:
        pass

    def allocated(self) -> int:
        return 1 << 20

    def peaks(self) -> tuple[int, int]:
        return 2 << 20, 4 << 20


def workloads(config: Any, kind: str, plan: Plan) -> Iterator[tuple[Workload, Shapes]]:
    """What is done with a model, each with its shapes."""
    known: dict[str, Any] = {
        "dtype": "bfloat16",
        "attention": "sdpa",
        "trace": False,
    }  # every shape is simulated
    yield Workload.from_model(config, "train", **known), plan.train
    if kind == "encoder":
        yield Workload.from_model(config, "forward", **known), plan.other
    else:
        yield (
            Workload.from_model(config, "generate", max_new_tokens=plan.max_new_tokens, **known),
            plan.other,
        )


def rows_of(name: str, plan: Plan, device: Device) -> list[Row]:
    """Every shape of one model, measured and simulated."""
    family = FAMILIES[name]
    sizes = plan.sizes or family.known
    if plan.sizes is not None and not family.grouped:
        sizes = Sizes(
            sizes.hidden, sizes.layers, sizes.heads, sizes.heads, sizes.ffn, sizes.vocabulary
        )
    config = family.build(sizes)
    rows: list[Row] = []
    for workload, shapes in workloads(config, family.kind, plan):
        model = as_random_model(config, workload, device.device)
        model.config.use_cache = workload.mode == "generate"  # as a Trainer does
        found = measure(model, workload, shapes, device=device)
        del model  # the next one takes its place on the device
        expected = simulate(config, workload, shapes)
        rows += [
            _row(name, found.workload, real, fake)
            for real, fake in zip(found.rows, expected.rows, strict=True)
        ]
    return rows


def _row(name: str, workload: Workload, real: Measurement, fake: Measurement) -> Row:
    assert fake.peak_bytes is not None
    return {
        "model": name,
        "mode": workload.mode,
        "num_samples": real.num_samples,
        **{f"longest_{stream}": length for stream, length in real.longest.items()},
        "static_bytes": real.static_bytes,
        "batch_bytes": real.batch_bytes,
        "peak_bytes": real.peak_bytes,
        "reserved_bytes": real.reserved_bytes,
        "oom": real.oom,
        "simulated_static_bytes": fake.static_bytes,
        "simulated_batch_bytes": fake.batch_bytes,
        "simulated_peak_bytes": fake.peak_bytes,
        "error": None if real.peak_bytes is None else fake.peak_bytes / real.peak_bytes - 1,
        "workload": workload.to_json(),
    }


def save(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> Path:
    """Write Parquet, or JSON lines where pyarrow is missing; returns what was written.

    JSON lines: the first holds ``about``, each other one a row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if find_spec("pyarrow") is None:
        path = path.with_suffix(".jsonl")
        path.write_text(
            "".join(json.dumps(line) + "\n" for line in ({"about": about}, *rows)), encoding="utf-8"
        )
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(list(rows))
    pq.write_table(
        table.replace_schema_metadata({"dynagroup.about": json.dumps(about)}),
        path,
        compression="zstd",
    )
    return path


def report(rows: Sequence[Row]) -> str:
    """Simulated against measured, a line a shape, and what is further off than the target."""
    lines = [
        [
            f"{row['model']} {row['mode']} {row['num_samples']} x {row['longest_tokens']}",
            f"{row['simulated_peak_bytes'] / 2**30:.3f}",
            "out of memory" if row["oom"] else f"{row['peak_bytes'] / 2**30:.3f}",
            "" if row["oom"] else f"{row['error']:+.1%}",
            "" if row["oom"] else f"{row['reserved_bytes'] / 2**30:.3f}",
        ]
        for row in rows
    ]
    table = format_table(["", "simulated GiB", "measured GiB", "error", "reserved GiB"], lines)
    far = [
        f"{row['model']} {row['mode']}"
        for row in rows
        if not row["oom"] and abs(row["error"]) > TARGET
    ]
    counts = ", ".join(f"{name} ({far.count(name)})" for name in dict.fromkeys(far)) or "none"
    measured = sum(not row["oom"] for row in rows)
    return f"{table}\n{measured} of {len(rows)} shapes measured; further off than {TARGET:.0%}: {counts}"


def about_device(device: Device) -> dict[str, Any]:
    """Hardware, driver, versions and date."""
    found: dict[str, Any] = {**environment("transformers"), "source": "dry"}
    if not isinstance(device, CudaDevice):
        return found
    memory = torch.cuda.get_device_properties(device.device).total_memory
    return {
        **found,
        **device.about(),
        "source": "measured",
        "gpu_bytes": memory,
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return shown.stdout.splitlines()[0].strip() if shown.stdout else "unknown"


def measure_all(
    models: Sequence[str],
    plan: Plan,
    device: Device,
    path: Path,
    minutes: float,
    clock: Callable[[], float],
) -> tuple[list[Row], dict[str, Any]]:
    """Model after model while there is time; the file is complete after each."""
    about, rows, end = about_device(device), [], clock() + 60 * minutes
    about |= {"failed": {}, "left_out": []}
    for name in models:
        if clock() > end - 60 * MINUTES_A_MODEL:
            about["left_out"].append(name)
            continue
        try:
            rows += rows_of(name, plan, device)
        except (
            Exception
        ) as error:  # one model's failure is written down, and costs no other model its place
            about["failed"][name] = f"{type(error).__name__}: {error}"
        print(
            f"{name}: {'failed' if name in about['failed'] else 'done'}, {(end - clock()) / 60:.1f} minutes left",
            flush=True,
        )
        device.reset()
        if rows:
            save(path, rows, about)
    return rows, about


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if nothing was measured or a model failed."""
    parser = argparse.ArgumentParser(
        prog="regressor.measure_gpu", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--models",
        default=",".join(MODELS),
        help="names of regressor/families.py (default: %(default)s)",
    )
    parser.add_argument("--minutes", type=float, default=25.0, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--dry", action="store_true", help="tiny models on the CPU, made-up counters"
    )
    args = parser.parse_args(arguments)
    models = args.models.split(",")
    unknown = sorted(set(models) - set(FAMILIES))
    if unknown:
        parser.error(f"--models names {unknown[0]!r}; there are {', '.join(sorted(FAMILIES))}")
    if args.dry and args.output == OUTPUT:
        parser.error("--dry needs an --output of its own: its figures are made up")
    device = DryDevice() if args.dry else CudaDevice()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pad_token_id.*")
        rows, about = measure_all(
            models, DRY if args.dry else Plan(), device, args.output, args.minutes, time.monotonic
        )
    if rows:
        print(report(rows))
        print(f"written: {save(args.output, rows, about).name}")
    print(json.dumps(about, indent=1))
    return 0 if rows and not about["failed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
