#!/usr/bin/env bash
# Tests whole datasets with sentence-transformers and ONNX Runtime, and files compressed by zstandard, in an environment of its own.
# usage: bash scripts/test_inference.sh [folder for the environment]
set -euo pipefail
source "$(dirname "$0")/_own_env.sh"
own_env "${1:-$root/.venv-inference}" sentence-transformers==6.2.0 scikit-learn joblib threadpoolctl narwhals cloudpickle zstandard \
  onnxruntime==1.32.0 onnx onnxscript onnx_ir ml_dtypes flatbuffers protobuf
OMP_NUM_THREADS=1 PYTHONPATH=$root "$own" -m pytest -q tests/jobs/test_sentences.py \
  tests/test_bench.py::test_embedding_on_a_device_runs_dry \
  tests/test_attention.py::test_sentence_transformers_run_with_them \
  tests/test_files.py::test_files_may_be_compressed_by_zstandard \
  tests/test_samples_of_files.py::test_sequences_may_be_compressed_by_zstandard "tests/docs/test_pages.py::test_blocks_run_and_print_what_they_say[map.md]"
