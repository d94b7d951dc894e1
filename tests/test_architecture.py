"""The shape of the package: imports point upstream, importing is light and changes nothing, the front door is short.

Sources are read with ``ast``; nothing is executed to learn what imports what.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import dynagroup

PACKAGE = Path(dynagroup.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# The rooms in reading order: a module imports only from its own room and those before it. See docs/architecture.md.
GROUND = ["errors", "shapes", "fingerprint", "validation", "distributed", "state", "device"]
ROOMS = [*GROUND, "lengths", "memory", "budget", "plan", "update", "online", "oom", "integrations", "text", "testing"]
ROOMS += ["demo", "cli", "__main__"]
HEAVY = ("torch", "xgboost", "transformers", "datasets", "matplotlib", "accelerate", "lightning")
PRIVATE_LOADER_NAMES = {
    *("_BaseDataLoaderIter", "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter", "_DatasetKind"),
    *("_get_iterator", "_iterator", "_index_sampler", "_dataset_kind", "_auto_collation"),
}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0] if parts[0] != "__init__" else ""


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a module stands"
            module = node.module or ""
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "dynagroup" else (module,)


def rooms_imported_by(path: Path) -> set[str]:
    names = (name.split(".") for name in imported_modules(ast.parse(path.read_text(encoding="utf-8"))))
    return {parts[1] for parts in names if parts[0] == "dynagroup" and len(parts) > 1} - {layer_of(path)}


def points_upstream(importer: str, imported: str) -> bool:
    return ROOMS.index(imported) < ROOMS.index(importer)


@pytest.mark.parametrize("path", [p for p in MODULES if layer_of(p)], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_upstream(path):
    layer = layer_of(path)
    assert layer in ROOMS, f"say in ROOMS where {layer} stands"
    for name in rooms_imported_by(path):
        assert points_upstream(layer, name), f"{layer} imports {name}, which is downstream"


def test_the_direction_can_be_violated():
    assert not points_upstream("plan", "update")


def imports(module: str, forbidden: tuple[str, ...] = HEAVY) -> list[str]:
    """Which of the forbidden packages importing a module in a fresh interpreter loads."""
    code = f"import sys, {module}; print(*({set(forbidden)!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("module", ["dynagroup", "dynagroup.plan.planner", "dynagroup.plan.report", "dynagroup.cli"])
def test_importing_is_light(module):
    assert imports(module) == []


def test_a_heavy_import_would_be_noticed():
    assert imports("torch") == ["torch"]


def test_importing_everything_changes_nothing():
    names = [".".join(("dynagroup", *p.relative_to(PACKAGE).with_suffix("").parts)) for p in MODULES if layer_of(p)]
    names = [name.removesuffix(".__init__") for name in names if not name.startswith("dynagroup.integrations.")]
    code = (
        "import os, threading, torch, transformers, accelerate\n"
        "before = dict(os.environ), threading.active_count(), torch.get_num_threads()\n"
        f"for name in {names!r}: __import__(name)\n"
        "assert before == (dict(os.environ), threading.active_count(), torch.get_num_threads())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_environment_variable_and_no_private_loader_name(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    named |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not named & {"environ", "getenv", "putenv"}, "environment variables are no options"
    own = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
    assert not (named - own) & PRIVATE_LOADER_NAMES, "only public PyTorch: batch_sampler, collate_fn, iteration"
    private = {name for name in imported_modules(tree) if any(part.startswith("_") for part in name.split("."))}
    # torch documents TorchDispatchMode for extension authors, but has no public alias for its module
    allowed = ("dynagroup", "__future__", "torch.utils._python_dispatch")
    assert not {name for name in private if not name.startswith(allowed)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_public_names_are_sorted_and_real():
    assert dynagroup.__all__ == sorted(dynagroup.__all__)
    assert set(dynagroup.__all__) <= set(dir(dynagroup))
    for name in dynagroup.__all__:
        value = getattr(dynagroup, name)
        assert getattr(import_module(value.__module__), value.__qualname__) is value


def test_type_checkers_see_the_public_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name)]
    seen = {a.name for block in blocks for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == set(dynagroup.__all__)


def test_the_names_of_the_design_are_there():
    names = {
        *("AdditiveCap", "BatchPlan", "Budget", "LengthAwareBatchSampler", "MemoryBudget", "OnlineDataLoader"),
        *("Share", "Step", "TokenBudget", "measure_lengths", "run_with_oom_retry", "text_dataloader"),
        *("AlignmentError", "BudgetError", "ConfigError", "StateError"),
    }
    assert names <= set(dynagroup.__all__)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynagroup.nothing  # type: ignore[attr-defined]


def test_rooms_that_users_visit_need_no_import_of_their_own():
    code = "import dynagroup; print(dynagroup.memory.Workload.__name__, dynagroup.testing.run_ranks.__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["Workload", "run_ranks"]


def test_dir_shows_the_api_only():
    assert set(dir(dynagroup)) - set(dynagroup.__all__) == {"__version__", "integrations", "memory", "oom", "testing"}
