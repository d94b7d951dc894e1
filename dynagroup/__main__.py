"""Runs the command line: ``python -m dynagroup``."""

import sys

from dynagroup.cli import main

if __name__ == "__main__":
    sys.exit(main())
