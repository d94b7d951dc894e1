"""Is the answer to "what fits?" the largest batch that a simulation of the whole model still fits?

For nine architectures, three modes, adapters and checkpointing, at lengths from 128 to 32,768: the batch that
``MemoryBudget.from_model`` calls the largest is simulated with every layer, and so is one of 2 % more samples. The first
must take at most 2 % more than the limit, the second must not fit. Writes
``benchmarks/results/fits.json``; some minutes on one core.

    python -m regressor.check_fits
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from dynagroup.budget.memory import MemoryBudget
from dynagroup.memory import simulate
from dynagroup.memory.trace.model import as_meta_model
from regressor.configs import config_of, names_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "fits.json"
LENGTHS = (128, 1024, 8192, 32768)
LIMIT = 80 * 10**9
HEADROOM = 0.9
TOLERANCE = 0.02

# How a model is run; "pad" rounds lengths up to 16, as a collate function with that setting does.
SETTINGS: dict[str, dict[str, Any]] = {
    "train": {"mode": "train"},
    "train, padded to 16": {"mode": "train", "pad_to_multiple_of": 16},
    "train, flash": {"mode": "train", "attention": "flash"},
    "train, checkpointing": {"mode": "train", "gradient_checkpointing": True},
    "train, LoRA, checkpointing": {"mode": "train", "lora": 16, "gradient_checkpointing": True},
    "train, packed, flash": {"mode": "train", "layout": "packed", "attention": "flash"},
    "forward": {"mode": "forward"},
    "generate": {"mode": "generate", "max_new_tokens": 256},
}


def cases(name: str, setting: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a length: the answer, and what the whole model takes with it and with 2 % more."""
    config = config_of("fits", name)
    lengths = list(LENGTHS)
    if "pad_to_multiple_of" not in setting:
        lengths = [length - 1 for length in LENGTHS]  # most lengths are no multiple of 16
    started = time.perf_counter()
    budget: Any = MemoryBudget.from_model(
        config, LIMIT, headroom=HEADROOM, dtype="bfloat16", **setting
    )
    traced_s = time.perf_counter() - started
    model = as_meta_model(
        config,
        dtype="bfloat16",
        attention=setting.get("attention"),
        lora=setting.get("lora"),
    )
    room = HEADROOM * LIMIT
    for length, count in zip(lengths, budget.most_samples(lengths).tolist(), strict=True):
        more = int(count * (1 + TOLERANCE)) + 1
        shapes = [(max(count, 1), length), (more, length)]
        first, second = simulate(model, budget.model.workload, shapes).rows
        assert first.peak_bytes is not None
        assert second.peak_bytes is not None
        largest_fits = count == 0 or first.peak_bytes <= room * (1 + TOLERANCE)
        yield {
            "length": length,
            "samples": count,
            "traced": True,
            "traced_s": round(traced_s, 1),
            "ok": largest_fits and second.peak_bytes > room,
            "taken": round(first.peak_bytes / room, 4),
            "taken_by_more": round(second.peak_bytes / room, 4),
        }


def is_possible(name: str, label: str) -> bool:
    """Two stacks are not packed; BERT decodes nothing."""
    if "packed" in label:
        return name not in ("t5", "bart")
    return label != "generate" or name != "bert"


def rows_of(name: str, label: str) -> list[dict[str, Any]]:
    try:
        rows = list(cases(name, SETTINGS[label]))
    except Exception as error:  # a row of the report, not the end of it
        rows = [{"error": f"{type(error).__name__}: {error}"[:200], "ok": False}]
    wrong = [row for row in rows if not row["ok"]]
    num_right = len(rows) - len(wrong)
    print(name, label, f"{num_right} of {len(rows)}", *wrong, flush=True)
    return [{"model": name, "setting": label, **row} for row in rows]


def main() -> None:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", nargs="+", default=names_of("fits"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    about = {
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "hardware": "2-core CPU",
        "date": str(datetime.date.today()),
        "limit_bytes": LIMIT,
    }
    rows = []
    for name, label in product(args.models, args.settings):
        if is_possible(name, label):
            rows += rows_of(name, label)
            text = json.dumps({"about": about, "rows": rows}, indent=1)
            args.output.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
