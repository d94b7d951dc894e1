"""verl's, OpenRLHF's, ms-swift's and LLaMA-Factory's own code beside ours, in environments of their own."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback

from dynagroup import PlannedDataLoader, TokenBudget, balanced_partitions, shard_micro_batches
from dynagroup.integrations.hf_data import UpdateItems
from tests import models
from tests.integrations import toys
from tests.integrations.toys import parameters

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
SWIFT = """
import sys
from swift.arguments import SftArguments
from swift.pipelines import sft_main
sft_main(SftArguments(
    model="model", model_type="llama", template="dummy", dataset=["data.jsonl"], output_dir=sys.argv[1], num_train_epochs=2,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, torch_dtype="float32", tuner_type="full",
    external_plugins=sys.argv[2:], save_strategy="no", logging_steps=1, split_dataset_ratio=0.0, report_to=[], check_model=False,
    learning_rate=1e-3, gradient_checkpointing=False, add_version=False))
"""


def own(package: str, script: str = "rl_frameworks") -> Any:
    return pytest.importorskip(
        package, reason=f"it has an environment of its own: bash scripts/test_{script}.sh"
    )


def blocks(page: str) -> list[str]:
    return [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M)]


def test_verl_restores_the_order_of_our_micro_batches() -> None:
    own("verl")
    restore = importlib.import_module("verl.utils.seqlen_balancing").restore_dynamic_batch
    lengths = np.random.default_rng(0).integers(16, 4000, 64)
    [parts] = shard_micro_batches(lengths, 1, TokenBudget(16_384, layout="packed"))
    assert (
        restore(torch.cat([torch.tensor(lengths)[part] for part in parts]), parts).tolist()
        == lengths.tolist()
    )


def test_openrlhf_passes_its_cap_and_the_line_of_the_page_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own("openrlhf")
    theirs = importlib.import_module("openrlhf.trainer.ppo_utils.replay_buffer")
    lengths, cap = [3, 3, 2, 2, 2], 6
    number = theirs.get_minimum_num_micro_batch_size(lengths, cap, 1, 1)
    sums = [
        sum(lengths[i] for i in part)
        for part in theirs.get_seqlen_balanced_partitions(lengths, number, False)
    ]
    assert sorted(sums) == [5, 7], "as the page says"
    assert [
        sum(lengths[i] for i in part) for part in balanced_partitions(lengths, number, limit=cap)
    ] == [6, 6]
    monkeypatch.setattr(
        theirs, "get_seqlen_balanced_partitions", theirs.get_seqlen_balanced_partitions
    )
    page = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    [line] = [block for block in blocks(page) if "from openrlhf" in block]
    exec(compile(line, "packing.md", "exec"), {})
    assert sorted(
        theirs.get_seqlen_balanced_partitions([9000, 9000, 5000], 2, equal_size=False)
    ) == [[0, 2], [1]]


def write_swift_job(folder: Path) -> None:
    toys.tokenizer().save_pretrained(folder / "model")
    LlamaForCausalLM(models.llama(vocab=toys.VOCAB, width=32, pad_token_id=0)).save_pretrained(
        folder / "model"
    )
    rng = random.Random(0)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(45):
            answer = " ".join(f"w{rng.randrange(4, toys.VOCAB)}" for _ in range(rng.randint(2, 40)))
            said = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")
    (folder / "job.py").write_text(SWIFT)


def logged(folder: Path, name: str, *plugins: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    command = [sys.executable, "job.py", name, *plugins]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-4000:]
    [log] = (folder / name).glob("**/logging.jsonl")
    return [row for row in map(json.loads, log.read_text().splitlines()) if "grad_norm" in row]


def test_swift_trains_the_same_with_the_plugin_of_the_page(tmp_path: Path) -> None:
    own("swift.trainers")
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    [plugin] = [block for block in blocks(page) if "TrainerFactory" in block]
    write_swift_job(tmp_path)
    (tmp_path / "fit.py").write_text(plugin.replace("16384", "128"))
    fixed, fitting = logged(tmp_path, "fixed"), logged(tmp_path, "fitting", "fit.py")
    assert len(fixed) == len(fitting) == 12
    assert [row["padding"] < 0.5 for row in fitting].count(True) > 6
    for one, other in zip(fixed, fitting, strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=2e-3)
        assert float(one["grad_norm"]) == pytest.approx(float(other["grad_norm"]), rel=2e-3)


class Watch(TrainerCallback):
    """Remembers what the workflow trained with."""

    def on_train_end(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self.parameters, self.loader, self.num_updates = (
            parameters(model),
            train_dataloader,
            state.global_step,
        )


def saved(folder):
    """A model, its tokenizer and a data set of pairs and texts, as LLaMA-Factory reads them from disk."""
    toys.causal_lm().float().save_pretrained(folder / "model")
    toys.tokenizer().save_pretrained(folder / "model")
    rng = np.random.default_rng(0)

    def text(size):
        return " ".join(f"w{i}" for i in rng.integers(4, toys.VOCAB, size))

    sizes = [int(size) for size in rng.integers(2, 40, 32)]
    talks = [{"instruction": text(4), "output": text(size)} for size in sizes]
    pairs = [
        {"instruction": text(4), "chosen": text(size), "rejected": text(size // 2 + 1)}
        for size in sizes
    ]
    data = folder / "data"
    data.mkdir()
    (data / "talks.json").write_text(json.dumps(talks))
    (data / "pairs.json").write_text(json.dumps(pairs))
    answers = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    info = {
        "talks": {
            "file_name": "talks.json",
            "columns": {"prompt": "instruction", "response": "output"},
        },
        "pairs": {"file_name": "pairs.json", "ranking": True, "columns": answers},
    }
    (data / "dataset_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("stage", ["sft", "pt", "dpo"])
def test_llamafactory_makes_the_updates_of_fixed_batches(stage, tmp_path):
    own("llamafactory", "llamafactory")
    run_exp = importlib.import_module("llamafactory.train.tuner").run_exp
    dynamic_batching = importlib.import_module(
        "dynagroup.integrations.llamafactory"
    ).dynamic_batching
    saved(tmp_path)

    def run(name):
        watch = Watch()
        arguments = {
            "model_name_or_path": str(tmp_path / "model"),
            "stage": stage,
            "do_train": True,
            "finetuning_type": "full",
            "dataset_dir": str(tmp_path / "data"),
            "dataset": "pairs" if stage == "dpo" else "talks",
            "template": "empty",
            "output_dir": str(tmp_path / name),
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "cutoff_len": 16 if stage == "pt" else 128,
            "overwrite_cache": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
            "disable_gradient_checkpointing": True,
        }
        run_exp(arguments, callbacks=[watch])
        return watch

    with dynamic_batching(
        TokenBudget(96 if stage == "pt" else 320)
    ):  # texts are packed into blocks of 16 tokens
        ours = run("ours")
    fixed = run("fixed")  # behind the block everything is as it was
    assert not isinstance(fixed.loader, UpdateItems)
    assert isinstance(ours.loader.loader, PlannedDataLoader)
    assert ours.num_updates == fixed.num_updates >= 2
    assert sum(ours.loader.loader.stats.batch_sizes.values()) > ours.num_updates, (
        "updates were divided"
    )
    assert (fixed.parameters - ours.parameters).abs().max() < 2e-5
    assert (fixed.parameters - parameters(toys.causal_lm().float())).abs().max() > 1e-2, (
        "nothing was trained"
    )
    assert (tmp_path / "ours" / "model.safetensors").exists()
