"""What the campaign's files say, as tables: ``python scripts/bench.py collect [--out FOLDER]``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dynagroup.plan.report import format_table
from dynagroup.plan.work import Work

__all__ = ["collected", "fit_of"]


def collected(folder: Path) -> str:
    """One section a part; says which parts are missing, and which files came of a dry run."""
    sections = []
    for part, show in SECTIONS.items():
        path = folder / f"gpu_{part}.json"
        if not path.exists():
            sections.append(f"{part}: not measured (bash scripts/gpu_campaign.sh {part})")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        dry = ", DRY: figures mean nothing" if found.get("dry") else ""
        sections.append(
            f"{part}: {found['hardware']}, torch {found['versions']['torch']}, {found['date']}{dry}\n{show(found['figures'])}"
        )
    return "\n\n".join(sections)


def fit_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Price and crossover of measured steps, and how far off the fit is: median and largest relative error."""
    shapes = [(row["num_samples"], row["longest"], row["seconds"]) for row in rows]
    work = Work.fit(shapes)
    predicted = np.array([work.per_step + n * float(work.of_lengths(longest)) for n, longest, _ in shapes])
    seconds = np.array([s for _, _, s in shapes])
    errors = np.abs(predicted / seconds * np.median(seconds / predicted) - 1)
    return {
        "per_step": work.per_step, "crossover": work.crossover,
        "median_error": float(np.median(errors)), "largest_error": float(errors.max()),
    }  # fmt: skip


def _work(figures: dict[str, Any]) -> str:
    head = ["model", "price of a step (linear tokens)", "crossover (tokens)", "median error", "largest"]
    timed = {name: [row for row in found.get("rows", []) if "seconds" in row] for name, found in figures.items()}
    fits = {name: fit_of(rows) for name, rows in timed.items() if len(rows) >= 3}
    lines = [
        [
            name,
            f"{f['per_step']:,.0f}",
            f"{f['crossover']:,.0f}",
            f"{f['median_error']:.1%}",
            f"{f['largest_error']:.0%}",
        ]
        for name, f in fits.items()
    ]
    return format_table(head, lines)


def _memory(figures: dict[str, Any]) -> str:
    cases: dict[str, list[float]] = {}
    for row in figures["rows"]:
        if row["error"] is not None:
            cases.setdefault(row["case"], []).append(row["error"])
    lines = [[case, str(len(e)), f"{min(e):+.2%}", f"{max(e):+.2%}"] for case, e in cases.items()]
    left = ", ".join([*figures["left_out"], *figures["failed"]]) or "none"
    return format_table(["simulated over measured", "shapes", "least", "most"], lines) + f"\nleft out or failed: {left}"


def _fits(figures: dict[str, Any]) -> str:
    lines = [
        [f"{row['model']}, {row['longest']} tokens", str(row["predicted"]), str(row["true"]), f"{row['share']:.0%}"]
        for row in figures["rows"]
        if "true" in row
    ]
    return format_table(["largest batch", "predicted", "true", "share"], lines)


def _train(figures: dict[str, Any]) -> str:
    lines = []
    for case, found in figures.items():
        methods = found.get("methods", {})
        base = methods.get("fixed", {}).get("real_tokens_per_s", {}).get("median")
        for name, one in methods.items():
            speed = one["real_tokens_per_s"]
            over = f"{speed['median'] / base:.2f}x" if base else "-"
            lines.append(
                [
                    f"{case}, {name}",
                    over,
                    f"{speed['median']:,.0f}",
                    f"{one['padding']:.1%}",
                    f"{one['peak_bytes'] / 2**30:.1f}",
                ]
            )
    return format_table(["", "over fixed", "real tokens/s", "padding", "peak GiB"], lines)


def _inference(figures: dict[str, Any]) -> str:
    lines = [
        [
            name,
            f"{one['samples_per_s']:.1f}",
            str(one["batches"]),
            f"{one['padding']:.1%}",
            f"{one['peak_bytes'] / 2**30:.1f}",
        ]
        for name, one in figures["methods"].items()
    ]
    return format_table(["", "samples/s", "batches", "padding", "peak GiB"], lines)


def _oom(figures: dict[str, Any]) -> str:
    return json.dumps(figures, indent=1)


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "work": _work, "memory": _memory, "fits": _fits, "train": _train, "train_large": _train, "oom": _oom,
    "generate": _inference, "embed": _inference,
}  # fmt: skip
