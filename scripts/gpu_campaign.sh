#!/usr/bin/env bash
# Measurements that need a GPU, in parts that each end within minutes and may run in any order, and again.
# usage: bash scripts/gpu_campaign.sh [PART...] [--out FOLDER] [--minutes M] [--dry]
#   parts: launching train_small train steps train_large generate embed memory memory_kinds packed fits work oom; without a name, all
#   --dry: tiny models on the CPU, to try the scripts; needs an --out of its own, since its figures mean nothing
# One machine for a quarter of an hour, commands of at most ten minutes, the most valuable first:
#   launching --minutes 4.5; train_small --minutes 4; then steps train --minutes 2.5. Another one: memory_kinds embed --minutes 4.
#   Every row is saved as it comes; a part that is stopped keeps what it has.
# Needs torch with CUDA and transformers 5.17 or later; no network. Where they are installed, more is measured: peft (LoRA); trl,
#   pyarrow and datasets (its packing); xgboost and dynabatch; `embed` needs sentence-transformers 6 with scikit-learn and scipy.
#   PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "$python" -m benchmarks gpu --device cuda "$@"
