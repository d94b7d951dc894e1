"""README and pages: each block runs as printed, figures are those of the results, links and messages exist, the site builds."""

import ast
import doctest
import inspect
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

import dynagroup
from benchmarks.pages import MARK, filled, shown
from dynagroup import (
    LengthAwareBatchSampler,
    MemoryBudget,
    OnlineDataLoader,
    PlannedDataLoader,
    Share,
    TokenBudget,
)
from dynagroup.cli import main
from dynagroup.demo import docstrings, train_tokenizer
from dynagroup.integrations.config import DynagroupConfig
from dynagroup.text.loader import TokenizingCollator
from tests import models
from tests.models import TEXTS, save_encoder, small_llama, small_tokenizer
from tests.torchrun import ROOT

DOCS, README = ROOT / "docs", ROOT / "README.md"
EVERY = [README, *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
NAMED = "Qwen/Qwen2.5-0.5B"
OWN_TEST = {
    "README.md",
    "recovery.md",
    "memory.md",
}  # they take a model, texts or a device for granted


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def promised(code: str) -> list[str]:
    """What comments after ``print`` say."""
    return re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "page", [p.name for p in EVERY if BLOCK.search(text_of(p)) and p.name not in OWN_TEST]
)
def test_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(BLOCK.findall(text_of(DOCS / page)))
    exec(compile(code, page, "exec"), {"__name__": "page"})
    assert not set(promised(code)) - set(capsys.readouterr().out.splitlines())
    assert promised("print(1 + 1)  # 3\nfor x in y:\n    print(x)  # a b\n") == ["3", "a b"]


