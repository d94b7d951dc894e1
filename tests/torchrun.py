"""Run a script on real gloo ranks and collect what each rank reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def torchrun(script: str | Path, *args: str, ranks: int, timeout_s: float = 240.0) -> list[Any]:
    """Start ``script`` (under ``tests/ranks/``) on ``ranks`` processes; each prints one line ``REPORT <json>``.

    Returns the reports in the order of ``report["rank"]``.
    """
    path = ROOT / "tests" / "ranks" / script
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as logs:  # a file a rank: lines of ranks that share a pipe may mix
        launch = [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "--redirects",
            "1",
            "--log-dir",
            logs,
        ]
        command = [sys.executable, "-m", *launch, str(path), *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT)
        printed = "\n".join(log.read_text() for log in sorted(Path(logs).glob("**/stdout.log")))
    assert done.returncode == 0, f"{path.name} on {ranks} ranks failed:\n{printed[-3000:]}\n{done.stderr[-6000:]}"
    reports = [json.loads(line.split("REPORT ", 1)[1]) for line in printed.splitlines() if "REPORT " in line]
    assert len(reports) == ranks, f"{len(reports)} of {ranks} ranks reported:\n{printed[-3000:]}"
    return sorted(reports, key=lambda report: report["rank"])
