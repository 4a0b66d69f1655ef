"""All layers in one kernel against the same layers called one after the other, for every family whose layers it
knows."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from family_cases import CASES, MAX_MODEL_LEN, config_json, make_oracle, prompt
from harness import ATTENTION_BACKENDS, Harness, Sequence, build_harness

from headrace.kernels import native
from headrace.kernels.native.loading import NativeState
from headrace.kernels.packed_linear.choice import FormChoice
from headrace.kernels.packed_linear.forms import PanelWeight, keep_in_panels
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8
from headrace.kernels.rowwise.reference import write_sum
from headrace.layers.attention.cpu import CpuAttention
from headrace.layers.batch import Features, FeatureSpec
from headrace.layers.decoder import decoder
from headrace.layers.lora.contract import AdaptedPart, AdapterWeights
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import AdapterBanks
from headrace.layers.quantization.storage import find_storable, store_fastest

TOGETHER = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "glm4", "mixtral", "gpt-oss")
"""Families that are run together, by the beginning of their case's name."""
APART = ("glm4-moe", "qwen2-moe")
"""Not those: shared experts beside the routed ones."""

MIXTURES = tuple(case for case in CASES if case.startswith(("mixtral", "qwen3-moe", "gpt-oss")))

LENGTHS = (1, 5, 23, 9, 14)


def is_together(case: str) -> bool:
    return case.startswith(TOGETHER) and not case.startswith(APART)


@pytest.fixture(autouse=True)
def cpu_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    monkeypatch.setattr(ATTENTION_BACKENDS, "load", lambda _: CpuAttention)


def build(
    case: str, dtype: torch.dtype = torch.float32, store=keep_in_panels, kv_dtype: str = "",
    adapters: BankSizes | None = None, **config: int
) -> Harness:
    """A model whose weights are packed; ``store`` packs one."""
    name, overrides = CASES[case]
    oracle = make_oracle(name, {**overrides, **config})
    harness = build_harness(
        config_json(oracle), oracle.state_dict(), num_sequences=12, max_len=120, dtype=dtype,
        max_model_len=MAX_MODEL_LEN.get(case, 0), kv_dtype=kv_dtype, adapters=adapters,
    )
    for weight in find_storable(harness.model):
        weight.store(store(weight.weight.data))
    return harness


def load_adapters(harness: Harness) -> None:
    """Of ranks 4 and 9 into slots 0 and 2, for all linears of layers."""
    sites = harness.model.find_adapter_sites()
    banks = AdapterBanks(harness.model, sites, BankSizes(3, 9), harness.model.step)
    generator = torch.Generator().manual_seed(8)
    for slot, rank in ((0, 4), (2, 9)):
        parts = [
            AdaptedPart(
                site.module, site.part, a=torch.randn(rank, site.in_features, generator=generator) * 0.2,
                b=torch.randn(site.out_features, rank, generator=generator) * 0.2
            )
            for site in sites.sites.values() if site.kind == "linear"
        ]
        banks.load(slot, banks.prepare(AdapterWeights(parts, rank, "", [])))


def adapt(harness: Harness) -> torch.Tensor:
    """Prompts, mixed steps and decodes of two adapters and of none; up to six rows of one adapter."""
    load_adapters(harness)
    sequences = [harness.start(slot) for slot in (0, 2, -1, 0, 2, 0)]
    steps = [harness.step(*((s, prompt(i, 2 + 3 * i)) for i, s in enumerate(sequences[:4])))]
    steps.append(harness.step((sequences[0], [3]), *((s, prompt(i, 6 + i)) for i, s in enumerate(sequences[4:]))))
    steps += [harness.step(*((s, [7 + step]) for s in sequences)) for step in range(2)]
    return torch.cat([logits for step in steps for logits in step])


def decode(harness: Harness) -> torch.Tensor:
    """Logits of a few decode steps of several sequences of different lengths."""
    sequences = [harness.start() for _ in LENGTHS]
    for i, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        harness.step((sequence, prompt(i, length + 1)))  # never one token: that would be a decode
    return torch.cat([torch.cat(harness.step(*((s, [7 + step]) for s in sequences))) for step in range(3)])


def mix(harness: Harness) -> torch.Tensor:
    """Prompts whole and in chunks beside decodes; of one step, the last tokens alone."""
    first, second, third, fourth = (harness.start() for _ in range(4))
    steps = [harness.step((first, prompt(0, 9)), (second, prompt(1, 33)))]
    steps.append(harness.step((first, [3]), (second, prompt(2, 20)), (third, prompt(3, 2)), (fourth, prompt(4, 40))))
    steps.append(
        harness.step((first, [4]), (third, [5]), (second, prompt(5, 3)), (fourth, prompt(6, 7)), wanted=[1, 3])
    )
    harness.step((first, prompt(7, 5)), (third, [8]), (fourth, prompt(8, 4)), wanted=[])
    steps.append(harness.step(*((s, [6]) for s in (first, second, third, fourth))))
    return torch.cat([logits for step in steps for logits in step])


