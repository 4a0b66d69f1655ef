#!/usr/bin/env bash
# Everything that needs several GPUs: tests on two of them, then the parts of benchmarks.many_gpus. May be called again
# with the same folder: what is done is not repeated.
#   benchmarks/many_gpus.sh [GPUS] [OUT_FOLDER] [SECONDS]
set -uo pipefail
cd "$(dirname "$0")/.."
gpus=${1:-2} out=${2:-many_gpus} seconds=${3:-570}
export PYTHONUNBUFFERED=1
began=$SECONDS
mkdir -p "$out"
count=$(python3 -c "import torch; print(torch.cuda.device_count())")
if [ "$count" -lt "$gpus" ]; then echo "needs $gpus GPUs; torch finds $count"; exit 1; fi
if ! [ -e "$out/tests.done" ]; then
  timeout 240 python3 -m pytest -m cuda -n 0 -q --timeout=120 -p no:cacheprovider tests/parallel > "$out/tests.log" 2>&1
  status=$?
  echo "tests: exit $status"; tail -n 4 "$out/tests.log"
  [ $status -ne 0 ] || touch "$out/tests.done"
fi
python3 -m benchmarks.many_gpus --gpus "$gpus" --out "$out" --seconds $((seconds - SECONDS + began))
