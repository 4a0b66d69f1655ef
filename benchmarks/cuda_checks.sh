#!/usr/bin/env bash
# Everything that needs a GPU, in one go: kernel and engine tests, then the benchmark table.
#   benchmarks/cuda_checks.sh [OUT_FOLDER] [BENCHMARK_ARGUMENT ...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}; shift || true
export PYTHONUNBUFFERED=1
timeout 400 python3 -m pytest -m cuda -q -x --timeout=200 -p no:cacheprovider tests > "$out/cuda_tests.log" 2>&1
echo "tests: exit $?"; tail -n 5 "$out/cuda_tests.log"
python3 -m benchmarks.cuda --json "$out/cuda.json" "$@" 2>&1 | tee "$out/cuda.log" | tail -n 60
