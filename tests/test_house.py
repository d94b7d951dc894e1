"""The house stays one that a newcomer can read: no circle of files, few floors, a guide that names what is there."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.test_architecture import (
    GROUND,
    MODULES,
    PACKAGE,
    layer_of,
    name_of,
    rooms_imported_by,
    tree_of,
)

MOST_FLOORS = 10


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
            arrows[name_of(path)] = {name_of(file) for file in read if file}
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
        assert len(passed) >= 5, sorted(passed)


def test_no_files_import_each_other_in_a_circle_and_floors_are_few():
    assert floors(rooms()) <= MOST_FLOORS
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == 3
    TopologicalSorter(graph()).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": {"a.py"}}).prepare()


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
