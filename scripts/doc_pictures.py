"""Draws pictures of the pages from real runs on the CPU. usage: python scripts/doc_pictures.py demo|log

demo (two minutes): docs/images/demo.png, benchmarks/results/demo_cpu.json. log (one minute): docs/images/log.svg."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dynagroup import MemoryBudget
from dynagroup.demo import DemoConfig, run_demo, speedup
from dynagroup.integrations.hf import DynagroupConfig, DynagroupTrainer
from dynagroup.plan.plots import REAL, draw_padding, new_figure

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.record import RESULTS, environment  # noqa: E402


def demo() -> None:
    """The picture shows the first update of both runs: the same samples, so that the eye can compare them."""
    torch.set_num_threads(1)
    runs, lengths = run_demo(DemoConfig(device="cpu"))
    figures = {run.name: run.figures(lengths) for run in runs}
    low, median, high = speedup(runs).tolist()
    results = {
        **environment("transformers"),
        "device": "cpu",
        "clock": "CPU",
        "runs": figures,
        "speedup": median,
        "speedup_quartiles": [low, high],
    }
    (RESULTS / "demo_cpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    picture = new_figure(12, 3.8)
    for axes, run in zip(picture.subplots(1, 2, sharey=True), runs, strict=True):
        draw_padding([lengths[batch] for batch in run.updates[0]], ax=axes)
        axes.set(xlabel="samples of the first update, batch after batch")
        axes.set_title(title_of(run.name, figures[run.name]), fontsize=10)
    picture.savefig(ROOT / "docs" / "images" / "demo.png", dpi=110)


def title_of(name: str, figures: dict[str, float]) -> str:
    padding = figures["padding"]
    steps = figures["steps"]
    seconds = figures["seconds"]
    return f"{name}: {padding:.0%} padding, {steps:,} steps, {seconds:.0f} s in all"


NUM_UPDATES = 60
HEADROOM = 0.9
PANELS = {  # what the log calls it -> title of its panel
    "padding": "padding, share of tokens",
    "tokens_per_s": "tokens_per_s",
    "samples_per_update": "samples_per_update",
    "predicted_memory": "predicted_memory, share of the limit",
}


def log() -> None:
    """Trains a small model with the Trainer; after half of the run, updates have twice as many samples."""
    torch.set_num_threads(1)
    model_config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
    )
    with np.load(ROOT / "benchmarks" / "lengths" / "gsm8k.npz") as lengths:
        rows = [{"input_ids": [1 + i % 500 for i in range(n)]} for n in lengths["tokens"][:4096]]

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        labels = padded.masked_fill(padded == 0, -100)
        return {"input_ids": padded, "attention_mask": padded.ne(0).long(), "labels": labels}

    def samples_per_update(update: int, metric: float | None) -> int:
        return 32 if update < NUM_UPDATES // 2 else 64

    config = DynagroupConfig(
        budget=MemoryBudget.from_model(model_config, "60MB", headroom=HEADROOM),
        samples_per_update=samples_per_update,
    )
    with TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=NUM_UPDATES,
            logging_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = DynagroupTrainer(
            LlamaForCausalLM(model_config),
            args,
            train_dataset=rows,
            data_collator=collate,
            dynagroup=config,
        )
        trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry][1:]
    updates = [entry["step"] for entry in entries]
    picture = new_figure(10, 4.4)
    for axes, (name, title) in zip(picture.subplots(2, 2).ravel(), PANELS.items(), strict=True):
        axes.plot(updates, [entry[name] for entry in entries], color=REAL)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        if name == "predicted_memory":
            axes.axhline(HEADROOM, color="black", linestyle="--", linewidth=1)
            axes.text(updates[0], HEADROOM, "headroom", fontsize=9, va="bottom")
            axes.set_ylim(top=1.05)
    picture.supxlabel("update", fontsize=10)
    picture.savefig(ROOT / "docs" / "images" / "log.svg", metadata={"Date": None})


if __name__ == "__main__":
    {"demo": demo, "log": log}[sys.argv[1]]()
