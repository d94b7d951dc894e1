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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import environment
from dynagroup.device import CudaDevice, Device
from dynagroup.memory import Measurement, Workload, measure, simulate
from dynagroup.memory.phases import Mode
from dynagroup.memory.trace.model import as_random_model
from dynagroup.plan.plan import format_table
from regressor.families import FAMILIES, Sizes

__all__ = ["Plan", "main", "row_of", "rows_of", "save"]

OUTPUT = Path(__file__).parent / "data" / "measured.parquet"
# 0.1B to 8B parameters.
MODELS = ("gpt2", "bert", "t5", "bart", "qwen2", "gemma3", "qwen3", "gpt_neox", "llama")
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
    yield _workload(config, "train", 0), plan.train
    if kind == "encoder":
        yield _workload(config, "forward", 0), plan.other
    else:
        yield _workload(config, "generate", plan.max_new_tokens), plan.other


def _workload(config: Any, mode: Mode, max_new_tokens: int) -> Workload:
    return Workload.from_model(
        config,
        mode,
        max_new_tokens=max_new_tokens,
        dtype="bfloat16",
        attention="sdpa",
        trace=False,  # every shape is simulated
    )


def rows_of(name: str, plan: Plan, device: Device) -> list[Row]:
    """Every shape of one model, measured and simulated."""
    family = FAMILIES[name]
    sizes = plan.sizes or family.known
    if not family.grouped:
        sizes = replace(sizes, kv_heads=sizes.heads)
    config = family.build(sizes)
    rows: list[Row] = []
    for workload, shapes in workloads(config, family.kind, plan):
        model: Any = as_random_model(config, workload, device.device)
        model.config.use_cache = workload.mode == "generate"  # as a Trainer does
        measured = measure(model, workload, shapes, device=device)
        del model  # the next one takes its place on the device
        simulated = simulate(config, workload, shapes)
        for real, fake in zip(measured.rows, simulated.rows, strict=True):
            rows.append(row_of(name, measured.workload, real, fake))
    return rows


def row_of(name: str, workload: Workload, real: Measurement, fake: Measurement) -> Row:
    assert fake.peak_bytes is not None
    row: Row = {"model": name, "mode": workload.mode, "num_samples": real.num_samples}
    for stream, length in real.longest.items():
        row[f"longest_{stream}"] = length
    row["static_bytes"] = real.static_bytes
    row["batch_bytes"] = real.batch_bytes
    row["peak_bytes"] = real.peak_bytes
    row["reserved_bytes"] = real.reserved_bytes
    row["oom"] = real.oom
    row["simulated_static_bytes"] = fake.static_bytes
    row["simulated_batch_bytes"] = fake.batch_bytes
    row["simulated_peak_bytes"] = fake.peak_bytes
    row["error"] = None
    if real.peak_bytes is not None:
        row["error"] = fake.peak_bytes / real.peak_bytes - 1
    row["workload"] = workload.to_json()
    return row


def save(path: Path, rows: Sequence[Row], about: Mapping[str, Any]) -> Path:
    """Write Parquet, or JSON lines where pyarrow is missing; returns what was written.

    JSON lines: the first holds ``about``, each other one a row.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if find_spec("pyarrow") is None:
        path = path.with_suffix(".jsonl")
        lines = [json.dumps({"about": about})]
        lines.extend(json.dumps(row) for row in rows)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(list(rows))
    table = table.replace_schema_metadata({"dynagroup.about": json.dumps(about)})
    pq.write_table(table, path, compression="zstd")
    return path


def report(rows: Sequence[Row]) -> str:
    """Simulated against measured, a line a shape, and what is further off than the target."""
    lines = []
    num_measured = 0
    num_far: Counter[str] = Counter()
    for row in rows:
        run = f"{row['model']} {row['mode']}"
        shape = f"{run} {row['num_samples']} x {row['longest_tokens']}"
        simulated = _gib(row["simulated_peak_bytes"])
        if row["oom"]:
            lines.append([shape, simulated, "out of memory", "", ""])
            continue
        num_measured += 1
        error = row["error"]
        if abs(error) > TARGET:
            num_far[run] += 1
        measured = _gib(row["peak_bytes"])
        lines.append([shape, simulated, measured, f"{error:+.1%}", _gib(row["reserved_bytes"])])
    table = format_table(["", "simulated GiB", "measured GiB", "error", "reserved GiB"], lines)
    far = [f"{run} ({count})" for run, count in num_far.items()] or ["none"]
    return (
        f"{table}\n{num_measured} of {len(rows)} shapes measured; "
        f"further off than {TARGET:.0%}: {', '.join(far)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f}"


def about_device(device: Device) -> dict[str, Any]:
    """Hardware, driver, versions and date."""
    about = environment("transformers")
    about["source"] = "dry"
    if isinstance(device, CudaDevice):
        about.update(device.about())
        about["source"] = "measured"
        about["gpu_bytes"] = torch.cuda.get_device_properties(device.device).total_memory
        about["driver"] = _driver()
    return about


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    if not shown.stdout:
        return "unknown"
    return shown.stdout.splitlines()[0].strip()


def measure_all(
    models: Sequence[str],
    plan: Plan,
    device: Device,
    path: Path,
    minutes: float,
    clock: Callable[[], float],
) -> tuple[list[Row], dict[str, Any]]:
    """Model after model while there is time; the file is complete after each."""
    end = clock() + 60 * minutes
    failed: dict[str, str] = {}
    left_out: list[str] = []
    about = about_device(device)
    about["failed"] = failed
    about["left_out"] = left_out
    rows: list[Row] = []
    for name in models:
        if clock() > end - 60 * MINUTES_A_MODEL:
            left_out.append(name)
            continue
        outcome = "done"
        try:
            rows += rows_of(name, plan, device)
        except Exception as error:  # written down; it costs no other model its place
            failed[name] = f"{type(error).__name__}: {error}"
            outcome = "failed"
        minutes_left = (end - clock()) / 60
        print(f"{name}: {outcome}, {minutes_left:.1f} minutes left", flush=True)
        device.reset()
        if rows:
            save(path, rows, about)
    return rows, about


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if nothing was measured or a model failed."""
    args = _parsed(arguments)
    device: Device
    if args.dry:
        plan = DRY
        device = DryDevice()
    else:
        plan = Plan()
        device = CudaDevice()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pad_token_id.*")
        rows, about = measure_all(
            args.models.split(","), plan, device, args.output, args.minutes, time.monotonic
        )
    if rows:
        print(report(rows))
        print(f"written: {save(args.output, rows, about).name}")
    print(json.dumps(about, indent=1))
    return 0 if rows and not about["failed"] else 1


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="regressor.measure_gpu", description=description)
    models_help = "names of regressor/families.py (default: %(default)s)"
    parser.add_argument("--models", default=",".join(MODELS), help=models_help)
    parser.add_argument("--minutes", type=float, default=25.0, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    dry_help = "tiny models on the CPU, made-up counters"
    parser.add_argument("--dry", action="store_true", help=dry_help)
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.models.split(",")) - set(FAMILIES))
    if unknown:
        parser.error(f"--models names {unknown[0]!r}; there are {', '.join(sorted(FAMILIES))}")
    if args.dry and args.output == OUTPUT:
        parser.error("--dry needs an --output of its own: its figures are made up")
    return args


if __name__ == "__main__":
    raise SystemExit(main())
