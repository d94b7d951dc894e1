"""``python -m benchmarks.gpu PART... [--out FOLDER] [--minutes M] [--dry]``: see ``scripts/gpu_campaign.sh``."""

from __future__ import annotations

import argparse
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine
from benchmarks.record import RESULTS, save

RIVALS = ("dynabatch", "odb", "lhotse")
PARTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "work": ("benchmarks.gpu.work", "run", ()),
    "memory": ("benchmarks.gpu.memory", "run", ()),
    "fits": ("benchmarks.gpu.fits", "run", ()),
    "train": ("benchmarks.gpu.train", "run", RIVALS),
    "train_large": ("benchmarks.gpu.train", "large", ("peft", *RIVALS)),
    "oom": ("benchmarks.gpu.oom", "run", ()),
    "generate": ("benchmarks.gpu.inference", "generate", ("dynabatch",)),
    "embed": ("benchmarks.gpu.inference", "embed", ("dynabatch",)),
}
"""Part -> (module, function, packages that it uses where they are installed)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts one after another; 1 if one of them failed. A part that is stopped keeps what it had saved."""
    parser = argparse.ArgumentParser(prog="gpu_campaign.sh", description="Measurements that need a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results (default: benchmarks/results)")
    parser.add_argument("--minutes", type=float, default=8.5, help="most minutes of a part (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="tiny models on the CPU; needs an --out of its own")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if given.dry and given.out == RESULTS:
        parser.error("--dry needs an --out of its own: its figures mean nothing")
    failed = [part for part in given.parts or PARTS if not _run(part, given)]
    print(f"done; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _run(part: str, given: argparse.Namespace) -> bool:
    module, function, packages = PARTS[part]
    missing = [name for name in packages if find_spec(name) is None]
    print(
        f"== {part}: needs torch and transformers; {'goes without ' + ', '.join(missing) if missing else 'all there'}"
    )
    machine, failed = Machine(given.dry, given.minutes), False
    name = f"gpu_{part}"
    try:
        begin: Callable[[Machine], Iterator[dict[str, Any]]] = getattr(import_module(module), function)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*pad_token_id.*")
            for figures in begin(machine):
                save(given.out, name, figures, "transformers", *packages, dry=given.dry, without=missing)
    except Exception:  # the other parts still run; what was saved stays
        traceback.print_exc()
        failed = True
    machine.free()  # outside the except block: its traceback kept models alive
    if failed:
        return False
    print(f"   {name}.json, {given.minutes * 60 - machine.left_s():.0f} s")
    return True


if __name__ == "__main__":
    raise SystemExit(main())
