"""Simulates the training set of the pretrained regressor: ``python -m regressor.generate``. About 40 minutes.

A row of ``data/simulated.parquet`` is one workload: its fields, and its phases (see phases.py), from which the memory
of any batch shape follows. Finished workloads are kept in a
JSON-lines file beside it, so that a stopped run goes on where it was.  # noqa: E501
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from dynagroup.memory.build import as_meta_model
from dynagroup.memory.program import prepare, static_bytes, trace
from dynagroup.memory.workload import Workload
from regressor.families import FAMILIES, Family, Sizes, VisionLanguage, random_sizes
from regressor.phases import MONOMIALS, TRACED_LAYERS, fit_phases, peaks, stacks

DATA = Path(__file__).parent / "data"
CHECK_SHAPES = [(3, 304, 208), (9, 1008, 48), (2, 48, 704)]


def settings(family: Family, name: str, rng: np.random.Generator, variation: int) -> list[dict[str, Any]]:
    """The modes, dtypes, attention implementations and so on to simulate one config with."""
    fused = name not in ("bloom", "gemma2", "t5", "mt5")
    autocasts = name not in ("bloom", "mixtral", "qwen3_moe")
    chosen: list[dict[str, Any]] = []
    count = {0: 3}.get(variation, 2) if family.kind in ("decoder", "encoder") else {0: 2}.get(variation, 1)
    for number in range(count):
        precision = str(rng.choice(["pure", "pure", "mixed", "full"])) if autocasts else "pure"
        dtype = "bfloat16" if precision == "pure" else "float32"
        attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager", "flash"]))
        if attention == "flash" and (not fused or precision == "full" or family.kind != "decoder"):
            attention = "sdpa"
        lora = family.kind == "decoder" and autocasts and number == 1 and variation % 2 == 1
        chosen.append({"mode": "train", "dtype": dtype, "attention": attention, "lora": lora,
                       "autocast": "bfloat16" if precision == "mixed" else None,
                       "gradient_checkpointing": bool(rng.random() < 0.4)})  # fmt: skip
    chosen = [setting for place, setting in enumerate(chosen) if setting not in chosen[:place]]
    plain = {"dtype": "bfloat16", "autocast": None, "lora": False, "gradient_checkpointing": False}
    if variation == 0 or variation % 2 or family.kind == "encoder":
        chosen.append({**plain, "mode": "forward", "attention": str(rng.choice(["sdpa", "sdpa", "eager"]))})
    if family.kind != "encoder" and (variation == 0 or variation % 2 == 0):
        tokens = int(np.exp(rng.uniform(np.log(16), np.log(1024))))
        attention = str(rng.choice(["sdpa", "sdpa", "sdpa", "eager"]))
        chosen.append({**plain, "mode": "generate", "attention": attention, "max_new_tokens": tokens})
    return chosen


def build(family: Family, sizes: Sizes, setting: dict[str, Any], workload: Workload | None) -> torch.nn.Module:
    """The meta model of these sizes, with LoRA where the setting says so."""
    config = family.build(sizes)
    if family.kind == "vision":
        parts = [as_meta_model(c, workload) for c in (config.text_config, config.vision_config)]
        vision: Any = parts[1]
        with torch.device("meta"):
            model: torch.nn.Module = VisionLanguage(config, parts[0], getattr(vision, "vision_model", vision))
        model.gradient_checkpointing_enable = parts[0].gradient_checkpointing_enable  # type: ignore[assignment]
        return model
    model = as_meta_model(config, workload)
    if not setting["lora"]:
        return model
    from peft import LoraConfig, get_peft_model

    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))  # type: ignore[arg-type]  # noqa: E501


def simulate_workload(family: Family, sizes: Sizes, setting: dict[str, Any]) -> dict[str, Any]:
    """One row of the data set."""
    known = {k: v for k, v in setting.items() if k not in ("mode", "lora") and v is not None}
    bare = Workload(mode=setting["mode"], **known)
    deep = build(family, sizes, setting, bare)
    workload = Workload.from_model(deep, setting["mode"], **known)
    layers = {index: len(stack) for index, stack in enumerate(stacks(deep))}
    shallow = prepare(build(family, replace(sizes, layers=TRACED_LAYERS), setting, bare), workload)
    two_streams = family.kind == "seq2seq" and setting["mode"] != "generate"
    phases = fit_phases(shallow, workload, two_streams=two_streams, layers=layers)
    return {
        "workload": workload.to_json(),
        "static_bytes": static_bytes(prepare(deep, workload), workload),
        "two_streams": two_streams,
        "phases": phases.tolist(),
        "layers": layers,
    }


def check(family: Family, sizes: Sizes, setting: dict[str, Any], row: dict[str, Any]) -> float:
    """Largest relative difference between the phases and traces of the whole model."""
    workload = Workload.from_json(row["workload"])
    model = prepare(build(family, sizes, setting, workload), workload)
    worst = 0.0
    for n, length, target in CHECK_SHAPES:
        longest = {"tokens": length, **({"target": target} if row["two_streams"] else {})}
        direct = trace(model, workload, n, longest).peak
        stated = peaks(
            np.array(row["phases"]), np.array([n]), np.array([length]), np.array([target * row["two_streams"]])
        )[0]
        worst = max(worst, abs(stated / direct - 1))
    return worst


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
    done = {json.loads(line)["key"] for line in log.read_text().splitlines()} if log.exists() else set()
    start = time.monotonic()
    todo = jobs(variations, seed)
    for number, (key, name, variation, sizes, setting) in enumerate(todo):
        if key in done or time.monotonic() - start > 60 * minutes:
            continue
        about = {"key": key, "family": name, "variation": variation, "sizes": asdict(sizes), "setting": setting}
        began = time.monotonic()
        try:
            row = simulate_workload(FAMILIES[name], sizes, setting)
            row["checked"] = check(FAMILIES[name], sizes, setting, row) if number % check_every == 0 else None
        except Exception as error:  # kept in the data, and listed in the report
            row = {"error": f"{type(error).__name__}: {error}"[:500]}
        row["seconds"] = round(time.monotonic() - began, 2)
        with log.open("a") as stream:
            stream.write(json.dumps({**about, **row}) + "\n")
        print(f"{number + 1}/{len(todo)} {key} {row['seconds']}s {row.get('error', '')[:160]}", flush=True)
    write_parquet(log, out)


def write_parquet(log: Path, out: Path) -> None:
    """The finished workloads as one compressed table, in a fixed order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    good = sorted((r for r in rows if "error" not in r), key=lambda r: r["key"])
    columns = {
        k: [r[k] for r in good]
        for k in ("key", "family", "variation", "workload", "static_bytes", "two_streams", "phases", "checked")
    }
    columns["sizes"] = [json.dumps(r["sizes"]) for r in good]
    columns["setting"] = [json.dumps(r["setting"]) for r in good]
    failed = {r["key"]: r["error"] for r in rows if "error" in r}
    about = {
        "monomials": json.dumps(MONOMIALS), "failed": json.dumps(failed), "torch": torch.__version__,
        "transformers": transformers.__version__, "seconds": str(round(sum(r["seconds"] for r in rows))),
    }  # fmt: skip
    pq.write_table(pa.table(columns).replace_schema_metadata(about), out, compression="zstd", compression_level=19)
    print(f"{out}: {len(good)} workloads, {len(failed)} failed, {out.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA / "simulated.parquet")
    parser.add_argument("--variations", type=int, default=5, help="random configs a family, beside the known one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then and write what there is")
    parser.add_argument(
        "--check-every", type=int, default=25, help="compare every n-th workload with traces of all its layers"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    generate(arguments.out, arguments.variations, arguments.seed, arguments.minutes, arguments.check_every)


if __name__ == "__main__":
    main()
