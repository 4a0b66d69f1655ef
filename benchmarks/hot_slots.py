"""What hot slots cost on a GPU: ``python -m benchmarks.hot_slots``.

One layer of DeepSeek-V4-Flash: entries of 584 bytes in pinned host memory, top 512, some contexts. For shares of the
wanted entries that stay from one step to the next: microseconds to find the swaps and to copy,
and the rate of the copies.
"""

from __future__ import annotations

import argparse

import torch

from headrace.kernels.hot_slots import EntryParts, HotSlots
from headrace.kernels.hot_slots.triton import find_swaps, load_entries

PAGE, VALUE_BYTES, SCALE_BYTES, TOP = 64, 576, 8, 512


def make_parts(num_pages: int, device: torch.device) -> list[torch.Tensor]:
    """Values and scales of packed pages, as views."""
    size = PAGE * (VALUE_BYTES + SCALE_BYTES)
    shape = (num_pages, -(-size // VALUE_BYTES) * VALUE_BYTES)
    pages = torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
    split = PAGE * VALUE_BYTES
    return [
        pages[:, :split].unflatten(1, (PAGE, VALUE_BYTES)), pages[:, split:size].unflatten(1, (PAGE, SCALE_BYTES))
    ]


def time_steps(arguments: argparse.Namespace, num_slots: int, overlap: float) -> tuple[float, float, float]:
    """Microseconds to find and to copy, and the mean number of loads of a step."""
    device, rows, entries = torch.device("cuda"), arguments.rows, arguments.context // 4
    torch.manual_seed(0)
    host = make_parts(rows * entries // PAGE + 1, torch.device("cpu"))
    slots = make_parts(rows * (num_slots + 1) // PAGE + 1, device)
    parts = EntryParts.of(host, slots)
    places = torch.arange(rows * (num_slots + 1), dtype=torch.int32, device=device).view(rows, -1)
    hot = HotSlots.allocate(places, entries)
    at, lengths = torch.arange(rows, device=device), torch.full((rows,), entries, dtype=torch.int32, device=device)
    wanted = torch.stack([torch.randperm(entries - 1)[:TOP] for _ in range(rows)])
    found, loads = (torch.empty((rows, TOP), dtype=torch.int32, device=device) for _ in range(2))
    begins = (torch.arange(rows) * entries).view(rows, 1)
    times, num_loads = [], []
    for step in range(arguments.steps):
        for row in range(rows):  # others take the place of some
            count = round(TOP * (1 - overlap))
            fresh = torch.randperm(entries - 1)
            fresh = fresh[~torch.isin(fresh, wanted[row])][:count]
            wanted[row, torch.randperm(TOP)[:count]] = fresh
        on_device = wanted.to(torch.int32).to(device)
        origins = (begins + wanted).to(device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda._sleep(2_000_000)  # launches are queued behind it
        events[0].record()
        find_swaps(hot, at, on_device, lengths, found, loads)
        events[1].record()
        load_entries(parts, origins, found, loads)
        events[2].record()
        torch.cuda.synchronize()
        if step > 2:
            times.append((events[0].elapsed_time(events[1]) * 1e3, events[1].elapsed_time(events[2]) * 1e3))
            num_loads.append(int((loads >= 0).sum()))
    find, copy = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
    return find, copy, sum(num_loads) / len(num_loads)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=65536, help="tokens, of which an entry holds four")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--slots", default="1024,4096")
    parser.add_argument("--overlaps", default="1,0.9,0.5,0")
    arguments = parser.parse_args()
    for num_slots in map(int, arguments.slots.split(",")):
        for overlap in map(float, arguments.overlaps.split(",")):
            find, copy, count = time_steps(arguments, num_slots, overlap)
            rate = count * (VALUE_BYTES + SCALE_BYTES) / max(copy, 1e-9) / 1e3
            print(
                f"{num_slots} slots, {arguments.rows} rows, overlap {overlap:.0%}: find {find:.1f} us, copy {copy:.1f} "
                f"us ({count:.0f} entries, {rate:.1f} GB/s)", flush=True
            )


if __name__ == "__main__":
    main()
