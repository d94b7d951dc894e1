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
        "pack": ("predicted", "packs", "pack"),
        "shards": ("predicted", "shards", "shards"),
    },
    "shapes": {
        "few": ("shapes", "few", "shapes"),
        "strata": ("shapes", "strata", "shapes_strata"),
        "compiled": ("shapes", "compiled", "compiled"),
    },
    "kinds": {
        "rows": ("kinds", "rows", "kinds"),
        "planning": ("kinds", "planning", "kinds_planning"),
    },
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
    "gpu": {
        "work": ("price", "run", "gpu_work"),
        "steps": ("steps", "run", "gpu_steps"),
        "memory": ("memory", "measured", "gpu_memory"),
        "packed": ("memory", "packed", "gpu_packed"),
        "fits": ("memory", "fits", "gpu_fits"),
        "train": ("train", "rivals", "gpu_train"),
        "train_large": ("train", "large", "gpu_train_large"),
        "oom": ("recovery", "run", "gpu_oom"),
        "generate": ("infer", "generate", "gpu_generate"),
        "embed": ("infer", "embed", "gpu_embed"),
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
        wanted = {
            name: words for name, words in everything(given.out).items() if name not in given.skip
        }
        failed = [name for name, words in wanted.items() if not _ran(name, words)]
    else:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        failed = [part for part in given.parts or COMMANDS[given.command] if not _run(given, part)]
    print(f"done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    about = "`all`: every figure that needs no GPU; `collect` shows what a GPU gave; `pages` writes figures into README and docs."
    parser = argparse.ArgumentParser(prog="bench.py", description=about)
    parser.add_argument("command", choices=[*COMMANDS, "all", "collect", "pages"])
    parser.add_argument(
        "parts",
        nargs="*",
        help="; ".join(f"{name}: {', '.join(COMMANDS[name])}" for name in COMMANDS),
    )
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
    given = parser.parse_args(arguments)
    given.device = "cpu" if given.dry else given.device
    known = COMMANDS.get(given.command, {})
    if unknown := sorted(set(given.parts) - set(known)) or sorted(
        set(given.skip) - set(everything(given.out))
    ):
        parser.error(
            f"{given.command} has no part {unknown[0]!r}; it has {', '.join(known or everything(given.out))}"
        )
    if given.dry and given.out == RESULTS:
        parser.error("--dry needs an --out of its own: its figures mean nothing")
    if (given.command == "gpu") != (given.device == "cuda" or given.dry):
        parser.error(
            "gpu, and nothing else, needs --device cuda, or --dry and an --out to try it on the CPU"
        )
    return given


def _run(given: argparse.Namespace, part: str) -> bool:
    """Whether it came to its end; what it had found is saved either way."""
    module, function, name = COMMANDS[given.command][part]
    machine, whole = Machine(given.device, given.dry, given.minutes), True
    try:
        found = getattr(import_module(f"benchmarks.{module}"), function)(machine)
        for figures in found if isinstance(found, Iterator) else [found]:
            save(given.out, name, figures, dry=given.dry)
    except Exception:  # the other parts still run
        traceback.print_exc()
        whole = False
    machine.free()  # outside the except block: its traceback kept models alive
    print(f"   {name}.json, {machine.minutes * 60 - machine.left_s():.0f} s", flush=True)
    return whole


def everything(out: Path) -> dict[str, list[str]]:
    """What needs no GPU: name -> what follows ``python -m``."""
    parts = [
        (command, part) for command in COMMANDS if command != "gpu" for part in COMMANDS[command]
    ]
    found = {
        f"{command} {part}": ["benchmarks", command, part, "--out", str(out.resolve())]
        for command, part in parts
    }
    found["demo"] = ["scripts.doc_pictures", "demo"]
    return {**found, "faults": ["benchmarks.faults", "--save"]}


def _ran(name: str, words: list[str]) -> bool:
    """In a process of its own: one that fails, or changes its process, costs the others nothing."""
    began = time.monotonic()
    failed = subprocess.run([sys.executable, "-m", *words], cwd=RESULTS.parents[1]).returncode
    print(
        f"{name}: {'FAILED' if failed else 'done'}, {(time.monotonic() - began) / 60:.1f} minutes",
        flush=True,
    )
    return not failed


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
    lines = [json.dumps(figures)]
    for case, found in ({"": figures} if "methods" in figures else figures).items():
        for name, one in found.get("methods", {}).items() if isinstance(found, dict) else ():
            numbers = (
                f"{key} {value:.4g}"
                for key, value in one.items()
                if isinstance(value, (int, float))
            )
            lines.append(f"{case} {name}: {', '.join(numbers)}")
    return lines[1:] or lines


if __name__ == "__main__":
    raise SystemExit(main())
