"""How fast KV pages travel from one engine to another of the same host: ``python -m benchmarks.transfers``.

Two transfer agents and their lines, with regions filled by hand: what is measured is the way from "these bytes are
filled" to "they have arrived", checksums included, for prompts of several lengths; by default with the page bytes of
Llama-3.1-8B in bfloat16 (128 KiB a token). ``--device cuda`` adds the copies between device and region on both sides.
``--backend cuda-ipc``: regions on GPU 0 and on the last one, which may be the same.
"""

from __future__ import annotations

import argparse
import time
import zlib
from typing import TYPE_CHECKING

import numpy as np
import psutil

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.sampling import TransferSpec
from headrace.base.step import PageMove
from headrace.base.transfer import AgentOptions, Arrived, Completed, Fetch, Filled, FirstTokens, Offer, PeerFacts
from headrace.memory.transfer.contract import AnyRegion
from headrace.memory.transfer.device_region import DeviceRegion
from headrace.service.transfer.line import AgentLine

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 64
FACTS = PeerFacts("benchmark", PAGE_TOKENS, [])


class End:
    """One engine's side."""

    def __init__(self, num_bytes: int, backend: str, *, listens: bool, device: int = -1):
        self.region: AnyRegion | None = None
        options = AgentOptions(FACTS, backend, num_bytes, "127.0.0.1" if listens else "", device=device)
        self.line = AgentLine(options, self._attach)
        self.line.start()

    def _attach(self, region: AnyRegion | None, epoch: int) -> None:
        self.region = region

    def fill(self, value: int) -> None:
        """All bytes; commits those of the host, as in a server that has run for a while."""
        assert self.region is not None
        if self.region.data.size:
            self.region.data[:] = value
        else:
            self.tensor().fill_(value)
            self.tensor()[0].item()

    def holds(self, value: int, num_bytes: int) -> bool:
        """Whether so many bytes have the value."""
        assert self.region is not None
        data = self.region.data if self.region.data.size else self.tensor()
        return bool((data[:num_bytes] == value).all())

    def tensor(self) -> torch.Tensor:
        """The region, on its GPU."""
        import torch

        assert isinstance(self.region, DeviceRegion)
        return torch.as_tensor(self.region, device=f"cuda:{self.region.driver.device}")


def exchange(source: End, target: End, port: int, ticket: int, spans: list[tuple[int, int]]) -> float:
    """Seconds from the first filled span to the arrival of all."""
    num_bytes = sum(size for _, size in spans)
    target.line.send(Fetch(ticket, TransferSpec(f"r{ticket}", "127.0.0.1", port), b"p", 0, num_bytes))
    source.line.send(Offer(ticket, f"r{ticket}", b"p", 0, num_bytes))
    time.sleep(0.05)
    began = time.perf_counter()
    for span in spans:
        source.line.send(Filled(ticket, [span]))
    source.line.send(Completed(ticket, FirstTokens([1])))
    while True:
        for message in target.line.poll():
            if isinstance(message, Arrived) and message.ticket == ticket:
                seconds = time.perf_counter() - began
                source.line.poll()
                return seconds
        source.line.poll()
        time.sleep(0.0001)


def time_lane(num_tokens: int, num_layers: int, region: AnyRegion) -> tuple[float, float]:
    """Seconds from device to region, and back, of a prompt's pages."""
    import torch

    from headrace.memory.paging import PageCopier
    from headrace.memory.peer_lane import PeerLane
    from headrace.memory.pools import build_pool

    device = torch.device("cuda")
    spec = CacheSpec("full", 8, 128, 128, "bfloat16")
    num_pages = num_tokens // PAGE_TOKENS
    pool = build_pool(CacheGroup(spec, list(range(num_layers)), num_pages + 1), PAGE_TOKENS, device)
    lane = PeerLane(device)
    lane.attach(PageCopier([pool], device))
    lane.map(region, 1)
    if region.data.size:
        time.sleep(3)  # until the driver has pinned it
    pages, rows = list(range(1, num_pages + 1)), list(range(num_pages))

    def run(move: PageMove) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        lane.start(move)
        while not lane.poll():
            pass
        return time.perf_counter() - began

    best = []
    for source, target in (("device", "peer"), ("peer", "device")):
        move = PageMove(1, 0, source, target, pages if source == "device" else rows,
                        rows if source == "device" else pages, peer="1 0")
        best.append(min(run(move) for _ in range(5)))
    lane.close()
    return best[0], best[1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill step")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--backend", default="shared-memory")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    token_bytes = arguments.layers * 2 * 8 * 128 * 2
    lengths = [int(text) for text in arguments.tokens.split(",")]
    size = max(lengths) * token_bytes
    devices = (-1, -1)
    if arguments.backend.startswith("cuda-ipc"):
        import torch

        devices = (0, torch.cuda.device_count() - 1)
    source = End(size, arguments.backend, listens=True, device=devices[0])
    target = End(size, arguments.backend, listens=False, device=devices[1])
    assert source.region is not None and target.region is not None
    try:
        source.fill(7)
        target.fill(1)
        port = next(
            c.laddr.port for c in psutil.Process(source.line.pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        )
        data, began = np.zeros(1 << 28, dtype=np.uint8), time.perf_counter()
        zlib.crc32(data.data)
        print(f"CRC-32 here: {data.nbytes / (time.perf_counter() - began) / 1e9:.2f} GB/s", flush=True)
        ticket = 0
        for num_tokens in lengths:
            chunk = arguments.chunk
            spans = [
                (begin * token_bytes, (min(begin + chunk, num_tokens) - begin) * token_bytes)
                for begin in range(0, num_tokens, chunk)
            ]
            found = []
            source.fill(7)  # the lane's timing has overwritten it
            target.fill(1)
            for _ in range(5):
                ticket += 1
                found.append(exchange(source, target, port, ticket, spans))
            seconds, last = min(found), spans[-1][1]
            assert target.holds(7, num_tokens * token_bytes)
            line = (
                f"{num_tokens} tokens, {num_tokens * token_bytes / 1e6:.0f} MB: agents {seconds * 1e3:.1f} ms "
                f"({num_tokens * token_bytes / seconds / 1e9:.2f} GB/s), last chunk of {last / 1e6:.0f} MB"
            )
            if arguments.device == "cuda":
                out, back = time_lane(num_tokens, arguments.layers, source.region)
                line += f"; device to region {out * 1e3:.1f} ms, region to device {back * 1e3:.1f} ms"
            print(line, flush=True)
    finally:
        source.line.close()
        target.line.close()


if __name__ == "__main__":
    main()
