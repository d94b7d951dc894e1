"""The notebooks run from top to bottom, as a reader would run them, and hold calls and pictures only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(cell: Any) -> str:
    return "".join(
        output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", ())
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


@pytest.fixture
def run(tmp_path):
    """Runs a notebook in a folder of its own: what it shows as text, one cell after another, and its pictures."""

    def run(name: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", EXECUTE, str(ROOT / "notebooks" / f"{name}.ipynb"), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-6000:]
        notebook = read(tmp_path / "executed.ipynb")
        pictures = [o for c in notebook.cells for o in c.get("outputs", ()) if "image/png" in o.get("data", {})]
        assert pictures
        return "\n".join(outputs(cell) for cell in notebook.cells if cell.cell_type == "code")

    return run


@pytest.mark.slow
class TestRuns:
    def test_quickstart(self, run):
        shown = run("quickstart")
        first, last = (float(x) for x in shown.split("updates, loss ")[1].split(",")[0].split(" to "))
        assert last < first
        assert "epoch 0: 512 samples for 1 rank" in shown
        assert "8 updates" in shown

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
        assert "by the trace" in shown
        assert "True" in shown.splitlines()  # what was loaded is what was saved
        assert (tmp_path / "my_model.ubj").exists()


def test_every_notebook_is_run():
    assert NOTEBOOKS
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
