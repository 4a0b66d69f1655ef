"""Attention of prompts on a CPU: ``python -m benchmarks.cpu_attention [--threads 1] [--isa avx512] [--kv-dtype int8]``.

The queries of one layer after what is cached, for the shapes of some models. Milliseconds, the least and the median of
rounds, and what the products' floating-point operations make of the least.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from headrace.kernels import native
from headrace.kernels.attention import cpu
from headrace.kernels.attention.reference import write_codes

SHAPES = (
    (4096, 0, 9, 3, 64), (1024, 3072, 9, 3, 64), (256, 768, 9, 3, 64), (32, 1024, 9, 3, 64), (512, 1536, 32, 8, 128),
    (256, 768, 8, 1, 256)
)
"""Queries, cached tokens before them, heads, kv heads, head dim."""
PAGE_SIZE = 16


def make_pages(
    tokens: int, num_kv_heads: int, dim: int, kv_dtype: str
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Random keys and values [P, page, K, E], and the scales of codes."""
    num_pages = (tokens + PAGE_SIZE - 1) // PAGE_SIZE
    k, v = (torch.randn(num_pages, PAGE_SIZE, num_kv_heads, dim) for _ in "kv")
    if kv_dtype != "int8":
        return (k.to(getattr(torch, kv_dtype)), v.to(getattr(torch, kv_dtype))), None
    pages, scales = (
        tuple(torch.zeros_like(x, dtype=torch.int8) for x in (k, v)), torch.zeros(num_pages, 2, num_kv_heads, PAGE_SIZE)
    )
    write_codes(pages, scales, torch.arange(num_pages * PAGE_SIZE), k.flatten(0, 1), v.flatten(0, 1))
    return pages, scales


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_attention", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", help="at most this instruction set")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--kv-dtype", choices=("float32", "bfloat16", "int8"), help="default: as the queries")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--shapes", default=",".join("x".join(map(str, shape)) for shape in SHAPES),
        help="queries x cached x heads x kv heads x head dim, comma-separated"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    state = native.build()
    if state.status != "ready":
        parser.error(f"no native kernels: {state.detail}")
    print(
        f"{native.select_isa(options.isa)}, {options.dtype}, keys and values {options.kv_dtype or options.dtype}, "
        f"{options.threads} threads, torch {torch.__version__}"
    )
    print("queries  cached  heads  dim     least ms   median    GFLOP/s")
    for count, cached, heads, num_kv_heads, dim in (
        tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")
    ):
        pages, scales = make_pages(count + cached, num_kv_heads, dim, options.kv_dtype or options.dtype)
        q = torch.randn(count, heads, dim).to(getattr(torch, options.dtype))
        step = tuple(
            torch.tensor(x, dtype=torch.int32) for x in ([0, count], [count + cached], [list(range(len(pages[0])))])
        )
        times = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            cpu.paged_attention(q, pages, step, scale=dim**-0.5, scales=scales)
            times.append(time.perf_counter() - start)
        operations = 4 * heads * dim * (count * cached + count * (count + 1) // 2)
        print(
            f"{count:7}{cached:8}{heads:5}/{num_kv_heads:<3}{dim:3}{1e3 * min(times):12.2f}{1e3 * statistics.median(times):9.2f}{operations / min(times) / 1e9:11.0f}",
            flush=True
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
