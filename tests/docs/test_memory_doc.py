"""The blocks of the page on memory run as printed, on a small model in place of the named one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import models

PAGE = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
NAMED = "Qwen/Qwen2.5-0.5B"


@pytest.mark.filterwarnings("ignore:the regressor never saw")
def test_the_blocks_run(tmp_path):
    config = models.llama(vocab=500, width=64, heads=4)
    config.save_pretrained(tmp_path)
    code = "\n".join(BLOCKS)
    assert NAMED in code
    found = {"config": config}
    exec(compile(code.replace(NAMED, str(tmp_path)), "memory.md", "exec"), found)
    assert type(found["budget"]).__name__ == "MemoryBudget"
