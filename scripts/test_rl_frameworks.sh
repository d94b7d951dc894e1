#!/usr/bin/env bash
# Runs the lines that the pages show for verl, OpenRLHF and ms-swift against the real packages, as far as they go on a CPU, in an
# environment of its own: they pin versions that other adapters are past. About three minutes from a clean state, most of them to install.
# usage: bash scripts/test_rl_frameworks.sh [folder for the environment]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-$root/.venv-rl}
python=${PYTHON:-$root/.venv/bin/python}

if [ ! -x "$env/bin/python" ]; then
  "$python" -m venv "$env"
  site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # torch, transformers and the rest come from the project's environment; what clashes is installed over them.
  "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/project.pth"
  "$env/bin/python" -m pip install -q --no-deps verl==0.9.1 openrlhf==0.11.2 ms-swift==4.6.0 trl==0.29.1 tensordict==0.10.0 ray==2.55.0 \
    pyvers orjson cloudpickle importlib_metadata zipp protobuf msgpack codetiming hydra-core omegaconf antlr4-python3-runtime==4.9.3 \
    pylatexenc modelscope modelscope-hub cryptography cffi pycparser json_repair dacite simplejson jsonlines binpacking oss2 einops \
    addict attrdict cpm_kernels transformers_stream_generator tiktoken fastapi uvicorn starlette openai
fi
cd "$root"
OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true PYTHONPATH=$root "$env/bin/python" -m pytest -q tests/integrations/test_rl_frameworks.py
