"""Every python block of README runs as printed on a tiny real dataset; figures are those of the results."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from benchmarks.pages import FIGURES, MARK, MARKED, filled, pages_with_figures
from dynagroup.demo import docstrings, train_tokenizer
from dynagroup.text import TokenizingCollator
from tests import models

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.S)


@pytest.fixture
def names() -> dict[str, Any]:
    """What README takes for granted: texts, a tokenizer, a tokenized dataset, a model and its optimizer."""
    torch.manual_seed(0)
    texts = [text[:200] for text in docstrings(at_least=40)[:40]]
    tokenizer = train_tokenizer(texts, vocabulary=400)
    dataset = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(models.llama(vocab=len(tokenizer), layers=1, inner=16, **own))
    tokenize = TokenizingCollator(tokenizer, None, 1, labels=True)

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return tokenize([tokenizer.decode(s["input_ids"], skip_special_tokens=True) for s in samples])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        **{"texts": texts, "tokenizer": tokenizer, "dataset": dataset, "collate": collate, "model": model},
        **{"encoder": model.model, "optimizer": optimizer, "DataLoader": DataLoader, "__name__": "page"},
    }


@pytest.mark.filterwarnings("ignore")  # of the frameworks that the recipes use
def test_every_block_runs_as_printed(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = [p.detach().clone() for p in names["model"].parameters()]
    for block in blocks("README.md"):
        exec(compile(block, "README.md", "exec"), names)
    assert any(not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True))
    assert len(names["answers"]) == 8
    assert names["trainer"].state.global_step == 3
    assert names["loader"].stats.updates == 2 * names["loader"].num_updates


def test_a_broken_block_would_be_noticed(names):
    with pytest.raises(ImportError):
        exec("from dynagroup import no_such_name", names)


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_figures_are_those_of_the_results():
    for name, expected in pages_with_figures().items():
        found = (ROOT / name).read_text(encoding="utf-8")
        assert found == expected, f"run python scripts/doc_tables.py: {name} shows older figures"


def test_a_changed_figure_would_be_noticed():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert filled(page) == page
    row = next(line for line in page.splitlines() if line.startswith("| CV 0.8 | dynagroup |"))
    assert filled(page.replace(row, row.replace("CV 0.8", "CV 0.9"))) == page


def test_every_figure_in_a_table_of_benchmarks_comes_from_a_file():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    by_hand = MARK.sub("", page)
    rows = [line for line in by_hand.splitlines() if line.startswith("|") and "scripts/" not in line]
    assert [row for row in rows if re.search(r"\d", row)] == []
    used = {name for path in MARKED for name in MARK.findall((ROOT / path).read_text(encoding="utf-8"))}
    assert used == set(FIGURES)


def test_every_file_of_results_is_quoted():
    """What nothing quotes is deleted, with the script that made it."""
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("regressor/*.py"),
        ROOT / "benchmarks" / "pages.py",
    ]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert results
    named = [path.name for path in results if path.name not in text and f'("{path.stem}")' not in text]
    assert named == []


def test_names_in_tables_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("|") and " from `dynagroup" in line]
    assert rows
    for row in rows:
        for named, module in re.findall(r"((?:`[^`]+`[^`|]*?)+?) from `(dynagroup[\w.]*)`", row.split("|")[2]):
            names = re.findall(r"`([A-Za-z_]\w*)", named)
            assert names
            assert all(hasattr(import_module(module), name) for name in names), row


def test_named_scripts_and_commands_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in set(re.findall(r"bash (scripts/\S+\.sh)", readme)):
        assert (ROOT / script).exists()
