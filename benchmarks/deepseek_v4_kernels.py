"""DeepSeek-V4's kernels at Flash's shape on one GPU: ``python -m benchmarks.deepseek_v4_kernels [--only REGEX]``.

One line a kernel and number of tokens: the least time by bytes and operations, the time that plain torch and each
faster solution takes, and the share of the least time that the fastest reaches. Values are compared with plain torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from benchmarks.cuda_kernels import Call, time_calls
from benchmarks.roofline import BANDWIDTH, MATRIX_RATE
from headrace.kernels.compressor import EntryPages, Pooling, StatePages, Windows
from headrace.kernels.latents import LatentNorm, LatentRows
from headrace.kernels.latents.slots import Slots
from headrace.kernels.sparse_attention import EntryView, Queries, SeenSlots
from headrace.kernels.streams import StreamMix, StreamShape

BF16 = torch.bfloat16
PAGE_BYTES = {256: 149760, 64: 37440, 2: 1728}
Case = tuple[str, float, float, dict[str, Call], Callable[[object], torch.Tensor]]
"""Name, bytes, operations, solutions, and what of a result is compared."""


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def vectors(per_page: int, pages: int) -> Slots:
    """Pages of random packed vectors."""
    raw = torch.zeros(pages, PAGE_BYTES[per_page], dtype=torch.uint8, device="cuda")
    slots = Slots(
        raw[:, : per_page * 576].unflatten(1, (per_page, 576)),
        raw[:, per_page * 576 : per_page * 584].unflatten(1, (per_page, 8)),
    )
    slots.write(torch.arange(per_page, per_page * pages, device="cuda"), randn(per_page * (pages - 1), 512))
    return slots


def keys(pages: int, is_narrow: bool = False) -> Slots:
    """Pages of 64 random index keys, in 8 bits or in MXFP4."""
    width = 64 if is_narrow else 128
    raw = torch.zeros(pages, 64 * (width + 4), dtype=torch.uint8, device="cuda")
    values, scales = raw[:, : 64 * width].unflatten(1, (64, width)), raw[:, 64 * width :].unflatten(1, (64, 4))
    slots = Slots(values, scales.view(torch.float8_e8m0fnu) if is_narrow else scales)
    slots.write(torch.arange(64, 64 * pages, device="cuda"), randn(64 * (pages - 1), 128))
    return slots


def angles(length: int) -> torch.Tensor:
    turns = torch.rand(length, 32, device="cuda") * 6
    return torch.cat((turns.cos(), turns.sin()), dim=1)


def stream_cases() -> Iterator[Case]:
    from headrace.kernels.streams import reference, triton

    mix = StreamMix(randn(24, 16384, dtype=torch.float32) / 64, torch.rand(3).cuda(), torch.rand(24).cuda())
    norm = randn(4096)
    shape = StreamShape(20, 1e-6, 1e-6)
    for tokens in (1, 64, 8192):
        streams, out = randn(tokens, 4, 4096), randn(tokens, 4096)
        _, post, mixing = reference.read_streams(streams, mix, norm, shape)
        moved = 2 * tokens * 16384
        yield (
            f"read_streams T{tokens}", moved + moved / 4 + 4 * 24 * 16384, 2.0 * tokens * 24 * 16384,
            {
                n: partial(m.read_streams, streams, mix, norm, shape)
                for n, m in (("torch", reference), ("triton", triton))
            },
            lambda result: result[0],
        )
        yield (
            f"write_streams T{tokens}", 2.25 * moved, 0.0,
            {
                n: partial(m.write_streams, streams, out, post, mixing)
                for n, m in (("torch", reference), ("triton", triton))
            },
            lambda result: result,
        )


def attention_cases() -> Iterator[Case]:
    from headrace.kernels.sparse_attention import hopper, reference, triton

    window, entries = vectors(256, 65), vectors(64, 65)
    cos_sin, sinks = angles(9000), randn(64, dtype=torch.float32)
    for tokens in (1, 64, 1024):
        q = Queries(randn(tokens, 64, 512), torch.full((tokens,), 8000, device="cuda"), cos_sin, 1e-6)
        near = SeenSlots(
            window, torch.randint(256, 65 * 256, (tokens, 128), device="cuda"),
            torch.full((tokens,), 128, device="cuda"),
        )
        far = SeenSlots(
            entries, torch.randint(64, 65 * 64, (tokens, 512), device="cuda"), torch.full((tokens,), 512, device="cuda")
        )
        solutions = {
            n: partial(m.attend_slots, q, near, far, sinks=sinks, scale=512**-0.5)
            for n, m in (("torch", reference), ("triton", triton), ("hopper", hopper))
        }
        moved = tokens * (640 * 584 + 2 * 2 * 64 * 512)
        yield f"attend_slots T{tokens}", moved, 4.0 * tokens * 64 * 640 * 512, solutions, lambda result: result


def index_cases() -> Iterator[Case]:
    from headrace.kernels.sparse_attention import few_scores, indexer, reference, selection

    cos_sin = angles(9000)
    sizes = ((1, 2048), (1, 32768), (1, 262144), (64, 2048), (1024, 2048), (8192, 2048))
    for (tokens, entries), is_narrow in product(sizes, (False, True)):
        pool, key_bytes = keys(entries // 64 + 1, is_narrow), 68.0 if is_narrow else 132.0
        decodes = tokens if tokens <= 64 else 0
        table = torch.arange(1, entries // 64 + 1, device="cuda", dtype=torch.int32)
        view = EntryView(
            table.expand(max(1, decodes), -1).contiguous(),
            torch.arange(tokens, device="cuda") if decodes else torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            torch.full((tokens,), entries, device="cuda"), entries, decodes,
            [] if decodes else [(0, 0, tokens, entries)],
        )
        queries = Queries(randn(tokens, 64, 128), torch.full((tokens,), 8000, device="cuda"), cos_sin, 0.0)
        weights, whole = torch.rand(tokens, 64, device="cuda"), slice(0, tokens)
        scores = reference.index_scores(queries, weights, pool, view, scale=0.01, top_k=512, tokens=whole)
        yield (
            f"index_scores T{tokens} N{entries}{' in MXFP4' * is_narrow}",
            entries * key_bytes * max(1, decodes) + 4.0 * tokens * entries,
            2.0 * tokens * 64 * entries * 128,
            {
                n: partial(m.index_scores, queries, weights, pool, view, scale=0.01, top_k=512, tokens=whole)
                for n, m in (("torch", reference), ("triton", indexer), ("cuda", few_scores))
            },
            lambda result: result,
        )
        if is_narrow:
            continue
        yield (
            f"select_entries T{tokens} N{entries}", 4.0 * tokens * entries, 0.0,
            {
                n: partial(m.select_entries, scores, view, top_k=512, per_page=64, tokens=whole)
                for n, m in (("torch", reference), ("triton", indexer), ("cuda", selection))
            },
            lambda result: result.sort(-1).values.float(),
        )


def latent_cases() -> Iterator[Case]:
    from headrace.kernels.compressor import RowNorm, fused
    from headrace.kernels.compressor import reference as pooling
    from headrace.kernels.compressor import triton as pooling_triton

    for tokens in (1, 64, 8192):
        slots, x = vectors(256, 34), randn(tokens, 1536)[:, 1024:]
        norm = LatentNorm(randn(512), 1e-6, angles(9000))
        positions = torch.arange(tokens, device="cuda")
        numbers = torch.randperm(33 * 256, device="cuda")[:tokens] + 256
        query = RowNorm(randn(tokens, 1536)[:, :1024], randn(1024), 1e-6)
        yield (
            f"norm and latents T{tokens}", tokens * (4096.0 + 1024 + 584), 0.0,
            {
                n: partial(m.finish, query, LatentRows(x, norm, positions, slots, numbers), ())
                for n, m in (("torch", pooling), ("triton", fused))
            },
            lambda _, slots=slots, numbers=numbers: slots.gather(numbers, torch.float32),
        )
        for ratio, width in ((4, 1024), (128, 512)):
            count = max(1, tokens // ratio)
            entries = EntryPages(
                vectors(256 // ratio, 34), torch.arange(1, 34, dtype=torch.int32, device="cuda")[None, :].contiguous()
            )
            state = StatePages(
                torch.zeros(34, 256 if ratio == 128 else 16, width, device="cuda"),
                torch.zeros(34, 256 if ratio == 128 else 16, width, device="cuda"), entries.page_table, 128,
                8 if ratio == 4 else 128,
            )
            windows = Windows(
                torch.zeros(count, dtype=torch.int64, device="cuda"), torch.arange(count, device="cuda"),
                torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
                torch.tensor([max(tokens, ratio)], dtype=torch.int32, device="cuda"),
            )
            projected = randn(tokens, 2 * width, dtype=torch.float32)
            pool = Pooling(ratio, randn(ratio, width, dtype=torch.float32))
            final = LatentNorm(randn(512, dtype=torch.float32), 1e-6, norm.cos_sin)
            yield (
                f"compress {ratio} T{tokens}", 8.0 * width * max(tokens, ratio) + 584 * count, 0.0,
                {
                    n: partial(m.compress, projected, windows, state, pool, final, entries)
                    for n, m in (("torch", pooling), ("triton", pooling_triton))
                },
                lambda _, slots=entries.slots, n=count: slots.gather(
                    torch.arange(n, device="cuda") + slots.per_page, torch.float32
                ),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names to run, a regular expression")
    args = parser.parse_args()
    torch.manual_seed(0)
    for cases in (stream_cases, latent_cases, index_cases, attention_cases):
        for name, moved, operations, solutions, look in cases():
            if not re.search(args.only, name):
                continue
            floor, times, expected = max(moved / BANDWIDTH, operations / MATRIX_RATE), {}, None
            parts = []
            for solution, call in solutions.items():
                try:
                    out = look(call()).double()
                    expected = out if expected is None else expected
                    error = float((out - expected).norm() / expected.norm())
                    times[solution] = time_calls([call])
                    parts.append(f"{solution} {times[solution] * 1e6:.1f}" + (f" ({error:.0e})" if error else ""))
                except Exception as error:  # a benchmark goes on
                    parts.append(f"{solution}: {type(error).__name__} {str(error)[:90]}")
            share = 100 * floor / min(times.values()) if times else 0.0
            print(f"{name:<28}{floor * 1e6:8.1f} us {share:4.0f} %  " + " | ".join(parts), flush=True)


if __name__ == "__main__":
    main()
