#!/usr/bin/env bash
# Measurements that need a GPU, in parts that each end within minutes and may run in any order, and again.
# usage: bash scripts/gpu_campaign.sh [PART...] [--out FOLDER] [--minutes M] [--dry]
#   parts: launching train_small train train_large steps work memory packed fits oom generate embed; without a name, all
#   --dry: tiny models on the CPU, to try the scripts; needs an --out of its own, since its figures mean nothing
# One machine for a quarter of an hour, commands of at most ten minutes, the most valuable first:
#   launching --minutes 4.5; train_small --minutes 4; then steps train --minutes 2.5. Every row is saved as it comes; a part that
#   is stopped keeps what it has. Wheels of trl, pyarrow, datasets, xgboost-cpu and dynabatch add these rivals.
# Needs torch with CUDA and transformers 5.17 or later; no network, xgboost or datasets. `embed` needs sentence-transformers 6 with
#   scikit-learn and scipy, too; dynabatch is measured where it runs. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
exec "$python" -m benchmarks gpu --device cuda "$@"
