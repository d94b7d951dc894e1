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
    calls = checkout / "calls"
    calls.write_text("")
    command = ["bash", *arguments]
    done = subprocess.run(command, cwd=checkout.parent, check=False, capture_output=True)
    assert status in (None, done.returncode)
    return calls.read_text().splitlines()


INSTALL = "-m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]"


def test_what_is_needed_is_installed_once_and_again_when_the_pins_change(checkout):
    demo = str(checkout / "scripts" / "demo.sh")
    (checkout / "broken").touch()
    calls = run(checkout, demo)
    assert not any("dynagroup demo" in call for call in calls)
    (checkout / "broken").unlink()
    calls = run(checkout, demo, "--samples", "9")
    assert calls[-2:] == [INSTALL, "-m dynagroup demo --samples 9"]
    for changed in ("pyproject.toml", "constraints.txt"):
        assert run(checkout, demo) == ["-m dynagroup demo"]
        with (checkout / changed).open("a") as file:
            file.write("# changed\n")
        calls = run(checkout, demo)
        assert calls[-2:] == [INSTALL, "-m dynagroup demo"]


def test_the_test_script_lints_checks_types_tests_and_tells_how_plain_the_code_is(checkout):
    script = str(checkout / "scripts" / "test.sh")
    calls = [call for call in run(checkout, script, "-k", "x") if "pip" not in call]
    check, form, *types_and_tests, plain = calls
    assert check == "-m ruff check ."
    assert form == "-m ruff format --check ."
    assert plain.startswith("scripts/plain.py")
    types, tests = sorted(types_and_tests)  # they run at the same time
    assert types.startswith("-m basedpyright")
    assert tests.startswith("-m pytest")
    assert tests.endswith("-m not slow -k x")
    calls = run(checkout, script, "--all")
    assert not any("not slow" in call for call in calls)
    (checkout / "broken").write_text("basedpyright")
    assert run(checkout, script, status=1)
    assert "bash scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def packages_in(path: Path) -> str:
    """A file of requirements, with names as pip compares them."""
    return path.read_text().lower().replace("_", "-")


def test_every_dependency_is_pinned():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads(packages_in(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    del extras["bench"]
    wanted = sum(extras.values(), project["dependencies"])
    names = {re.split(r"[\[<>=!;~ ]", dependency)[0] for dependency in wanted}
    pinned = re.findall(r"^([\w.-]+)==", packages_in(ROOT / "constraints.txt"), re.M)
    assert names - {"dynagroup"} <= set(pinned)


def test_scripts_name_no_host_and_no_machine():
    scripts = (ROOT / "scripts").glob("*.sh")
    for path in [ROOT / "constraints.txt", *scripts, ROOT / ".ci" / "run"]:
        text = path.read_text()
        assert "://" not in text, path
        assert not re.search(r"(?<![\w.])/(home|root|work|opt|tmp)/", text), path
