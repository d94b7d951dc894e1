"""``python -m benchmarks.faults [--cases N] [--first SEED] [--seed SEED] [--save]``: see :mod:`benchmarks.faults`."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.faults.campaign import FAULTS, campaign, draws, run_case
from benchmarks.faults.case import Case
from benchmarks.record import RESULTS, save


def main(arguments: Sequence[str] | None = None) -> int:
    """Print counts; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="faults", description="Random configurations meet faults.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--seed", type=int, help="one case, by its seed (and --first of its campaign)")
    parser.add_argument("--fault", choices=FAULTS, help="with --seed: this fault instead of the campaign's")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/faults.json")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # recovering is loud, and here it is all there is
    gc.freeze()  # recovering collects garbage, too: of the case, not of all that was imported
    if given.seed is not None:
        fault = given.fault or next(fault for seed, fault in draws(given.first) if seed == given.seed)
        case = Case(given.seed, fault)
        shown = {name: value for name, value in vars(case).items() if name not in ("lengths", "rng")}
        print(shown, f"{len(case.lengths)} lengths: {case.lengths[:20]}")
        wrong = run_case(case)
        print(wrong or "nothing wrong")
        return int(bool(wrong))
    began = time.monotonic()
    found = campaign(given.cases, given.first)
    print(json.dumps({**found, "findings": len(found["findings"])}, indent=1))
    if given.save:
        print(save(RESULTS, "faults", {**found, "minutes": round((time.monotonic() - began) / 60, 1)}))
    return 1 if found["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
