"""The package's form: imports point upstream, importing is light and changes nothing. Sources are read with ``ast``."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import dynagroup

PACKAGE = Path(dynagroup.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# The rooms in reading order: a module imports only from its own room and those before it. See docs/architecture.md.
GROUND = [
    "errors",
    "shapes",
    "fingerprint",
    "validation",
    "distributed",
    "state",
    "device",
    "attention",
]
BEFORE_FRAMEWORKS = "lengths memory budget plan update online oom text jobs"
AFTER_FRAMEWORKS = "files testing demo cli __main__"
ROOMS = [*GROUND, *BEFORE_FRAMEWORKS.split(), "integrations", *AFTER_FRAMEWORKS.split()]
HEAVY = {"torch", "xgboost", "transformers", "datasets", "matplotlib", "accelerate", "lightning"}
PRIVATE_LOADER_NAMES = {
    "_BaseDataLoaderIter",
    "_SingleProcessDataLoaderIter",
    "_MultiProcessingDataLoaderIter",
    "_DatasetKind",
    "_get_iterator",
    "_iterator",
    "_index_sampler",
    "_dataset_kind",
    "_auto_collation",
}
# torch documents TorchDispatchMode for extension authors, but has no public alias for its module
PRIVATE_MODULES = ("dynagroup", "__future__", "torch.utils._python_dispatch")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return part if part != "__init__" else ""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a module stands"
            module = node.module or ""
            if module == "dynagroup":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def rooms_imported_by(path: Path) -> set[str]:
    rooms = set()
    for name in imported_modules(tree_of(path)):
        package, *parts = name.split(".")
        if package == "dynagroup" and parts:
            rooms.add(parts[0])
    return rooms - {layer_of(path)}


def points_upstream(importer: str, imported: str) -> bool:
    return ROOMS.index(imported) < ROOMS.index(importer)


def test_imports_point_upstream():
    wrong = set()
    for path in MODULES:
        room = layer_of(path)
        for imported in rooms_imported_by(path):
            if room and not points_upstream(room, imported):
                wrong.add((room, imported))
    assert wrong == set()
    assert not points_upstream("plan", "update")


def output_of(code: str, *arguments: str) -> list[str]:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(("dynagroup", *parts)).removesuffix(".__init__")


LIGHT = f"""
import sys, dynagroup, dynagroup.plan.planner, dynagroup.plan.compare, dynagroup.cli
print(sorted({HEAVY!r} & set(sys.modules)))
print(dynagroup.memory.Workload.__name__, dynagroup.testing.run_ranks.__name__)
"""
UNCHANGED = f"""
import os, sys, threading, torch, transformers, accelerate
before = dict(os.environ), threading.active_count(), torch.get_num_threads()
for name in sys.argv[1:]:
    __import__(name)
assert before == (dict(os.environ), threading.active_count(), torch.get_num_threads())
print("torch" in {HEAVY!r} & set(sys.modules))
"""


def test_importing_is_light():
    """A name is loaded when it is first asked for."""
    assert output_of(LIGHT) == ["[]", "Workload", "run_ranks"]


def test_importing_everything_changes_nothing():
    modules = [module_of(path) for path in MODULES if layer_of(path)]
    names = [name for name in modules if not name.startswith("dynagroup.integrations.")]
    assert output_of(UNCHANGED, *names) == ["True"]


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def names_in(path: Path) -> set[str]:
    """Names that a file uses, but for what only ``self`` has."""
    names = set()
    own = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
            if is_of_self(node):
                own.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.name for alias in node.names)
    return names - (own & PRIVATE_LOADER_NAMES)


def is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_environment_variables_are_no_options(path):
    assert not names_in(path) & {"environ", "getenv", "putenv"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_public_names_of_torch_are_used(path):
    """Batch samplers, collate functions, iteration."""
    assert not names_in(path) & PRIVATE_LOADER_NAMES
    private = [name for name in imported_modules(tree_of(path)) if is_private(name)]
    assert not [name for name in private if not name.startswith(PRIVATE_MODULES)]


ROOMS_OF_THE_FRONT = {"__version__", "integrations", "jobs", "memory", "oom", "testing"}
KNOWN = {"LengthAwareBatchSampler", "Step", "TokenBudget", "run_with_oom_retry", "StateError"}


def names_for_type_checkers() -> set[str]:
    """What the front imports if a type checker reads it."""
    names = set()
    for block in tree_of(PACKAGE / "__init__.py").body:
        if not isinstance(block, ast.If) or not isinstance(block.test, ast.Name):
            continue
        for node in block.body:
            if isinstance(node, ast.ImportFrom):
                names.update(alias.name for alias in node.names)
    return names


def test_public_names_are_sorted_and_real():
    assert dynagroup.__all__ == sorted(dynagroup.__all__)
    assert set(dir(dynagroup)) - set(dynagroup.__all__) == ROOMS_OF_THE_FRONT
    assert set(dynagroup.__all__) <= set(dir(dynagroup))
    for name in dynagroup.__all__:
        value = getattr(dynagroup, name)
        assert getattr(import_module(value.__module__), value.__qualname__) is value


def test_public_names_are_seen_by_type_checkers():
    names = names_for_type_checkers()
    assert names == set(dynagroup.__all__)
    assert names >= KNOWN


def test_other_names_are_none():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynagroup.nothing  # type: ignore[attr-defined]
