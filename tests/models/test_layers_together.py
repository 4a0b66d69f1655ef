"""All layers in one kernel against the same layers called one after the other, for every family whose layers it knows."""

from __future__ import annotations

import pytest
import torch
from harness import ATTENTION_BACKENDS, Harness, build_harness
from test_parity import CASES, MAX_MODEL_LEN, config_json, make_oracle, prompt

from headrace.kernels import native
from headrace.kernels.packed_linear.forms import PanelWeight, keep_in_panels
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8
from headrace.layers.attention.cpu import CpuAttention
from headrace.layers.storing import find_storable

TOGETHER = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "glm4")
"""Families that are run together, by the beginning of their case's name; those of mixtures are not."""

LENGTHS = (1, 5, 23, 9, 14)


def is_together(case: str) -> bool:
    return case.startswith(TOGETHER) and "moe" not in case


@pytest.fixture(autouse=True)
def cpu_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    monkeypatch.setattr(ATTENTION_BACKENDS, "load", lambda _: CpuAttention)


def build(case: str, dtype: torch.dtype = torch.float32, store=keep_in_panels) -> Harness:
    """A model whose weights are packed; ``store`` packs one."""
    oracle = make_oracle(*CASES[case])
    harness = build_harness(
        config_json(oracle), oracle.state_dict(), num_sequences=len(LENGTHS), dtype=dtype, max_model_len=MAX_MODEL_LEN.get(case, 0),
    )
    for weight in find_storable(harness.model):
        weight.store(store(weight.weight.data))
    return harness


def decode(harness: Harness, *, together: bool, steps: int = 3) -> torch.Tensor:
    """Logits of a few decode steps of several sequences of different lengths."""
    if not together:
        harness.model._table, harness.model._is_table_due = None, False
    sequences = [harness.start() for _ in LENGTHS]
    for i, (sequence, length) in enumerate(zip(sequences, LENGTHS, strict=True)):
        harness.step((sequence, prompt(i, length + 1)))  # never one token: that would be a decode
    logits = [torch.cat(harness.step(*((s, [7 + step]) for s in sequences))) for step in range(steps)]
    assert (getattr(harness.model, "_table", None) is not None) == together
    return torch.stack(logits)


@pytest.mark.parametrize("case", [case for case in CASES if is_together(case)])
def test_float32_is_the_same(case):
    torch.testing.assert_close(decode(build(case), together=True), decode(build(case), together=False), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", ["llama-tied-biased", "gemma3", "qwen3"])
def test_bfloat16_is_the_same_but_for_rounding(case):
    together, apart = (decode(build(case, torch.bfloat16), together=which) for which in (True, False))
    assert (together - apart).abs().max() <= 0.02 * apart.abs().max()


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4])
def test_quantised_weights_are_the_same(quantise):
    def store(weight: torch.Tensor) -> PanelWeight:
        return PanelWeight(quantise(weight))

    together, apart = (decode(build("llama", store=store), together=which) for which in (True, False))
    torch.testing.assert_close(together, apart, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_instruction_sets(isa, threads):
    if native.select_isa(isa) != isa:
        pytest.skip(f"this machine has no {isa}")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        torch.testing.assert_close(decode(build("gemma3"), together=True), decode(build("gemma3"), together=False), atol=1e-5, rtol=1e-5)
    finally:
        torch.set_num_threads(before)
        native.select_isa()


@pytest.mark.parametrize("case", ["mixtral", "olmo2", "granite", "deepseek-v3"])
def test_other_layers_are_called_one_after_the_other(case):
    assert torch.isfinite(decode(build(case), together=False)).all()
    harness = build(case)
    harness.step((harness.start(), [5]))
    assert getattr(harness.model, "_table", None) is None


def test_steps_with_prefill_are_not_taken(monkeypatch):
    harness = build("llama")
    monkeypatch.setattr("headrace.kernels.decode_layers.table.LayerTable.run", lambda *_: pytest.fail("a prefill went through"))
    sequence = harness.start()
    harness.step((sequence, prompt(0)), (harness.start(), [4, 5]))
    harness.step((sequence, [6]), (harness.start(), [4, 5]))


def test_new_weights_and_pages_are_noticed():
    harness, other = build("llama"), build("llama")
    decode(harness, together=True)
    with torch.no_grad():
        for model in (harness.model, other.model):
            for layer in model.layers:
                layer.mlp.down.stored = PanelWeight(quantise_int8(torch.zeros(layer.mlp.down.stored.shape)))
    harness.model.bind_cache([layer.attention.pages for layer in harness.model.layers], [0] * len(harness.model.layers))
    for free in harness.free:
        free.clear()
        free.extend(other.free[0])
    assert torch.equal(decode(harness, together=True), decode(other, together=True))