def fork(harness: Harness, parent: Sequence, num_pages: int) -> Sequence:
    """A sequence that begins with a parent's pages."""
    child = harness.start()
    for own, theirs in zip(child.page_tables, parent.page_tables, strict=True):
        own[:num_pages] = theirs[:num_pages]
    child.length = num_pages * harness.page_size
    return child


def share(harness: Harness) -> torch.Tensor:
    """Decodes of sequences that begin with the same pages: many of them, some with fewer, one with none."""
    parent, other = harness.start(), harness.start()
    harness.step((parent, prompt(0, 84)), (other, prompt(1, 30)))
    sequences = [
        *(fork(harness, parent, 20) for _ in range(5)), parent, *(fork(harness, parent, 17) for _ in range(2)), other
    ]
    harness.step(*((s, prompt(i, 2 + i)) for i, s in enumerate(sequences) if s not in (parent, other)))
    steps = [harness.step(*((s, [9 + step + i]) for i, s in enumerate(sequences))) for step in range(3)]
    return torch.cat([logits for step in steps for logits in step])


def crowd(harness: Harness) -> torch.Tensor:
    """More rows than are computed with at a time."""
    sequences = [harness.start() for _ in range(4)]
    steps = [harness.step(*((s, prompt(i, 70 + i)) for i, s in enumerate(sequences)), wanted=[1, 2])]
    steps.append(harness.step(*((s, prompt(7 + i, 3)) for i, s in enumerate(sequences))))
    return torch.cat([logits for step in steps for logits in step])


SCENES = {"decode": decode, "mix": mix, "share": share}


def play(scene: str, harness: Harness, *, together: bool) -> torch.Tensor:
    """Logits of a scene."""
    if not together:
        harness.model._table, harness.model._is_table_due = None, False
    logits = ({**SCENES, "crowd": crowd, "adapt": adapt})[scene](harness)
    assert (getattr(harness.model, "_table", None) is not None) == together
    return logits


