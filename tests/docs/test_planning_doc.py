"""Every python block of docs/planning.md runs as printed, one after another."""

from __future__ import annotations

import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "planning.md"


def test_blocks_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), str(DOC), "exec"), {})
