"""Configs of real models, by the study that asks about them: ``data/configs.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers as hf

__all__ = ["config_of", "names_of", "run_of"]

TABLE = Path(__file__).parent / "data" / "configs.json"


def _rows(study: str) -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))[study]


def names_of(study: str) -> list[str]:
    return list(_rows(study))


def config_of(study: str, name: str) -> Any:
    """Returns a new config."""
    row = _rows(study)[name]
    config_class = getattr(hf, row["config"])
    return config_class(**row["values"])


def run_of(study: str, name: str) -> dict[str, Any]:
    """Returns how the model is run: arguments of ``TracedMemory.of``; "lora" names the modules with adapters."""
    return _rows(study)[name]["run"]
