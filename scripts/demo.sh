#!/usr/bin/env bash
# The main job: trains a small language model on real text with fixed batches and with dynagroup, and compares them.
# Options are those of `python -m dynagroup demo`; see `bash scripts/demo.sh --help`.
set -euo pipefail
source "$(dirname "$0")/_env.sh"
exec "$PYTHON" -m dynagroup demo "$@"
