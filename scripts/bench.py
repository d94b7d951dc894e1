"""Figures that need no GPU, see :mod:`benchmarks.__main__`. usage: python scripts/bench.py COMMAND [PART...]"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
