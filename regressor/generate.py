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
from dataclasses import asdict
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


def settings(
    family: Family, name: str, rng: np.random.Generator, variation: int
) -> list[dict[str, Any]]:
    """The modes, dtypes, attention implementations and so on to simulate one config with."""
    fused = name not in ("bloom", "gemma2")  # their only attention is eager
    chosen: list[dict[str, Any]] = []
    count = (
        {0: 3}.get(variation, 2)
        if family.kind in ("decoder", "encoder")
        else {0: 2}.get(variation, 1)
    )
    for number in range(count):
        precision = str(rng.choice(["pure", "pure", "mixed", "full"]))
        dtype = "bfloat16" if precision == "pure" else "float32"
        attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager", "flash"]))
        if attention == "flash" and (
            name in ("t5", "mt5") or precision == "full" or family.kind != "decoder"
        ):
            attention = "sdpa"
        lora = family.kind == "decoder" and number == 1 and variation % 2 == 1
        chosen.append(
            {
                "mode": "train",
                "dtype": dtype,
                "attention": attention,
                "lora": lora,
                "autocast": "bfloat16" if precision == "mixed" else None,
                "gradient_checkpointing": bool(rng.random() < 0.4),
            }
        )
    chosen = [setting for place, setting in enumerate(chosen) if setting not in chosen[:place]]
    plain = {"dtype": "bfloat16", "autocast": None, "lora": False, "gradient_checkpointing": False}
    if variation == 0 or variation % 2 or family.kind == "encoder":
        chosen.append(
            {**plain, "mode": "forward", "attention": str(rng.choice(["sdpa", "sdpa", "eager"]))}
        )
    if family.kind != "encoder" and (variation == 0 or variation % 2 == 0):
        tokens = int(np.exp(rng.uniform(np.log(16), np.log(1024))))
        attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager"]))
        chosen.append(
            {**plain, "mode": "generate", "attention": attention, "max_new_tokens": tokens}
        )
    return chosen if fused else [{**setting, "attention": "eager"} for setting in chosen]


def build(
    family: Family, sizes: Sizes, setting: dict[str, Any], workload: Workload | None
) -> torch.nn.Module:
    """The meta model of these sizes, with LoRA where the setting says so."""
    config = family.build(sizes)
    if family.kind == "vision":
        parts = [as_meta_model(c, workload) for c in (config.text_config, config.vision_config)]
        vision: Any = parts[1]
        with torch.device("meta"):
            model: torch.nn.Module = VisionLanguage(
                config, parts[0], getattr(vision, "vision_model", vision)
            )
        model.gradient_checkpointing_enable = parts[0].gradient_checkpointing_enable  # type: ignore[assignment]
        return model
    model = as_meta_model(config, workload)
    if not setting["lora"]:
        return model
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        return get_peft_model(
            model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        )  # type: ignore[arg-type]


def simulate_workload(family: Family, sizes: Sizes, setting: dict[str, Any]) -> dict[str, Any]:
    """One row of the data set."""
    known = {k: v for k, v in setting.items() if k not in ("mode", "lora") and v is not None}
    model = build(family, sizes, setting, Workload(mode=setting["mode"], **known))
    workload = Workload.from_model(model, setting["mode"], trace=False, **known)
    return {
        "workload": workload.to_json(),
        "static_bytes": static_bytes(prepare(model, workload), workload),
        "two_streams": family.kind in ("seq2seq", "speech") and setting["mode"] != "generate",
        "phases": trace_phases(model, workload).rows,
    }


def check(family: Family, sizes: Sizes, setting: dict[str, Any], row: dict[str, Any]) -> list[int]:
    """What simulating the whole model says of each of CHECK_SHAPES, bytes: an independent truth for the phases."""
    workload = Workload.from_json(row["workload"])
    model = prepare(build(family, sizes, setting, workload), workload)
    streams = [
        {"tokens": length, **({"target": target} if row["two_streams"] else {})}
        for _, length, target in CHECK_SHAPES
    ]
    return [
        trace(model, workload, n, longest).peak
        for (n, *_), longest in zip(CHECK_SHAPES, streams, strict=True)
    ]


def jobs(variations: int, seed: int) -> list[tuple[str, str, int, Sizes, dict[str, Any]]]:
    """Everything to simulate, famous sizes of all families first."""
    found = []
    for variation in range(variations + 1):
        for place, (name, family) in enumerate(FAMILIES.items()):
            rng = np.random.default_rng((seed, variation, place))
            sizes = family.known if variation == 0 else random_sizes(family, rng)
            for number, setting in enumerate(settings(family, name, rng, variation)):
                found.append((f"{name}/{variation}/{number}", name, variation, sizes, setting))
    return found


def generate(out: Path, variations: int, seed: int, minutes: float, check_every: int) -> None:
    log = out.with_suffix(".jsonl")
    done = (
        {json.loads(line)["key"] for line in log.read_text().splitlines()}
        if log.exists()
        else set()
    )
    start = time.monotonic()
    todo = jobs(variations, seed)
    for number, (key, name, variation, sizes, setting) in enumerate(todo):
        if key in done or time.monotonic() - start > 60 * minutes:
            continue
        about = {
            "key": key,
            "family": name,
            "variation": variation,
            "sizes": asdict(sizes),
            "setting": setting,
        }
        began = time.monotonic()
        try:
            row = simulate_workload(FAMILIES[name], sizes, setting)
            checks = variation < 2 and number % check_every == 0
            row["checked"] = check(FAMILIES[name], sizes, setting, row) if checks else None
        except Exception as error:  # kept in the data, and listed in the report
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        row["seconds"] = round(time.monotonic() - began, 2)
        with log.open("a") as stream:
            stream.write(json.dumps({**about, **row}) + "\n")
        print(
            f"{number + 1}/{len(todo)} {key} {row['seconds']}s {row.get('error', '')[:160]}",
            flush=True,
        )
    write_parquet(log, out)


def write_parquet(log: Path, out: Path) -> None:
    """The finished workloads as one compressed table, in a fixed order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    good = sorted((r for r in rows if "error" not in r), key=lambda r: r["key"])
    columns = {
        k: [r[k] for r in good]
        for k in (
            "key",
            "family",
            "variation",
            "workload",
            "static_bytes",
            "two_streams",
            "phases",
            "checked",
        )
    }
    columns["sizes"] = [json.dumps(r["sizes"]) for r in good]
    columns["setting"] = [json.dumps(r["setting"]) for r in good]
    failed = {r["key"]: r["error"] for r in rows if "error" in r}
    about = {
        "monomials": json.dumps(MONOMIALS),
        "failed": json.dumps(failed),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": str(round(sum(r["seconds"] for r in rows))),
    }
    pq.write_table(
        pa.table(columns).replace_schema_metadata(about),
        out,
        compression="zstd",
        compression_level=19,
    )
    print(f"{out}: {len(good)} workloads, {len(failed)} failed, {out.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA / "simulated.parquet")
    parser.add_argument(
        "--variations", type=int, default=5, help="random configs a family, beside the known one"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, default=1e9, help="stop then and write what there is"
    )
    parser.add_argument(
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
    generate(
        arguments.out,
        arguments.variations,
        arguments.seed,
        arguments.minutes,
        arguments.check_every,
    )


if __name__ == "__main__":
    main()
