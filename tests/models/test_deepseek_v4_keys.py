"""DeepSeek-V4's index keys in MXFP4: bytes, numbers, what they choose beside those in 8 bits, and that no step and no
cache changes what is said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deepseek_v4_cache import FLASH, PRO, read
from test_deepseek_v4_graphs import compare, greedy

from headrace import LLM
from headrace.base.cache import CacheGroup, CacheSpec, group_layers
from headrace.base.config import NARROW_KEYS
from headrace.base.errors import ConfigError
from headrace.kernels.latents import MOST_APART
from headrace.kernels.latents.reference import hadamard
from headrace.kernels.latents.slots import Slots, pack_keys, pack_narrow_keys, unpack_keys, unpack_narrow_keys
from headrace.kernels.sparse_attention import EntryView, Queries, reference
from headrace.memory.pools import build_pool, group_page_bytes
from headrace.models.catalog import find_family
from headrace.models.deepseek_v4 import layout
from headrace.models.deepseek_v4.packed_pools import NarrowKeyPool
from tests.execution.tiny_checkpoint import write_tiny_checkpoint
from tests.service.test_deepseek_v4_served import BASE, NEW_TOKENS, PARAMS, make_model, make_prompts

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEYS = CacheSpec(layout.INDEX_KEYS_FP4, 1, 128, 128, layout.FP4, compress_ratio=4)


def round_exactly(x: list[float]) -> tuple[list[float], list[int]]:
    """A key's values and the exponents of its scales, by the definition alone, in float64."""
    blocks = [x[i : i + 32] for i in range(0, len(x), 32)]
    exponents = [math.ceil(math.log2(max(1e-4, *map(abs, block)) / 6)) for block in blocks]
    exponents = [max(exponent, max(exponents) - MOST_APART) for exponent in exponents]
    rounded = []
    for block, exponent in zip(blocks, exponents, strict=True):
        for value in block:
            size = min(SIZES, key=lambda s: (abs(abs(value) / 2.0**exponent - s), s))
            rounded.append(math.copysign(size * 2.0**exponent, value) if size else 0.0)
    return rounded, exponents


@pytest.mark.parametrize("spread", [0, 3, 30], ids="blocks of sizes 2 ** {} apart".format)
def test_numbers(spread: int):
    generator = torch.Generator().manual_seed(spread)
    x = torch.randn(40, 4, 32, generator=generator)
    x *= 2.0 ** torch.randint(-spread, spread + 1, (40, 4, 1), generator=generator)
    x[0], x[1, 1] = 0, 0  # a key of zeros, and a block
    x = x.flatten(1)
    codes, scales = pack_narrow_keys(x)
    assert codes.shape == (40, 64) and scales.shape == (40, 4) and codes.dtype == scales.dtype == torch.uint8
    unpacked = unpack_narrow_keys(codes, scales)
    for row, own, exponents in zip(x.tolist(), unpacked.tolist(), scales.tolist(), strict=True):
        rounded, right = round_exactly(row)
        assert own == rounded and [e - 127 for e in exponents] == right
    # what kernels multiply: e4m3 times one power of two, without rounding
    unit = 2.0 ** (scales.amax(1, keepdim=True).double() - 127 - 6)
    scaled = unpacked.double() / unit
    assert torch.equal(scaled.to(torch.float8_e4m3fn).double(), scaled) and scaled.abs().max() <= 384


def test_bytes():
    """64 codes and 4 scales a key; a page of 256 tokens is 4,352 bytes, and all of it keys."""
    find_family("DeepseekV4ForCausalLM")  # which has these pools
    group = CacheGroup(KEYS, [0, 1], 3)
    pool = build_pool(group, 256, torch.device("cpu"))
    assert isinstance(pool, NarrowKeyPool) and pool.num_bytes == 3 * 2 * 4352 == 3 * group_page_bytes(group, 256)
    values, scales = pool.layer(0)
    assert (values.shape, scales.shape, scales.dtype) == ((3, 64, 64), (3, 64, 4), torch.float8_e8m0fnu)
    (page, _), x = [part.tensor for part in pool.parts], torch.randn(2, 128)
    slots = Slots(values, scales)
    slots.write(torch.tensor([64 + 3, 2 * 64]), x)
    codes, exponents = pack_narrow_keys(x)
    expected = torch.zeros(3, 4352, dtype=torch.uint8)
    expected[1, 3 * 64 : 4 * 64], expected[1, 4096 + 12 : 4096 + 16] = codes[0], exponents[0]
    expected[2, :64], expected[2, 4096:4100] = codes[1], exponents[1]
    assert torch.equal(page, expected)
    assert torch.equal(slots.gather(torch.tensor([67, 128]), torch.float32), unpack_narrow_keys(codes, exponents))


@pytest.mark.parametrize(
    ("options", "kept"), [(FLASH, 3850.25 - 21 * 16), (PRO, 5511.4375 - 30 * 16)], ids=["flash", "pro"]
)
def test_bytes_per_token_of_published_models(options: dict[str, Any], kept: float):
    """Of each token 16 bytes less in each layer with an indexer."""
    spec, family = read(**options), find_family("DeepseekV4ForCausalLM")
    specs = family.narrowing(spec).cache_specs(spec, layout.FP8)
    assert layout.token_bytes(specs, 0.0) == pytest.approx(kept, abs=1e-6)
    usual = family.cache_specs(spec, layout.FP8)
    fewer = [
        sum(group_page_bytes(group, 256) for group in group_layers(own) if group.spec.compress_ratio == 4)
        for own in (usual, specs)
    ]
    layers = sum(place.kind == layout.INDEX_KEYS_FP4 for place in specs)
    assert fewer[0] - fewer[1] == layers * 64 * (132 - 68)


