"""Attention of decodes as a model runs it: ``python -m benchmarks.cuda_decode [--requests 8 32 256] [--lengths even
long] [--model heads kv_heads dim] [--pages float8_e4m3fn] [--also MOST_TILES PROGRAMS STAGES] [--whole 5 7 9]``.

A captured chain of layers: rotation and page write, then attention, launched dependently; each layer has pages of its
own. Lengths are 600 tokens each (even), as offline256 has them half-way (uneven; sorted: the longest first, as a step
has them), 8,192 (long), 32,768 (longer), 60,000 once and else 500 (one), or 8,192 once and else 1,500 (prompt: a long
prompt's first tokens beside streams).
Microseconds a layer, and the least that the keys and values take at the memory's bandwidth. ``--pages``: their type.
``--model``: may be repeated. ``--also``: with a rule of `decodes.SPLIT_RULES` more. ``--whole``: also without dividing
keys, with so many stages each.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from unittest.mock import patch

import torch

from benchmarks.cuda_kernels import MODELS, PAGE, Model, Pool, randn, time_calls
from benchmarks.roofline import BANDWIDTH
from headrace.kernels.attention import decodes
from headrace.kernels.attention.blocks import Head
from headrace.kernels.attention.decodes import DecodeStep, DecodeWorkspace, SplitRule, WholeRule, decode
from headrace.kernels.attention.fp8_decodes import fp8_decodes
from headrace.kernels.rowwise.triton import rope_write_pdl

POOL_TOKENS = 1_024_000
LEAST_LAYERS, MOST_LAYERS = 14, 64
CHAIN_BYTES = 2e8
"""Of keys and values in a chain, where so many layers hold them: four times the second-level cache."""
Attend = Callable[[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor, Head, DecodeStep], None]


def make_lengths(kind: str, requests: int) -> list[int]:
    random = Random(5)
    if kind == "sorted":
        return sorted(make_lengths("uneven", requests), reverse=True)
    if kind == "uneven":
        return [random.randint(100, 1024) + random.randint(0, 600) for _ in range(requests)]
    if kind == "one":
        return [60_000] + [500] * (requests - 1)
    if kind == "prompt":
        return [8192] + [1500] * (requests - 1)
    return [{"even": 600, "long": 8192, "longer": 32768}[kind]] * requests


def solutions(
    model: Model, dtype: torch.dtype, also: SplitRule | None = None, whole: Sequence[int] = ()
) -> dict[str, Attend]:
    """By name, for pages of a type; a variant to compare goes here."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    # room for the programs of a rule to compare
    workspace = replace(
        DecodeWorkspace.allocate(4 * processors, model.heads // model.kv_heads, model.dim, torch.device("cuda")),
        processors=processors,
    )
    found: dict[str, Attend] = {"triton": partial(_attend, workspace)}
    if dtype == torch.float8_e4m3fn:
        found["cuda_fp8"] = partial(_attend_codes, workspace)
    if also is not None:
        found["with the rule"] = partial(_attend_by_rule, also, workspace)
    for stages in whole:
        found[f"whole, {stages} stages"] = partial(_attend_whole, stages, workspace)
    return found


def _attend_codes(
    workspace: DecodeWorkspace, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    head: Head, step: DecodeStep
) -> None:
    assert fp8_decodes(q, pages, out, workspace, head, step, pdl=True), "the kernel does not take it"


def _attend_by_rule(
    rule: SplitRule, workspace: DecodeWorkspace, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor, head: Head, step: DecodeStep
) -> None:
    rules = decodes.SPLIT_RULES.get(q.shape[-1], decodes.OTHER_RULES)
    with patch.dict(decodes.SPLIT_RULES, {q.shape[-1]: (*rules, rule)}):
        _attend(workspace, q, pages, out, head, step)


def _attend_whole(
    stages: int, workspace: DecodeWorkspace, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor, head: Head, step: DecodeStep
) -> None:
    rules = {q.shape[-1]: WholeRule(float("inf"), stages)}
    with patch.multiple(decodes, SPLIT_RULES={}, OTHER_RULES=(), LONG_RULES=(), WHOLE_RULES=rules):
        _attend(workspace, q, pages, out, head, step)


def _attend(
    workspace: DecodeWorkspace, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    head: Head, step: DecodeStep
) -> None:
    decode(q, pages, out, workspace, head, step, pdl=True)


def count_bytes(model: Model, pool: Pool, lens: list[int]) -> int:
    """Of the keys and values that a layer reads."""
    return 2 * pool.k.element_size() * sum(lens) * model.kv_heads * model.dim


def time_chain(model: Model, pool: Pool, lens: list[int], attend: Attend) -> float:
    """Microseconds a layer."""
    requests, longest, bytes_each = len(lens), max(lens), count_bytes(model, pool, lens)
    layers = max(LEAST_LAYERS, min(MOST_LAYERS, int(CHAIN_BYTES / bytes_each)))
    kv_lens, tables, pages = (
        torch.tensor(lens, device="cuda", dtype=torch.int32), pool.tables(layers, requests, longest, PAGE),
        pool.pages(PAGE)
    )
    positions = kv_lens.long() - 1
    slots = [table.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE for table in tables]
    qkv, cos_sin, norm = (
        randn(requests, model.qkv), torch.randn(longest, model.dim, device="cuda"),
        randn(model.dim) if model.has_qk_norm else None
    )
    out, head = randn(requests, model.heads, model.dim), Head(model.dim**-0.5)
    write = partial(
        rope_write_pdl, num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, rotary_dim=model.dim,
        interleaved=False, norm_eps=1e-6, norm_offset=0.0, q_norm=norm, k_norm=norm,
    )

    def run() -> None:
        for table, at in zip(tables, slots, strict=True):
            attend(
                write(qkv, positions, cos_sin, at, *pages), pages, out, head,
                DecodeStep(kv_lens, table, requests, longest)
            )

    run()  # compiles
    return time_calls([run]) / layers * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument(
        "--lengths", nargs="+", choices=["even", "uneven", "sorted", "long", "longer", "one", "prompt"],
        default=["even", "uneven", "long"]
    )
    parser.add_argument("--also", type=float, nargs=3, metavar=("MOST_TILES", "PROGRAMS", "STAGES"))
    parser.add_argument("--whole", type=int, nargs="+", default=[], metavar="STAGES")
    parser.add_argument(
        "--model", type=int, nargs=3, action="append", metavar=("HEADS", "KV_HEADS", "DIM"),
        help="others than Qwen3-0.6B and Llama-3.1-8B"
    )
    parser.add_argument("--pages", choices=["bfloat16", "float8_e4m3fn"], default="bfloat16")
    args = parser.parse_args()
    models = [
        Model(f"{heads}/{kv_heads}/{dim}", heads, kv_heads, 1024, 1024, 1024, 1, False, dim)
        for heads, kv_heads, dim in args.model or ()
    ] or MODELS
    for model in models:
        dtype = getattr(torch, args.pages)
        pool = Pool(
            POOL_TOKENS * 1024 // max(1024, model.kv_heads * model.dim) // PAGE * PAGE, model.kv_heads, model.dim,
            dtype,
        )
        rule = None if args.also is None else SplitRule(args.also[0], int(args.also[1]), int(args.also[2]))
        attends = solutions(model, dtype, rule, args.whole)
        print(f"{model.name:10s} requests lengths   floor  " + "  ".join(attends), flush=True)
        for kind in args.lengths:
            for requests in args.requests:
                lens = make_lengths(kind, requests)
                if sum(lens) > pool.tokens:
                    continue
                floor = 1e6 * count_bytes(model, pool, lens) / BANDWIDTH
                times = [time_chain(model, pool, lens, attend) for attend in attends.values()]
                print(
                    f"{'':10s} {requests:8d} {kind:8s} {floor:7.1f}  "
                    + "  ".join(f"{t:{len(n)}.1f}" for n, t in zip(attends, times, strict=True)),
                    flush=True
                )


if __name__ == "__main__":
    main()
