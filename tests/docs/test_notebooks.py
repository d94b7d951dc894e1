"""The notebooks run from top to bottom, as a reader would run them, and hold calls and pictures only."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PICTURES = {"quickstart": 2, "compare_on_your_data": 3, "generate_with_oom_retry": 1, "train_custom_regressor": 2}


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(cell: Any) -> str:
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a notebook in a folder of its own: what it shows as text, one cell after another, and its pictures."""
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run(name: str) -> str:
        notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
        resources = {"metadata": {"path": str(tmp_path)}}  # what it saves stays out of the repository
        NotebookClient(notebook, kernel_name="python3", timeout=180, resources=resources).execute()
        pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
        assert len(pictures) == PICTURES[name]
        return "\n".join(outputs(cell) for cell in notebook.cells if cell.cell_type == "code")

    return run


# jupyter_client writes its connection file before it has one, and zmq leaves sockets to the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestRuns:
    def test_quickstart(self, run):
        shown = run("quickstart")
        first, last = (float(x) for x in shown.split("updates, loss ")[1].split(",")[0].split(" to "))
        assert last < first
        assert "epoch 0: 1,000 samples for 1 rank" in shown
        assert "16 updates" in shown

    def test_compare_on_your_data(self, run):
        shown = run("compare_on_your_data")
        assert "fixed 8, shuffled" in shown
        assert "dynagroup, updates of 128" in shown

    def test_generate_with_oom_retry(self, run):
        lines = run("generate_with_oom_retry").splitlines()
        splits = next(line for line in lines if "splits; sizes that did not fit" in line)
        assert int(splits.split()[0]) > 0
        assert "True" in lines  # the output of the whole
        assert "(64, True)" in lines
        learned = next(line for line in lines if line.startswith("failures in the first call"))
        first, second = (int(part.split(": ")[1]) for part in learned.split(", "))
        assert second < first

    def test_train_custom_regressor(self, run, tmp_path):
        shown = run("train_custom_regressor")
        difference = float(shown.split("largest difference: ")[1].split("%")[0])
        assert difference < 5
        assert "('simulated', 24, 12)" in shown
        assert "epoch 0: 5,000 samples for 1 rank" in shown
        assert "True" in shown.splitlines()  # what was loaded is what was saved
        assert (tmp_path / "my_model.ubj").exists()


def test_every_notebook_is_run():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)
    assert all(hasattr(TestRuns, f"test_{path.stem}") for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_defines_nothing(path):
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    source = "\n".join(cell.source for cell in code)
    logic = (ast.FunctionDef, ast.ClassDef, ast.While, ast.Try)
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, logic)]
