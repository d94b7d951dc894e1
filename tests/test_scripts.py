"""The two commands: install once from pinned constraints, again only when these change, and never half."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.torchrun import ROOT

STUB = """#!/bin/sh
echo "$*" >> calls
case "$*" in *"pip install"*) [ ! -e broken ];; *basedpyright*) [ ! -s broken ];; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose interpreter writes down what it is asked. With a file `broken` installing fails, with text in it types."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    return tmp_path


def run(checkout: Path, *arguments: str, status: int | None = None) -> list[str]:
    """Run a script, which ends with this status; what its interpreter was asked."""
    (calls := checkout / "calls").write_text("")
    done = subprocess.run(
        ["bash", *arguments], cwd=checkout.parent, check=False, capture_output=True
    )
    assert status in (None, done.returncode)
    return calls.read_text().splitlines()


def test_what_is_needed_is_installed_once_and_tests_are_linted_typed_and_run_in_this_order(
    checkout,
):
    demo = str(checkout / "scripts" / "demo.sh")
    (checkout / "broken").touch()
    assert not any("dynagroup demo" in call for call in run(checkout, demo))
    (checkout / "broken").unlink()
    install = "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"
    assert run(checkout, demo, "--samples", "9")[-2:] == [install, "-m dynagroup demo --samples 9"]
    for changed in ("pyproject.toml", "constraints.txt"):
        assert run(checkout, demo) == ["-m dynagroup demo"]
        with (checkout / changed).open("a") as file:
            file.write("# changed\n")
        assert run(checkout, demo)[-2:] == [install, "-m dynagroup demo"]
    calls = [
        call
        for call in run(checkout, str(checkout / "scripts" / "test.sh"), "-k", "x")
        if "pip" not in call
    ]
    assert [call.split()[1] for call in calls[:2]] == ["ruff", "ruff"]
    assert calls[-1].split()[0] == "scripts/plain.py"
    types, tests = sorted(calls[2:-1])  # at the same time
    assert ("-m basedpyright" in types, tests.split()[1], tests.endswith("-m not slow -k x")) == (
        True,
        "pytest",
        True,
    )
    assert not any(
        "not slow" in call for call in run(checkout, str(checkout / "scripts" / "test.sh"), "--all")
    )
    (checkout / "broken").write_text("basedpyright")
    assert run(checkout, str(checkout / "scripts" / "test.sh"), status=1)
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text(), (
        "every change is checked by it"
    )


def test_every_dependency_is_pinned_and_scripts_name_no_host_and_no_machine():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text().lower().replace("_", "-"))[
        "project"
    ]
    project["optional-dependencies"].pop("bench")
    wanted = sum(project["optional-dependencies"].values(), project["dependencies"])
    names = {re.split(r"[\[<>=!;~ ]", dependency)[0] for dependency in wanted}
    pinned = re.findall(
        r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text().lower().replace("_", "-"), re.M
    )
    assert names - {"dynagroup"} <= set(pinned)
    for path in [ROOT / "constraints.txt", *(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]:
        text = path.read_text()
        assert "://" not in text, path
        assert not re.search(r"(?<![\w.])/(home|root|work|opt|tmp)/", text), path
