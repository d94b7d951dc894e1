"""One command for every figure: its parts are there, and what is no part is refused."""

from __future__ import annotations

from importlib import import_module

import pytest

from benchmarks.__main__ import COMMANDS, main

PARTS = [(command, part) for command, parts in COMMANDS.items() for part in parts]


@pytest.mark.parametrize(("command", "part"), PARTS)
def test_every_part_is_there(command, part):
    module, function, _ = COMMANDS[command][part]
    assert callable(getattr(import_module(f"benchmarks.{module}"), function))


def test_every_part_writes_a_result_of_its_own():
    names = [name for parts in COMMANDS.values() for _, _, name in parts.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("arguments", [["plan", "no_such_part"], ["no_such_command"]])
def test_what_is_no_part_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "no_such" in capsys.readouterr().err
