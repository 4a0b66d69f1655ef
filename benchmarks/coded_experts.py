"""Experts in codes beside plain ones, on one GPU: ``python -m benchmarks.coded_experts [--tokens 1 16 64] [--few]
[--parts [NAME]] [--activations [NAME]]``.

For shapes of whole layers, microseconds from choices to sums (cold cache): plain, in codes, and in codes with other
tiles and numbers of programs; before, bytes of the chosen experts' codes over the time. For up to four tokens also
captured chains of steps with other choices, by block shape of the own CUDA C++; ``--few``: only these. ``--parts``:
only such chains of MXFP4 for some tokens, by tile of `headrace.kernels.moe.parts` and as they ran before, with the
products alone and how far both outputs are apart. ``--activations``: only MXFP4 for many tokens, with activations in
bfloat16 and in FP8, the two products alone too, and how far the outputs are apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import torch

from benchmarks.cuda_kernels import time_calls
from benchmarks.roofline import BANDWIDTH
from headrace.kernels.coded_linear.codes import Code, CodedMatrix
from headrace.kernels.coded_linear.device_codes import DeviceCodes, pack_for_device
from headrace.kernels.coded_linear.expand import expand
from headrace.kernels.coded_linear.hopper import Gated
from headrace.kernels.coded_linear.quantise import quantise_float, quantise_fp4, quantise_integer
from headrace.kernels.moe import CodedStack, coded, coded_few, fp8_few, hopper, many, parts, rounded, sorted_rows
from headrace.kernels.moe.coded import Tile
from headrace.kernels.moe.coded_few import Shape
from headrace.kernels.moe.experts import run_experts_pdl
from headrace.kernels.moe.triton import group_pairs, own_experts
from headrace.kernels.rowwise import Gate
from headrace.kernels.timing import time_on_gpu

SHAPES: dict[str, tuple[Callable[[torch.Tensor], CodedMatrix], int, int, int, int]] = {
    "gpt-oss-20b MXFP4": (quantise_fp4, 32, 4, 2880, 2880),
    "Qwen3-30B-A3B FP8 block": (partial(quantise_float, rows=128, group=128), 128, 8, 2048, 768),
    "Qwen3-30B-A3B INT4": (partial(quantise_integer, bits=4, group=128), 128, 8, 2048, 768),
}
TILES = [Tile(16, 64, 4, stages) for stages in (2, 3, 4)] + [
    Tile(32, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3), Tile(64, 128, 8, 4), Tile(128, 128, 8, 2)
]
PROGRAMS = (0, 400, 800, 1600)
FP8_DOWN_SHAPES = [fp8_few.Shape(*numbers) for numbers in ((2, 6, 2, 2), (4, 3, 2, 4), (2, 5, 2, 4))]
PART_SHAPES = {
    "gpt-oss-20b": (32, 32, 4, 2880, 2880, (8, 16, 32, 64, 128, 250)),
    "DeepSeek-V4-Flash": (256, 256, 6, 4096, 2048, (64,)),
    "DeepSeek-V4-Flash, half of the experts": (256, 128, 6, 4096, 2048, (64, 128)),
}
"""Experts, those that are here, choices, sizes, tokens."""
MANY_TOKENS = (512, 2048, 8192)
PART_TILES = [
    parts.Tile(rows, groups, is_beside)
    for rows, groups, is_beside in (
        (8, 4, True), (8, 4, False), (8, 3, True), (8, 2, True), (16, 4, True), (16, 4, False), (16, 3, True),
        (16, 2, True), (32, 4, False), (32, 3, False),
    )
]
FEW_SHAPES = [Shape(*numbers) for numbers in ((12, 2, 4), (12, 4, 2), (12, 3, 4), (16, 2, 4), (8, 4, 4))]


def draw(form: Callable[[torch.Tensor], CodedMatrix], outputs: int, inputs: int) -> DeviceCodes:
    """Random stacked matrices in codes."""
    packed = pack_for_device(form(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02))
    assert packed is not None
    return packed


def run_shape(name: str, tokens: list[int]) -> None:
    """Print the lines of one shape."""
    form, num_experts, top_k, width, inner = SHAPES[name]
    gate = Gate("clamped", 7.0, 1.702, 1.0) if "oss" in name else Gate("silu")
    gate_up, down = draw(form, num_experts * 2 * inner, width), draw(form, num_experts * width, inner)
    plain = [(expand(codes, torch.bfloat16).unflatten(0, (num_experts, -1)), None) for codes in (gate_up, down)]
    tiles, programs = coded.choose_tile, coded.LEAST_PROGRAMS
    for num_tokens in tokens:
        x = torch.randn(num_tokens, width, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices
        step = (x, ids, torch.rand(num_tokens, top_k, device="cuda"))
        found = {"plain": time_on_gpu(partial(run_experts_pdl, *step, *plain, gate))}
        call = partial(coded.run_experts_pdl, *step, (gate_up, None), (down, None), gate)
        found["chosen"] = time_on_gpu(call)
        read = len(ids.unique()) / num_experts * (gate_up.num_bytes + down.num_bytes)
        for tile in TILES if num_tokens > 16 else TILES[:3]:
            coded.choose_tile = lambda *_, tile=tile, **__: tile  # type: ignore[assignment]
            for least in PROGRAMS if num_tokens <= 16 else (programs,):
                coded.LEAST_PROGRAMS = least
                key = f"{tile.rows}x{tile.outputs}/{tile.num_stages}" + (f" of {least}" if num_tokens <= 16 else "")
                try:
                    found[key] = time_on_gpu(call)
                except Exception as error:  # a benchmark goes on
                    print(f"{key}: {type(error).__name__}", flush=True)
        coded.choose_tile, coded.LEAST_PROGRAMS = tiles, programs
        line = " | ".join(f"{key} {seconds * 1e6:.0f}" for key, seconds in sorted(found.items(), key=lambda p: p[1]))
        print(f"{name} {num_tokens:>5} tokens {read / found['chosen'] / 1e12:.2f} TB/s  {line}", flush=True)


def run_few(name: str, num_tokens: int) -> None:
    """Print a line of chains of steps with few tokens."""
    form, num_experts, top_k, width, inner = SHAPES[name]
    gate = Gate("clamped", 7.0, 1.702, 1.0) if "oss" in name else Gate("silu")
    layers = [
        ((draw(form, num_experts * 2 * inner, width), None), (draw(form, num_experts * width, inner), None))
        for _ in range(3)
    ]
    x, weights = torch.randn(num_tokens, width, device="cuda").bfloat16(), torch.rand(num_tokens, top_k, device="cuda")
    steps = [
        (x, torch.rand(num_tokens, num_experts, device="cuda").topk(top_k).indices, weights, *layers[i % 3], gate)
        for i in range(18)
    ]
    chosen = coded_few.SHAPES
    found = {
        "triton": time_calls([partial(coded.run_experts_pdl, *step) for step in steps]),
        "chosen": time_calls([partial(coded_few.run_experts, *step) for step in steps]),
    }
    is_fp8, down_shape = layers[0][0][0].code is Code.E4M3, fp8_few.DOWN_SHAPE
    if is_fp8:  # of which a wave of down has fewer than it needs, if clusters of four do not all run at once
        kernel = fp8_few.Form(down_shape, True).load(x.device)
        print(f"clusters of {down_shape.splits} at once: {kernel.count_clusters(down_shape.splits, 288)}", flush=True)
    for shape in FP8_DOWN_SHAPES if is_fp8 else FEW_SHAPES if layers[0][0][0].code is Code.E2M1 else ():
        if isinstance(shape, fp8_few.Shape):
            fp8_few.DOWN_SHAPE = shape
        else:
            coded_few.SHAPES = (shape, *chosen)  # type: ignore[assignment]
        found["/".join(map(str, shape))] = time_calls([partial(coded_few.run_experts, *step) for step in steps])
    coded_few.SHAPES, fp8_few.DOWN_SHAPE = chosen, down_shape
    read = sum(len(ids.unique()) for _, ids, *_ in steps) / len(steps) / num_experts
    num_bytes = read * sum(codes.num_bytes for codes, _ in layers[0])
    line = " | ".join(f"{key} {seconds * 1e6:.1f}" for key, seconds in sorted(found.items(), key=lambda p: p[1]))
    print(f"{name} {num_tokens} tokens in a chain, bytes {num_bytes / BANDWIDTH * 1e6:.1f} us: {line}", flush=True)


def draw_mxfp4(num_experts: int, outputs: int, inputs: int) -> DeviceCodes:
    """Random stacked matrices, made as codes: plain ones of DeepSeek-V4 would need much memory. Their inputs are a
    multiple of 64."""
    rows, blocks = num_experts * outputs, -(-inputs // 128)
    codes = torch.randint(0, 256, (rows, blocks, 64), dtype=torch.uint8, device="cuda")
    if inputs % 128:
        codes[:, -1] &= 15
    powers = torch.randint(244, 248, (rows, blocks * 4), dtype=torch.uint8, device="cuda")
    return DeviceCodes(Code.E2M1, inputs, codes.flatten(1), powers, 32, has_whole_zeros=True)


def run_parts(name: str) -> None:
    """Print lines of chains of steps with some tokens."""
    all_experts, num_experts, top_k, width, inner, tokens = PART_SHAPES[name]
    gate = Gate("clamped", 7.0, 1.702, 1.0) if "oss" in name else Gate("clamped", 10.0, 1.0, 0.0)
    layers: list[tuple[CodedStack, CodedStack]] = []
    for _ in range(2):
        gate_up, down = draw_mxfp4(num_experts, 2 * inner, width), draw_mxfp4(num_experts, width, inner)
        biases = [torch.randn(num_experts, n, device="cuda").bfloat16() for n in (2 * inner, width)]
        layers.append(((gate_up, biases[0]), (down, biases[1])) if "oss" in name else ((gate_up, None), (down, None)))
    num_bytes, tiles = sum(stack[0].num_bytes for stack in layers[0]), parts.TILES
    for num_tokens in tokens:
        x = torch.randn(num_tokens, width, device="cuda").bfloat16()
        weights, steps = torch.rand(num_tokens, top_k, device="cuda"), []
        for i in range(8):
            ids = torch.rand(num_tokens, all_experts, device="cuda").topk(top_k).indices
            steps.append((x, own_experts(ids, 0, num_experts), weights, *layers[i % 2], gate))
        parts.TILES = ()  # type: ignore[assignment]
        expected = many.run_experts_pdl(*steps[0]).double()
        found = {"before": time_calls([partial(many.run_experts_pdl, *step) for step in steps])}
        parts.TILES = tiles
        chosen = parts.choose_tile(num_tokens, top_k, num_experts)
        distance = 0.0
        for tile in PART_TILES:
            if chosen is None or not chosen.rows // 2 < tile.rows <= chosen.rows:
                continue
            key = f"{tile.rows}x{64 * tile.groups}" + ("" if tile.is_beside else " in turn")
            calls = [partial(parts.run_experts, *step, tile=tile) for step in steps]
            out = parts.run_experts(*steps[0], tile=tile)
            assert out is not None, "it takes these codes"
            distance = max(distance, float((out.double() - expected).norm() / expected.norm()))
            found[key] = time_calls(calls)
            found[f"products of {key}"] = time_calls([multiply_parts(step, num_experts, tile) for step in steps])
        read = sum(len(ids[ids >= 0].unique()) for _, ids, *_ in steps) / len(steps) / num_experts
        line = " | ".join(f"{key} {seconds * 1e6:.1f}" for key, seconds in sorted(found.items(), key=lambda p: p[1]))
        print(
            f"{name} {num_tokens} tokens, bytes {read * num_bytes / BANDWIDTH * 1e6:.1f} us, apart {distance:.1e}: "
            f"{line}", flush=True
        )


def multiply_parts(step: tuple, num_experts: int, tile: parts.Tile) -> Callable[[], None]:
    """Both products of a step, of rows that are in parts already."""
    x, ids, _, gate_up, down, gate = step
    order, _, ends = group_pairs(ids, num_experts)
    rows = parts.take_apart(x, ends, order, ids.shape[1], pdl=False)
    inner = parts.take_apart(parts.multiply(rows, *gate_up, ends, tile, Gated(*gate)), ends, pdl=False)

    def run() -> None:
        parts.multiply(rows, *gate_up, ends, tile, Gated(*gate))
        parts.multiply(inner, *down, ends, tile)

    return run


def run_activations(name: str) -> None:
    """Print lines of chains of steps with many tokens."""
    all_experts, num_experts, top_k, width, inner, _ = PART_SHAPES[name]
    is_oss = "oss" in name
    gate = Gate("clamped", 7.0, 1.702, 1.0) if is_oss else Gate("clamped", 10.0, 1.0, 0.0)
    gate_up, down = draw_mxfp4(num_experts, 2 * inner, width), draw_mxfp4(num_experts, width, inner)
    biases = [torch.randn(num_experts, n, device="cuda").bfloat16() if is_oss else None for n in (2 * inner, width)]
    stacks: list[CodedStack] = [(gate_up, biases[0]), (down, biases[1])]
    device = torch.empty(0, device="cuda").device
    every = {own.choose_tile(count, top_k, num_experts) for own in (many, rounded) for count in MANY_TOKENS}
    with ThreadPoolExecutor(initializer=torch.cuda.synchronize) as pool:  # which gives a thread the device's context
        list(pool.map(lambda kind: sorted_rows.find_kernel(*kind, device), product(every, (gate.kind, ""))))
    for num_tokens in MANY_TOKENS:
        x = torch.randn(num_tokens, width, device="cuda").bfloat16()
        weights = torch.rand(num_tokens, top_k, device="cuda")
        ids = own_experts(torch.rand(num_tokens, all_experts, device="cuda").topk(top_k).indices, 0, num_experts)
        step = (x, ids, weights, *stacks, gate)
        order, place, ends = group_pairs(ids, num_experts)
        plain = hopper.gather_rows(x, order, ends, top_k, evens_first=True)
        tiles = [own.choose_tile(num_tokens, top_k, num_experts) for own in (many, rounded)]
        found, flops = {}, 2 * int(ends[-1]) * 3 * width * inner
        for kind, rows, tile in (
            ("bf16", plain, tiles[0]), ("fp8", rounded.round_pairs(x, ids, place, ends), tiles[1])
        ):
            first = partial(sorted_rows.multiply, rows, *stacks[0], ends, tile, Gated(*gate))
            between = rounded.round_rows(first(), ends) if kind == "fp8" else first()
            second = partial(sorted_rows.multiply, between, *stacks[1], ends, tile)
            found |= {f"{kind} gate and up": time_calls([first] * 4), f"{kind} down": time_calls([second] * 4)}
        calls = {"bf16": partial(many.run_experts, *step), "fp8": partial(rounded.run_many, *step)}
        found |= {kind: time_calls([call] * 4) for kind, call in calls.items()}
        exact, out = (call() for call in calls.values())
        assert exact is not None and out is not None, "they take these codes"
        distance = float((out.double() - exact.double()).norm() / exact.double().norm())
        line = " | ".join(f"{key} {seconds * 1e6:.0f}" for key, seconds in found.items())
        rates = ", ".join(
            f"{kind} {flops / (found[f'{kind} gate and up'] + found[f'{kind} down']) / 1e12:.0f}" for kind in calls
        )
        print(f"{name} {num_tokens} tokens, apart {distance:.1e}, TFLOP/s of products {rates}: {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 64, 256, 1024])
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--parts", nargs="*", metavar="NAME", help="of shapes whose names begin so; without, of all")
    parser.add_argument("--activations", nargs="*", metavar="NAME", help="as --parts")
    args = parser.parse_args()
    if args.activations is not None:
        for name in PART_SHAPES:
            if not args.activations or name.startswith(tuple(args.activations)):
                run_activations(name)
        return
    if args.parts is not None:
        for name in PART_SHAPES:
            if not args.parts or name.startswith(tuple(args.parts)):
                run_parts(name)
        return
    for name in SHAPES:
        for num_tokens in (tokens for tokens in (1, 2, 4) if not args.few or tokens in args.tokens):
            run_few(name, num_tokens)
        if not args.few:
            run_shape(name, args.tokens)


if __name__ == "__main__":
    main()
