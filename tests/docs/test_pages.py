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
from itertools import chain
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

DOCS = ROOT / "docs"
README = ROOT / "README.md"
EVERY = [README, *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
NAMED = "Qwen/Qwen2.5-0.5B"
# they take a model, texts or a device for granted
OWN_TEST = {"README.md", "recovery.md", "memory.md"}
NEEDS = {"map.md": ("onnxruntime", "onnxscript")}  # tried by scripts/test_inference.sh


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks_of(path: Path) -> list[str]:
    return BLOCK.findall(text_of(path))


PAGES_WITH_CODE = [page.name for page in EVERY if blocks_of(page) and page.name not in OWN_TEST]


def promised(code: str) -> list[str]:
    """What comments after ``print`` say."""
    return re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks_of(DOCS / page))
    exec(compile(code, page, "exec"), {"__name__": "page"})
    printed = capsys.readouterr().out.splitlines()
    assert set(promised(code)) - set(printed) == set()


def test_what_a_page_promises_to_print_is_seen():
    assert promised("print(1 + 1)  # 3\nfor x in y:\n    print(x)  # a b\n") == ["3", "a b"]


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.filterwarnings("ignore")  # of the frameworks that the recipes use
def test_the_readme_runs_as_printed(tmp_path, monkeypatch):
    """With what it takes for granted: texts, a tokenizer, a tokenized dataset, a model and its optimizer."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    texts = [text[:200] for text in docstrings(at_least=40)[:40]]
    tokenizer = train_tokenizer(texts, vocabulary=400)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = models.llama(vocab=len(tokenizer), layers=1, inner=16, **special)
    model = LlamaForCausalLM(config)
    tokenize = TokenizingCollator(tokenizer, None, 1, labels=True)

    def collate(rows):
        return tokenize(
            [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows]
        )

    names = {
        "__name__": "page",
        "texts": texts,
        "tokenizer": tokenizer,
        "dataset": [{"input_ids": tokenizer(text)["input_ids"]} for text in texts],
        "collate": collate,
        "model": model,
        "encoder": model.model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "DataLoader": DataLoader,
    }
    before = parameters_of(model)
    for block in blocks_of(README):
        exec(compile(block, "README.md", "exec"), names)
    assert not torch.equal(before, parameters_of(model))
    assert len(names["answers"]) == 8
    assert names["trainer"].state.global_step == 3
    assert names["loader"].stats.updates == 2 * names["loader"].num_updates


@pytest.mark.filterwarnings("ignore:the regressor was not trained on")
def test_the_page_on_memory_runs_on_a_small_model(tmp_path):
    config = models.llama(vocab=500, width=64, heads=4)
    config.save_pretrained(tmp_path)
    code = "\n".join(blocks_of(DOCS / "memory.md"))
    assert NAMED in code
    code = code.replace(NAMED, str(tmp_path))
    code = code.replace("measure(model, ", "simulate(config, ")
    code = code.replace("import Workload, measure", "import *")
    lengths = np.array([9, 30, 400, 12])

    def collate(samples):
        ids = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"input_ids": ids, "labels": ids.clone()}

    names: dict[str, Any] = {
        "config": config,
        "model": LlamaForCausalLM(config),
        "lengths": lengths,
        "dataset": [torch.ones(length, dtype=torch.long) for length in lengths],
        "collate": collate,
        "PlannedDataLoader": PlannedDataLoader,
    }
    exec(compile(code, "memory.md", "exec"), names)
    assert repr(names["budget"]).startswith("MemoryBudget(")


def test_the_readme_and_the_command_line_give_the_same_answer(tmp_path, capsys):
    """ "I have 24 GB": the line of Python and the line for the shell, as the README prints them, on another model."""
    (python,) = re.findall(r"`(MemoryBudget\.from_model\(.+?\))`", text_of(README))
    (shell,) = re.findall(r"`dynagroup (fit .+?)`", text_of(README))
    models.llama(vocab=500, width=64, heads=4).save_pretrained(tmp_path)
    names = {"MemoryBudget": MemoryBudget}
    budget = eval(python.replace(NAMED, str(tmp_path)), names)
    words = shell.replace(NAMED, str(tmp_path)).split()
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    code = answer.pop("code")
    assert answer == budget.figures()
    assert eval(code, names) == budget
    assert answer["max_tokens"] > 0


def test_the_examples_of_recovery_that_need_no_model_print_what_they_say():
    results = doctest.testfile(str(DOCS / "recovery.md"), module_relative=False)
    assert results.failed == 0
    assert results.attempted > 5


@pytest.fixture
def recovery() -> dict[str, str]:
    """Blocks of the page on recovery, by the first name that they import."""
    text = text_of(DOCS / "recovery.md")
    text = text.replace("max_new_tokens=128", "max_new_tokens=2")
    blocks = [block for block in BLOCK.findall(text) if ">>>" not in block]
    return {re.findall(r"import (\w+)", block)[0]: block for block in blocks}


def test_every_block_on_recovery_has_its_test(recovery):
    assert set(recovery) == {
        "generate_dataset",
        "iter_embed",
        "generate_with_oom_retry",
        "OomSafeBackward",
        "LearningBudget",
    }


def test_the_page_on_recovery_runs_whole_datasets(recovery, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": small_llama(), "tokenizer": small_tokenizer(), "texts": TEXTS[:8]}
    exec(recovery["generate_dataset"], names)
    assert len(names["translations"]) == 8
    assert (tmp_path / "translations.jsonl").exists()
    encoder = save_encoder(tmp_path / "all-MiniLM-L6-v2")
    rows: dict[int, Any] = {}
    names["model"] = encoder
    names["database"] = SimpleNamespace(add=rows.__setitem__)
    names["already_there"] = {3}
    exec(recovery["iter_embed"], names)
    assert sorted(rows) == [0, 1, 2, 4, 5, 6, 7]


def test_the_page_on_recovery_generates_and_trains(recovery):
    model = small_llama()
    tokenizer = small_tokenizer()
    encoded = tokenizer(
        TEXTS[:2],
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_token_type_ids=False,
    )
    batch = dict(encoded)
    names = {"model": model, "tokenizer": tokenizer, "loader": [batch]}
    exec(recovery["generate_with_oom_retry"], names)
    batch["labels"] = batch["input_ids"]
    step = dynagroup.Step(
        batch,
        range(2),
        samples=Share(2, 2),
        weight=Share(5, 5),
        loss_scale=1.0,
        ends_update=True,
    )
    names["loader"] = [step]
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    before = parameters_of(model)
    exec(recovery["OomSafeBackward"], names)
    assert not torch.equal(before, parameters_of(model))


def test_the_page_on_recovery_lowers_a_limit_that_ran_out(recovery):
    lengths = [3 + i % 50 for i in range(512)]
    saved = PlannedDataLoader(
        lengths,
        lengths,
        dynagroup.LearningBudget(TokenBudget(16384)),
        samples_per_update=256,
        collate_fn=list,
        weigh="samples",
    )
    block = recovery["LearningBudget"]
    block = block.replace("collate_fn=collate", 'collate_fn=collate, weigh="samples"')
    names = {
        "dataset": lengths,
        "lengths": lengths,
        "states": [saved.state_dict()],
        "collate": list,
        "num_samples": 100,
        "tokens": 50,
    }
    exec(block, names)
    assert max(len(step.batch) * max(step.batch) for step in names["loader"]) <= 0.9 * 100 * 50


def test_links_and_scripts_exist():
    for page in EVERY:
        targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text_of(page))
        files = [target for target in targets if "http" not in target]
        assert [file for file in files if not (page.parent / file).exists()] == [], page.name
    scripts = re.findall(r"bash (scripts/\S+\.sh)", text_of(README))
    assert [script for script in scripts if not (ROOT / script).exists()] == []


def test_commands_that_pages_show_exist():
    shown = re.compile(r"^(?:.*`|\$ |- |)dynagroup ([a-z]+) (?!import)", re.M)
    commands = set()
    for page in EVERY:
        commands.update(shown.findall(text_of(page)))
    assert {"plan", "doctor", "compare", "fit"} <= commands
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0, command


def texts_in_the_package() -> str:
    texts = []
    for path in (ROOT / "dynagroup").rglob("*.py"):
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_pages_explain_exist():
    table = text_of(DOCS / "troubleshooting.md").split("## Errors and warnings")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    assert len(messages) > 5
    for page in DOCS.glob("*.md"):
        messages += re.findall(r'^\| "([^"]+)"', text_of(page), re.M)
    source = texts_in_the_package()
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in source


def rows_of_tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_figures_are_those_of_the_results():
    for name, expected in filled().items():
        message = f"run python scripts/bench.py pages: {name} shows older figures"
        assert text_of(ROOT / name) == expected, message
    by_hand = MARK.sub("", text_of(DOCS / "benchmarks.md"))
    rows = [row for row in rows_of_tables(by_hand) if "scripts/" not in row]
    assert [row for row in rows if re.search(r"\d", row)] == []
    marks = set()
    for page in EVERY:
        marks.update(MARK.findall(text_of(page)))
    assert marks == set(shown())


def test_names_in_the_readmes_table_exist():
    rows = [row for row in rows_of_tables(text_of(README)) if " from `dynagroup" in row]
    assert rows
    named_in_module = re.compile(r"((?:`[^`]+`[^`|]*?)+?) from `(dynagroup[\w.]*)`")
    for row in rows:
        for text, module in named_in_module.findall(row.split("|")[2]):
            names = re.findall(r"`([A-Za-z_]\w*)", text)
            assert names
            assert [name for name in names if not hasattr(import_module(module), name)] == []


def test_the_api_page_has_all_public_names():
    named = set(re.findall(r"^::: dynagroup\.(\w+)$", text_of(DOCS / "api.md"), re.M))
    errors = {"AlignmentError", "BudgetError", "ConfigError", "StateError"}
    assert set(dynagroup.__all__) - named == errors


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
    site = tmp_path / "site"
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))
    index = text_of(DOCS / "index.md")
    for page in {path.stem for path in DOCS.glob("*.md")} - {"index"}:
        assert (site / page / "index.html").exists()
        assert f"]({page}.md)" in index
    assert "PlannedDataLoader" in text_of(site / "api" / "index.html")
    home = text_of(site / "index.html")
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
    pattern = r"^    (\*{0,2}\w+(?:, \w+)*): ((?:.*\n?)(?:^     .*\n?)*)"
    texts = {}
    for names, text in re.findall(pattern, section, re.M):
        for name in names.split(","):
            texts[name.strip("* ")] = text
    return texts


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
    texts = []
    for output in cell.get("outputs", ()):
        texts.append(output.get("text", ""))
        texts.append(output.get("data", {}).get("text/plain", ""))
    return "".join(texts)


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
        "('measured', 8, 2)",
        "(8, 64)",
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
    all_outputs = chain.from_iterable(cell.outputs for cell in cells)
    assert any("image/png" in output.get("data", {}) for output in all_outputs)
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
