"""Runs the command line: ``python -m dynagroup``."""

from dynagroup.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