def both(scene: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Logits of a scene, layers together and layers apart."""
    return [play(scene, build(*args, **kwargs), together=together) for together in (True, False)]


@pytest.mark.parametrize(("scene", "case"), [
    (scene, case)
    for scene in SCENES
    for case in CASES if is_together(case) and not (scene == "share" and case in MAX_MODEL_LEN)
])
def test_float32_is_the_same(scene, case):
    torch.testing.assert_close(*both(scene, case), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("dtype", "is_coded"), [
    (torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)
])
def test_adapters_are_added_in_the_call(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_coded: bool):
    num_calls, run = 0, decoder.run_layers

    def count_calls(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return run(*args)

    monkeypatch.setattr(decoder, "run_layers", count_calls)
    sizes = BankSizes(3, 9, is_coded=is_coded)
    together, apart = both("adapt", "llama-tied-biased", dtype, adapters=sizes)
    assert num_calls == 4, "every step, also those with prompts"
    plain = play("adapt", build("llama-tied-biased", dtype, adapters=BankSizes(3, 9)), together=True)
    limit = 2e-5 if dtype == torch.float32 else 0.02
    assert (together - apart).abs().max() <= limit * apart.abs().max()
    assert (plain - together).abs().max() <= (limit + 0.03 * is_coded) * apart.abs().max()


@pytest.mark.parametrize("case", ["llama-tied-biased", "gemma3", "qwen3"])
@pytest.mark.parametrize("scene", SCENES)
def test_bfloat16_is_the_same_but_for_rounding(scene, case):
    together, apart = both(scene, case, torch.bfloat16)
    assert (together - apart).abs().max() <= 0.02 * apart.abs().max()


@pytest.mark.parametrize("case", MIXTURES)
@pytest.mark.parametrize("scene", SCENES)
def test_bfloat16_chooses_other_experts_only_where_it_is_close(scene, case):
    """Of two experts that are nearly as good rounding may choose either, for this token and so for what later ones see
    of it."""
    together, apart = both(scene, case, torch.bfloat16)
    exact = play(scene, build(case), together=True)
    differences = (together - apart).abs().amax(-1)
    assert (
        (differences <= 0.02 * apart.abs().max()).float().mean() >= 0.75
        and differences.median() <= 0.01 * apart.abs().max()
    )
    # of a token in the middle: another expert moves a few tokens by far more than rounding does
    errors = [(outputs - exact).abs().amax(-1).median() for outputs in (together, apart)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4])
def test_quantised_weights_are_the_same(quantise, case):
    def store(weight: torch.Tensor) -> PanelWeight:
        return PanelWeight(quantise(weight))

    torch.testing.assert_close(*both("mix", case, store=store), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("scene", SCENES)
def test_pages_of_codes(scene, case):
    together, apart = both(scene, case, kv_dtype="int8")
    plain = play(scene, build(case), together=True)
    assert (together - apart).abs().max() <= 0.01 * apart.abs().max()
    assert 0.0 < (together - plain).abs().max() <= 0.1 * plain.abs().max()


@pytest.mark.parametrize("intermediate_size", [56, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows(dtype, intermediate_size):
    together, apart = both("crowd", "llama", dtype, intermediate_size=intermediate_size)
    assert (together - apart).abs().max() <= (1e-5 if dtype == torch.float32 else 0.02) * apart.abs().max()


def test_many_query_heads_share_a_kv_head():
    torch.testing.assert_close(
        *both("mix", "llama", num_attention_heads=12, num_key_value_heads=1), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avxvnni", "avx512", "amx"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("scene", SCENES)
def test_threads_and_instruction_sets(scene, isa, threads):
    if native.select_isa(isa) != isa:
        pytest.skip(f"this machine has no {isa}")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.testing.assert_close(*both(scene, "gemma3"), atol=2e-5, rtol=2e-5)
        if isa == "amx":  # whose tiles are of bfloat16
            together, apart = both(scene, "llama", torch.bfloat16)
            assert (together - apart).abs().max() <= 0.02 * apart.abs().max()
    finally:
        torch.set_num_threads(before)
        native.select_isa()


@pytest.mark.parametrize("case", ["olmo2", "granite", "deepseek-v3"])
def test_other_layers_are_called_one_after_the_other(case):
    assert torch.isfinite(play("decode", build(case), together=False)).all()
    harness = build(case)
    harness.step((harness.start(), [5]))
    assert getattr(harness.model, "_table", None) is None


def test_large_steps_are_not_taken(monkeypatch):
    harness = build("llama")
    monkeypatch.setattr(
        "headrace.kernels.decoder_layers.table.LayerTable.run", lambda *_: pytest.fail("a large step went through")
    )
    monkeypatch.setattr("headrace.layers.decoder.fused.MOST_TOKENS", 20)
    harness.step((harness.start(), prompt(0, 12)), (harness.start(), prompt(1, 9)))


def test_weights_laid_out_while_requests_run_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """As at the very first start, when kernels are compiled meanwhile."""
    name, overrides = CASES["llama"]
    oracle = make_oracle(name, overrides)
    harness = build_harness(config_json(oracle), oracle.state_dict(), num_sequences=12, max_len=120)
    expected = play("decode", harness, together=False)
    monkeypatch.setattr(native, "state", lambda: NativeState("compiling"))
    monkeypatch.setattr(FormChoice, "choose", lambda *_: "panels")
    store_fastest(harness.model)
    for thread in threading.enumerate():
        if thread.name == "weight-storing":
            thread.join()
    torch.testing.assert_close(play("decode", harness, together=True), expected, atol=2e-5, rtol=2e-5)


def test_new_weights_and_pages_are_noticed():
    harness, other = build("llama"), build("llama")
    decode(harness)
    with torch.no_grad():
        for model in (harness.model, other.model):
            for layer in model.layers:
                layer.mlp.down.stored = PanelWeight(quantise_int8(torch.zeros(layer.mlp.down.stored.shape)))
    harness.model.bind_cache([layer.attention.pages for layer in harness.model.layers], [0] * len(harness.model.layers))
    for free in harness.free:
        free.clear()
        free.extend(other.free[0])
    assert torch.equal(play("decode", harness, together=True), play("decode", other, together=True))


@pytest.mark.parametrize("case", ["llama", "gemma3", "mixtral", "qwen2-mixed-window"])
@pytest.mark.parametrize("layers", [(0, 1), (1,), (2, 1, 1)])
def test_features_are_read_between_calls(case: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Layers between two whose inputs are read run together: the same features and states as layer by layer."""
    harness = build(case, num_hidden_layers=3)
    calls, run_layers = [], decoder.run_layers

    def count(*arguments: Any) -> Any:
        calls.append(1)
        return run_layers(*arguments)

    monkeypatch.setattr(decoder, "run_layers", count)
    results = []
    for is_together in (True, False):
        if not is_together:
            monkeypatch.setattr(harness.model, "_find_table", lambda: None)
        first, second = harness.start(), harness.start()
        harness.step((first, prompt(0, 9)), (second, prompt(1, 20)))
        batch = harness._batch([(first, [5]), (second, prompt(2, 6))])
        batch.features, batch.wanted = Features(FeatureSpec(layers), write_sum), harness._want(batch, [0, 1])
        calls.clear()
        with torch.inference_mode():
            hidden = harness.model.forward(batch)
        assert len(calls) == (len({0, 3, *layers}) - 1 if is_together else 0)
        results.append((batch.features.values, hidden))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert results[0][0].shape[0] == 7 and results[0][1].shape[0] == 2
