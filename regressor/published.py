"""Simulated against real GPUs: peaks that others published, and 7,352 generation batches that others measured.

Writes ``benchmarks/results/published.json``, from which ``python -m regressor.report`` makes its section. A minute on one core.

    python -m regressor.published
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import transformers as hf
import xgboost

from dynagroup.memory import (
    Measurement,
    Measurements,
    MemoryRegressor,
    ProfiledMemory,
    TracedMemory,
)
from dynagroup.shapes import BatchShape

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "published.json"
QUANTILE, FOLDS = 0.98, 10
KNOWN, FEWEST_OF_A_RUN = 12, 60
FEWEST = 4  # rows a shape, to speak of its upper envelope

LLAMA2 = {"vocab_size": 32000, "max_position_embeddings": 4096}


def _adapters(names: list[str]) -> Any:
    import peft

    return peft.LoraConfig(r=8, target_modules=names)


# Of each model: its config, and how the source ran it. LitGPT's GELU is the fused one, not `transformers`' "gelu_new".
MODELS: dict[str, Any] = {
    "phi-1.5": lambda: (
        hf.PhiConfig(
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=32,
            intermediate_size=8192,
            vocab_size=51200,
            max_position_embeddings=2048,
            hidden_act="gelu_pytorch_tanh",
        ),
        {"dtype": "bfloat16", "attention": "flash", "lora": _adapters(["q_proj", "v_proj"])},
    ),
    "llama-2-7b": lambda: (
        hf.LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            intermediate_size=11008,
            **LLAMA2,
        ),
        {"dtype": "bfloat16", "attention": "flash", "lora": _adapters(["q_proj", "v_proj"])},
    ),
    "llama-2-13b": lambda: (
        hf.LlamaConfig(
            hidden_size=5120,
            num_hidden_layers=40,
            num_attention_heads=40,
            intermediate_size=13824,
            **LLAMA2,
        ),
        {"dtype": "bfloat16", "attention": "flash", "lora": _adapters(["q_proj", "v_proj"])},
    ),
    "qwen2.5-0.5b": lambda: (
        hf.Qwen2Config(
            hidden_size=896,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            intermediate_size=4864,
            vocab_size=151936,
            tie_word_embeddings=True,
            max_position_embeddings=32768,
        ),
        {"dtype": "bfloat16", "sharding": "ddp", "num_ranks": 2},
    ),
    "llama-3.1-8b": lambda: (
        hf.LlamaConfig(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            vocab_size=128256,
            max_position_embeddings=131072,
        ),
        {
            "dtype": "float32",
            "autocast": "bfloat16",
            "attention": "flash",
            "gradient_checkpointing": True,
            "keeps_outputs": False,
            "sharding": "fsdp",
            "num_ranks": 8,
        },
    ),
}


def published() -> list[dict[str, Any]]:
    """Each published row with what is simulated for it."""
    traced: dict[str, TracedMemory] = {}
    found = []
    for row in json.loads((DATA / "published.json").read_text(encoding="utf-8"))["rows"]:
        if row["model"] not in traced:
            config, how = MODELS[row["model"]]()
            traced[row["model"]] = TracedMemory.of(config, "train", **how)
        memory = traced[row["model"]]
        batch = float(memory.batch_bytes(BatchShape.of(row["num_samples"], row["longest"]))[0])
        simulated = (memory.static_bytes + batch) / row["unit"]
        found.append(
            {
                **row,
                "simulated": round(simulated, 2),
                "error": round(simulated / row["peak"] - 1, 4),
            }
        )
    return found


def generation() -> dict[str, Any]:
    """Measured against simulated batches of NLLB-200-600M's generate(), and whether trees close what gap there is."""
    table = pq.read_table(DATA / "nllb600m_generation.parquet")
    rows = {
        name: np.array(table[name])
        for name in ("num_samples", "longest", "peak_mib_above_start", "pos")
    }
    runs = np.unique(np.array(table["file"]), return_inverse=True)[1]
    config = hf.M2M100Config(
        vocab_size=256206,
        d_model=1024,
        encoder_layers=12,
        decoder_layers=12,
        encoder_ffn_dim=4096,
        decoder_ffn_dim=4096,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        max_position_embeddings=1024,
    )
    memory = TracedMemory.of(config, "generate", dtype="bfloat16", max_new_tokens=200)
    simulated = memory.batch_bytes(BatchShape.of(rows["num_samples"], rows["longest"])) / 2**20
    ratio = rows["peak_mib_above_start"] / simulated
    shapes, which = np.unique(
        np.stack([rows["num_samples"], rows["longest"]]), axis=1, return_inverse=True
    )
    which = which.ravel()
    often = np.bincount(which) >= FEWEST
    envelope = np.array([ratio[which == k].max() for k in np.flatnonzero(often)])
    large = np.array([simulated[which == k].max() for k in np.flatnonzero(often)]) > 500
    return {
        "rows": len(ratio),
        "runs": int(runs.max()) + 1,
        "shapes": int(shapes.shape[1]),
        "ratio_quantiles": _quantiles(ratio),
        "envelope_quantiles": _quantiles(envelope[large]),
        "envelope_shapes": int(large.sum()),
        "share_above_simulated": round(float((ratio > 1).mean()), 4),
        "share_above_simulated_over_500_mib": round(float((ratio > 1)[simulated > 500].mean()), 4),
        "corrected": _corrected(rows, runs, simulated, ratio),
        "own_rows": _own_rows(rows, runs, memory),
    }


