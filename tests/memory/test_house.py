"""The rooms `memory` and `budget`: no file imports one that imports it, types included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dynagroup

PACKAGE = Path(dynagroup.__file__).parent
ROOMS = ("memory", "budget")


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dynagroup."):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def module_of(path: Path) -> str:
    return ".".join(("dynagroup", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


FILES = {module_of(p): p for room in ROOMS for p in (PACKAGE / room).rglob("*.py") if p.stem != "__init__"}
GRAPH = {name: imports_of(path) & set(FILES) for name, path in FILES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other, or nothing."""
    left = dict(graph)
    while ready := [name for name, needs in left.items() if not needs & set(left)]:
        for name in ready:
            del left[name]
    return sorted(left)


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_imports_one_that_imports_it(room):
    assert any(name.startswith(f"dynagroup.{room}.") for name in GRAPH)
    assert circle(GRAPH) == []


def test_a_circle_would_be_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
