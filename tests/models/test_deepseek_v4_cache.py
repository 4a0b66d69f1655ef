"""DeepSeek-V4's caches: bytes of packed slots, sizes of published models, what must be kept, reading in 8 bits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepseek_v4_tiny import TINY, build_harness, make_oracle, prompt, published_config
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.cache import CACHE_POOLS, CacheGroup, CacheSpec, group_layers
from headrace.base.errors import ConfigError
from headrace.base.registry import Registry
from headrace.execution.assembly import Assembly
from headrace.kernels.block_scaled import ceil_power_of_two, power_of_two
from headrace.kernels.latents.slots import pack_keys, pack_vectors, unpack_keys, unpack_vectors
from headrace.kernels.sparse_attention.reference import attend
from headrace.layers.attention.contract import KvPages
from headrace.memory.pools import build_pool, group_page_bytes
from headrace.models.catalog import find_family
from headrace.models.deepseek_v4 import layout
from headrace.models.deepseek_v4.backends import EntriesBackend
from headrace.models.deepseek_v4.layout import CompressorStatePolicy
from headrace.models.deepseek_v4.places import open_slots
from headrace.models.deepseek_v4.spec import cache_specs, places

CPU = torch.device("cpu")
FLASH = {
    "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "sliding_window": 128,
}
PRO = {**FLASH, "num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
VECTOR = CacheSpec(layout.WINDOW_FP8, 1, 512, 512, layout.FP8, window=128)


def read(**options: Any) -> Any:
    return find_family("DeepseekV4ForCausalLM").read_config(published_config(**options))


@pytest.mark.parametrize(
    ("options", "at_a_tenth", "compressed"), [(FLASH, 15897.45, 3850.25), (PRO, 23691.4375, 5511.4375)],
    ids=["flash", "pro"]
)
def test_bytes_per_token_of_published_models(options: dict[str, Any], at_a_tenth: float, compressed: float):
    spec = read(**options)
    kept = [place for layer in spec.layers for place in places(spec, layer)]
    assert layout.token_bytes(kept, 0.1) == pytest.approx(at_a_tenth, abs=1e-6)
    assert layout.token_bytes(kept, 0.0) == pytest.approx(compressed, abs=1e-6)
    # Pools take the same and the padding of their pages.
    groups = group_layers(cache_specs(spec, layout.FP8))
    pools = sum(group_page_bytes(g, 256) * (0.1 if g.spec.window else 1.0) for g in groups) / 256
    assert at_a_tenth < pools < 1.02 * at_a_tenth


@pytest.mark.parametrize(
    ("tokens", "ratio", "slots", "page"),
    [(256, 1, 256, 149760), (128, 1, 128, 74880), (256, 4, 64, 37440), (256, 128, 2, 1728)]
)
def test_pages_of_packed_vectors(tokens: int, ratio: int, slots: int, page: int):
    spec = CacheSpec(layout.ENTRIES_FP8, 1, 512, 512, layout.FP8, compress_ratio=ratio)
    pool = build_pool(CacheGroup(spec, [3], 3), tokens, CPU)
    values, scales = pool.layer(3)
    assert pool.page_bytes(spec, tokens) == page and pool.num_bytes == 3 * page
    assert values.shape == (3, slots, 576) and scales.shape == (3, slots, 8)


@pytest.mark.parametrize("slot", [0, 63, 64, 127])
def test_a_slot_is_two_pieces_and_nothing_else_is_touched(slot: int):
    spec = CacheSpec(layout.ENTRIES_FP8, 1, 512, 512, layout.FP8, compress_ratio=4)
    pool = build_pool(CacheGroup(spec, [0], 3), 256, CPU)
    raw = pool._layers[0]
    raw.fill_(0xAB)
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(slot)) * 3
    open_slots(KvPages(*pool.layer(0))).write(torch.tensor([64 + slot]), x)
    values, scales = pack_vectors(x)
    page, place = 1 + slot // 64, slot % 64
    at = page * 37440 + place * 576
    expected = torch.full((3 * 37440,), 0xAB, dtype=torch.uint8)
    expected[at : at + 576] = values[0]
    at = page * 37440 + 64 * 576 + place * 8
    expected[at : at + 8] = scales[0]
    assert torch.equal(raw.flatten(), expected)


def test_scales_are_the_least_powers_of_two_that_hold():
    x = torch.tensor([1.0, 0.5, 0.3, 1e-4 / 448, 1e-4 / 6, 3.0])
    assert ceil_power_of_two(x).tolist() == [127, 126, 126, 105, 112, 129]
    assert (
        power_of_two(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist()
        == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    )
    vectors = torch.randn(50, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 4, 50)[:, None]
    unpacked = unpack_vectors(*pack_vectors(vectors))
    assert torch.equal(unpacked[:, 448:], vectors[:, 448:].bfloat16().float())
    largest = vectors[:, :448].unflatten(1, (7, 64)).abs().amax(-1, keepdim=True).clamp(min=1e-4)
    error = (unpacked - vectors)[:, :448].unflatten(1, (7, 64)).abs()
    assert (error <= largest * 2**-4).all(), "half a step of 3 bits of mantissa at up to twice the scale that fits"
    again = unpack_vectors(*pack_vectors(unpacked))
    assert torch.equal(again, unpacked)


def test_packed_index_keys():
    keys = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    codes, scales = pack_keys(keys)
    assert codes.shape == (20, 128) and scales.shape == (20, 4)
    assert torch.allclose(scales.view(torch.float32)[:, 0], keys.abs().amax(-1) / 448)
    assert ((unpack_keys(codes, scales) - keys).abs() <= keys.abs().amax(-1, keepdim=True) * 2**-4).all()


def test_attention_in_8_bits_is_attention_over_what_was_unpacked():
    generator = torch.Generator().manual_seed(2)
    pool = build_pool(CacheGroup(VECTOR, [0], 3), 256, CPU)
    packed = open_slots(KvPages(*pool.layer(0)))
    written = torch.randperm(512, generator=generator)[:200] + 256
    vectors = torch.randn(200, 512, generator=generator)
    packed.write(written, vectors)
    q, sinks = torch.randn(6, 4, 512, generator=generator), torch.randn(4, generator=generator)
    seen = torch.stack([torch.randperm(200, generator=generator)[:50] for _ in range(6)])
    hidden = torch.rand(6, 50, generator=generator) < 0.3
    out = attend(q, [(packed, written[seen].masked_fill(hidden, -1))], sinks=sinks, scale=512**-0.5)
    kv = unpack_vectors(*pack_vectors(vectors))[seen].double()
    logits = torch.einsum("the,tne->thn", q.double(), kv) * 512**-0.5
    weights = logits.masked_fill(hidden[:, None], float("-inf")).exp()
    weights = weights / (weights.sum(-1, keepdim=True) + sinks.double().exp()[:, None])
    torch.testing.assert_close(out.double(), torch.einsum("thn,tne->the", weights, kv), atol=1e-5, rtol=1e-5)


@given(length=st.integers(0, 900), ratio=st.sampled_from([4, 128]), page_size=st.sampled_from([128, 256, 512]))
def test_state_is_kept_from_the_first_window_that_still_needs_it(length: int, ratio: int, page_size: int):
    spec = CacheSpec(layout.STATE, 1, 8, 8, "float32", window=8 if ratio == 4 else 128, compress_ratio=ratio)
    policy = CompressorStatePolicy(spec, page_size)
    closing = length // ratio * ratio + ratio - 1  # the end of the first window to be finished from here
    read_from = max(0, closing + 1 - spec.window)
    assert policy.first_needed(length) == min(read_from, length) // page_size
    assert policy.first_needed(length + 1) >= policy.first_needed(length)
    held = [begin // page_size + 1 - policy.first_needed(begin - begin % page_size) for begin in range(length)]
    assert policy.peak_pages(length) == max(held, default=0)


def test_at_the_end_of_a_page_only_overlapping_windows_need_state():
    wide, overlapping = (
        CompressorStatePolicy(CacheSpec(layout.STATE, 1, 8, 8, "float32", w, r), 256) for w, r in ((128, 128), (8, 4))
    )
    assert wide.first_needed(512) == 2 and overlapping.first_needed(512) == 1


def test_scores_of_a_chunk_at_the_end_of_a_long_context_are_planned_for():
    """The largest step is measured at the beginning of a prompt."""
    keys, vectors = (
        EntriesBackend(CacheSpec(kind, 1, 128, 128, layout.FP8, compress_ratio=4), 256, CPU)
        for kind in (layout.INDEX_KEYS_FP8, layout.ENTRIES_FP8)
    )
    for longest, most in ((131_072, 2**30), (16_384, 8192 * 4096 * 4), (4096, 0)):
        config = SimpleNamespace(scheduler=SimpleNamespace(max_step_tokens=8192))
        assembly = Assembly(config, SimpleNamespace(max_model_len=longest), [keys, vectors], torch.device("cuda"))
        assert assembly.context_bytes == max(0, most - 8192 * min(longest, 8192) // 4 * 4)
    assert Assembly(config, SimpleNamespace(max_model_len=131_072), [keys], CPU).context_bytes == 0


def test_pages_that_do_not_hold_whole_windows_are_refused():
    with pytest.raises(ConfigError, match="multiple of 128"):
        build_pool(CacheGroup(CacheSpec(layout.WINDOW, 1, 8, 8, "float32", window=16), [0], 3), 16, CPU)


PACKED = {
    "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_hidden_layers": 3,
    "compress_ratios": [4, 128, 0], "index_topk": 64
}


def test_serving_in_8_bits():
    """Vectors of 512 dims packed, against the same model whose cache keeps float32: near, and the same choice
    mostly."""
    options = {**TINY, **PACKED}
    state, text = make_oracle(**options).state_dict(), prompt(0, 200)
    logits = []
    for kv_dtype in ("float32", layout.FP8):
        harness = build_harness(published_config(**options), state, kv_dtype=kv_dtype, max_len=256, num_sequences=1)
        sequence = harness.start()
        logits.append(torch.cat([harness.step((sequence, text[:150]))[0], harness.step((sequence, text[150:]))[0]]))
    exact, packed = logits
    assert (packed - exact).norm() < 0.1 * exact.norm()
    assert (packed.argmax(-1) == exact.argmax(-1)).float().mean() > 0.8
    assert not torch.equal(packed, exact)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_packed_entries_in_host_memory_are_read_like_those_on_the_device(device: str):
    """Prompts whose pages are staged in turns, chunks beside decodes, decodes beyond their slots. The first layer
    selects, so that rounding, as the parts of a step are summed apart, changes no selection."""
    options = {**TINY, **PACKED}
    state, logits = make_oracle(**options).state_dict(), []
    for hot_slots in (0, 64):
        harness = build_harness(
            published_config(**options), state, max_len=384, num_sequences=3, hot_slots=hot_slots, kv_dtype=layout.FP8,
            dtype=torch.float32 if device == "cpu" else torch.bfloat16, device=torch.device(device)
        )
        first, second, third = (harness.start() for _ in range(3))
        steps = [
            ((first, prompt(0, 200)), (second, prompt(1, 250)), (third, prompt(2, 300))), ((first, [5]), (third, [6])),
            ((second, [7]), (first, prompt(3, 150)), (third, [8])), ((third, prompt(4, 70)), (second, [9])),
            *(((first, [n]), (third, [n + 9]), (second, [n + 5])) for n in range(1, 9)),
        ]
        logits.append(torch.cat([piece.float() for step in steps for piece in harness.step(*step)]))
    assert (logits[1] - logits[0]).norm() <= 1e-2 * logits[0].norm()


def test_a_broken_8_bit_pool_leaves_the_model_servable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    broken: Registry[Any] = Registry("KV pool")
    broken.add(layout.WINDOW_FP8, "a_module_that_is_not_there:Pool")
    monkeypatch.setattr("headrace.models.deepseek_v4.spec.CACHE_POOLS", broken)
    with caplog.at_level(logging.WARNING):
        specs = cache_specs(read(**FLASH), layout.FP8)
    assert {s.kind for s in specs} == {layout.WINDOW, layout.ENTRIES, layout.INDEX_KEYS, layout.STATE}
    assert {s.dtype for s in specs if s.kind != layout.STATE} == {"bfloat16"}
    assert layout.WINDOW_FP8 in caplog.text and "a_module_that_is_not_there" in caplog.text


def test_vectors_that_cannot_be_packed_are_refused():
    with pytest.raises(ConfigError, match="kv_dtype"):
        cache_specs(read(), layout.FP8)


def test_kinds_are_registered_once_however_often():
    from headrace.models.deepseek_v4 import family

    before = CACHE_POOLS.names()
    for kind in (layout.WINDOW, layout.STATE):
        assert kind in before
    import importlib

    importlib.reload(family)
    assert CACHE_POOLS.names() == before
