"""Packages that not everybody needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dynagroup.errors import ConfigError

__all__ = ["needed"]


def needed(module: str, purpose: str, extra: str = "memory") -> Any:
    """A module of the optional packages, or an error that says how to get it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f"{purpose} needs {package}: pip install dynagroup[{extra}]") from error
