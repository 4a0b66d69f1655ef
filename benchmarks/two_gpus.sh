#!/usr/bin/env bash
# Everything that needs two GPUs, in under ten minutes: tests, collectives beside NCCL, a model on both, and two replicas.
#   benchmarks/two_gpus.sh [OUT_FOLDER]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
export PYTHONUNBUFFERED=1
began=$SECONDS
count=$(python3 -c "import torch; print(torch.cuda.device_count())")
if [ "$count" -lt 2 ]; then echo "needs two GPUs; torch finds $count"; exit 1; fi
timeout 240 python3 -m pytest -m cuda -n 0 -q --timeout=120 -p no:cacheprovider tests/parallel > "$out/two_gpus_tests.log" 2>&1
echo "tests: exit $?"; tail -n 4 "$out/two_gpus_tests.log"
timeout 90 python3 -m benchmarks.collectives --ranks 2 --json "$out/collectives.json" > "$out/collectives.log" 2>&1
echo "collectives: exit $?"; tail -n 2 "$out/collectives.log"
python3 -m benchmarks.two_gpus --seconds $((570 - SECONDS + began)) --collectives "$out/collectives.json" \
  --json "$out/two_gpus.json" 2> "$out/two_gpus.log"
