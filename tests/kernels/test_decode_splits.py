"""How decodes are divided among programs, and that Triton copies keys ahead of their products in every form of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from headrace.kernels.attention.decodes import _share_out  # noqa: E402

KEYS, WINDOW = 16, 40


@triton.jit
def _store_shares(
    kv_lens_ptr, out_ptr, num_requests, slots, WINDOW: tl.constexpr, KEYS: tl.constexpr, BLOCK_R: tl.constexpr
):
    slot = tl.program_id(0)
    request, kv_len, split, each, count = _share_out(kv_lens_ptr, num_requests, slot, slots, WINDOW, KEYS, BLOCK_R)
    tl.store(out_ptr + slot * 5, request)
    tl.store(out_ptr + slot * 5 + 1, kv_len)
    tl.store(out_ptr + slot * 5 + 2, split)
    tl.store(out_ptr + slot * 5 + 3, each)
    tl.store(out_ptr + slot * 5 + 4, count)


@pytest.mark.parametrize("device", [
    pytest.param("cpu", marks=pytest.mark.interpreted), pytest.param("cuda", marks=pytest.mark.cuda)
])
@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize(("lens", "slots"), [
    ([1], 4), ([300], 7), ([0, 0], 3), ([1000, 3, 16], 12), ([17] * 9, 20), ([4000] + [5] * 7, 9),
    ([900, 30, 30, 800, 700, 16, 0, 450], 40),
])
def test_shares_are_as_short_as_slots_allow(lens: list[int], slots: int, window: int, device: str):
    lengths = torch.tensor(lens, dtype=torch.int32, device=device)
    out = torch.empty(slots, 5, dtype=torch.int32, device=device)
    _store_shares[(slots,)](lengths, out, len(lens), slots, WINDOW=window, KEYS=KEYS, BLOCK_R=16)
    shares = out.tolist()
    seen = [max(0, n - window) // KEYS if window else 0 for n in lens]
    blocks = [max(1, -(-n // KEYS) - first) for n, first in zip(lens, seen, strict=True)]
    least = next(each for each in range(1, 1000) if sum(-(-b // each) for b in blocks) <= slots)
    expected = [
        [request, lens[request], split, least, -(-own // least)]
        for request, own in enumerate(blocks) for split in range(-(-own // least))
    ]
    used = [share for share in shares if share[0] < 16]
    # where the range to search is wider than the search, shares may be a little longer
    if max(blocks) > 64:
        each = used[0][3]
        assert least <= each <= least + sum(blocks) // (slots - len(lens)) // 64 + 1
        assert [share[0] for share in used] == [i for i, own in enumerate(blocks) for _ in range(-(-own // each))]
    else:
        assert used == expected


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headrace.kernels.attention.decodes import _decode_kernel as kernel

for is_split, requests in ((True, 16), (True, 256), (False, 1)):
    given = dict(
        PAGE=64, K=2, G=8, E=128, EV=128, WINDOW=0, SOFTCAP=False, SINKS=False, BLOCK_E=128, BLOCK_EV=128, BLOCK_M=16,
        BLOCK_N=64, IS_SPLIT=is_split, BLOCK_R=requests, BLOCK_G=8, CHUNK=16, PRECISION="tf32", OPEN=False, FP8=False,
        PDL=True,
    )
    types = {name: "*bf16" for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "sinks_ptr")}
    types |= {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in given else types.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
        if name.endswith("_ptr") or name.startswith("page_stride")
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in given.items()}, aligned)
    options = {"num_warps": 4, "num_stages": 5, "launch_pdl": True}
    assembly = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    copies = [line for line in assembly.splitlines() if "cp.async.cg.shared.global" in line]
    assert copies and all("0x10" in line or " 16" in line for line in copies), "not 16 bytes at a time, or not ahead"
    print("compiled")
"""


def test_keys_are_copied_ahead_whether_or_not_they_are_divided(tmp_path):
    """By the compiler for Hopper, which needs no device. In Triton 3.7 a `while` ahead of the loop prevents it."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["compiled"] * 3, done.stderr[-2000:]
