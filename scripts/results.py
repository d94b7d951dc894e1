"""Write a benchmark's figures where docs can cite them: with hardware, versions and date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynagroup.plan.report import environment

FOLDER = Path(__file__).parent.parent / "benchmarks" / "results"


def circumstances(*packages: str) -> dict[str, Any]:
    """Hardware, versions of ``packages`` that are installed, and the date."""
    found = environment(*packages)
    return {**found, "hardware": f"{found['hardware']}, no GPU"}


def save(name: str, figures: Any, *packages: str) -> Path:
    """Write ``benchmarks/results/<name>.json``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**circumstances(*packages), "figures": figures}, indent=1) + "\n")
    return path
