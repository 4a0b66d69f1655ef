"""How a prompt's entries reach host memory of a decode engine: ``python -m benchmarks.hosted_transfers``, on two GPUs.

Of DeepSeek-V4-Flash, those that hot slots keep in host memory. A prefill engine on the first GPU has computed them, the
decode engine is on the second. Ways:

- direct: from the first GPU to pinned memory of the host
- staged: into pages of the second GPU (NVLink), and from these to pinned memory
- region: as ``cuda-ipc`` does, to memory of the second GPU, from where a kernel writes pages of host memory

All start with a copy of the prompt's pages, which lie anywhere, to rows. Prints the milliseconds of each for whole
prompts, and chunk by chunk, where only the last one's are behind the computation; and what share of the prompt's
computation they are beyond the direct way. With one GPU, all is on that; with ``--device cpu`` on the host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.deepseek_v4 import read_config
from headrace.base.cache import CacheGroup, CacheSpec
from headrace.kernels.operation import KernelQuery
from headrace.kernels.pages import GATHER_PAGES, SCATTER_PAGES, PageParts
from headrace.memory.mapped import allocate_mapped
from headrace.memory.transfer.device_region import driver_of
from headrace.models.deepseek_v4 import layout
from headrace.models.deepseek_v4.family import FAMILY
from headrace.models.deepseek_v4.packed_pools import PackedVectorPool

CHUNK_S = 0.45
"""Seconds of a chunk of 8,192 tokens, as recorded in docs/benchmarks/deepseek-v4-prefill.md."""
MEMORY_TYPE, IS_HOST = 2, 1
"""``CU_POINTER_ATTRIBUTE_MEMORY_TYPE`` and ``CU_MEMORYTYPE_HOST``."""


def list_groups(num_layers: int, ratios: Sequence[int], num_pages: int) -> list[CacheGroup]:
    """Entries in 8 bits of windows of ``ratios`` tokens, in the first layers of Flash."""
    spec = FAMILY.read_config({**read_config(False), "num_hidden_layers": num_layers})
    groups = []
    for ratio in ratios:
        layers = [number for number, layer in enumerate(spec.layers) if layer.ratio == ratio]
        dim = spec.heads.head_dim
        entries = CacheSpec(layout.ENTRIES_FP8, 1, dim, dim, layout.FP8, compress_ratio=ratio)
        groups.append(CacheGroup(entries, layers, num_pages))
    return groups


def divide(num_pages: int, chunk_pages: int) -> list[tuple[int, int]]:
    """Pages ``[begin, end)`` of each chunk."""
    return [(begin, min(begin + chunk_pages, num_pages)) for begin in range(0, num_pages, chunk_pages)]


class Pages:
    """A prompt's pages in the pools of one engine, one pool per cache group; ``order`` has their numbers."""

    def __init__(self, pools: list[PackedVectorPool], order: torch.Tensor):
        self.pools = pools
        self.tensors = [[part.tensor for part in pool.parts] for pool in pools]
        self.device, self._order = self.tensors[0][0].device, order
        self._parts = [PageParts.of(tensors) for tensors in self.tensors]
        self._pages, self._places = order.to(self.device), torch.arange(len(order), device=self.device)
        query = KernelQuery(self.device.type, "uint8", capability(self.device))
        self._gather, self._scatter = GATHER_PAGES.choose(query), SCATTER_PAGES.choose(query)

    @property
    def widths(self) -> list[int]:
        """Bytes of a page of all layers, padding included, by group."""
        return [parts.page_bytes for parts in self._parts]

    def gather(self, rows: list[torch.Tensor], begin: int, end: int) -> None:
        """Pages ``[begin, end)`` of the prompt to the same rows, [pages, width] of each group."""
        self._copy(self._gather, rows, begin, end)

    def scatter(self, rows: list[torch.Tensor], begin: int, end: int) -> None:
        """The reverse."""
        self._copy(self._scatter, rows, begin, end)

    def read(self, group: int, num_pages: int) -> torch.Tensor:
        """Rows of the first pages, on the host and by its own indexing."""
        return torch.cat([tensor.cpu()[self._order[:num_pages]] for tensor in self.tensors[group]], 1)

    def _copy(self, kernel: Callable[..., None], rows: list[torch.Tensor], begin: int, end: int) -> None:
        with enter(self.device):
            for parts, own in zip(self._parts, rows, strict=True):
                kernel(parts, self._pages[begin:end], own[begin:end], self._places[: end - begin])


