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
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:length]).with_suffix(".py")
        if path.exists():
            return path
    return None


def files_imported_by(path: Path) -> set[str]:
    """Lazily or not."""
    files = set()
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        files.update(file_of(name) for name in names if name.startswith("dynagroup."))
    return {name_of(file) for file in files - {None, path}}


def graph() -> dict[str, set[str]]:
    """Which files each file of the package imports; package faces only hand names on."""
    files = [path for path in MODULES if path.name != "__init__.py"]
    return {name_of(path): files_imported_by(path) for path in files}


def room_of(layer: str) -> str:
    """The files of the ground are one room."""
    return "ground" if layer in GROUND else layer


def rooms() -> dict[str, set[str]]:
    """What each room imports."""
    imported: dict[str, set[str]] = {}
    for path in MODULES:
        room = room_of(layer_of(path))
        if room:
            others = {room_of(name) for name in rooms_imported_by(path)}
            imported.setdefault(room, set()).update(others - {room})
    return imported


def floors(arrows: Mapping[str, set[str]]) -> int:
    """Rooms of the longest way down."""

    @cache
    def below(room: str) -> int:
        return 1 + max(map(below, arrows[room]), default=0)

    return max(map(below, arrows))


PAGE = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", PAGE)


def test_the_guide_names_what_is_there():
    assert [name for name in NAMED if not (PACKAGE / name).exists()] == []


def test_the_guide_names_all_files_and_rooms():
    files = {name_of(path) for path in MODULES if path.name != "__init__.py"}
    assert files - set(NAMED) == set()
    rooms = {name.split("/")[0].removesuffix(".py") for name in NAMED}
    assert {layer_of(path) for path in MODULES} - {"", "__main__"} <= rooms


@pytest.mark.parametrize("way", PAGE.split("## The way of one sample")[1:])
def test_the_guide_follows_a_sample_through_at_least_five_files(way):
    chapter = way.split("\n## ")[0]
    files = set(re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", chapter))
    assert len(files) >= 5, sorted(files)


def test_floors_are_few():
    assert floors(rooms()) <= MOST_FLOORS
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == 3


def test_no_files_import_each_other_in_a_circle():
    TopologicalSorter(graph()).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a.py": {"b.py"}, "b.py": {"c.py"}, "c.py": {"a.py"}}).prepare()


MAKES = re.compile(r"(?m)(?:def |class |self\.|^)(_(?!_)\w+)")
TAKES = re.compile(r"(?:(?<!self)(?<!cls)\.|import (?:\w+, )*|setattr\(\S+ \")(_(?!_)\w+)")


def private_names(path: Path) -> tuple[set[str], set[str]]:
    """Names with one leading underscore that a file makes; and those it takes from others (imported, looked up, patched)."""
    text = path.read_text(encoding="utf-8")
    made_here = set(MAKES.findall(text))
    return made_here, set(TAKES.findall(text)) - made_here


def test_tests_reach_for_no_private_name():
    """What a test must look at or change is public, so that the inside can change without it."""
    private = set()
    for path in MODULES:
        private |= private_names(path)[0]
    for path in Path(__file__).parent.rglob("*.py"):
        _, taken = private_names(path)
        assert not taken & private, path.name
