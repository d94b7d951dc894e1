#!/usr/bin/env bash
# Runs the lines that the pages show for verl, OpenRLHF and ms-swift against the real packages, as far as they go on a CPU, in an
# environment of its own. Takes 1 to 2 minutes from a clean state on a 2-core CPU (88 s measured), most of them to install.
# usage: bash scripts/test_rl_frameworks.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
own_env "${1:-$root/.venv-rl}" verl==0.9.1 openrlhf==0.11.2 ms-swift==4.6.0 trl==0.29.1 tensordict==0.10.0 \
  pyvers orjson cloudpickle importlib_metadata zipp protobuf msgpack codetiming hydra-core omegaconf antlr4-python3-runtime==4.9.3 \
  pylatexenc modelscope modelscope-hub cryptography cffi pycparser json_repair dacite simplejson jsonlines binpacking oss2 einops \
  addict attrdict cpm_kernels transformers_stream_generator tiktoken fastapi uvicorn starlette openai
OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true PYTHONPATH=$root "$own" -m pytest -q tests/integrations/test_frameworks.py -k 'verl or openrlhf or swift'
