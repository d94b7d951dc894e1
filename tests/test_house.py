"""The house stays one that a newcomer can read: no circle of files, few floors, no giant class, no page-long function."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.test_architecture import (
    GROUND,
    MODULES,
    PACKAGE,
    layer_of,
    name_of,  # isort: skip
    rooms_imported_by,
    tree_of,
)

MOST_FILES, MOST_LINES = 93, 16_999
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_CLASS, MOST_LINES_OF_A_FUNCTION = 400, 200, 50
FEWEST_LINES_OF_A_MODULE = 80  # of one with a single importer: a shorter one belongs into it
MEDIAN_BODY, LONG_BODY = 6, 20  # lines of a function's body: of the middle one, and of nine in ten
MOST_FLOORS, MOST_FILES_OF_A_SAMPLE = 9, 12
# What shows a plan is asked by the plan's own methods when they are called; nothing else may point downstream.
SHOWN_BY = {"plan/plan.py": {"plan/report.py", "plan/plots.py"}}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def file_of(module: str) -> Path | None:
    """The file that an import of ``dynagroup.x.y`` or ``dynagroup.x.y.Name`` reads; package faces only hand names on."""
    parts = module.split(".")[1:]
    paths = (
        PACKAGE.joinpath(*parts[:length]).with_suffix(".py") for length in range(len(parts), 0, -1)
    )
    return next((path for path in paths if path.exists()), None)


def graph(*, faces: bool = False) -> dict[str, set[str]]:
    """Which files each file of the package imports, lazily or not."""
    arrows = {}
    for path in MODULES:
        if faces or path.name != "__init__.py":
            nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom))
            names = (f"{node.module}.{alias.name}" for node in nodes for alias in node.names)
            read = {file_of(name) for name in names if name.startswith("dynagroup.")} - {None, path}
            arrows[name_of(path)] = {name_of(file) for file in read if file} - SHOWN_BY.get(
                name_of(path), set()
            )
    return arrows


def rooms() -> dict[str, set[str]]:
    """What each room imports; the files of the ground are one."""
    found: dict[str, set[str]] = {}
    of = {name: "ground" if name in GROUND else name for name in map(layer_of, MODULES)}
    for path in MODULES:
        if room := of[layer_of(path)]:
            found.setdefault(room, set()).update(
                {of[name] for name in rooms_imported_by(path)} - {room}
            )
    return found


def floors(arrows: Mapping[str, set[str]]) -> int:
    """Rooms of the longest way down."""

    @cache
    def below(room: str) -> int:
        return 1 + max(map(below, arrows[room]), default=0)

    return max(map(below, arrows))


def test_the_guide_names_rooms_and_files_that_are_there():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", page)
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    files = {name_of(path) for path in MODULES}
    assert {
        name for name in files if name not in named and not name.endswith("__init__.py")
    } == set()
    rooms = {name.split("/")[0].removesuffix(".py") for name in named}
    assert {layer_of(path) for path in MODULES} - {"", "__main__"} <= rooms
    for way in page.split("## The way of one sample")[1:]:
        passed = set(re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", way.split("\n## ")[0]))
        assert 5 <= len(passed) <= MOST_FILES_OF_A_SAMPLE, sorted(passed)


def lines_of() -> dict[str, int]:
    return {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}


def lonely(read_by: Mapping[str, set[str]], lines: Mapping[str, int]) -> set[str]:
    """Modules that one file reads and that are too short to stand alone."""
    return {
        name
        for name, files in read_by.items()
        if len(files) == 1 and lines[name] < FEWEST_LINES_OF_A_MODULE
    }


def test_no_files_import_each_other_in_a_circle_floors_are_few_and_no_short_module_has_a_single_reader():
    arrows = graph(faces=True)
    read_by = {name: {reader for reader, read in arrows.items() if name in read} for name in arrows}
    assert lonely(read_by, lines_of()) == set()
    assert lonely({"a.py": {"b.py"}, "b.py": set()}, {"a.py": 79, "b.py": 9}) == {"a.py"}
    assert floors(rooms()) <= MOST_FLOORS
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == 3
    TopologicalSorter(graph()).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": {"a.py"}}).prepare()


def definitions(*kinds: type) -> Iterator[tuple[str, Any]]:
    for path in MODULES:
        nodes = (node for node in ast.walk(tree_of(path)) if isinstance(node, kinds))
        yield from ((f"{name_of(path)}:{node.name}", node) for node in nodes)


def lines_of_body(node: ast.FunctionDef) -> int:
    """Without the docstring."""
    body = node.body[ast.get_docstring(node) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def code_lines(node: Any) -> int:
    """Lines without docstrings: explaining is no vice."""
    explained = (
        n
        for n in ast.walk(node)
        if isinstance(n, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(n)
    )
    size = lambda part: (part.end_lineno or part.lineno) - part.lineno + 1  # noqa: E731
    return size(node) - sum(size(n.body[0]) for n in explained)


def test_the_house_its_classes_and_its_functions_are_small():
    for kinds, most in (
        ((ast.ClassDef,), MOST_LINES_OF_A_CLASS),
        (FUNCTIONS, MOST_LINES_OF_A_FUNCTION),
    ):
        found = ((name, code_lines(node)) for name, node in definitions(*kinds))
        assert [(name, lines) for name, lines in found if lines > most] == []
    assert (
        code_lines(
            ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n').body[
                0
            ]
        )
        == 3
    )
    found = sorted(lines_of_body(node) for _, node in definitions(*FUNCTIONS))
    assert found[len(found) // 2] <= MEDIAN_BODY
    assert found[len(found) * 9 // 10] <= LONG_BODY
    lines = lines_of()
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert {name: number for name, number in lines.items() if number > MOST_LINES_OF_A_FILE} == {}


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """Names with one leading underscore that a file makes; and those it takes from others (imported, looked up, patched)."""
    text = path.read_text(encoding="utf-8")
    made = set(re.findall(r"(?m)(?:def |class |self\.|^)(_(?!_)\w+)", text))
    return made, set(
        re.findall(r"(?:(?<!self)(?<!cls)\.|import (?:\w+, )*|setattr\(\S+ \")(_(?!_)\w+)", text)
    ) - made


def test_tests_reach_for_no_private_name():
    """What a test must look at or change is public, so that the inside can change without it."""
    ours = set().union(*(private_names(path)[0] for path in MODULES))
    reached = {
        path.name: private_names(path)[1] & ours for path in Path(__file__).parent.rglob("*.py")
    }
    assert {name: found for name, found in reached.items() if found} == {}