@pytest.mark.filterwarnings("ignore")  # of the frameworks that the recipes use
def test_the_readme_runs_as_printed(tmp_path, monkeypatch):
    """With what it takes for granted: texts, a tokenizer, a tokenized dataset, a model and its optimizer."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    texts = [text[:200] for text in docstrings(at_least=40)[:40]]
    tokenizer = train_tokenizer(texts, vocabulary=400)
    dataset = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    own = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(models.llama(vocab=len(tokenizer), layers=1, inner=16, **own))
    tokenize = TokenizingCollator(tokenizer, None, 1, labels=True)
    collate = lambda rows: tokenize(  # noqa: E731
        [tokenizer.decode(r["input_ids"], skip_special_tokens=True) for r in rows]
    )
    names = {
        **{
            "texts": texts,
            "tokenizer": tokenizer,
            "dataset": dataset,
            "collate": collate,
            "model": model,
        },
        **{"encoder": model.model, "DataLoader": DataLoader, "__name__": "page"},
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }
    before = [p.detach().clone() for p in model.parameters()]
    for block in BLOCK.findall(text_of(README)):
        exec(compile(block, "README.md", "exec"), names)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert len(names["answers"]) == 8
    assert names["trainer"].state.global_step == 3
    assert names["loader"].stats.updates == 2 * names["loader"].num_updates


@pytest.mark.filterwarnings("ignore:the regressor was not trained on")
def test_the_page_on_memory_runs_on_a_small_model(tmp_path):
    config = models.llama(vocab=500, width=64, heads=4)
    config.save_pretrained(tmp_path)
    code = "\n".join(BLOCK.findall(text_of(DOCS / "memory.md"))).replace(
        "measure(model, ", "simulate(config, "
    )
    assert NAMED in code
    lengths = np.array([9, 30, 400, 12])
    dataset = [torch.ones(length, dtype=torch.long) for length in lengths]
    pad = lambda samples: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)  # noqa: E731
    collate = lambda samples: {"input_ids": pad(samples), "labels": pad(samples)}  # noqa: E731
    found: dict[str, Any] = {
        "config": config,
        "model": LlamaForCausalLM(config),
        "lengths": lengths,
    }
    found |= {"PlannedDataLoader": PlannedDataLoader, "collate": collate, "dataset": dataset}
    code = code.replace("import Workload, measure", "import *").replace(NAMED, str(tmp_path))
    exec(compile(code, "memory.md", "exec"), found)
    assert repr(found["budget"]).startswith("MemoryBudget(")


def test_the_readme_and_the_command_line_give_the_same_answer(tmp_path, capsys):
    """ "I have 24 GB": the line of Python and the line for the shell, as the README prints them, on another model."""
    (python,) = re.findall(r"`(MemoryBudget\.from_model\(.+?\))`", text_of(README))
    (shell,) = re.findall(r"`dynagroup (fit .+?)`", text_of(README))
    models.llama(vocab=500, width=64, heads=4).save_pretrained(tmp_path)
    budget = eval(python.replace(NAMED, str(tmp_path)), {"MemoryBudget": MemoryBudget})
    assert main([*shell.replace(NAMED, str(tmp_path)).split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    code = found.pop("code")
    assert found == budget.figures()
    assert eval(code, {"MemoryBudget": MemoryBudget}) == budget
    assert found["max_tokens"] > 0


def test_the_page_on_recovery_runs_on_small_models(tmp_path: Path, monkeypatch: Any) -> None:
    page = DOCS / "recovery.md"
    results = doctest.testfile(str(page), module_relative=False)
    assert (results.failed, results.attempted > 5) == (0, True)
    monkeypatch.chdir(tmp_path)
    text = (
        text_of(page)
        .replace("max_new_tokens=128", "max_new_tokens=2")
        .replace('"sentence-transformers/', '"./')
    )
    blocks = {
        re.findall(r"import (\w+)", block)[0]: block
        for block in BLOCK.findall(text)
        if ">>>" not in block
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
    exec(
        blocks.pop("iter_embed"),
        {**names, "model": encoder, "database": database, "already_there": {3}},
    )
    assert sorted(kept) == [0, 1, 2, 4, 5, 6, 7]
    how = {
        "padding": True,
        "padding_side": "left",
        "return_tensors": "pt",
        "return_token_type_ids": False,
    }
    batch = dict(tokenizer(TEXTS[:2], **how))
    exec(blocks.pop("generate_with_oom_retry"), {**names, "loader": [batch]})
    batch["labels"] = batch["input_ids"]
    step = dynagroup.Step(
        batch, range(2), Share(2, 2), Share(5, 5), loss_scale=1.0, ends_update=True
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(blocks.pop("OomSafeBackward"), {**names, "loader": [step], "optimizer": optimizer})
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in model.parameters()]))
    lengths, how = [3 + i % 50 for i in range(512)], {"collate_fn": list, "weigh": "samples"}
    budget = dynagroup.LearningBudget(TokenBudget(16384))
    saved = PlannedDataLoader(lengths, lengths, budget, samples_per_update=256, **how)
    names = {
        "dataset": lengths,
        "lengths": lengths,
        "states": [saved.state_dict()],
        "collate": list,
    }
    block = blocks.pop("LearningBudget").replace(
        "collate_fn=collate", 'collate_fn=collate, weigh="samples"'
    )
    exec(block, names := {**names, "num_samples": 100, "tokens": 50})
    assert max(len(step.batch) * max(step.batch) for step in names["loader"]) <= 0.9 * 100 * 50
    assert not blocks


def test_links_scripts_commands_and_messages_exist():
    for page in EVERY:
        links = (
            target
            for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text_of(page))
            if "http" not in target
        )
        assert [target for target in links if not (page.parent / target).exists()] == [], page.name
    assert all(
        (ROOT / script).exists()
        for script in re.findall(r"bash (scripts/\S+\.sh)", text_of(README))
    )
    shown = re.compile(r"^(?:.*`|\$ |- |)dynagroup ([a-z]+) (?!import)", re.M)
    commands = {command for page in EVERY for command in shown.findall(text_of(page))}
    assert {"plan", "doctor", "compare", "fit"} <= commands
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0, command
    shown = text_of(DOCS / "troubleshooting.md").split("## Errors and warnings")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", shown, re.M)
    assert len(messages) > 5
    for how_to in DOCS.glob("*.md"):
        messages += re.findall(r'^\| "([^"]+)"', text_of(how_to), re.M)
    nodes = (
        node
        for path in (ROOT / "dynagroup").rglob("*.py")
        for node in ast.walk(ast.parse(text_of(path)))
    )
    source = "\n".join(
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )
    parts = (part.strip() for message in messages for part in message.split("..."))
    assert [part for part in parts if part not in source] == []


def test_figures_are_those_of_the_results_names_in_tables_exist_and_the_api_page_has_all():
    for name, expected in filled().items():
        assert text_of(ROOT / name) == expected, (
            f"run python scripts/bench.py pages: {name} shows older figures"
        )
    by_hand = MARK.sub("", text_of(DOCS / "benchmarks.md"))
    rows = [
        line for line in by_hand.splitlines() if line.startswith("|") and "scripts/" not in line
    ]
    assert [row for row in rows if re.search(r"\d", row)] == []
    assert {name for page in EVERY for name in MARK.findall(text_of(page))} == set(shown())
    rows = [
        line
        for line in text_of(README).splitlines()
        if line.startswith("|") and " from `dynagroup" in line
    ]
    assert rows
    for row in rows:
        for named, module in re.findall(
            r"((?:`[^`]+`[^`|]*?)+?) from `(dynagroup[\w.]*)`", row.split("|")[2]
        ):
            names = re.findall(r"`([A-Za-z_]\w*)", named)
            assert names
            assert all(hasattr(import_module(module), name) for name in names), row
    named = set(re.findall(r"^::: dynagroup\.(\w+)$", text_of(DOCS / "api.md"), re.M))
    assert set(dynagroup.__all__) - named == {
        "AlignmentError",
        "BudgetError",
        "ConfigError",
        "StateError",
    }


@pytest.mark.filterwarnings("ignore")
def test_the_site_builds_strictly_and_offline(tmp_path, monkeypatch):
    pytest.importorskip("mkdocs")
    import socket

    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def refuse(*args, **kwargs):
        raise AssertionError(f"the build asked for {args}")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert {
        page for page in pages if not (tmp_path / "site" / page / "index.html").exists()
    } == set()
    assert {page for page in pages if f"]({page}.md)" not in text_of(DOCS / "index.md")} == set()
    assert "PlannedDataLoader" in text_of(tmp_path / "site" / "api" / "index.html")
    home = text_of(tmp_path / "site" / "index.html")
    loaded = re.findall(r"(?:<script[^>]+src|<link[^>]+href)=\"?(https?://[^\" >]+)", home)
    assert loaded == [], "a reader without a network sees the same page"


EXPLAINED = [
    DynagroupConfig,
    OnlineDataLoader,
    PlannedDataLoader,
    LengthAwareBatchSampler,
    TokenBudget,
    MemoryBudget,
]


def explained(thing: type) -> dict[str, str]:
    """Arguments in the docstring's section, with their text."""
    section = (inspect.getdoc(thing) or "").split("Args:\n")[1].split("\n\n")[0]
    found = re.findall(r"^    (\*{0,2}\w+(?:, \w+)*): ((?:.*\n?)(?:^     .*\n?)*)", section, re.M)
    return {name.strip("* "): text for names, text in found for name in names.split(",")}


