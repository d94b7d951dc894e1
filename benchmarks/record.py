"""A result file: figures with the hardware, versions and date they were made with, written whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynagroup import __version__
from dynagroup.plan.report import environment

__all__ = ["RESULTS", "about", "save", "spread"]

RESULTS = Path(__file__).parent / "results"


def about(*packages: str) -> dict[str, Any]:
    """Hardware, versions of the packages that are installed, the date, and how busy the machine is: the mean number of
    running processes in the last one, five and fifteen minutes, this one among them."""
    found = environment(*packages)
    load = [round(mean, 1) for mean in os.getloadavg()] if hasattr(os, "getloadavg") else None
    return {**found, "load": load, "dynagroup": __version__, "hardware": f"{found['hardware']}, {_gpu()}"}


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    gpu = torch.cuda.get_device_properties(0)
    return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, driver {_driver()}, CUDA {torch.version.cuda}"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    return shown.splitlines()[0].strip() if shown else "unknown"


def save(folder: Path, name: str, figures: Mapping[str, Any], *packages: str, **more: Any) -> Path:
    """Write ``folder/<name>.json``; a run that is stopped leaves the file of before."""
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.json", folder / f".{name}.part"
    part.write_text(json.dumps({**about(*packages), **more, "figures": figures}, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
    return path


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and number of repeats.

    >>> spread([1.0, 2.0, 9.0])
    {'median': 2.0, 'quartiles': [1.5, 5.5], 'repeats': 3}
    """
    low, middle, high = (round(float(q), 9) for q in np.quantile(values, [0.25, 0.5, 0.75]))
    return {"median": middle, "quartiles": [low, high], "repeats": len(values)}
