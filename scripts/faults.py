"""The fault campaign, see :mod:`benchmarks.faults`. usage: python scripts/faults.py [--cases 1000] [--save]"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.faults.__main__ import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
