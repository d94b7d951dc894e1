# Sourced by the other scripts: makes .venv and installs what constraints.txt pins, once; $PYTHON is its interpreter.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=.venv/bin/python

# The stamp holds what the environment was installed from. It is written last, so an interrupted installation is redone.
stamp_of() { cat pyproject.toml constraints.txt | cksum; }

if [ ! -x "$PYTHON" ] || [ "$(cat .venv/stamp 2>/dev/null)" != "$(stamp_of)" ]; then
  echo "installing into .venv (a few minutes; later calls skip this)"
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
    for python in python3 python3.13 python3.12 python3.11 python3.10 ""; do
      if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi
    done
    "${python:?dynagroup needs Python 3.10 or newer with its venv module; none was found on PATH}" -m venv --clear .venv
  fi
  "$PYTHON" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
  stamp_of > .venv/stamp
fi
