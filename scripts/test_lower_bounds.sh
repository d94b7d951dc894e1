#!/usr/bin/env bash
# Runs tests of the core with the oldest versions that pyproject.toml declares, in an environment of its own.
# torch's oldest wheel brings CUDA libraries: gigabytes to download, minutes to an hour by the connection.
# usage: bash scripts/test_lower_bounds.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
env=${1:-$root/.venv-lower-bounds}
python=${PYTHON:-$root/.venv/bin/python}

# "name>=1.2" of the core and of dynagroup[memory], as "name==1.2". Adapters are tested as constraints.txt pins them.
bounds=$("$python" - <<'PY'
import re

text = open("pyproject.toml", encoding="utf-8").read()
tables = [re.search(rf"^{name} = \[(.*?)\]$", text, re.S | re.M) for name in ("dependencies", "memory")]
print(*[f"{name}=={bound}" for table in tables for name, bound in re.findall(r'"([\w-]+)>=([\d.]+)"', table[1])])
PY
)
if [ ! -x "$env/bin/python" ]; then
  "$python" -m venv "$env"
  "$env/bin/python" -m pip install -q --disable-pip-version-check $bounds pytest hypothesis torchdata
fi
echo "$bounds"
OMP_NUM_THREADS=1 PYTHONPATH=$root "$env/bin/python" -m pytest -q -p no:cacheprovider -m "not slow" -k "not drawn" \
  tests/budget tests/laws tests/plan tests/online tests/update tests/jobs/test_storage.py tests/test_{arguments,distributed,device,text,fingerprint}.py
