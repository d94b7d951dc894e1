#!/usr/bin/env bash
# Builds sdist and wheel, checks them, and installs the wheel with each extra alone in an empty environment.
# usage: bash scripts/test_package.sh [extra ...]; without names, all extras of users. Needs a network.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/tools"
"$folder/tools/bin/python" -m pip install -q --disable-pip-version-check build twine
"$folder/tools/bin/python" -m build -q --outdir "$folder/dist" .
"$folder/tools/bin/python" -m twine check --strict "$folder"/dist/*
"$python" scripts/check_package.py files "$folder"/dist

wheel=$(echo "$folder"/dist/*.whl)
# core is no extra: the wheel alone
for extra in "${@:-core memory hf trl lightning viz parquet ray}"; do
  for name in $extra; do
    echo "== $name"
    "$python" -m venv "$folder/$name"
    package=$wheel
    if [ "$name" != core ]; then package="$wheel[$name]"; fi
    "$folder/$name/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt "$package"
    (cd "$folder" && "$folder/$name/bin/python" "$root/scripts/check_package.py" extra "$name")
    rm -rf "${folder:?}/$name"
  done
done
