"""Every CUDA kernel and attention backend, checked and timed: ``python -m benchmarks.cuda_kernels [--only REGEX]
[--json FILE]``.

Timed are CUDA-graph replays over rotated buffers (more than the second-level cache holds). One line an item: the time
of each solution in microseconds and the share of the roofline that the fastest reaches. A failing solution prints its
error and the run goes on. Sweeps of tile sizes come last and stop at ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.roofline import BANDWIDTH, MATRIX_RATE

BF16 = torch.bfloat16
ROTATED_BYTES = 160 * 2**20
PAGE = 64
Call = Callable[[], object]


@dataclass(frozen=True)
class Model:
    name: str
    heads: int
    kv_heads: int
    width: int
    hidden: int
    vocab: int
    layers: int
    has_qk_norm: bool
    dim: int = 128

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim


MODELS = [
    Model("qwen0.6b", 16, 8, 1024, 3072, 151936, 28, True),
    Model("llama8b", 32, 8, 4096, 14336, 128256, 32, False),
]


@dataclass
class Item:
    """One thing to do, by several solutions. ``calls(solution, n)`` gives n calls on different buffers; ``floor`` is
    the least time in seconds; ``check`` compares a solution's output with float64 or None."""

    name: str
    floor: float
    solutions: dict[str, Callable[[int], list[Call]]]
    bytes_each: float
    expected: Callable[[], torch.Tensor] | None = None
    tolerance: float = 2e-2
    times: dict[str, float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def run(self) -> str:
        rotations = max(1, min(48, int(ROTATED_BYTES / self.bytes_each)))
        expected = self.expected() if self.expected else None
        for name, make in self.solutions.items():
            try:
                calls = make(rotations)
                if expected is not None:
                    self._check(name, calls[0](), expected)
                self.times[name] = time_calls(calls)
            except Exception as error:  # a benchmark goes on
                self.errors[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:70] if str(error) else ''}"
        return self.line()

    def _check(self, name: str, out: object, expected: torch.Tensor) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if out is None:
            return
        error = float((out.double() - expected.double()).norm() / expected.double().norm())
        if not error < self.tolerance:
            self.errors[name + "?"] = f"WRONG {error:.1e}"

    def line(self, most: int = 99) -> str:
        parts = [f"{n} {t * 1e6:.1f}" for n, t in sorted(self.times.items(), key=lambda i: i[1])[:most]]
        parts += [f"{n}: {e}" for n, e in self.errors.items()]
        share = f"{100 * self.floor / min(self.times.values()):3.0f}%" if self.times else "  -"
        return f"{self.name:<30}{self.floor * 1e6:8.1f} {share}  " + " | ".join(parts)


def time_calls(calls: list[Call], seconds: float = 0.02) -> float:
    """Seconds a call, median of graph replays; each replay runs all calls at least once and 16 calls in all."""
    torch.cuda.synchronize()  # the buffers were filled on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        start.record()
        calls[0]()
        end.record()
    end.synchronize()
    repeats = max(1, 16 // len(calls)) if start.elapsed_time(end) < 3 else 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            for call in calls:
                call()
    samples: list[float] = []
    graph.replay()
    torch.cuda.synchronize()
    began = time.time()
    while len(samples) < 5 or (time.time() - began < seconds and len(samples) < 50):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3 / (repeats * len(calls)))
    return statistics.median(samples)


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * scale


def each(n: int, make_inputs: Callable[[], tuple], function: Callable[..., object]) -> list[Call]:
    return [partial(function, *make_inputs()) for _ in range(n)]


