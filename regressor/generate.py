"""Simulates the training set of the pretrained regressor: ``python -m regressor.generate``. About half
an hour.

A row of ``data/simulated.parquet`` is one workload: its fields, and its phases (see
dynagroup/memory/trace/polynomials.py), from which the memory of any batch shape follows. Finished
workloads are kept in a JSON-lines file beside it, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dynagroup.memory.phases import MONOMIALS
from dynagroup.memory.trace.model import as_meta_model
from dynagroup.memory.trace.polynomials import trace_phases
from dynagroup.memory.trace.program import prepare, static_bytes, trace
from dynagroup.memory.workload import Workload
from dynagroup.shapes import TARGET, TOKENS
from regressor.families import FAMILIES, Family, Sizes, VisionLanguage, random_sizes

DATA = Path(__file__).parent / "data"
# Number of samples, tokens, target tokens. No length is one that was traced, and few are multiples of anything.
CHECK_SHAPES = [
    (1, 4001, 1203),
    (4, 1027, 771),
    (9, 997, 48),
    (16, 250, 101),
    (31, 131, 64),
    (64, 61, 40),
]

COLUMNS = (
    "key",
    "family",
    "variation",
    "workload",
    "static_bytes",
    "two_streams",
    "phases",
    "checked",
)
EAGER = ("bloom", "gemma2")  # their only attention is eager
PLAIN = {"dtype": "bfloat16", "autocast": None, "lora": False, "gradient_checkpointing": False}


def settings(
    family: Family, name: str, rng: np.random.Generator, variation: int
) -> list[dict[str, Any]]:
    """The modes, dtypes, attention implementations and so on to simulate one config with."""
    num_trained = 2 if family.kind in ("decoder", "encoder") else 1
    if variation == 0:
        num_trained += 1
    chosen: list[dict[str, Any]] = []
    for number in range(num_trained):
        setting = _training(family, name, rng)
        setting["lora"] = family.kind == "decoder" and number == 1 and variation % 2 == 1
        if setting not in chosen:
            chosen.append(setting)
    if variation == 0 or variation % 2 == 1 or family.kind == "encoder":
        attention = str(rng.choice(["sdpa", "sdpa", "eager"]))
        chosen.append({**PLAIN, "mode": "forward", "attention": attention})
    if family.kind != "encoder" and variation % 2 == 0:
        tokens = int(np.exp(rng.uniform(np.log(16), np.log(1024))))
        attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager"]))
        chosen.append(
            {**PLAIN, "mode": "generate", "attention": attention, "max_new_tokens": tokens}
        )
    if name in EAGER:
        for setting in chosen:
            setting["attention"] = "eager"
    return chosen


def _training(family: Family, name: str, rng: np.random.Generator) -> dict[str, Any]:
    precision = str(rng.choice(["pure", "pure", "mixed", "full"]))
    attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager", "flash"]))
    has_flash = family.kind == "decoder" and precision != "full" and name not in ("t5", "mt5")
    if attention == "flash" and not has_flash:
        attention = "sdpa"
    return {
        "mode": "train",
        "dtype": "bfloat16" if precision == "pure" else "float32",
        "attention": attention,
        "lora": False,
        "autocast": "bfloat16" if precision == "mixed" else None,
        "gradient_checkpointing": bool(rng.random() < 0.4),
    }


def build(
    family: Family, sizes: Sizes, setting: Mapping[str, Any], workload: Workload
) -> torch.nn.Module:
    """The meta model of these sizes, with LoRA where the setting says so."""
    config = family.build(sizes)
    if family.kind == "vision":
        return _vision_language(config, workload)
    model = as_meta_model(config, dtype=workload.dtype, attention=workload.attention)
    if not setting["lora"]:
        return model
    import peft

    lora = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.device("meta"):
        return peft.get_peft_model(model, lora)


def _vision_language(config: Any, workload: Workload) -> torch.nn.Module:
    dtype = workload.dtype
    text = as_meta_model(config.text_config, dtype=dtype, attention=workload.attention)
    vision = as_meta_model(config.vision_config, dtype=dtype, attention=workload.attention)
    with torch.device("meta"):
        model: Any = VisionLanguage(config, text, getattr(vision, "vision_model", vision))
    model.gradient_checkpointing_enable = text.gradient_checkpointing_enable
    return model


def simulate_workload(family: Family, sizes: Sizes, setting: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the data set."""
    mode = setting["mode"]
    known = {name: value for name, value in setting.items() if value is not None}
    del known["mode"]
    del known["lora"]
    model = build(family, sizes, setting, Workload(mode=mode, **known))
    workload = Workload.from_model(model, mode, trace=False, **known)
    return {
        "workload": workload.to_json(),
        "static_bytes": static_bytes(model, workload),
        "two_streams": family.kind in ("seq2seq", "speech") and mode != "generate",
        "phases": trace_phases(model, workload).rows,
    }


