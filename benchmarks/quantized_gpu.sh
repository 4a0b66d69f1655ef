#!/usr/bin/env bash
# Quantised weights on a GPU, in one go: kernel tests, the table of products beside bfloat16, then the serve cells.
#   benchmarks/quantized_gpu.sh [OUT_FOLDER]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
export PYTHONUNBUFFERED=1
timeout 300 python3 -m pytest -m cuda -q --timeout=200 -p no:cacheprovider tests/kernels/test_coded_linear.py \
  tests/e2e/test_cuda_quantized.py > "$out/quantized_tests.log" 2>&1
echo "tests: exit $?"; tail -n 5 "$out/quantized_tests.log"
python3 -m benchmarks.quantized_gpu --models llama8b --json "$out/quantized_products.json" 2>&1 | tee "$out/quantized_products.log"
python3 -m benchmarks.quantized_gpu --forms '^$' --serve 2>&1 | tee "$out/quantized_serve.log"
