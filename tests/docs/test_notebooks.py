"""The notebooks run from top to bottom, as a reader would run them, and hold calls and pictures only."""

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
    shown = (o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", ()))
    return "".join(shown)


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
    "train_custom_regressor": ["('simulated', 24, 12)", "epoch 0: 5,000 samples for 1 rank", "by the trace", "True"],
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_folder_of_its_own_and_shows_what_it_promises(path, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
