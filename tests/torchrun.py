"""Real gloo ranks, each a process that ``torchrun`` starts: a script that prints, or a function that returns."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HANG_S = 1200.0
"""Only what hangs takes so long, on the slowest of machines."""
ROOT = Path(__file__).parent.parent


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)``, of a module that can be imported, returns on each of ``ranks`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, args), f"{folder}/job.pt")
        started(folder, ranks=ranks)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(ranks)]


def started(script: str | Path, *args: str, ranks: int) -> str:
    """What ``ranks`` processes of the script print to stdout, one after the other; asserts that all end well."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "PYTHONPATH": str(ROOT),
    }
    rank = str(ROOT / "tests" / "ranks" / "__main__.py")
    # Each rank prints to a file: lines of ranks that share a pipe may mix.
    with tempfile.TemporaryDirectory() as logs:
        launch = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        options = ["--redirects", "1", "--log-dir", logs]
        done = subprocess.run(
            [sys.executable, "-m", *launch, *options, rank, str(script), *args],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            env=environment,
            cwd=ROOT,
        )
        files = sorted(Path(logs).glob("**/stdout.log"))
        printed = "\n".join(file.read_text() for file in files)
    assert done.returncode == 0, (
        f"{script} on {ranks} ranks failed:\n{printed[-3000:]}\n{done.stderr[-20000:]}"
    )
    return printed
