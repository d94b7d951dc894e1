#!/usr/bin/env bash
# Measurements that need a GPU, in parts that each end within minutes and may run in any order, and again.
# usage: bash scripts/gpu_campaign.sh [PART...] [--out FOLDER] [--minutes M] [--dry]
#   parts: work steps memory packed memory_kinds fits train train_large oom generate embed; all of them without a name
#   --dry: tiny models on the CPU, to try the scripts; needs an --out of its own, since its figures mean nothing
# One machine for half an hour, commands of at most ten minutes: `train`; then `work fits oom --minutes 3`; then
#   `train_large --minutes 6` and `memory --minutes 3`. `memory_kinds --minutes 4` is for another machine.
# Every row is saved as it comes; a part that is stopped keeps what it has.
# Needs torch with CUDA and transformers 5.17 or later; no network, xgboost or datasets; `memory_kinds`
#   leaves LoRA out without peft. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "$python" -m benchmarks gpu --device cuda "$@"
