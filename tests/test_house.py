"""The house stays one that a newcomer can read: no circle of files, few floors, no giant class, no page-long function."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tests.test_architecture import GROUND, MODULES, PACKAGE, imported_modules, layer_of, rooms_imported_by

MOST_FILES, MOST_LINES = 121, 24_400
MOST_LINES_OF_A_FILE = 400
FEWEST_LINES_OF_A_MODULE = 80  # of one with a single importer: a shorter one belongs into it
MEDIAN_BODY, LONG_BODY = 6, 20  # lines of a function's body: of the middle one, and of nine in ten
MOST_LINES_OF_A_CLASS = 200
SHOWN_BY_NAME = {"_repr_png_"}  # what notebooks call
MOST_LINES_OF_A_FUNCTION = 50
MOST_FLOORS = 9
MOST_FILES_OF_A_SAMPLE = 12
# What shows a plan is asked by the plan's own methods when they are called; nothing else may point downstream.
SHOWN_BY = {
    "plan/plan.py": {"plan/report.py", "plan/plots.py"},
}


# Still to be merged into the one file that reads them, or to be divided.
LONELY: set[str] = set()
LONG: set[str] = {"update/updates.py"}


def file_of(module: str) -> Path | None:
    """The file that an import of ``dynagroup.x.y`` or ``dynagroup.x.y.Name`` reads; package faces only hand names on."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:length]).with_suffix(".py")
        if path.exists():
            return path
    return None


def graph() -> dict[Path, set[Path]]:
    arrows = {}
    for path in MODULES:
        if path.name == "__init__.py":
            continue
        names = [n for n in imported_modules(ast.parse(path.read_text(encoding="utf-8"))) if n.startswith("dynagroup.")]
        shown = {PACKAGE / name for name in SHOWN_BY.get(path.relative_to(PACKAGE).as_posix(), ())}
        arrows[path] = {found for n in names if (found := file_of(n)) is not None and found != path} - shown
    return arrows


