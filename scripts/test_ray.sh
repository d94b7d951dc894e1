#!/usr/bin/env bash
# Tests what is documented for Ray Data on a local cluster of two workers, in an environment of its own.
# usage: bash scripts/test_ray.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
own_env "${1:-$root/.venv-ray}" ray==2.60.0 msgpack jsonschema referencing rpds-py jsonschema-specifications protobuf aiosignal frozenlist
OMP_NUM_THREADS=1 PYTHONPATH=$root "$own" -m pytest -q tests/integrations/test_ray.py