def copy_rows(sources: list[torch.Tensor], targets: list[torch.Tensor], begin: int, end: int) -> None:
    """Some rows of each group, on the copy engines, in order of the source's current stream."""
    for source, target in zip(sources, targets, strict=True):
        target[begin:end].copy_(source[begin:end], non_blocking=True)


class Rig:
    """Pools and rows of both engines, for prompts of up to ``num_pages``, whose pages are in no order."""

    def __init__(self, groups: list[CacheGroup], page_size: int, devices: tuple[torch.device, torch.device]):
        first, second = self.devices = devices
        num_pages, random = groups[0].num_pages, torch.Generator().manual_seed(0)
        left, came = (torch.randperm(num_pages, generator=random) for _ in range(2))
        self.source = Pages([PackedVectorPool(group, page_size, first) for group in groups], left)
        self.staged = Pages([PackedVectorPool(group, page_size, second) for group in groups], came)
        self.hosted = Pages(
            [PackedVectorPool(group, page_size, second, allocate=allocate_mapped) for group in groups], came
        )
        for tensor in (tensor for tensors in self.source.tensors for tensor in tensors):
            tensor.copy_(torch.randint(256, tensor.shape, dtype=torch.uint8, generator=random))

        def allocate(device: torch.device | None) -> list[torch.Tensor]:
            is_pinned = device is None and first.type == "cuda"
            return [
                torch.zeros((num_pages, width), dtype=torch.uint8, device=device or "cpu", pin_memory=is_pinned)
                for width in self.source.widths
            ]

        self._leaving, self._arriving, self._down = allocate(first), allocate(second), allocate(second)
        self.direct_rows, self.staged_rows = allocate(None), allocate(None)
        self.ways = {"direct": self.copy_directly, "staged": self.stage, "region": self.send_to_region}
        if (reason := reason_against(self.hosted)) is not None:
            print(f"the way by a region is left out: {reason}")
            del self.ways["region"]

    def copy_directly(self, begin: int, end: int) -> None:
        """Pages ``[begin, end)`` of the prompt, launched; see the module."""
        self.source.gather(self._leaving, begin, end)
        copy_rows(self._leaving, self.direct_rows, begin, end)

    def stage(self, begin: int, end: int) -> None:
        """The same."""
        self.source.gather(self._leaving, begin, end)
        copy_rows(self._leaving, self._arriving, begin, end)
        self.staged.scatter(self._arriving, begin, end)
        self.staged.gather(self._down, begin, end)
        copy_rows(self._down, self.staged_rows, begin, end)

    def send_to_region(self, begin: int, end: int) -> None:
        """The same."""
        self.source.gather(self._leaving, begin, end)
        copy_rows(self._leaving, self._arriving, begin, end)
        self.hosted.scatter(self._arriving, begin, end)

    def check(self, num_pages: int) -> None:
        """Raise `ValueError` unless each way has brought the bytes of so many pages; then forget them."""
        synchronize(self.devices)
        for group in range(len(self.source.pools)):
            came = {
                "direct": self.direct_rows[group][:num_pages], "staged": self.staged_rows[group][:num_pages],
                "region": self.hosted.read(group, num_pages),
            }
            expected = self.source.read(group, num_pages)
            if wrong := [name for name in self.ways if not torch.equal(came[name], expected)]:
                raise ValueError(f"other bytes came by the ways {wrong}")
        for tensors in (self.direct_rows, self.staged_rows, *self.staged.tensors, *self.hosted.tensors):
            for tensor in tensors:
                tensor.zero_()
        synchronize(self.devices)


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def reason_against(hosted: Pages) -> str | None:
    """Why pages are not in host memory where they should be; None if they are."""
    for tensor in (tensor for tensors in hosted.tensors for tensor in tensors if tensor.is_cuda):
        kind = ctypes.c_uint()
        driver = driver_of(hosted.device.index)
        driver.enter()
        driver.call(
            "cuPointerGetAttribute", ctypes.byref(kind), ctypes.c_int(MEMORY_TYPE), ctypes.c_uint64(tensor.data_ptr())
        )
        if kind.value != IS_HOST:
            return f"mapped memory is of type {kind.value} on {tensor.device}"
    return None


