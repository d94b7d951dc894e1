"""Every python block of the pages runs as printed, one after another, and prints what its comments say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
# Pages that take a model, texts or a device for granted have tests of their own, which bring them.
OWN_TEST = {"recovery.md", "memory.md"}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
PAGES = [page.name for page in sorted(DOCS.glob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


def run(page: str) -> str:
    """The page's code, after it ran."""
    code = "\n".join(BLOCK.findall((DOCS / page).read_text(encoding="utf-8")))
    exec(compile(code, page, "exec"), {"__name__": "page"})
    return code


def promised(code: str) -> list[str]:
    """What comments after ``print`` say."""
    return re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OWN_TEST])
def test_blocks_run_and_print_what_they_say(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    printed_by = run(page)
    printed = capsys.readouterr().out.splitlines()
    for line in promised(printed_by):
        assert line in printed, f"{page} promises {line!r}"


def test_a_wrong_promise_would_be_noticed():
    assert promised("print(1 + 1)  # 3\nfor x in y:\n    print(x)  # a b\n") == ["3", "a b"]


def test_pages_with_a_test_of_their_own_are_there():
    assert {page for page in OWN_TEST if page not in PAGES} == set()


def test_pages_show_no_command_that_does_not_exist(capsys):
    from dynagroup.cli import main

    shown = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    commands = {
        c
        for page in shown
        for c in re.findall(r"^(?:.*`|\$ |- |)dynagroup ([a-z]+) (?!import)", page.read_text(), re.M)
    }
    assert {"plan", "doctor", "compare", "fit"} <= commands
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0, command


def test_messages_that_pages_show_are_those_of_the_source():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8").split("## Errors and warnings")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(messages) > 5
    for how_to in DOCS.glob("*.md"):
        messages += re.findall(r'^\| "([^"]+)"', how_to.read_text(encoding="utf-8"), re.M)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (DOCS.parent / "dynagroup").rglob("*.py")]
    texts = [
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    source = "\n".join(texts)
    for message in messages:
        for part in filter(None, (part.strip() for part in message.split("..."))):
            assert part in source, f"no message says {part!r}"


def test_the_loop_is_shown_one_way():
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        text = page.read_text(encoding="utf-8")
        assert "update_ends, scales" not in text, (
            f"{page.name} weighs batches by an epoch's plan: a loader's steps know"
        )
        assert not re.search(r"zip\(\s*DataLoader", text), page.name
