"""The notebook runs from top to bottom, as a reader would run it, and holds calls and pictures only."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "train_custom_regressor.ipynb"


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def outputs(cell: Any) -> str:
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
    )


# jupyter_client writes its connection file before it has one, and zmq leaves sockets to the collector
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_notebook_runs_from_top_to_bottom(notebook, tmp_path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    resources = {"metadata": {"path": str(tmp_path)}}  # what it saves stays out of the repository
    NotebookClient(notebook, kernel_name="python3", timeout=180, resources=resources).execute()
    shown = "\n".join(outputs(cell) for cell in notebook.cells if cell.cell_type == "code")
    difference = float(shown.split("largest difference: ")[1].split("%")[0])
    assert difference < 5
    assert "('simulated', 24, 12)" in shown
    assert "epoch 0: 5,000 samples for 1 rank" in shown
    assert "True" in shown.splitlines()  # what was loaded is what was saved
    pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert (tmp_path / "my_model.ubj").exists()


def test_the_notebook_is_committed_without_outputs(notebook):
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_the_notebook_defines_nothing(notebook):
    source = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    logic = (ast.FunctionDef, ast.ClassDef, ast.While, ast.Try)
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, logic)]
