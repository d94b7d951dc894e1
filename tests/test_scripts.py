"""The two commands: install once from pinned constraints, again only when these change, and never half."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchrun import ROOT

STUB = """#!/bin/sh
echo "$*" >> calls
case "$*" in *"pip install"*) [ ! -e broken ];; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose interpreter writes down what it is asked, and fails to install while a file `broken` is there."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str) -> list[str]:
    """Run a script; what its interpreter was asked."""
    calls = checkout / "calls"
    calls.unlink(missing_ok=True)
    subprocess.run(["bash", *arguments], cwd=checkout.parent, check=False, capture_output=True)
    return calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> list[str]:
    return [call for call in calls if "pip install" in call]


def test_what_is_needed_is_installed_once_again_when_it_changes_and_never_half(checkout):
    demo = str(checkout / "scripts" / "demo.sh")
    (checkout / "broken").touch()
    assert not any("dynagroup demo" in call for call in run(checkout, demo))
    (checkout / "broken").unlink()
    first = run(checkout, demo, "--samples", "9")
    assert installs(first) == ["-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"]
    assert first[-1] == "-m dynagroup demo --samples 9"
    assert run(checkout, demo) == ["-m dynagroup demo"]
    for changed in ("pyproject.toml", "constraints.txt"):
        with (checkout / changed).open("a") as file:
            file.write("# changed\n")
        assert len(installs(run(checkout, demo))) == 1
        assert installs(run(checkout, demo)) == []


def test_tests_are_linted_typed_and_run_in_this_order(checkout):
    calls = [call for call in run(checkout, str(checkout / "scripts" / "test.sh"), "-k", "x") if "pip" not in call]
    assert [call.split()[1] for call in calls] == ["ruff", "ruff", "basedpyright", "pytest"]
    assert calls[-1].endswith("-m not slow -k x")
    everything = run(checkout, str(checkout / "scripts" / "test.sh"), "--all")[-1]
    assert "not slow" not in everything
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text(), "every change is checked by it"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_every_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(d for name, group in extras.items() if name != "bench" for d in group)]
    names = {re.split(r"[\[<>=!;~ ]", dependency)[0].lower().replace("_", "-") for dependency in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names - {"dynagroup"} <= pinned


def test_scripts_and_constraints_name_no_host_and_no_machine():
    for path in [ROOT / "constraints.txt", *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        text = path.read_text()
        assert "://" not in text, path
        assert not re.search(r"(?<![\w.])/(home|root|work|opt|tmp)/", text), path