def enter(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def synchronize(devices: Sequence[torch.device]) -> None:
    """Wait for all of them."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Times:
    """Seconds of one way: of a whole prompt, of the sum of its chunks, and of the last of these."""

    whole_s: float
    chunks_s: float
    last_s: float


def measure(rig: Rig, way: Callable[[int, int], None], chunks: list[tuple[int, int]], repeats: int) -> Times:
    """Medians, behind two runs that are not timed."""

    def time_one(begin: int, end: int) -> float:
        began = time.perf_counter()
        way(begin, end)
        synchronize(rig.devices)
        return time.perf_counter() - began

    found = []
    for _ in range(repeats + 2):
        synchronize(rig.devices)
        whole = time_one(0, chunks[-1][1])
        each = [time_one(begin, end) for begin, end in chunks]
        found.append((whole, sum(each), each[-1]))
    return Times(*(statistics.median(column) for column in zip(*found[2:], strict=True)))


def tell(name: str, times: Times, direct: Times, num_bytes: int, compute_s: float) -> str:
    """A line of one way."""
    line = (
        f"  {name:6} whole {times.whole_s * 1e3:7.3f} ms ({num_bytes / times.whole_s / 1e9:5.1f} GB/s), chunk by chunk "
        f"{times.chunks_s * 1e3:7.3f} ms, of which the last {times.last_s * 1e3:6.3f}"
    )
    if times is not direct:
        whole, last = ((own - other) * 1e3 for own, other in (
            (times.whole_s, direct.whole_s), (times.last_s, direct.last_s),
        ))
        line += (
            f"; beyond direct {whole:+.3f} ms ({whole / compute_s / 10:+.3f} % of {compute_s:.2f} s) and, by the last "
            f"chunk, {last:+.3f} ms ({last / compute_s / 10:+.3f} %)"
        )
    return line


def find_devices(kind: str, numbers: str) -> tuple[torch.device, torch.device]:
    """Of the prefill and of the decode engine."""
    if kind == "cpu":
        return torch.device("cpu"), torch.device("cpu")
    first, second = (min(int(text), torch.cuda.device_count() - 1) for text in numbers.split(","))
    reach = "the same GPU" if first == second else (
        "by peer access" if torch.cuda.can_device_access_peer(first, second) else "WITHOUT peer access"
    )
    print(f"{torch.cuda.get_device_name(first)}, GPUs {first} and {second} ({reach}), torch {torch.__version__}")
    return torch.device("cuda", first), torch.device("cuda", second)


def main() -> None:
    """Print some lines for each prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="8192,65536", help="of prompts")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a prefill step")
    parser.add_argument("--chunk-seconds", type=float, default=CHUNK_S, help="that computing a chunk takes")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--ratios", default="4", help="tokens of an entry; hot slots have those of 4 in host memory")
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--devices", default="0,1", help="numbers of the GPUs of the prefill and the decode engine")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args()
    devices, ratios = find_devices(args.device, args.devices), [int(text) for text in args.ratios.split(",")]
    lengths = [int(text) for text in args.tokens.split(",")]
    groups = list_groups(args.layers, ratios, -(-max(lengths) // args.page_size))
    rig = Rig(groups, args.page_size, devices)
    for num_tokens in lengths:
        num_pages = -(-num_tokens // args.page_size)
        chunks = divide(num_pages, max(1, args.chunk // args.page_size))
        for way in rig.ways.values():
            way(0, num_pages)
        rig.check(num_pages)
        found = {name: measure(rig, way, chunks, args.repeats) for name, way in rig.ways.items()}
        rig.check(num_pages)
        num_bytes = num_pages * sum(rig.source.widths)
        layers = " and ".join(f"{len(group.layers)} layers of {group.spec.compress_ratio}" for group in groups)
        print(f"{num_tokens} tokens, entries in {layers} tokens, {num_bytes / 1e6:.1f} MB, {len(chunks)} chunks")
        for name, times in found.items():
            print(tell(name, times, found["direct"], num_bytes, len(chunks) * args.chunk_seconds), flush=True)


if __name__ == "__main__":
    main()
