#!/usr/bin/env bash
# Runs examples/train_graphs.py and its test with torch_geometric, in an environment of its own.
# usage: bash scripts/test_graphs.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
own_env "${1:-$root/.venv-graphs}" torch_geometric==2.8.1
OMP_NUM_THREADS=1 PYTHONPATH=$root "$own" -m pytest -q tests/integrations/test_examples.py -k graphs
