"""Products with coded weights beside bfloat16, on one GPU: ``python -m benchmarks.quantized_gpu [--models ...] [--forms
REGEX] [--rows 1 8 64] [--json FILE]``.

For each weight of a layer and each form of codes, the time of every solution of `CODED_LINEAR` by number of rows, as
loading measures it (a captured chain, no weight in the cache), in microseconds, checked against float64 first; then
which solution is chosen and how many times as fast as bfloat16 it is. `benchmarks.cuda` runs whole models.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_kernels import MODELS, products
from headrace.kernels.coded_linear import CODED_LINEAR
from headrace.kernels.coded_linear.choice import (
    PLAIN,
    ROWS,
    describe_codes,
    find_solutions,
    make_plan,
    measure,
)
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.kernels.coded_linear.reference import dequantise
from headrace.kernels.timing import time_chain

BF16 = torch.bfloat16
TOLERANCE = {"scaled_mm": 6e-2, "scaled_mm_blocks": 6e-2, "triton_fp8_blocks": 6e-2}
"""Of solutions that round rows to FP8, relative to the product in float64; others 2e-2."""


def quantise_nvfp4(weight: torch.Tensor) -> CodedMatrix:
    """Random codes of E2M1 with scales of the weight's size: only times and values of products matter."""
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, device=weight.device)
    scales = weight.float().unflatten(1, (-1, 16)).abs().amax(2) / 6
    return CodedMatrix(Code.E2M1, codes, scales, 16, bits=4)


FORMS: dict[str, Callable[[torch.Tensor], CodedMatrix]] = {
    "fp8 channel": quantise_float, "fp8 block 128": partial(quantise_float, rows=128, group=128),
    "int4 group 128": partial(quantise_integer, bits=4, group=128),
    "int4 group 32": partial(quantise_integer, bits=4, group=32),
    "int8 group 128": partial(quantise_integer, bits=8, group=128),
    "mxfp4": quantise_fp4, "nvfp4": quantise_nvfp4,
}


def check(name: str, weight: DeviceCodes, rows: int) -> float:
    """The error of a solution, relative to the product of the dequantised weight in float64."""
    x = torch.randn(rows, weight.in_features, device="cuda", dtype=BF16)
    expected = x.double() @ dequantise(weight, torch.float32).double().T
    out = CODED_LINEAR.load(name)(x, weight, None).double()
    return float((out - expected).norm() / expected.norm())


def run_shape(form: str, shape: tuple[int, int], rows_shown: list[int]) -> dict[str, Any]:
    """Measure one weight and print its lines."""
    outputs, inputs = shape
    weight = pack_for_device(FORMS[form](torch.randn(outputs, inputs, device="cuda", dtype=BF16) * 0.02))
    assert weight is not None
    query = describe_codes(weight, BF16, torch.cuda.get_device_capability())
    wrong = {}
    for rows in (1, 17, 300):
        for name in find_solutions(query, rows):
            try:
                error = check(name, weight, rows)
            except Exception as fault:  # a benchmark goes on
                wrong[name] = f"{type(fault).__name__}: {str(fault).splitlines()[0][:80] if str(fault) else ''}"
                continue
            if not error < TOLERANCE.get(name, 2e-2):
                wrong[name] = f"WRONG {error:.1e} at {rows} rows"
    times = measure(weight, query, time_chain)
    plan = make_plan(times)
    for rows in rows_shown:
        found = sorted(times[rows].items(), key=lambda pair: pair[1])
        gain = times[rows][PLAIN] / times[rows][plan.find(rows)]
        line = " | ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in found)
        print(f"{form:<16}{outputs:>7} x {inputs:<6}{rows:>6} rows {gain:5.2f}x  {line}", flush=True)
    for name, fault in wrong.items():
        print(f"{'':16}{name}: {fault}", flush=True)
    return {
        "form": form, "shape": list(shape), "gain": plan.gain, "steps": plan.steps, "wrong": wrong,
        "times": {str(rows): found for rows, found in times.items()}
    }


def find_shapes(names: list[str]) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of a layer's weights, each once."""
    seen = set()
    for model in MODELS:
        for name, shape in products(model).items():
            if model.name in names and name != "head" and shape not in seen:
                seen.add(shape)
                yield shape


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--forms", default=".")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 64, 256, 4096], choices=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [
        run_shape(form, shape, options.rows)
        for form in FORMS if re.search(options.forms, form) for shape in find_shapes(options.models)
    ]
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
