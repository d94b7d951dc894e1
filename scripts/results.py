"""Write a benchmark's figures where docs can cite them: with hardware, versions and date."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "benchmarks" / "results"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def circumstances(*packages: str) -> dict[str, Any]:
    """Hardware, versions of ``packages`` that are installed, and the date."""
    versions = {}
    for package in ("torch", "numpy", *packages):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "hardware": f"{os.cpu_count()}-core {_processor()}, no GPU",
        "python": platform.python_version(),
        "versions": versions,
        "date": date.today().isoformat(),
    }


def save(name: str, figures: Any, *packages: str) -> Path:
    """Write ``benchmarks/results/<name>.json``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({**circumstances(*packages), "figures": figures}, indent=1) + "\n")
    return path
