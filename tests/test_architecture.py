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
GROUND = ["errors", "shapes", "fingerprint", "validation", "distributed", "state", "device"]
ROOMS = [
    *GROUND,
    "lengths",
    "memory",
    "budget",
    "plan",
    "update",
    "online",
    "oom",
    "text",
    "jobs",
    "integrations",
]
ROOMS += ["files", "testing", "demo", "cli", "__main__"]
HEAVY = {"torch", "xgboost", "transformers", "datasets", "matplotlib", "accelerate", "lightning"}
PRIVATE_LOADER_NAMES = {
    *(
        "_BaseDataLoaderIter",
        "_SingleProcessDataLoaderIter",
        "_MultiProcessingDataLoaderIter",
        "_DatasetKind",
    ),
    *("_get_iterator", "_iterator", "_index_sampler", "_dataset_kind", "_auto_collation"),
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
            yield from (
                (f"{module}.{alias.name}" for alias in node.names)
                if module == "dynagroup"
                else (module,)
            )


def rooms_imported_by(path: Path) -> set[str]:
    names = (name.split(".") for name in imported_modules(tree_of(path)))
    return {parts[1] for parts in names if parts[0] == "dynagroup" and len(parts) > 1} - {
        layer_of(path)
    }


def points_upstream(importer: str, imported: str) -> bool:
    return ROOMS.index(imported) < ROOMS.index(importer)


def test_imports_point_upstream():
    arrows = {
        (layer_of(path), name)
        for path in MODULES
        if layer_of(path)
        for name in rooms_imported_by(path)
    }
    assert [arrow for arrow in sorted(arrows) if not points_upstream(*arrow)] == []
    assert not points_upstream("plan", "update")


def output_of(code: str) -> list[str]:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_is_light_and_importing_everything_changes_nothing():
    """A name is loaded when it is first asked for."""
    names = [
        ".".join(("dynagroup", *p.relative_to(PACKAGE).with_suffix("").parts))
        for p in MODULES
        if layer_of(p)
    ]
    names = [
        name.removesuffix(".__init__")
        for name in names
        if not name.startswith("dynagroup.integrations.")
    ]
    code = (
        "import sys, dynagroup, dynagroup.plan.planner, dynagroup.plan.compare, dynagroup.cli\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))\n"
        "print(dynagroup.memory.Workload.__name__, dynagroup.testing.run_ranks.__name__)\n"
        "import os, threading, torch, transformers, accelerate\n"
        "before = dict(os.environ), threading.active_count(), torch.get_num_threads()\n"
        f"for name in {names!r}: __import__(name)\n"
        "assert before == (dict(os.environ), threading.active_count(), torch.get_num_threads())\n"
        f"print('torch' in {HEAVY!r} & set(sys.modules))\n"
    )
    assert output_of(code) == ["[]", "Workload", "run_ranks", "True"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_environment_variable_and_no_private_loader_name(path):
    nodes = list(ast.walk(tree_of(path)))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {
        node.attr
        for node in attributes
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    named = {node.attr for node in attributes} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }
    named |= {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not named & {"environ", "getenv", "putenv"}, "environment variables are no options"
    assert not (named - own) & PRIVATE_LOADER_NAMES, (
        "only public PyTorch: batch_sampler, collate_fn, iteration"
    )
    names = imported_modules(tree_of(path))
    private = {name for name in names if any(part.startswith("_") for part in name.split("."))}
    assert not {name for name in private if not name.startswith(PRIVATE_MODULES)}


def test_public_names_are_sorted_real_and_seen_by_type_checkers():
    assert dynagroup.__all__ == sorted(dynagroup.__all__)
    assert set(dir(dynagroup)) - set(dynagroup.__all__) == {
        "__version__",
        "integrations",
        "jobs",
        "memory",
        "oom",
        "testing",
    }
    assert set(dynagroup.__all__) <= set(dir(dynagroup))
    for name in dynagroup.__all__:
        value = getattr(dynagroup, name)
        assert getattr(import_module(value.__module__), value.__qualname__) is value
    nodes = tree_of(PACKAGE / "__init__.py").body
    blocks = [n for n in nodes if isinstance(n, ast.If) and isinstance(n.test, ast.Name)]
    seen = {
        a.name
        for block in blocks
        for n in block.body
        if isinstance(n, ast.ImportFrom)
        for a in n.names
    }
    assert seen == set(dynagroup.__all__)
    assert {
        "LengthAwareBatchSampler",
        "Step",
        "TokenBudget",
        "run_with_oom_retry",
        "StateError",
    } <= seen
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynagroup.nothing  # type: ignore[attr-defined]
