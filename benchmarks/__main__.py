"""``python scripts/bench.py COMMAND [PART...]``: one command for every figure.

Each part prints what it found and writes ``benchmarks/results/<name>.json`` with hardware, versions and date; rivals run in
the same process, in turns, where they are installed (extra ``bench``), and their absence is said. The parts of ``gpu`` need one
(``--device cuda``), end within ``--minutes`` each and save every row as it comes; ``--dry`` tries them on the CPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.record import RESULTS, save

COMMANDS: dict[str, dict[str, tuple[str, str, str]]] = {
    "plan": {
        "speed": ("plan", "speed", "plan_speed"),
        "rival": ("plan", "rival", "plan_rival"),
        "growth": ("plan", "growth", "growth"),
        "padding": ("predicted", "padding", "plan_padding"),
        "cut": ("predicted", "cuts", "cut"),
        "shards": ("predicted", "shards", "shards"),
        "pack": ("predicted", "packs", "pack"),
        "streams": ("predicted", "streams", "streams"),
    },
    "ablation": {"ablation": ("ablation", "ablation", "ablation")},
    "loader": {
        "speed": ("loader", "speed", "loader_speed"),
        "fill": ("loader", "fill", "loader_fill"),
        "overhead": ("loader", "overhead", "loader_overhead"),
        "balance": ("loader", "balance", "loader_balance"),
    },
    "ranks": {"windows": ("ranks", "many_ranks", "loader_ranks"), "train": ("ranks", "train", "loader_train")},
    "train": {
        "rivals": ("train", "rivals", "train_rivals"),
        "trainer": ("trainer", "adapter", "trainer"),
        "quality": ("train", "quality", "quality"),
        "objective": ("train", "objective", "objective"),
    },
    "generate": {
        "wrapper": ("recovery", "wrapper", "oom_wrapper"),
        "work": ("recovery", "work", "oom_work"),
        "update": ("recovery", "update", "oom_update"),
        "rivals": ("infer", "generate", "generate_rivals"),
    },
    "embed": {"texts": ("infer", "embed", "embed")},
    "gpu": {
        "work": ("price", "run", "gpu_work"),
        "memory": ("memory", "measured", "gpu_memory"),
        "fits": ("memory", "fits", "gpu_fits"),
        "train": ("train", "run", "gpu_train"),
        "train_large": ("train", "large", "gpu_train_large"),
        "oom": ("recovery", "run", "gpu_oom"),
        "generate": ("infer", "generate", "gpu_generate"),
        "embed": ("infer", "embed_random", "gpu_embed"),
    },
}
"""Command -> part -> (module, function, name of its result). Parts of ``gpu`` take a machine and yield figures as they come."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of one command, all of them by default; 1 if one failed."""
    given = _parsed(arguments)
    if given.command == "collect":
        print(collected(given.out))
        return 0
    logging.disable(logging.WARNING)
    failed = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for command, part in _chosen(given):
            machine = partial(Machine, given.device, given.dry, given.minutes) if command == "gpu" else None
            if not _run(*COMMANDS[command][part], given.out, machine):
                failed.append(part)
    print(f"done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "Every figure, rivals in the same run; `all` is what needs no GPU, `collect` shows what a GPU gave."
    parser = argparse.ArgumentParser(prog="bench.py", description=about)
    parser.add_argument("command", choices=[*COMMANDS, "all", "collect"])
    parser.add_argument("parts", nargs="*", help="; ".join(f"{name}: {', '.join(COMMANDS[name])}" for name in COMMANDS))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what the parts of `gpu` run on")
    parser.add_argument("--minutes", type=float, default=8.5, help="most minutes of a part of `gpu` (default: 8.5)")
    parser.add_argument(
        "--dry", action="store_true", help="parts of `gpu`, tiny, on the CPU; needs an --out of its own"
    )
    given = parser.parse_args(arguments)
    given.device = "cpu" if given.dry else given.device
    unknown = sorted(set(given.parts) - {part for _, part in _chosen(given, every=True)})
    if unknown:
        parser.error(f"{given.command} has no part {unknown[0]!r}; it has {', '.join(COMMANDS.get(given.command, {}))}")
    if given.dry and given.out == RESULTS:
        parser.error("--dry needs an --out of its own: its figures mean nothing")
    if given.command == "gpu" and given.device == "cpu" and not given.dry:
        parser.error("gpu needs --device cuda, or --dry and an --out to try it on the CPU")
    return given


def _chosen(given: argparse.Namespace, every: bool = False) -> list[tuple[str, str]]:
    names = [name for name in COMMANDS if name != "gpu"] if given.command == "all" else [given.command]
    parts = [(name, part) for name in names for part in COMMANDS.get(name, {})]
    return [(name, part) for name, part in parts if every or not given.parts or part in given.parts]


def _run(module: str, function: str, name: str, folder: Path, machine: Callable[[], Machine] | None) -> bool:
    """Whether it came to its end; what a part on a machine had found is saved either way."""
    found = import_module(f"benchmarks.{module}")
    if machine is None:
        return _save(name, folder, getattr(found, function)())
    made, whole = machine(), True
    try:
        for figures in getattr(found, function)(made):
            save(folder, name, figures, dry=made.dry)
    except Exception:  # the other parts still run; what was saved stays
        traceback.print_exc()
        whole = False
    made.free()  # outside the except block: its traceback kept models alive
    print(f"   {name}.json, {made.minutes * 60 - made.left_s():.0f} s", flush=True)
    return whole


def _save(name: str, folder: Path, figures: Mapping[str, Any]) -> bool:
    assert not any(isinstance(value, float) and math.isnan(value) for value in figures.values()), figures
    if "skipped" in figures:  # what was measured elsewhere stays
        print(f"{name}: {figures['skipped']}", flush=True)
        return True
    print(name, json.dumps(figures, indent=1), sep="\n", flush=True)
    print("written:", save(folder, name, figures).name)
    return True


def collected(folder: Path, parts: Iterable[str] = COMMANDS["gpu"]) -> str:
    """What a GPU gave, one section a part; says which parts are missing, and which files came of a dry run."""
    sections = []
    for part in parts:
        module, _, name = COMMANDS["gpu"][part]
        path = folder / f"{name}.json"
        if not path.exists():
            sections.append(f"{part}: not measured (bash scripts/gpu_campaign.sh {part})")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        dry = ", DRY: figures mean nothing" if found.get("dry") else ""
        shown = getattr(import_module(f"benchmarks.{module}"), "shown", lambda figures: [json.dumps(figures, indent=1)])
        about = f"{part}: {found['hardware']}, torch {found['versions']['torch']}, {found['date']}{dry}"
        sections.append("\n".join([about, *shown(found["figures"])]))
    return "\n\n".join(sections)


if __name__ == "__main__":
    raise SystemExit(main())
