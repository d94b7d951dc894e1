"""Every python block of docs/integrations.md runs as printed, and prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytest.importorskip("transformers")
DOC = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.mark.filterwarnings("ignore")
def test_blocks_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert blocks
    assert all(len(block.strip().splitlines()) <= 25 for block in blocks)
    code = "\n".join(blocks)
    exec(compile(code, str(DOC), "exec"), {"__name__": "doc"})
    printed = capsys.readouterr().out
    for expected in re.findall(r"^print\(.*\)\s+# (.*)$", code, re.M):
        assert expected in printed
