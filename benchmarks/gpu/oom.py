"""Real out-of-memory errors: the checks of ``scripts/gpu_oom.py``, as a part of the campaign."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import Machine

__all__ = ["run"]

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_oom.py"


def run(machine: Machine) -> Iterator[dict[str, Any]]:
    """Generation, forward and training under a limit that makes them fail."""
    spec = importlib.util.spec_from_file_location("gpu_oom", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    checks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checks)
    found: dict[str, Any] = {}
    for found in checks.progress(machine.dry):
        yield found
    checks.prove(found)  # a failure is the part's; what was found stays
