"""The page for coding assistants: what its changes add runs, and trains. The page on versions is that of the package."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests import models

ROOT = Path(__file__).parents[2]


def added_by_changes() -> list[str]:
    """The lines that each change of the page adds."""
    page = (ROOT / "docs" / "assistants.md").read_text(encoding="utf-8")
    changes = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    added = []
    for change in changes:
        lines = [line[1:] for line in change.splitlines() if line.startswith("+")]
        added.append("\n".join(lines))
    return added


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(row["input_ids"]) for row in rows], batch_first=True
    )
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def names() -> dict[str, Any]:
    """What a script has before the change."""
    model = LlamaForCausalLM(models.llama(layers=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "dataset": [{"input_ids": list(range(1, 3 + (7 * i) % 40))} for i in range(40)],
        "collate": collate,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.5),
        "torch": torch,
    }


def test_the_loops_of_the_page_train_as_many_updates_as_before() -> None:
    _, loop, *_ = added_by_changes()
    script = names()
    exec(loop, script)
    assert script["loader"].stats.updates == 3 * 40 // 8
    assert script["scheduler"].last_epoch == 15


def test_the_online_loader_of_the_page_runs() -> None:
    online = next(change for change in added_by_changes() if "OnlineDataLoader(" in change)
    script = names()
    exec(online.replace("num_workers=4", "num_workers=0"), script)
    assert sum(len(step.indices) for step in script["loader"]) == 40


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_the_page_trains(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    trainer = added_by_changes()[0]
    script = names()
    script["args"] = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=8, max_steps=2, report_to=[], use_cpu=True
    )
    script["SFTTrainer"] = Trainer
    trainer = trainer.replace("from trl import SFTTrainer", "")
    trainer = trainer.replace("dynagroup=", "data_collator=collate, dynagroup=")
    exec(trainer, script)
    script["trainer"].train()
    assert script["trainer"].state.global_step == 2


def test_the_lowest_versions_of_the_page_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ["hf", "trl", "lightning", "memory", "viz", "parquet", "ray"]
    needed = list(project["dependencies"])
    for extra in extras:
        needed += project["optional-dependencies"][extra]
    for requirement in needed:
        lowest = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
        if lowest:
            row = next(line for line in page.splitlines() if re.search(rf"\b{lowest[1]}\b", line))
            assert lowest[2] in row