def elementwise_items() -> Iterator[Item]:
    from headrace.kernels.rowwise import reference, triton

    for model in MODELS:
        for tokens in (1, 256, 8192):
            at = f"{model.name} T{tokens}"
            moved = 2 * tokens * model.width
            weight = randn(model.width)
            yield Item(f"add_rms_norm {at}", 4 * moved / BANDWIDTH, {
                name: lambda n, f=f, m=model, w=weight,
                t=tokens: each(n, lambda: (randn(t, m.width), randn(t, m.width), w, 1e-6), f)
                for name,
                f in (
                    ("triton", triton.add_rms_norm), ("pdl", triton.add_rms_norm_pdl), ("torch", reference.add_rms_norm)
                )
            }, 4 * moved)
            moved = 6 * tokens * model.hidden
            yield Item(f"silu_mul {at}", moved / BANDWIDTH, {
                name: lambda n, f=f, m=model, t=tokens: each(n, lambda: (randn(t, 2 * m.hidden),), f)
                for name, f in (("triton", triton.silu_mul), ("torch", reference.silu_mul))
            }, moved)
            moved = 4 * tokens * model.qkv
            pages = [randn(1 + tokens // PAGE, PAGE, model.kv_heads, model.dim) for _ in range(2)]
            table, at_slots = torch.randn(8192, model.dim, device="cuda"), torch.arange(tokens, device="cuda")
            weights = {n: randn(model.dim) if model.has_qk_norm else None for n in ("q_norm", "k_norm")}
            shape = dict(
                num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, rotary_dim=model.dim,
                interleaved=False, norm_eps=1e-6, norm_offset=0.0, **weights,
            )
            yield Item(f"rope_write {at}", moved / BANDWIDTH, {
                name: lambda n, f=f, m=model, t=tokens, p=pages, c=table, s=at_slots, k=shape: each(
                    n, lambda: (randn(t, m.qkv), s, c, s, *p), partial(f, **k))
                for name, f in (("triton", triton.rope_write), ("torch", reference.rope_write))
            }, moved)


def products(model: Model) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's weights and of the head."""
    return {
        "qkv": (model.qkv, model.width), "out": (model.width, model.heads * model.dim),
        "gate_up": (2 * model.hidden, model.width),
        "down": (model.width, model.hidden), "head": (model.vocab, model.width),
    }


def linear_items() -> Iterator[Item]:
    from headrace.kernels.linear import triton as linear

    for model in MODELS:
        for name, (outputs, inputs) in products(model).items():
            for rows in (1, 4, 8):
                x, moved = randn(rows, inputs), 2.0 * outputs * inputs
                solutions = {"cublas": F.linear, "skinny": linear.skinny} | ({"gemv": linear.gemv} if rows <= 4 else {})
                first = randn(outputs, inputs, scale=0.02)

                def calls(n: int, f: Callable, x=x, first=first) -> list[Call]:
                    return [partial(f, x, w, None) for w in [first, *(first.clone() for _ in range(n - 1))]]

                yield Item(
                    f"linear {model.name} {name} M{rows}", moved / BANDWIDTH,
                    {s: partial(calls, f=f) for s, f in solutions.items()}, moved,
                    expected=lambda x=x, w=first: x.float() @ w.float().T,
                )


class Pool:
    """KV pages shared by all attention items, large enough for the largest."""

    def __init__(self, tokens: int, kv_heads: int = 8, dim: int = 128, dtype: torch.dtype = BF16):
        self.tokens = tokens
        self.k, self.v = (
            torch.empty(tokens, kv_heads, dim, device="cuda", dtype=BF16).normal_().to(dtype) for _ in range(2)
        )

    def pages(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(t.view(-1, page_size, *t.shape[1:]) for t in (self.k, self.v))

    def tables(self, n: int, requests: int, length: int, page_size: int) -> list[torch.Tensor]:
        columns = -(-length // page_size)
        order = torch.randperm(self.tokens // page_size, device="cuda", dtype=torch.int32)
        tables = order[: order.numel() // (requests * columns) * requests * columns].view(-1, requests, columns)
        return [tables[i % tables.shape[0]].contiguous() for i in range(n)]


def dense_decode(q: torch.Tensor, pages: tuple, table: torch.Tensor, length: int) -> torch.Tensor:
    """Attention of the first 4 requests by torch in float32."""
    few = min(4, q.shape[0])
    k, v = (p[table[:few].long()].flatten(1, 2)[:, :length].float().transpose(1, 2) for p in pages)
    return F.scaled_dot_product_attention(q[:few].float().unsqueeze(2), k, v, enable_gqa=True).squeeze(2)


def triton_decode(
    model: Model, pool: Pool, q: torch.Tensor, length: int, n: int, *, page_size: int = PAGE, **options: object
) -> list[Call]:
    from headrace.kernels.attention import decodes as attention
    from headrace.kernels.attention.blocks import Head

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = attention.DecodeWorkspace.allocate(processors, model.heads // model.kv_heads, model.dim, q.device)
    lens = torch.full((q.shape[0],), length, dtype=torch.int32, device="cuda")
    out, head = torch.empty_like(q), Head(model.dim**-0.5)
    bound = options.pop("bound", length)

    def call(table: torch.Tensor) -> torch.Tensor | None:
        step = attention.DecodeStep(lens, table, q.shape[0], bound)
        attention.decode(q, pool.pages(page_size), out, workspace, head, step, **options)
        # another page size means another table: not the one checked against
        return out[:4] if page_size == PAGE else None

    return [partial(call, table) for table in pool.tables(n, q.shape[0], length, page_size)]


def flashinfer_decode(model: Model, pool: Pool, q: torch.Tensor, length: int, n: int) -> list[Call]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    table = pool.tables(n, q.shape[0], length, PAGE)[0]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(2**27, dtype=torch.uint8, device="cuda"))
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32) * table.shape[1]
    last = torch.full((q.shape[0],), (length - 1) % PAGE + 1, dtype=torch.int32)
    wrapper.plan(
        starts, table.flatten(), last, model.heads, model.kv_heads, model.dim, PAGE, q_data_type=BF16, kv_data_type=BF16
    )
    return [lambda: wrapper.run(q, pool.pages(PAGE))[:4]]


def decode_items(pool: Pool) -> Iterator[Item]:
    for model in MODELS:
        for requests in (1, 8, 64, 256):
            for length in (512, 2048, 8192):
                q = randn(requests, model.heads, model.dim)
                moved = 4.0 * requests * length * model.kv_heads * model.dim
                given = (model, pool, q, length)
                long = {"bound": 32768}
                solutions = {
                    "triton": partial(triton_decode, *given), "page16": partial(triton_decode, *given, page_size=16),
                }
                if moved >= ROTATED_BYTES:
                    solutions |= {"flashinfer": partial(flashinfer_decode, *given)}
                if length == 512 and requests <= 64:
                    solutions |= {"triton-32k-bound": partial(triton_decode, *given, **long)}
                yield Item(
                    f"decode {model.name} R{requests} L{length}", moved / BANDWIDTH,
                    {name: partial(_seeded, f) for name, f in solutions.items()},
                    moved, partial(_first_expected, pool, q, length),
                )


def _seeded(make: Callable[[int], list[Call]], n: int) -> list[Call]:
    torch.manual_seed(7)  # so that the first table is the one that was checked against
    return make(n)


def _first_expected(pool: Pool, q: torch.Tensor, length: int) -> torch.Tensor | None:
    torch.manual_seed(7)
    return dense_decode(q, pool.pages(PAGE), pool.tables(1, q.shape[0], length, PAGE)[0], length)


def prefill_items(pool: Pool) -> Iterator[Item]:
    from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages
    from headrace.layers.attention.triton import TritonAttention

    def backend_calls(cls: Callable, model: Model, lens: list[tuple[int, int]], tile=None) -> list[Call]:
        torch.manual_seed(3)
        requests, longest = len(lens), max(kv for _, kv in lens)
        starts = torch.tensor([0, *(n for n, _ in lens)], device="cuda").cumsum(0).int()
        tokens = int(starts[-1])
        inputs = AttentionInputs(
            tokens, 0, [n for n, _ in lens], [kv for _, kv in lens], max(n for n, _ in lens), longest, starts,
            torch.tensor([kv for _, kv in lens], device="cuda", dtype=torch.int32),
            pool.tables(1, requests, longest, PAGE)[0], torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        )
        geometry = AttentionGeometry(
            "cuda", "bfloat16", "bfloat16", (9, 0), model.heads, model.kv_heads, model.dim, model.dim, PAGE
        )
        backend = cls(geometry, torch.device("cuda"))
        backend.prepare(inputs)
        if tile is not None:
            from headrace.kernels.attention.prefill import plan_prefill

            backend._plan = plan_prefill(
                starts, inputs.query_lens_cpu, first=0, group=model.heads // model.kv_heads, tile=tile)
        q, pages, params = (
            randn(tokens, model.heads, model.dim), KvPages(*pool.pages(PAGE)), AttentionParams(model.dim**-0.5)
        )
        return [lambda: backend.attend(q, pages, params)]

    def hopper_calls(model: Model, lens: list[tuple[int, int]]) -> list[Call]:
        from headrace.layers.attention.hopper import HopperAttention

        return backend_calls(HopperAttention, model, lens)

    def cudnn_calls(model: Model, lens: list[tuple[int, int]]) -> list[Call]:
        from headrace.layers.attention.cudnn import CudnnAttention

        return backend_calls(CudnnAttention, model, lens)

    def flashinfer_calls(model: Model, lens: list[tuple[int, int]]) -> list[Call]:
        from headrace.layers.attention import flashinfer

        flashinfer.LEAST_QUERIES = 1
        return backend_calls(flashinfer.FlashinferAttention, model, lens)

    def torch_calls(model: Model, length: int) -> list[Call]:
        q, k, v = (randn(1, h, length, model.dim) for h in (model.heads, model.kv_heads, model.kv_heads))
        return [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)]

    from headrace.kernels.attention.blocks import Tile

    tiles = {
        "128x64w8s3": Tile(128, 64, 8, 3), "128x128w8s2": Tile(128, 128, 8, 2), "64x64w4s3": Tile(64, 64, 4, 3),
        "128x64w4s3": Tile(128, 64, 4, 3)
    }
    for model in MODELS:
        for name, lens in {
            "8k": [(8192, 8192)], "4x2k": [(2048, 2048)] * 4, "2k@32k": [(2048, 32768)], "4x512@4k": [(512, 4096)] * 4,
            "8x256@2k": [(256, 2304)] * 8,
            "16x128@2k": [(128, 2176)] * 16, "32x64@2k": [(64, 2112)] * 32,
        }.items():
            pairs = sum(n * kv - n * (n - 1) / 2 for n, kv in lens)
            flops = 4 * model.heads * model.dim * pairs
            solutions = {
                "triton": lambda n, m=model, s=lens: backend_calls(TritonAttention, m, s),
                "hopper": lambda n, m=model, s=lens: hopper_calls(m, s),
                "cudnn": lambda n, m=model, s=lens: cudnn_calls(m, s),
                "flashinfer": lambda n, m=model, s=lens: flashinfer_calls(m, s),
            }
            if name == "8k":
                solutions["torch-sdpa"] = lambda n, m=model: torch_calls(m, 8192)
            yield Item(f"prefill {model.name} {name}", flops / MATRIX_RATE, solutions, ROTATED_BYTES)
            if name == "8k":
                solutions = {
                    t: lambda n, m=model, s=lens, x=x: backend_calls(TritonAttention, m, s, x) for t, x in tiles.items()
                }
                yield Item(f"sweep prefill {model.name} {name}", flops / MATRIX_RATE, solutions, ROTATED_BYTES)


def sample_items() -> Iterator[Item]:
    from headrace.kernels.sample import SampleParams, reference
    from headrace.kernels.sample import triton as sample

    for rows in (1, 8, 64, 256):
        vocab = MODELS[0].vocab
        moved = 4.0 * rows * vocab
        logits = torch.randn(rows, vocab, device="cuda") * 3

        def fill(value: float, dtype: torch.dtype, rows=rows) -> torch.Tensor:
            return torch.full((rows,), value, device="cuda", dtype=dtype)

        counter = torch.arange(rows, device="cuda")
        copies = lambda n, f, x=logits: [partial(f, x.clone()) for _ in range(n)]  # noqa: E731
        yield Item(f"argmax R{rows}", moved / BANDWIDTH, {
            "triton": partial(copies, f=sample.argmax), "torch": partial(copies, f=lambda x: x.max(-1)),
        }, moved)
        for cut, (top_k, top_p) in {"plain": (0, 1.0), "top-p": (0, 0.9), "top-k-p": (50, 0.9)}.items():
            params = SampleParams(
                fill(0.8, torch.float64), fill(top_k, torch.int64), fill(top_p, torch.float64),
                fill(0.0, torch.float64), counter, counter,
                has_min_p=False, has_top_p=top_p < 1, num_ranked=top_k or (vocab if top_p < 1 else 0),
            )
            yield Item(f"sample {cut} R{rows}", moved / BANDWIDTH, {
                name: partial(copies, f=partial(function, params=params))
                for name, function in (("triton", sample.sample), ("torch", reference.sample))
            }, moved)


def layer_items(pool: Pool) -> Iterator[Item]:
    """A whole decoder layer at one token and 1k of context, as a model runs it: with and without dependent launch."""
    for model in MODELS:
        weights = sum(a * b for name, (a, b) in products(model).items() if name != "head")
        moved = 2.0 * weights + 4.0 * 1024 * model.kv_heads * model.dim
        yield Item(f"layer {model.name} M1 L1024", moved / BANDWIDTH, {
            name: lambda n, m=model, o=options: layer_calls(m, pool, n, **o)
            for name, options in {
                "fused_norm": {"pdl": True, "fused_norm": True}, "pdl": {"pdl": True}, "triton": {},
                "cublas": {"gemv": False},
                "cublas+pdl": {"gemv": False, "pdl": True}, "torch": {"fused": False, "gemv": False},
            }.items()
        }, moved)


def layer_calls(
    model: Model, pool: Pool, n: int, *, pdl: bool = False, gemv: bool = True, fused: bool = True,
    fused_norm: bool = False,
) -> list[Call]:
    from headrace.kernels.attention import decodes as attention
    from headrace.kernels.attention.blocks import Head
    from headrace.kernels.linear import Norm, norm_linear
    from headrace.kernels.linear import triton as linear
    from headrace.kernels.rowwise import reference, triton

    multiply = partial(linear.linear, pdl=pdl) if gemv else F.linear
    add_norm = partial(triton.add_rms_norm, pdl=pdl) if fused else reference.add_rms_norm
    activate = partial(triton.silu_mul, pdl=pdl) if fused else reference.silu_mul
    write = (triton.rope_write_pdl if pdl else triton.rope_write) if fused else reference.rope_write
    q_norm = randn(model.dim) if model.has_qk_norm else None
    write = partial(
        write, num_heads=model.heads, num_kv_heads=model.kv_heads, head_dim=model.dim, rotary_dim=model.dim,
        interleaved=False, norm_eps=1e-6, norm_offset=0.0, q_norm=q_norm, k_norm=q_norm,
    )
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = attention.DecodeWorkspace.allocate(processors, model.heads // model.kv_heads, model.dim, device)
    lens = torch.full((1,), 1024, dtype=torch.int32, device="cuda")
    position, table_of_angles = torch.full((1,), 1023, device="cuda"), torch.randn(2048, model.dim, device="cuda")
    x, residual, norm_weight = randn(1, model.width), randn(1, model.width), randn(model.width)
    pages, head = pool.pages(PAGE), Head(model.dim**-0.5)

    def call(w: dict[str, torch.Tensor], table: torch.Tensor) -> None:
        if fused_norm:
            qkv, _ = norm_linear.norm_linear(x, residual, Norm(norm_weight, 1e-6), w["qkv"], None, pdl=pdl)
        else:
            qkv = multiply(add_norm(x, residual, norm_weight, 1e-6)[0], w["qkv"], None)
        q = write(qkv, position, table_of_angles, position, *pages)
        out = torch.empty_like(q)
        attention.decode(q, pages, out, workspace, head, attention.DecodeStep(lens, table, 1, 1024), pdl=pdl)
        projected = multiply(out.flatten(1), w["out"], None)
        if fused_norm:
            gated, _ = norm_linear.norm_linear(
                projected, residual, Norm(norm_weight, 1e-6), w["gate_up"], None, "silu", pdl=pdl
            )
        else:
            gated = activate(multiply(add_norm(projected, residual, norm_weight, 1e-6)[0], w["gate_up"], None))
        multiply(gated, w["down"], None)

    shapes = {name: shape for name, shape in products(model).items() if name != "head"}
    layers = [{name: randn(*shape, scale=0.02) for name, shape in shapes.items()} for _ in range(max(n, 4))]
    return [partial(call, w, table) for w, table in zip(layers, pool.tables(len(layers), 1, 1024, PAGE), strict=True)]


def tile_sweeps(pool: Pool) -> Iterator[Item]:
    """Other tile sizes, to choose the tables in the kernels by."""
    from headrace.kernels.linear import triton as linear

    for model in MODELS:
        for name, (outputs, inputs) in products(model).items():
            if name == "head":
                continue
            x, first = randn(1, inputs), randn(outputs, inputs, scale=0.02)
            tiles = [
                linear.Tile(o, i, w) for o, i,
                w in ((1, 4096, 4), (2, 2048, 4), (4, 1024, 4), (4, 2048, 4), (8, 2048, 8), (16, 1024, 4))
            ]

            def calls(n: int, tile: linear.Tile, x=x, first=first) -> list[Call]:
                return [partial(linear.gemv, x, w, None, tile) for w in [first, *(first.clone() for _ in range(n - 1))]]

            moved = 2.0 * outputs * inputs
            solutions = {f"{t.outputs}x{t.inputs}w{t.num_warps}": partial(calls, tile=t) for t in tiles}
            yield Item(f"sweep gemv {model.name} {name}", moved / BANDWIDTH, solutions, moved)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression on item names")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop starting items after this long")
    args = parser.parse_args()
    began = time.time()
    pool = Pool(256 * 8192 + PAGE * 16)
    groups = (
        partial(layer_items, pool), partial(decode_items, pool), partial(prefill_items, pool), linear_items,
        elementwise_items, sample_items, partial(tile_sweeps, pool),
    )
    lines, rows = [], []
    for group in groups:
        try:
            for item in group():
                if not re.search(args.only, item.name):
                    continue
                if time.time() - began > args.seconds:
                    lines.append(f"{item.name:<30} not run: out of time")
                    continue
                print(f"[{time.time() - began:5.0f} s] {item.run()}", flush=True)
                lines.append(item.line(most=3)[:120])
                rows.append(
                    {
                        "name": item.name, "floor_us": item.floor * 1e6,
                        "us": {k: v * 1e6 for k, v in item.times.items()}, "errors": item.errors
                    }
                )
        except Exception as error:  # a benchmark goes on
            lines.append(f"{group}: {type(error).__name__}: {error}"[:200])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}: item, floor in us, share of it reached, us by "
        "solution"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
