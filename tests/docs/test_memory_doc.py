"""The blocks of the page on memory run as printed, on a small model in place of the named one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from dynagroup.budget.memory import MemoryBudget
from dynagroup.cli import main
from dynagroup.update.planned import PlannedDataLoader
from tests import models

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
NAMED = "Qwen/Qwen2.5-0.5B"


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "labels": ids}


@pytest.mark.filterwarnings("ignore:the regressor never saw")
def test_the_blocks_run(tmp_path):
    config = models.llama(vocab=500, width=64, heads=4)
    config.save_pretrained(tmp_path)
    code = (
        "\n".join(BLOCKS)
        .replace("measure(model, ", "simulate(config, ")
        .replace("import Workload, measure", "import *")
    )
    assert NAMED in code
    lengths = np.array([9, 30, 400, 12])
    dataset = [torch.ones(length, dtype=torch.long) for length in lengths]
    model = LlamaForCausalLM(config)
    found = {"config": config, "model": model, "dataset": dataset, "lengths": lengths, "collate": collate}
    found["PlannedDataLoader"] = PlannedDataLoader
    exec(compile(code.replace(NAMED, str(tmp_path)), "memory.md", "exec"), found)
    assert type(found["budget"]).__name__ == "MemoryBudget"


def test_the_readme_and_the_command_line_give_the_same_answer(tmp_path, capsys):
    """ "I have 24 GB": the line of Python and the line for the shell, as the README prints them, on another model."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"`(MemoryBudget\.from_model\(.+?\))`", readme)
    (shell,) = re.findall(r"`dynagroup (fit .+?)`", readme)
    models.llama(vocab=500, width=64, heads=4).save_pretrained(tmp_path)
    budget = eval(python.replace(NAMED, str(tmp_path)), {"MemoryBudget": MemoryBudget})
    assert main([*shell.replace(NAMED, str(tmp_path)).split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["limit_bytes"] == 24 * 10**9
    lengths = np.array([int(length) for length in found["samples"]])
    assert budget.largest(lengths).tolist() == list(found["samples"].values())
    assert budget.largest(np.array([lengths[-1]])) > 0