def check(
    family: Family, sizes: Sizes, setting: Mapping[str, Any], row: Mapping[str, Any]
) -> list[int]:
    """What simulating the whole model says of each of CHECK_SHAPES, bytes: an independent truth for the phases."""
    workload = Workload.from_json(row["workload"])
    model = prepare(build(family, sizes, setting, workload), workload)
    peaks = []
    for num_samples, tokens, target in CHECK_SHAPES:
        longest = {TOKENS: tokens}
        if row["two_streams"]:
            longest[TARGET] = target
        peaks.append(trace(model, workload, num_samples, longest).peak)
    return peaks


@dataclass(frozen=True)
class Job:
    """One workload to simulate."""

    key: str
    family: str
    variation: int
    sizes: Sizes
    setting: Mapping[str, Any]


def jobs(variations: int, seed: int) -> list[Job]:
    """Everything to simulate, famous sizes of all families first."""
    found = []
    for variation in range(variations + 1):
        for place, (name, family) in enumerate(FAMILIES.items()):
            rng = np.random.default_rng((seed, variation, place))
            sizes = family.known if variation == 0 else random_sizes(family, rng)
            for number, setting in enumerate(settings(family, name, rng, variation)):
                key = f"{name}/{variation}/{number}"
                found.append(Job(key, name, variation, sizes, setting))
    return found


def generate(arguments: argparse.Namespace) -> None:
    log = arguments.out.with_suffix(".jsonl")
    done = set()
    if log.exists():
        done = {json.loads(line)["key"] for line in log.read_text().splitlines()}
    start = time.monotonic()
    todo = jobs(arguments.variations, arguments.seed)
    for number, job in enumerate(todo):
        if job.key in done or time.monotonic() - start > 60 * arguments.minutes:
            continue
        is_checked = job.variation < 2 and number % arguments.check_every == 0
        row = _row_of(job, is_checked)
        with log.open("a") as stream:
            stream.write(json.dumps({**asdict(job), **row}) + "\n")
        error = row.get("error", "")[:160]
        place = f"{number + 1}/{len(todo)}"
        print(f"{place} {job.key} {row['seconds']}s {error}", flush=True)
    write_parquet(log, arguments.out)


def _row_of(job: Job, is_checked: bool) -> dict[str, Any]:
    began = time.monotonic()
    family = FAMILIES[job.family]
    row: dict[str, Any]
    try:
        row = simulate_workload(family, job.sizes, job.setting)
        row["checked"] = check(family, job.sizes, job.setting, row) if is_checked else None
    except Exception as error:  # kept in the data, and listed in the report
        row = {"error": f"{type(error).__name__}: {error}"[:500]}
    row["seconds"] = round(time.monotonic() - began, 2)
    return row


def write_parquet(log: Path, out: Path) -> None:
    """The finished workloads as one compressed table, in a fixed order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    complete = sorted((row for row in rows if "error" not in row), key=lambda row: row["key"])
    columns = {name: [row[name] for row in complete] for name in COLUMNS}
    for name in ("sizes", "setting"):
        columns[name] = [json.dumps(row[name]) for row in complete]
    failed = {row["key"]: row["error"] for row in rows if "error" in row}
    about = {
        "monomials": json.dumps(MONOMIALS),
        "failed": json.dumps(failed),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": str(round(sum(row["seconds"] for row in rows))),
    }
    table = pa.table(columns).replace_schema_metadata(about)
    pq.write_table(table, out, compression="zstd", compression_level=19)
    size = out.stat().st_size / 1e6
    print(f"{out}: {len(complete)} workloads, {len(failed)} failed, {size:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=DATA / "simulated.parquet")
    add("--variations", type=int, default=5, help="random configs a family, beside the known one")
    add("--seed", type=int, default=0)
    add("--minutes", type=float, default=1e9, help="stop then and write what there is")
    add(
        "--check-every",
        type=int,
        default=5,
        help="simulate every n-th workload of the first two configs of a family directly, too",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    generate(arguments)


if __name__ == "__main__":
    main()
