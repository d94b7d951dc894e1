"""docs/recovery.md: prompts give what is printed, and the other blocks run on small models."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dynagroup.update.loss_weight import Share
from dynagroup.update.step import Step
from tests.oom.texts import TEXTS, save_encoder, small_llama, small_tokenizer

DOC = Path(__file__).parents[2] / "docs" / "recovery.md"


def test_prompts_give_what_is_printed() -> None:
    results = doctest.testfile(str(DOC), module_relative=False)
    assert (results.failed, results.attempted > 5) == (0, True)


def test_the_other_blocks_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = DOC.read_text().replace("max_new_tokens=128", "max_new_tokens=2").replace('"sentence-transformers/', '"./')
    blocks = {
        re.findall(r"import (\w+)", b)[0]: b for b in re.findall(r"```python\n(.*?)```", text, re.S) if ">>>" not in b
    }
    model, tokenizer = small_llama(), small_tokenizer()
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "texts": TEXTS[:8]}
    exec(blocks.pop("generate_dataset"), names)
    assert len(names["translations"]) == 8
    assert (tmp_path / "translations.jsonl").exists()
    encoder = save_encoder(tmp_path / "all-MiniLM-L6-v2")
    exec(blocks.pop("encode"), names)
    assert names["vectors"].shape == (8, 16)
    kept: dict[int, Any] = {}
    database = SimpleNamespace(add=kept.__setitem__)
    exec(blocks.pop("iter_embed"), {**names, "model": encoder, "database": database, "already_there": {3}})
    assert sorted(kept) == [0, 1, 2, 4, 5, 6, 7]
    batch = dict(
        tokenizer(TEXTS[:2], padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    )
    exec(blocks.pop("generate_with_oom_retry"), {**names, "loader": [batch]})
    batch["labels"] = batch["input_ids"]
    step = Step(batch, range(2), Share(2, 2), Share(5, 5), loss_scale=1.0, ends_update=True)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    exec(
        blocks.pop("OomSafeBackward"),
        {**names, "loader": [step], "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)},
    )
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert not blocks
