"""Figures of README.md and docs, from benchmarks/results. usage: python scripts/doc_tables.py (writes them into the pages)"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.pages import write  # noqa: E402

if __name__ == "__main__":
    write()
