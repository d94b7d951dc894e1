"""``python scripts/bench.py COMMAND [PART...]``: one command for every figure.

Each part is handed a machine (``--device``) and writes ``benchmarks/results/<name>.json`` with hardware, versions and date;
rivals run in the same process, in turns, where they are installed. The parts of ``gpu`` need one, end within ``--minutes`` each
and save every row as it comes; ``--dry`` tries them on the CPU.
"""

import argparse
import json
import logging
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.machine import Machine
from benchmarks.record import RESULTS, save

COMMANDS: dict[str, dict[str, tuple[str, str, str]]] = {
    "plan": {
        "speed": ("plan", "speed", "plan_speed"),
        "growth": ("plan", "growth", "growth"),
        "scale": ("plan", "scale", "scale"),
        "padding": ("predicted", "padding", "plan_padding"),
        "strata": ("predicted", "strata", "plan_strata"),
        "updates": ("plan", "updates", "plan_updates"),
        "each": ("plan", "each", "plan_each"),
        "ranks": ("plan", "of_ranks", "plan_ranks"),
        "exchange": ("plan", "exchange", "plan_exchange"),
        "pack": ("predicted", "packs", "pack"),
        "shards": ("predicted", "shards", "shards"),
    },
    "shapes": {
        "few": ("shapes", "few", "shapes"),
        "compiled": ("shapes", "compiled", "compiled"),
    },
    "kinds": {"rows": ("kinds", "rows", "kinds")},
    "check": {
        "architectures": ("check", "architectures", "check"),
        "logits": ("memory", "logits", "logits"),
    },
    "ablation": {"ablation": ("ablation", "ablation", "ablation")},
    "loader": {
        "speed": ("loader", "speed", "loader_speed"),
        "same": ("loader", "same_batches", "loader_same"),
        "cost": ("loader", "own_cost", "loader_cost"),
    },
    "ranks": {
        "windows": ("ranks", "windows", "loader_ranks"),
        "train": ("ranks", "train", "loader_train"),
    },
    "train": {
        "rivals": ("train", "rivals", "train_rivals"),
        "small": ("train", "small", "train_small"),
        "packed": ("train", "packed", "train_packed"),
        "quality": ("quality", "run", "quality"),
        "trainer": ("trainer", "adapter", "trainer"),
        "recipe": ("trainer", "recipe", "trainer_recipe"),
    },
    "generate": {
        "work": ("recovery", "work", "oom_work"),
        "update": ("recovery", "update", "oom_update"),
        "rivals": ("infer", "generate", "generate_rivals"),
    },
    "embed": {"texts": ("infer", "embed", "embed")},
    "gpu": {  # the most valuable first
        "launching": ("launching", "run", "gpu_launching"),
        "train_small": ("device_train", "small_updates", "gpu_train_small"),
        "train": ("device_train", "medium", "gpu_train"),
        "steps": ("steps", "run", "gpu_steps"),
        "train_large": ("device_train", "large", "gpu_train_large"),
        "generate": ("infer", "generate", "gpu_generate"),
        "embed": ("infer", "embed", "gpu_embed"),
        "memory": ("memory", "measured", "gpu_memory"),
        "packed": ("memory", "packed", "gpu_packed"),
        "memory_kinds": ("memory_kinds", "measured", "gpu_memory_kinds"),
        "fits": ("memory", "fits", "gpu_fits"),
        "work": ("price", "run", "gpu_work"),
        "oom": ("recovery", "run", "gpu_oom"),
    },
}
"""Command -> part -> (module, function, name of its result). A function takes a machine, and returns or yields its figures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts of one command, all of them by default; 1 if one failed."""
    given = _parsed(arguments)
    if given.command == "collect":
        print(collected(given.out))
        return 0
    if given.command == "pages":
        import_module("benchmarks.pages").write()
        return 0
    if given.command == "all":
        failed = _failed_of_all(given)
    else:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        parts = given.parts or COMMANDS[given.command]
        failed = [part for part in parts if not _run(given, part)]
    print(f"done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _failed_of_all(given: argparse.Namespace) -> list[str]:
    """Runs every part that needs no GPU and is not to be skipped; returns those that failed."""
    failed = []
    for name, words in everything(given.out).items():
        if name not in given.skip and not _ran(name, words):
            failed.append(name)
    return failed


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "`all`: every figure that needs no GPU; `collect` shows what a GPU gave; `pages` writes figures into README and docs."
    parser = argparse.ArgumentParser(prog="bench.py", description=about)
    parser.add_argument("command", choices=[*COMMANDS, "all", "collect", "pages"])
    parts_of_commands = [f"{name}: {', '.join(parts)}" for name, parts in COMMANDS.items()]
    parser.add_argument("parts", nargs="*", help="; ".join(parts_of_commands))
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="folder of the results (default: benchmarks/results)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="most minutes of a part of `gpu` (default: 8.5)"
    )
    parser.add_argument(
        "--dry", action="store_true", help="parts of `gpu`, tiny, on the CPU; needs its own --out"
    )
    parser.add_argument(
        "--skip", nargs="*", default=[], help='with `all`: such as "plan growth" "faults"'
    )
    given = parser.parse_intermixed_args(arguments)
    if given.dry:
        given.device = "cpu"
    _check_names(parser, given)
    if given.dry and given.out == RESULTS:
        parser.error("--dry needs an --out of its own: its figures mean nothing")
    is_of_gpu = given.device == "cuda" or given.dry
    if (given.command == "gpu") != is_of_gpu:
        parser.error(
            "gpu, and nothing else, needs --device cuda, or --dry and an --out to try it on the CPU"
        )
    return given