def _own_rows(rows: dict[str, Any], runs: np.ndarray, memory: TracedMemory) -> dict[str, Any]:
    """Each run's own rows: its first four batches and eight others drawn at random correct the prediction of all the rest."""
    rng = np.random.default_rng(0)
    found: dict[str, list[dict[str, float]]] = {}
    for run in np.unique(runs):
        mine = np.flatnonzero(runs == run)
        mine = mine[np.argsort(rows["pos"][mine])]
        if len(mine) < FEWEST_OF_A_RUN or rows["pos"][mine[0]] != 0:
            continue
        known = np.concatenate([mine[:4], rng.choice(mine[4:], KNOWN - 4, replace=False)])
        rest, first = np.setdiff1d(mine, known), mine[:1]
        taken, limit = rows["peak_mib_above_start"][rest], rows["peak_mib_above_start"][first[0]]
        for name, predict in _correctors(rows, known, memory, limit * 2**20).items():
            said, of_first = (
                predict(_shape(rows, rest)) / 2**20,
                float(predict(_shape(rows, first))[0]) / 2**20,
            )
            accepted = said <= 0.9 * of_first
            found.setdefault(name, []).append(
                {
                    "exceeded": float((taken > said).mean()),
                    "slack": float(np.median(said / taken)),
                    "accepted": float(accepted.mean()),
                    "unsafe_of_accepted": float((taken > limit)[accepted].mean())
                    if accepted.any()
                    else 0.0,
                }
            )
    mean = {
        name: {
            key: round(float(np.mean([judged[key] for judged in all_runs])), 4)
            for key in all_runs[0]
        }
        for name, all_runs in found.items()
    }
    return {"runs": len(next(iter(found.values()))), "known": KNOWN, "how": mean}


def _shape(rows: dict[str, Any], index: np.ndarray) -> BatchShape:
    return BatchShape.of(rows["num_samples"][index], rows["longest"][index])


