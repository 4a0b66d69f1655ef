"""What GPUs of each generation are given: nothing that they cannot run, and something for everything."""

from __future__ import annotations

import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import headrace.kernels
from headrace.kernels import cuda_source, nvrtc
from headrace.kernels.coded_linear import CODED_LINEAR
from headrace.kernels.moe import CODED_EXPERTS, GROUPED_LINEAR, RUN_EXPERTS
from headrace.kernels.operation import LARGE_BLOCK, KernelQuery, Operation, count_block_bytes

CARDS = {
    "A100": (8, 0), "A10": (8, 6), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0), "B300": (10, 3), "RTX 5090": (12, 0)
}
HOPPER = CARDS["H100"]
SHAPE = {
    "in_features": 4096, "out_features": 4096, "width": 4096, "streams": 4, "num_experts": 128, "head_dim": 512,
    "rotary_dim": 64, "packed": 1, "is_float": 1, "group": 128, "rows": 128, "bits": 8, "num_rows": 4, "ranks": 2,
}
"""Sizes that every solution for Hopper takes."""
TILED = {"tiled": 1, "is_float": 0, "bits": 4, "num_rows": 256}
"""Of integers in tiles, which those for 8-bit floats refuse."""
MANY = {"num_rows": 64}
"""Of products, which those for tens of rows begin with."""
HEADS = {"head_dim": 64}
"""Of attention, whose kernels refuse those of latents."""
LOADED = re.compile(r'load_kernel\(\s*"(\w+)"')
"""Sources that a module loads kernels of."""


def find_operations() -> list[Operation]:
    """All of them, and none of their solutions."""
    packages = [module.name for module in pkgutil.iter_modules(headrace.kernels.__path__) if module.ispkg]
    assert len(packages) > 15
    modules = [importlib.import_module(f"headrace.kernels.{name}") for name in packages if name != "native"]
    return [own for module in modules for own in vars(module).values() if isinstance(own, Operation)]


def read_source(target: str) -> str:
    spec = find_spec(target.partition(":")[0])
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def is_for_hopper(target: str) -> bool:
    """Whether a module's kernels multiply by wgmma, which Hopper alone has."""
    text = read_source(target)
    sources = map(nvrtc.read_source, LOADED.findall(text))
    return "experimental.gluon" in text or any(b"wgmma.mma_async" in source for source in sources)


def find_hopper_solutions() -> list[tuple[Operation, str]]:
    """Those that an operation chooses by itself; others are the same by name, see `CODED_LINEAR`."""
    found = []
    for operation in find_operations():
        for entry in operation:
            if is_for_hopper(entry.target) and entry.supports(KernelQuery("cpu", "int8")) is not None:
                found.append((operation, entry.name))
    return found


def ask(capability: tuple[int, int], **shape: int) -> KernelQuery:
    return KernelQuery("cuda", "bfloat16", capability, {**SHAPE, **shape})


def test_what_is_compiled_for_hopper_is_chosen_on_hopper_alone():
    solutions = find_hopper_solutions()
    assert len(solutions) >= 9
    for operation, name in solutions:
        shapes = [own for own in ({}, TILED, MANY, HEADS) if operation.reason_against(name, ask(HOPPER, **own)) is None]
        assert shapes, (operation.noun, name)
        for shape in shapes:
            able = [card for card, own in CARDS.items() if operation.reason_against(name, ask(own, **shape)) is None]
            assert able == ["H100"], (operation.noun, name)


@pytest.mark.parametrize(("operation", "name", "shape"), [
    (CODED_LINEAR, "cuda", {}), (CODED_LINEAR, "cuda_tiles", {"tiled": 1, "is_float": 0}),
    (CODED_LINEAR, "cuda_tile_block", {"tiled": 1, "is_float": 0, "num_rows": 8}), (CODED_EXPERTS, "cuda", {}),
    (RUN_EXPERTS, "triton_pdl", {}),
])
def test_large_blocks_are_chosen_where_they_fit(operation: Operation, name: str, shape: dict[str, int]):
    """Else weights would be stored in tiles that only a slow solution takes, and kernels fail to load."""
    taken = [card for card, own in CARDS.items() if operation.reason_against(name, ask(own, **shape)) is None]
    assert taken == ["H100", "B200", "B300"]
    assert all((count_block_bytes(own) == LARGE_BLOCK) == (card in taken) for card, own in CARDS.items())


def test_grouped_products_never_wait_for_row_counts_on_a_gpu():
    """torch's own does where it has no kernel: such a step could not be captured."""
    best = {card: next(e.name for e in GROUPED_LINEAR if e.supports(ask(own)) is None) for card, own in CARDS.items()}
    assert best == {card: "cutlass" if own[0] in (9, 10) else "triton" for card, own in CARDS.items()}


@pytest.mark.parametrize("card", CARDS)
def test_weights_in_codes_have_a_solution_for_every_number_of_rows(card: str):
    for shape in ({"is_float": 1}, {"is_float": 0, "bits": 4}, {"is_float": 0, "bits": 4, "looks_up": 1}):
        for rows in (1, 4, 64, 4096):
            query = ask(CARDS[card], **shape, num_rows=rows)
            names = [name for name in CODED_LINEAR.names() if CODED_LINEAR.reason_against(name, query) is None]
            assert names[-1] == "reference" and (len(names) > 1) == (CARDS[card] >= (8, 9) or not shape["is_float"])


def test_tiles_of_prefill_fit_each_gpu():
    pytest.importorskip("triton")
    from headrace.kernels.attention.prefill import prefill_tile

    for width in (64, 128, 256):
        for own in CARDS.values():
            tile = prefill_tile(width, 2, count_block_bytes(own))
            # queries, a block of keys, one of values, and shares: what is there at once without a pipeline
            least = 2 * (tile.rows * width + 2 * tile.keys * width + tile.rows * tile.keys)
            assert least <= count_block_bytes(own)


@pytest.mark.parametrize("needed", [0, 20 << 10, cuda_source.LONE_BYTES, cuda_source.MOST_BYTES])
def test_blocks_that_are_kept_apart_fit_once_and_not_twice(needed: int):
    asked = cuda_source.keep_apart(needed) + cuda_source.RESERVED_BYTES
    assert needed + cuda_source.RESERVED_BYTES <= asked <= cuda_source.SM_BYTES < 2 * asked
