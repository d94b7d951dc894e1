#!/usr/bin/env bash
# Tests the Trainer under DeepSpeed's ZeRO on gloo ranks without a GPU, in an environment of its own.
# usage: bash scripts/test_deepspeed.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
export DS_ACCELERATOR=cpu DS_BUILD_OPS=0 OMP_NUM_THREADS=1 PYTHONPATH=$root
own_env "${1:-$root/.venv-deepspeed}" deepspeed==0.19.8 hjson py-cpuinfo msgpack ninja einops
"$own" -m pytest -q tests/oom/test_ranks.py -k of_the_engine
