#!/usr/bin/env bash
# Lints, checks types and runs the tests. usage: bash scripts/test.sh [--all] [pytest arguments]
#   --all: the slow tests too
set -euo pipefail
source "$(dirname "$0")/_env.sh"

selection=(-m "not slow")
if [ "${1:-}" = "--all" ]; then
  selection=()
  shift
fi
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# Types are checked by one thread, beside the tests, and told at the end.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$PYTHON" -m basedpyright --pythonpath "$PYTHON" > "$types" 2>&1 &
failed=0
# A file stays on one worker, so what its tests share is made once; in this order no long file comes last.
"$PYTHON" -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=15 ${selection[@]+"${selection[@]}"} "$@" || failed=$?
wait $! || failed=$?
cat "$types"
# How plain the code is: figures that the formatter cannot change. They are shown, not enforced.
"$PYTHON" scripts/plain.py dynagroup
exit "$failed"
