#!/usr/bin/env bash
# Everything that needs a GPU, in one go: kernel and engine tests, side by side, then the benchmark table.
#   benchmarks/cuda_checks.sh [OUT_FOLDER] [BENCHMARK_ARGUMENT ...]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}; shift || true
export PYTHONUNBUFFERED=1
# These look at all of the GPU's memory, or take it, so nothing may run beside them.
alone=(tests/execution/test_cuda_sleep.py tests/execution/test_cuda_captures.py tests/weights/test_device_copy.py tests/e2e/test_cuda_out_of_memory.py)
check() {  # NAME PYTEST_ARGUMENT ...
  local name=$1; shift
  timeout 400 python3 -m pytest -m cuda -q --timeout=300 -p no:cacheprovider "$@" > "$out/cuda_tests_$name.log" 2>&1
  echo "tests $name: exit $?"; tail -n 5 "$out/cuda_tests_$name.log"
}
ties=tests/execution/test_drafted_ties.py  # prints how often drafts changed a near tie
check together -n 8 --dist worksteal "${alone[@]/#/--ignore=}" --ignore=$ties tests
check ties -n 4 --dist worksteal -rP $ties; grep -h 'near ties' "$out/cuda_tests_ties.log"
check alone "${alone[@]}"
python3 -m benchmarks.cuda --json "$out/cuda.json" "$@" 2>&1 | tee "$out/cuda.log" | tail -n 60
grep -h 'fell back' "$out"/cuda*.log | sort | uniq -c  # nothing, unless own kernels could not be compiled or loaded
