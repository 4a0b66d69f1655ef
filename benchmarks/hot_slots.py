"""What hot slots cost on a GPU: ``python -m benchmarks.hot_slots``.

One layer of DeepSeek-V4-Flash: entries of 584 bytes in host memory, top 512, some contexts. For shares of the wanted
entries that stay from one step to the next: microseconds to find the swaps and to copy, and the rate of the copies.
Then the rate at which whole pages are staged for prompts.
"""

from __future__ import annotations

import argparse

import torch

from headrace.kernels.hot_slots import EntryParts, HotSlots, Loads
from headrace.kernels.hot_slots.triton import find_swaps, load_entries
from headrace.kernels.pages import GATHER_PAGES, PageParts
from headrace.memory.mapped import allocate_mapped

PAGE, VALUE_BYTES, SCALE_BYTES, TOP, RATIO = 64, 576, 8, 512, 4
PAGE_BYTES = -(-PAGE * (VALUE_BYTES + SCALE_BYTES) // VALUE_BYTES) * VALUE_BYTES
DEVICE = torch.device("cuda")


def open_parts(pages: torch.Tensor) -> list[torch.Tensor]:
    """Values and scales of packed pages, as views."""
    split, size = PAGE * VALUE_BYTES, PAGE * (VALUE_BYTES + SCALE_BYTES)
    return [
        pages[:, :split].unflatten(1, (PAGE, VALUE_BYTES)), pages[:, split:size].unflatten(1, (PAGE, SCALE_BYTES))
    ]


class Rig:
    """``rows`` requests of ``entries`` each, all in host memory."""

    def __init__(self, rows: int, entries: int, num_slots: int):
        self.rows, self.entries = rows, entries
        self.table = torch.arange(rows * entries // PAGE, dtype=torch.int32, device=DEVICE).view(rows, -1)
        self.host = allocate_mapped((rows * entries // PAGE, PAGE_BYTES), torch.uint8, DEVICE)
        slots = torch.zeros((rows * (num_slots + 1) // PAGE + 1, PAGE_BYTES), dtype=torch.uint8, device=DEVICE)
        self.parts = EntryParts.of(open_parts(self.host), open_parts(slots))
        self.hot = HotSlots.allocate(1, rows, num_slots, entries, DEVICE, ratio=RATIO).layer(0)
        self.wanted = torch.stack([torch.randperm(entries - 1)[:TOP] for _ in range(rows)])

    def change(self, overlap: float) -> torch.Tensor:
        """What the next step wants: others take the place of some."""
        count = round(TOP * (1 - overlap))
        for row in range(self.rows):
            fresh = torch.randperm(self.entries - 1)
            fresh = fresh[~torch.isin(fresh, self.wanted[row])][:count]
            self.wanted[row, torch.randperm(TOP)[:count]] = fresh
        return self.wanted.to(DEVICE)

    def time_steps(self, steps: int, overlap: float) -> tuple[float, float, float]:
        """Microseconds to find and to copy, and the mean number of loads of a step."""
        at, loads = torch.arange(self.rows, device=DEVICE), Loads.allocate(self.rows, TOP, DEVICE)
        kv_lens = torch.full((self.rows,), RATIO * self.entries + 1, dtype=torch.int32, device=DEVICE)
        times, num_loads = [], []
        for step in range(steps):
            wanted = self.change(overlap)
            found = torch.empty_like(wanted)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda._sleep(2_000_000)  # launches are queued behind it
            events[0].record()
            find_swaps(self.hot, at, wanted, kv_lens, found, loads)
            events[1].record()
            load_entries(self.parts, self.table, loads)
            events[2].record()
            torch.cuda.synchronize()
            if step > 2:
                times.append((events[0].elapsed_time(events[1]) * 1e3, events[1].elapsed_time(events[2]) * 1e3))
                num_loads.append(int(loads.counts.sum()))
        find, copy = (sorted(column)[len(times) // 2] for column in zip(*times, strict=True))
        return find, copy, sum(num_loads) / len(num_loads)

    def time_staging(self) -> float:
        """GB/s at which the pages of the first request are copied to the device."""
        pages = self.table[0].long()
        stage = torch.zeros((len(pages), PAGE_BYTES), dtype=torch.uint8, device=DEVICE)
        gather, parts, places = GATHER_PAGES.load("triton"), PageParts.of([self.host]), torch.arange(len(pages))
        places = places.to(DEVICE)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(3):
            begin.record()
            gather(parts, pages, stage, places)
            end.record()
            torch.cuda.synchronize()
        return stage.numel() / begin.elapsed_time(end) / 1e6


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--context", type=int, default=65536, help="tokens, of which an entry holds four")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--slots", default="1024,4096")
    parser.add_argument("--overlaps", default="1,0.9,0.5,0")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for rows in map(int, arguments.rows.split(",")):
        for num_slots in map(int, arguments.slots.split(",")):
            rig = Rig(rows, arguments.context // 4, num_slots)
            for overlap in map(float, arguments.overlaps.split(",")):
                find, copy, count = rig.time_steps(arguments.steps, overlap)
                rate = count * (VALUE_BYTES + SCALE_BYTES) / max(copy, 1e-9) / 1e3
                print(
                    f"{num_slots} slots, {rows} rows, overlap {overlap:.0%}: find {find:.1f} us, copy {copy:.1f} us "
                    f"({count:.0f} entries, {rate:.1f} GB/s)", flush=True
                )
    print(f"staging {rig.time_staging():.1f} GB/s")


if __name__ == "__main__":
    main()