@pytest.mark.parametrize(("clusters", "narrow_at_least", "wide_at_least"), [(0, 0.85, 0.96), (24, 0.7, 0.93)])
def test_what_they_choose(clusters: int, narrow_at_least: float, wide_at_least: float):
    """Of the 512 of 8,192 entries that exact keys choose, the share that rounded ones choose, too: among random keys,
    and among such as lie close together."""
    generator = torch.Generator().manual_seed(clusters)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    keys, turn = draw(8192, 128), hadamard(128, torch.device("cpu"))
    if clusters:
        keys = draw(clusters, 128)[torch.randint(clusters, (8192,), generator=generator)] + 0.3 * keys
    q, weights = draw(16, 64, 128), draw(16, 64)
    turned, queries = keys @ turn, unpack_keys(*pack_keys(q @ turn))

    def choose(q: torch.Tensor, keys: torch.Tensor) -> list[set[int]]:
        scores = torch.einsum("thn,th->tn", torch.einsum("the,ne->thn", q, keys).relu_(), weights)
        return [set(row) for row in scores.topk(512).indices.tolist()]

    exact = choose(q, keys)
    narrow = choose(queries, unpack_narrow_keys(*pack_narrow_keys(turned)))
    wide = choose(queries, unpack_keys(*pack_keys(turned)))
    shares = [
        sum(len(a & b) for a, b in zip(exact, found, strict=True)) / (16 * 512) for found in (narrow, wide)
    ]
    print(f"clusters {clusters}: {shares[0]:.3f} in MXFP4, {shares[1]:.3f} in 8 bits")
    assert shares[0] > narrow_at_least and shares[1] > wide_at_least


def test_scores():
    """Float64 sums over numbers that are rounded by the definition."""
    generator = torch.Generator().manual_seed(5)
    keys, q, weights = (torch.randn(*shape, generator=generator) for shape in ((60, 128), (2, 8, 128), (2, 8)))
    slots = Slots(
        torch.zeros(2, 64, 64, dtype=torch.uint8), torch.zeros(2, 64, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    )
    slots.write(torch.arange(64, 124), keys)
    numbers = torch.zeros(2, dtype=torch.int64)
    view = EntryView(torch.ones(1, 1, dtype=torch.int32), numbers, numbers + 60, 60, 0, [(0, 0, 2, 60)])
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    found = reference.index_scores(
        Queries(q, numbers, cos_sin, 0.0), weights, slots, view, scale=0.5, top_k=8, tokens=slice(0, 2)
    )
    rounded = torch.tensor([round_exactly(row)[0] for row in keys.tolist()], dtype=torch.float64)
    queries = unpack_keys(*pack_keys(q @ hadamard(128, q.device))).double()
    exact = torch.einsum("thn,th->tn", torch.einsum("the,ne->thn", queries, rounded).relu_(), 0.5 * weights.double())
    torch.testing.assert_close(found.double(), exact, atol=1e-4, rtol=1e-5)


NARROW = {"kv_dtype": NARROW_KEYS}
WIDTHS = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A saved model, prompts, and what is said to each without a prefix cache, prompts in one piece."""
    folder, prompts = tmp_path_factory.mktemp("deepseek_v4"), make_prompts()
    make_model(**WIDTHS).save_pretrained(folder)
    with LLM(str(folder), **BASE | NARROW, prefix_cache=False, max_step_tokens=1024) as llm:
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
    return folder, prompts, [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize("options", [
    {"max_step_tokens": 101, "overlap_depth": 2},
    {"kv_pages": 8, "overlap_depth": 2, "max_step_tokens": 300},
    {"hot_slots": 40, "max_step_tokens": 101},
    {"kv_pages": 6, "host_cache_gb": 0.02},
    {"speculative_config": {"method": "suffix", "num_speculative_tokens": 5}},
], ids=str)
def test_nothing_changes_what_is_said(
    served: tuple[Path, list[list[int]], list[list[int]]], options: dict[str, Any]
):
    folder, prompts, expected = served
    with LLM(str(folder), **BASE | NARROW | options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
            assert [o.outputs[0].token_ids for o in outputs] == expected
        llm.check()


def test_captured_steps(served: tuple[Path, list[list[int]], list[list[int]]]):
    """As with caches in 8 bits, a last bit may become larger; here it may also choose another entry of equal score."""
    compare(served[0], served[1], greedy(NEW_TOKENS), NARROW | {"max_step_tokens": 101}, error=0.1)


def test_where_they_cannot_be(served: tuple[Path, list[list[int]], list[list[int]]], tmp_path: Path):
    spec = read()
    with pytest.raises(ConfigError, match="has none: take fp8"):
        find_family("DeepseekV4ForCausalLM").narrowing(spec).cache_specs(spec, "float32")
    llama = find_family("LlamaForCausalLM")
    spec = llama.read_config(json.loads((write_tiny_checkpoint(tmp_path / "llama", 5) / "config.json").read_text()))
    with pytest.raises(ConfigError, match="this llama model has none: take fp8"):
        llama.narrowing(spec).cache_specs(spec, layout.FP8)
    make_model(**WIDTHS | {"index_head_dim": 16}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="multiples of 32"):
        LLM(str(tmp_path), **BASE | NARROW)
