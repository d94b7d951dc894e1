"""What all tables are made of: files of results, rows and numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def row(*cells: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    """The line below a table's head."""
    return "|" + "---|" * columns


def short(value: float) -> str:
    """A number of about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(found: dict[str, Any]) -> str:
    """A median with its quartiles."""
    return f"{found['median']:.2f}x ({found['quartiles'][0]:.2f} to {found['quartiles'][1]:.2f})"