def circles(arrows: dict[Path, set[Path]]) -> list[list[str]]:
    """Groups of files that import each other in a loop (Tarjan 1972)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found = []

    def visit(node: Path) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = []
            while True:
                member = stack.pop()
                group.append(str(member.relative_to(PACKAGE)))
                if member == node:
                    break
            if len(group) > 1:
                found.append(sorted(group))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


def test_no_files_import_each_other_in_a_circle():
    assert circles(graph()) == []


def test_a_circle_would_be_found():
    a, b, c = (PACKAGE / name for name in ("a.py", "b.py", "c.py"))
    assert circles({a: {b}, b: {c}, c: {a}}) == [["a.py", "b.py", "c.py"]]


def rooms() -> dict[str, set[str]]:
    """What each room imports; the files of the ground are one."""
    found: dict[str, set[str]] = {}
    of = {name: "ground" if name in GROUND else name for name in map(layer_of, MODULES)}
    for path in MODULES:
        if room := of[layer_of(path)]:
            found.setdefault(room, set()).update({of[name] for name in rooms_imported_by(path)} - {room})
    return found


def floors(arrows: Mapping[str, set[str]]) -> int:
    """Rooms of the longest way down."""

    @cache
    def below(room: str) -> int:
        return 1 + max(map(below, arrows[room]), default=0)

    return max(map(below, arrows))


def test_the_house_has_few_floors():
    assert floors(rooms()) <= MOST_FLOORS
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == 3


def test_the_guide_names_rooms_and_files_that_are_there():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+\.py)`", page)
    assert [name for name in named if not (PACKAGE / name).exists()] == []
    assert {layer_of(path) for path in MODULES} - {"", "__main__"} <= {
        name.split("/")[0].removesuffix(".py") for name in named
    }
    for way in page.split("## The way of one sample")[1:]:
        passed = set(re.findall(r"`([a-z_]+/[a-z_/]*\.py)`", way.split("\n## ")[0]))
        assert 5 <= len(passed) <= MOST_FILES_OF_A_SAMPLE, sorted(passed)


def sources() -> dict[Path, list[str]]:
    return {path: path.read_text(encoding="utf-8").splitlines() for path in MODULES}


def test_the_house_is_small():
    lines = {path.relative_to(PACKAGE).as_posix(): len(source) for path, source in sources().items()}
    assert len(lines) <= MOST_FILES
    assert sum(lines.values()) <= MOST_LINES
    assert {name: number for name, number in lines.items() if number > MOST_LINES_OF_A_FILE and name not in LONG} == {}


def importers() -> dict[str, set[str]]:
    """Which files import each file of the package, lazily or not."""
    found: dict[str, set[str]] = {path.relative_to(PACKAGE).as_posix(): set() for path in MODULES}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            names = [f"{module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            for read in {file_of(name) for name in names if module.startswith("dynagroup")} - {None, path}:
                found[read.relative_to(PACKAGE).as_posix()].add(path.relative_to(PACKAGE).as_posix())  # type: ignore[union-attr]
    return found


def lonely(read_by: Mapping[str, set[str]], lines: Mapping[str, int]) -> set[str]:
    """Modules that one file reads and that are too short to stand alone."""
    return {name for name, files in read_by.items() if len(files) == 1 and lines[name] < FEWEST_LINES_OF_A_MODULE}


def test_no_short_module_has_a_single_reader():
    lines = {path.relative_to(PACKAGE).as_posix(): len(source) for path, source in sources().items()}
    assert lonely(importers(), lines) - LONELY == set()
    assert lonely({"a.py": {"b.py"}, "b.py": set()}, {"a.py": 79, "b.py": 9}) == {"a.py"}


def bodies() -> list[int]:
    """Lines of every function's body without its docstring, the shortest first."""
    found = []
    for lines in sources().values():
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[ast.get_docstring(node) is not None :]
                found.append((body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0)
    return sorted(found)


def test_functions_are_short():
    found = bodies()
    assert found[len(found) // 2] <= MEDIAN_BODY
    assert found[len(found) * 9 // 10] <= LONG_BODY


def code_lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without docstrings: explaining is no vice."""
    explained = 0
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(inner) is not None
        ):
            first = inner.body[0]
            explained += (first.end_lineno or first.lineno) - first.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - explained


def definitions(*kinds: type) -> Iterator[tuple[str, int]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds):
                yield f"{path.relative_to(PACKAGE)}:{node.name}", code_lines(node)


def test_no_class_is_a_giant():
    assert [(name, lines) for name, lines in definitions(ast.ClassDef) if lines > MOST_LINES_OF_A_CLASS] == []


def test_no_function_is_a_page():
    found = definitions(ast.FunctionDef, ast.AsyncFunctionDef)
    assert [(name, lines) for name, lines in found if lines > MOST_LINES_OF_A_FUNCTION] == []


def test_docstrings_do_not_count_and_code_does():
    tree = ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n')
    assert isinstance(tree.body[0], ast.FunctionDef)
    assert code_lines(tree.body[0]) == 3


def private_names_defined(tree: ast.AST) -> set[str]:
    """Names with one leading underscore that a file gives to functions, classes, variables and attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def private_names_used(tree: ast.AST) -> set[str]:
    """Private names that a file takes from others: imported, looked up on anything but itself, or patched."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            found |= {arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
    return found


def test_tests_reach_for_no_private_name():
    """What a test must look at or change is public, so that the inside can change without it."""
    ours = set().union(*(private_names_defined(ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES))
    reached = {}
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        reached[path.name] = (private_names_used(tree) - private_names_defined(tree) - SHOWN_BY_NAME) & ours
    assert {name: found for name, found in reached.items() if found} == {}
    assert private_names_used(ast.parse("loader._parts.patch(self._own)")) >= {"_parts"}
