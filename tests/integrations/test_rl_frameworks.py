"""verl's, OpenRLHF's and ms-swift's own code beside ours. Needs an environment of its own: scripts/test_rl_frameworks.sh."""

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

from dynagroup import TokenBudget, balanced_partitions, shard_micro_batches
from tests.integrations import toys

pytestmark = pytest.mark.filterwarnings("ignore")
REASON = "it has an environment of its own: bash scripts/test_rl_frameworks.sh"
ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return [block for _, block in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M)]


def test_verl_restores_the_order_of_our_micro_batches() -> None:
    pytest.importorskip("verl", reason=REASON)
    restore = importlib.import_module("verl.utils.seqlen_balancing").restore_dynamic_batch
    lengths = np.random.default_rng(0).integers(16, 4000, 64)
    [parts] = shard_micro_batches(lengths, 1, TokenBudget(16_384, layout="packed"))
    shuffled = torch.cat([torch.tensor(lengths)[part] for part in parts])
    assert restore(shuffled, parts).tolist() == lengths.tolist()


def test_openrlhf_passes_its_cap_and_the_line_of_the_page_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openrlhf", reason=REASON)
    theirs = importlib.import_module("openrlhf.trainer.ppo_utils.replay_buffer")
    lengths, cap = [3, 3, 2, 2, 2], 6
    number = theirs.get_minimum_num_micro_batch_size(lengths, cap, 1, 1)
    sums = [sum(lengths[i] for i in part) for part in theirs.get_seqlen_balanced_partitions(lengths, number, False)]
    assert sorted(sums) == [5, 7], "as the page says"
    assert [sum(lengths[i] for i in part) for part in balanced_partitions(lengths, number, limit=cap)] == [6, 6]
    monkeypatch.setattr(theirs, "get_seqlen_balanced_partitions", theirs.get_seqlen_balanced_partitions)
    page = (ROOT / "docs" / "packing.md").read_text(encoding="utf-8")
    [line] = [block for block in blocks(page) if "from openrlhf" in block]
    exec(compile(line, "packing.md", "exec"), {})
    assert sorted(theirs.get_seqlen_balanced_partitions([9000, 9000, 5000], 2, equal_size=False)) == [[0, 2], [1]]


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


def write_swift_job(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    toys.tokenizer().save_pretrained(folder / "model")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=toys.VOCAB, pad_token_id=0, **sizes)).save_pretrained(folder / "model")
    rng = random.Random(0)
    with open(folder / "data.jsonl", "w") as file:
        for _ in range(45):
            answer = " ".join(f"w{rng.randrange(4, toys.VOCAB)}" for _ in range(rng.randint(2, 40)))
            said = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": said}) + "\n")
    (folder / "job.py").write_text(SWIFT)


def logged(folder: Path, name: str, *plugins: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "job.py", name, *plugins]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    [log] = (folder / name).glob("**/logging.jsonl")
    return [row for row in map(json.loads, log.read_text().splitlines()) if "grad_norm" in row]


def test_swift_trains_the_same_with_the_plugin_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("swift.trainers", reason=REASON)
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
