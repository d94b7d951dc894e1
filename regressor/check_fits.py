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
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from dynagroup.budget.memory import MemoryBudget
from dynagroup.memory import simulate
from dynagroup.memory.trace.model import as_meta_model

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "fits.json"
LENGTHS = (128, 1024, 8192, 32768)
LONGEST = LENGTHS[-1]
LIMIT, HEADROOM, TOLERANCE = 80 * 10**9, 0.9, 0.02

# Widths of released models; positions up to the longest length asked about.
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=LONGEST,
    ),
    "qwen2": lambda: hf.Qwen2Config(
        hidden_size=896,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        intermediate_size=4864,
        vocab_size=151936,
        max_position_embeddings=LONGEST,
    ),
    "mistral": lambda: hf.MistralConfig(
        hidden_size=4096,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=32000,
        sliding_window=None,
        max_position_embeddings=LONGEST,
    ),
    "gpt2": lambda: hf.GPT2Config(n_positions=LONGEST),
    "opt": lambda: hf.OPTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        ffn_dim=4096,
        word_embed_proj_dim=1024,
        max_position_embeddings=LONGEST,
    ),
    "olmoe": lambda: hf.OlmoeConfig(
        hidden_size=1024,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=4,
        max_position_embeddings=LONGEST,
    ),
    "bert": lambda: hf.BertConfig(max_position_embeddings=LONGEST),
    "t5": lambda: hf.T5Config(d_model=768, num_layers=12, num_heads=12, d_ff=3072),
    "bart": lambda: hf.BartConfig(
        d_model=768,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        max_position_embeddings=LONGEST,
    ),
}

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
    config, how = CONFIGS[name](), {"dtype": "bfloat16", **setting}
    mode, lora = how.pop("mode"), how.get("lora")
    aligned = how.get("pad_to_multiple_of", 1) % 16 == 0
    lengths = [
        length if aligned else length - 1 for length in LENGTHS
    ]  # most lengths are no multiple of 16
    started = time.perf_counter()
    budget: Any = MemoryBudget.from_model(config, LIMIT, mode=mode, headroom=HEADROOM, **how)
    traced_s = time.perf_counter() - started
    workload, samples = budget.model.workload, budget.most_samples(lengths).tolist()
    model = as_meta_model(config, dtype="bfloat16", attention=how.get("attention"), lora=lora)
    room = HEADROOM * LIMIT
    for length, count in zip(lengths, samples, strict=True):
        more = int(count * (1 + TOLERANCE)) + 1
        rows = simulate(model, workload, [(max(count, 1), length), (more, length)]).rows
        first, second = (row.peak_bytes for row in rows)
        ok = (count == 0 or first <= room * (1 + TOLERANCE)) and second > room
        yield {
            "length": length,
            "samples": count,
            "traced": True,
            "traced_s": round(traced_s, 1),
            "ok": bool(ok),
            "taken": round(first / room, 4),
            "taken_by_more": round(second / room, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(CONFIGS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        for label in args.settings:
            if "packed" in label and name in ("t5", "bart"):
                continue  # two stacks are not packed
            if label == "generate" and name == "bert":
                continue  # it decodes nothing
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = list(cases(name, SETTINGS[label]))
                except Exception as error:  # a row of the report, not the end of it
                    found = [{"error": f"{type(error).__name__}: {error}"[:200], "ok": False}]
            rows += [{"model": name, "setting": label, **row} for row in found]
            bad = [row for row in found if not row.get("ok")]
            print(name, label, f"{len(found) - len(bad)} of {len(found)}", *bad, flush=True)
            versions = {"torch": torch.__version__, "transformers": hf.__version__}
            about = {
                **versions,
                "hardware": "2-core CPU",
                "date": str(datetime.date.today()),
                "limit_bytes": LIMIT,
            }
            args.output.write_text(
                json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8"
            )


if __name__ == "__main__":
    main()