def _check_names(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Each part must be one of the command's, each name to skip one of `all`."""
    every_part = everything(given.out)
    parts = COMMANDS.get(given.command, {})
    unknown = sorted(set(given.parts) - set(parts))
    if not unknown:
        unknown = sorted(set(given.skip) - set(every_part))
    if unknown:
        names = ", ".join(parts or every_part)
        parser.error(f"{given.command} has no part {unknown[0]!r}; it has {names}")


def _run(given: argparse.Namespace, part: str) -> bool:
    """Whether it came to its end; what it had found is saved either way."""
    module, function, name = COMMANDS[given.command][part]
    machine = Machine(given.device, given.dry, given.minutes)
    ended = True
    try:
        measure = getattr(import_module(f"benchmarks.{module}"), function)
        results = measure(machine)
        if not isinstance(results, Iterator):
            results = [results]
        for figures in results:
            save(given.out, name, figures, dry=given.dry)
    except Exception:  # the other parts still run
        traceback.print_exc()
        ended = False
    machine.free()  # outside the except block: its traceback kept models alive
    print(f"   {name}.json, {machine.minutes * 60 - machine.left_s():.0f} s", flush=True)
    return ended


def everything(out: Path) -> dict[str, list[str]]:
    """What needs no GPU: name -> what follows ``python -m``."""
    words = {}
    for command, parts in COMMANDS.items():
        if command == "gpu":
            continue
        for part in parts:
            words[f"{command} {part}"] = ["benchmarks", command, part, "--out", str(out.resolve())]
    words["demo"] = ["scripts.doc_pictures", "demo"]
    words["faults"] = ["benchmarks.faults", "--save"]
    return words


def _ran(name: str, words: list[str]) -> bool:
    """In a process of its own: one that fails, or changes its process, costs the others nothing."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *words], cwd=RESULTS.parents[1])
    minutes = (time.monotonic() - began) / 60
    has_failed = done.returncode != 0
    outcome = "FAILED" if has_failed else "done"
    print(f"{name}: {outcome}, {minutes:.1f} minutes", flush=True)
    return not has_failed


def collected(folder: Path) -> str:
    """What a GPU gave, one section a part; says which parts are missing, and which files came of a dry run."""
    sections = []
    for part, (module, _, name) in COMMANDS["gpu"].items():
        path = folder / f"{name}.json"
        if not path.exists():
            sections.append(f"{part}: not measured (bash scripts/gpu_campaign.sh {part})")
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        dry = ", DRY: figures mean nothing" if found.get("dry") else ""
        shown = getattr(import_module(f"benchmarks.{module}"), "shown", methods_of)
        about = (
            f"{part}: {found['hardware']}, torch {found['versions']['torch']}, {found['date']}{dry}"
        )
        sections.append("\n".join([about, *shown(found["figures"])]))
    return "\n\n".join(sections)


def methods_of(figures: dict[str, Any]) -> list[str]:
    """One line a case and method: its numbers."""
    cases = {"": figures} if "methods" in figures else figures
    lines = []
    for case, found in cases.items():
        if not isinstance(found, dict):
            continue
        for name, one in found.get("methods", {}).items():
            lines.append(f"{case} {name}: {', '.join(_numbers(one))}")
    return lines or [json.dumps(figures)]


def _numbers(one: dict[str, Any]) -> list[str]:
    numbers = []
    for key, value in one.items():
        if isinstance(value, (int, float)):
            numbers.append(f"{key} {value:.4g}")
    return numbers


if __name__ == "__main__":
    raise SystemExit(main())