@pytest.mark.parametrize("thing", EXPLAINED, ids=lambda thing: thing.__name__)
def test_every_argument_is_explained(thing):
    arguments = [name for name in inspect.signature(thing).parameters if name != "self"]
    texts = explained(thing)
    assert [name for name in arguments if name not in texts] == []
    assert [name for name in texts if name not in arguments] == []
    assert [name for name in arguments if len(texts[name].split()) < 4] == []


# The notebooks run from top to bottom, as a reader would run them, and hold calls and pictures only.
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(cell: Any) -> str:
    return "".join(
        o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", ())
    )


# A process of its own: zmq leaves its sockets to the collector, which would come upon them in the middle of another test.
# They lie in a folder with a short name, for no two kernels to be given one port; so does IPython's history, a database.
EXECUTE = """
import os, sys, tempfile, nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
source, folder = sys.argv[1:]
with tempfile.TemporaryDirectory() as short:
    os.environ["IPYTHONDIR"] = short
    manager = AsyncKernelManager(kernel_name="python3", transport="ipc", connection_file=f"{short}/k.json")
    notebook, resources = nbformat.read(source, as_version=4), {"metadata": {"path": folder}}
    NotebookClient(notebook, km=manager, timeout=1200, startup_timeout=1200, resources=resources).execute()
nbformat.write(notebook, f"{folder}/executed.ipynb")
"""


SHOWN = {
    "quickstart": ["epoch 0: 512 samples for 1 rank", "8 updates"],
    "compare_on_your_data": ["fixed 8, shuffled", "dynagroup, updates of 128"],
    "generate_with_oom_retry": ["splits; sizes that did not fit", "True", "(64, True)"],
    "train_custom_regressor": [
        "('simulated', 24, 12)",
        "epoch 0: 5,000 samples for 1 rank",
        "by the trace",
        "True",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_folder_of_its_own_and_shows_what_it_promises(path, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", EXECUTE, str(path), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    cells = [cell for cell in read(tmp_path / "executed.ipynb").cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    shown = "\n".join(map(outputs, cells))
    assert [text for text in SHOWN[path.stem] if text not in shown] == []
    if path.stem == "train_custom_regressor":
        assert float(shown.split("largest difference: ")[1].split("%")[0]) < 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_defines_nothing(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    source = "\n".join(cell.source for cell in code)
    logic = (ast.FunctionDef, ast.ClassDef, ast.While, ast.Try)
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, logic)]