def _correctors(
    rows: dict[str, Any], known: np.ndarray, memory: TracedMemory, limit: float
) -> dict[str, Any]:
    """Bytes of shapes, as each way of using a run's own rows says."""
    workload = memory.workload
    measured = [
        Measurement(int(n), {"tokens": int(length)}, 0, int(peak * 2**20))
        for n, length, peak in zip(
            *(rows[name][known] for name in ("num_samples", "longest", "peak_mib_above_start")),
            strict=True,
        )
    ]
    table = Measurements(tuple(measured), workload, "measured")
    replaced = Measurements(
        tuple(measured), workload.replace(mode="generate", phases=None), "measured"
    )
    first = _shape(rows, known[:1])
    raised, own = MemoryRegressor.fit(table), MemoryRegressor.fit(replaced)
    free = dataclasses.replace(raised, card={**raised.card, "lift": [-5.0, 5.0]})
    return {
        "traced": memory.batch_bytes,
        "traced, a line above the rows (`measured=`)": memory.corrected(table).batch_bytes,
        "traced, raised by trees (`MemoryRegressor.fit`)": lambda shape: (
            limit * raised.relative(shape, first)
        ),
        "traced, trees both ways": lambda shape: limit * free.relative(shape, first),
        "form of the rows, trees both ways": lambda shape: limit * own.relative(shape, first),
        "form of the rows (`ProfiledMemory.fit`)": ProfiledMemory.fit(table).batch_bytes,
    }


def _corrected(
    rows: dict[str, Any], runs: np.ndarray, simulated: np.ndarray, ratio: np.ndarray
) -> list[dict[str, Any]]:
    """Runs held out in ten folds: the simulation, plus or times one number, and times what trees say, each for the same quantile.

    ``exceeded``: batches that took more than was said; ``slack``: median of said / taken; ``accepted``: batches said to take
    at most 0.9 of their run's first; ``unsafe_of_accepted``: of these, those that took more than it.
    """
    values = np.log(np.stack([rows["num_samples"], rows["longest"], simulated], axis=1)).astype(
        np.float32
    )
    said = {
        name: np.empty_like(simulated)
        for name in ("simulated", "plus one number", "times one number", "times trees")
    }
    for fold in range(FOLDS):
        out = runs % FOLDS == fold
        said["simulated"][out] = simulated[out]
        gap = np.quantile((rows["peak_mib_above_start"] - simulated)[~out], QUANTILE)
        said["plus one number"][out] = simulated[out] + gap
        said["times one number"][out] = simulated[out] * np.quantile(ratio[~out], QUANTILE)
        data = xgboost.QuantileDMatrix(values[~out], label=np.log(ratio[~out]), nthread=1)
        settings = {
            "objective": "reg:quantileerror",
            "quantile_alpha": QUANTILE,
            "max_depth": 3,
            "eta": 0.1,
            "tree_method": "hist",
            "nthread": 1,
            "seed": 0,
        }
        trees = xgboost.train(settings, data, num_boost_round=100)
        said["times trees"][out] = simulated[out] * np.exp(trees.inplace_predict(values[out]))
    measured = rows["peak_mib_above_start"]
    first = {int(run): index for index, run in enumerate(runs) if rows["pos"][index] == 0}
    limits = np.array([measured[first[int(run)]] if int(run) in first else np.inf for run in runs])
    found = []
    for name, predicted in said.items():
        base = np.array(
            [predicted[first[int(run)]] if int(run) in first else np.inf for run in runs]
        )
        accepted = predicted <= 0.9 * base
        found.append(
            {
                "how": name,
                "exceeded": round(float((measured > predicted).mean()), 4),
                "slack": round(float(np.median(predicted / measured)), 3),
                "accepted": round(float(accepted.mean()), 4),
                "unsafe_of_accepted": round(float((measured > limits)[accepted].mean()), 4),
            }
        )
    return found


def _quantiles(values: np.ndarray) -> dict[str, float]:
    return {f"{q:g}": round(float(np.quantile(values, q)), 4) for q in (0.05, 0.5, 0.95, 0.99, 1.0)}


def main() -> None:
    warnings.simplefilter("ignore")
    about = {
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "xgboost": xgboost.__version__,
    }
    about |= {
        "hardware": "2-core CPU (simulated); measured and published by others on GPUs",
        "date": str(datetime.date.today()),
    }
    result = {"about": about, "published": published(), "generation": generation()}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
