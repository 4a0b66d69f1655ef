#!/usr/bin/env bash
# Quantised weights on a GPU, in one go: kernel tests, the table of products beside bfloat16, then whole models.
#   benchmarks/quantized_gpu.sh [OUT_FOLDER]
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-.}
export PYTHONUNBUFFERED=1
timeout 300 python3 -m pytest -m cuda -q --timeout=200 -p no:cacheprovider tests/kernels/test_coded_linear.py \
  tests/e2e/test_cuda_quantized.py > "$out/quantized_tests.log" 2>&1
echo "tests: exit $?"; tail -n 5 "$out/quantized_tests.log"
python3 -m benchmarks.quantized_gpu --models llama8b --json "$out/quantized_products.json" 2>&1 | tee "$out/quantized_products.log"
for model in llama-3.1-8b:{fp8,fp8-block,gptq,awq,q4_k_m} gpt-oss-20b:mxfp4 qwen3-30b-a3b:fp8-block; do
  timeout 300 python3 -m benchmarks.cuda --models "$model" --no-startup --workloads latency1 offline256 prefill16x8k \
    --json "$out/served_${model//[^a-z0-9]/_}.json" 2>&1 | tail -n 5
done
