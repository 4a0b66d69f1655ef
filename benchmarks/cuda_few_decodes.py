"""Decodes of one and two requests between products, as a model runs them: ``python -m benchmarks.cuda_few_decodes
[--rows 1 2] [--keys 128 1024 4096 8192] [--models NAME ...]``.

A captured chain of layers with weights and pages of their own: product of queries, keys and values, then rotation, page
write and attention, then the output product, launched dependently. Microseconds a layer that attention adds to the
products alone: one launch and two over bfloat16 pages, one and two over e4m3 pages; two are the page write, then
`decode` or `fp8_decodes`. Contexts longer than `few_decodes` takes by itself are measured too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch

from benchmarks.cuda_kernels import PAGE, Pool, randn, time_calls
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import DecodeStep, DecodeWorkspace, decode
from headrace.kernels.attention.fp8_decodes import fp8_decodes
from headrace.kernels.few_decodes import Rotation
from headrace.kernels.few_decodes import hopper as few
from headrace.kernels.linear.rows import multiply
from headrace.kernels.precompile import precompile
from headrace.kernels.rowwise import HeadShape
from headrace.kernels.rowwise.triton import rope_write_pdl

LAYERS, POOL_TOKENS, MOST_KEYS = 14, 400_000, 1 << 20
Pages = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, Rotation, Pages, Head, DecodeStep], torch.Tensor]


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    dim: int
    width: int
    has_norms: bool = False
    has_sinks: bool = False
    window: int = 0


MODELS = (
    Model("8B", 32, 8, 128, 4096),
    Model("8B on two GPUs", 16, 4, 128, 4096),
    Model("gpt-oss", 64, 8, 64, 2880, has_sinks=True),
    Model("gpt-oss, window", 64, 8, 64, 2880, has_sinks=True, window=128),
    Model("Qwen3-30B-A3B", 32, 4, 128, 2048, has_norms=True),
    Model("Qwen3-30B-A3B on two GPUs", 16, 2, 128, 2048, has_norms=True),
    Model("Qwen3-30B-A3B on four GPUs", 8, 1, 128, 2048, has_norms=True),
)


def attend_at_once(qkv: torch.Tensor, rotation: Rotation, pages: Pages, head: Head, step: DecodeStep) -> torch.Tensor:
    out = few.few_decodes(qkv, rotation, pages, head, step)
    assert out is not None, "the kernel does not take it"
    return out


def attend_apart(
    workspace: DecodeWorkspace, qkv: torch.Tensor, rotation: Rotation, pages: Pages, head: Head, step: DecodeStep
) -> torch.Tensor:
    q_norm, k_norm = rotation.norms or (None, None)
    q = rope_write_pdl(
        qkv, rotation.positions, rotation.cos_sin, rotation.slots, *pages, q_norm=q_norm, k_norm=k_norm,
        **rotation.shape,
    )
    out = torch.empty_like(q)
    call = (q, pages, out, workspace, head, step)
    if pages[0].dtype == torch.bfloat16:
        decode(*call, pdl=True)
    else:
        assert fp8_decodes(*call, pdl=True), "the kernel does not take it"
    return out


class Bench:
    """A model's weights and pages of both types."""

    def __init__(self, model: Model):
        self.model = model
        self._into = [randn((model.heads + 2 * model.kv_heads) * model.dim, model.width) for _ in range(LAYERS)]
        self._out = [randn(model.width, model.heads * model.dim) for _ in range(LAYERS)]
        self._pools = [
            Pool(POOL_TOKENS // PAGE * PAGE, model.kv_heads, model.dim, dtype)
            for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        ]
        workspace = DecodeWorkspace.allocate(
            torch.cuda.get_device_properties(0).multi_processor_count, model.heads // model.kv_heads, model.dim,
            torch.device("cuda"),
        )
        self._solutions: tuple[tuple[Pool, Attend], ...] = tuple(
            (pool, attend) for pool in self._pools for attend in (attend_at_once, partial(attend_apart, workspace))
        )

    def make_chains(self, rows: int, keys: int) -> list[Callable[[], None]]:
        """The products alone, then with each solution."""
        model = self.model
        shape = HeadShape(
            num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, rotary_dim=model.dim,
            interleaved=False, norm_eps=1e-6, norm_offset=0.0,
        )
        sinks = torch.randn(model.heads, device="cuda") if model.has_sinks else None
        head, norms = Head(model.dim**-0.5, model.window, 0.0, sinks), None
        if model.has_norms:
            norms = randn(model.dim), randn(model.dim)
        lens = torch.full((rows,), keys, device="cuda", dtype=torch.int32)
        positions, cos_sin = lens.long() - 1, torch.randn(keys, model.dim, device="cuda")
        tables = self._pools[0].tables(LAYERS, rows, keys, PAGE)
        steps = [DecodeStep(lens, table, rows, keys) for table in tables]
        ids = [table.gather(1, (positions // PAGE)[:, None])[:, 0].long() for table in tables]
        rotations = [Rotation(positions, cos_sin, own * PAGE + positions % PAGE, norms, shape) for own in ids]
        x, columns = randn(rows, model.width), model.heads * model.dim

        def run(pool: Pool | None, attend: Attend | None) -> None:
            pages = None if pool is None else pool.pages(PAGE)
            for layer in range(LAYERS):
                qkv = multiply(x, self._into[layer], None)
                assert qkv is not None
                out = qkv[:, :columns]
                if attend is not None and pages is not None:
                    out = attend(qkv, rotations[layer], pages, head, steps[layer]).flatten(1)
                assert multiply(out, self._out[layer], None) is not None

        return [partial(run, None, None), *(partial(run, *solution) for solution in self._solutions)]


def run_all(benches: list[Bench], rows: list[int], keys: int) -> None:
    """Every kernel, none of which depends on the number of keys."""
    for bench in benches:
        for count in rows:
            for chain in bench.make_chains(count, keys):
                chain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--keys", type=int, nargs="+", default=[128, 1024, 4096, 8192])
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    args = parser.parse_args()
    divisions = {
        dim: tuple(replace(each, most_keys=MOST_KEYS) for each in own) for dim, own in few.DIVISIONS.items()
    }
    print(f"{'':26s} rows   keys  bfloat16  apart   e4m3  apart")
    with patch.object(few, "DIVISIONS", divisions):
        benches = [Bench(model) for model in MODELS if model.name in args.models]
        precompile(partial(run_all, benches, args.rows, args.keys[0]), f"{args}", torch.device("cuda", 0))
        for bench in benches:
            for rows in args.rows:
                for keys in args.keys:
                    alone, *times = (time_calls([chain]) / LAYERS * 1e6 for chain in bench.make_chains(rows, keys))
                    added = [each - alone for each in times]
                    columns = f"{added[0]:8.1f}  " + "  ".join(f"{each:5.1f}" for each in added[1:])
                    print(f"{bench.model.name:26s} {rows:4d} {keys:6d}  {columns}", flush=True)


if __name__ == "__main__":
    main()
