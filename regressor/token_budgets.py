"""Where a token budget fails: the batch it would run out of memory on, and what a safe one leaves unused.

For each workload on 24 GB: the token budget that just fits at 2,048 tokens a sample, taken to other lengths; and the
largest that is safe at all lengths up to 8,192. Writes ``benchmarks/results/token_budgets.json``; a minute on one core.

    python -m regressor.token_budgets
"""

from __future__ import annotations

import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from dynagroup.memory import what_fits
from dynagroup.shapes import BatchShape

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "token_budgets.json"
LENGTHS = (128, 512, 2048, 8192)
TUNED_AT, LIMIT, HEADROOM = 2048, 24 * 10**9, 0.9

QWEN = hf.Qwen2Config(hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
                      intermediate_size=4864, vocab_size=151936, max_position_embeddings=32768)  # fmt: skip
GPT2 = hf.GPT2Config(n_positions=8192)
T5 = hf.T5Config(d_model=768, num_layers=12, num_heads=12, d_ff=3072)

WORKLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen2.5-0.5B, training, flash": (QWEN, {"attention": "flash"}),
    "Qwen2.5-0.5B, training, padding masks": (QWEN, {}),
    "Qwen2.5-0.5B, training, checkpointing, padding masks": (QWEN, {"gradient_checkpointing": True}),
    "GPT-2, training, eager attention": (GPT2, {"attention": "eager"}),
    "T5-base, training": (T5, {}),
    "Qwen2.5-0.5B, generating 1,024 tokens": (QWEN, {"mode": "generate", "max_new_tokens": 1024}),
}


def judged(config: Any, how: dict[str, Any]) -> dict[str, Any]:
    found = what_fits(config, LIMIT, headroom=HEADROOM, lengths=list(LENGTHS), dtype="bfloat16", **how)
    lengths, most = np.array(LENGTHS), np.array(found.samples)
    tuned = int(most[LENGTHS.index(TUNED_AT)]) * TUNED_AT
    counts = tuned // lengths
    memory = found.memory
    peaks = memory.static_bytes + memory.batch_bytes(BatchShape.of(np.maximum(counts, 1), lengths))
    share = [round(float(p / LIMIT), 3) if n else None for p, n in zip(peaks, counts, strict=True)]
    safe = [
        round(float(found.max_tokens // length / n), 3) if n else None for length, n in zip(LENGTHS, most, strict=True)
    ]
    return {"tuned_tokens": tuned, "samples_of_tuned": counts.tolist(), "peak_share_of_tuned": share,
            "largest": most.tolist(), "safe_tokens": found.max_tokens, "share_used_by_safe": safe}  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    about = {"torch": torch.__version__, "transformers": hf.__version__, "hardware": "2-core CPU, simulated"}
    about |= {"date": str(datetime.date.today()), "limit_bytes": LIMIT, "headroom": HEADROOM, "lengths": LENGTHS}
    rows = {name: judged(config, how) for name, (config, how) in WORKLOADS.items()}
    RESULTS.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
