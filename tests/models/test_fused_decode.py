"""A step of decodes in one call against the same step by its parts: the same logits to the last bit, and the first
greatest of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import ATTENTION_BACKENDS, Harness, Sequence, build_harness
from test_layers_together import LENGTHS, build

from headrace.kernels import native
from headrace.kernels.block_scaled import quantise_mxfp4
from headrace.kernels.decoder_layers.table import FusedDecode
from headrace.kernels.packed_linear.blocks import WeightBlocks, pack_blocks
from headrace.kernels.packed_linear.forms import PanelWeight, keep_in_panels
from headrace.kernels.packed_linear.layout import PackedMatrix, unpack
from headrace.kernels.packed_linear.quantise import quantise_int4, quantise_int8_groups
from headrace.layers.attention.cpu import CpuAttention

ROWS = (9, 3, 14, 4, 0, 11, 7)
"""Of the sequences, in no order; 16 are there."""


@pytest.fixture(autouse=True)
def cpu_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.build().status != "ready":
        pytest.skip("no native kernels")
    monkeypatch.setattr(ATTENTION_BACKENDS, "load", lambda _: CpuAttention)


def start(harness: Harness, lengths: tuple[int, ...] = LENGTHS) -> list[Sequence]:
    sequences = [harness.start() for _ in lengths]
    for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        harness.step((sequence, prompt(i, length + 1)))
    return sequences


def run(
    harness: Harness, sequences: list[Sequence], tokens: list[int], *, is_greedy: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Logits and sampled of the next step of the sequences."""
    step = harness.model.fuse_decode()
    assert isinstance(step, FusedDecode)
    rows = torch.tensor(ROWS[: len(sequences)])
    tables = torch.full((len(harness.geometries), 16, len(sequences[0].page_tables[0])), 10**6, dtype=torch.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        tables[:, row] = torch.tensor(sequence.page_tables, dtype=torch.int32)
    lengths = torch.tensor([sequence.length + 1 for sequence in sequences])
    sampled = torch.full((2, len(rows)), -1)
    requests = torch.stack((rows, lengths, torch.tensor(tokens)))
    return step.run(requests, tables, sampled if is_greedy else None), sampled


def check(harness: Harness, sequences: list[Sequence]) -> None:
    """Both ways through the next step."""
    tokens = [5 + i for i in range(len(sequences))]
    logits, _ = run(harness, sequences, tokens, is_greedy=False)
    none, sampled = run(harness, sequences, tokens, is_greedy=True)
    expected = torch.cat(harness.step(*((s, [t]) for s, t in zip(sequences, tokens, strict=True))))
    assert torch.equal(logits, expected) and none is None
    assert sampled[0].tolist() == [int((row == row.max()).nonzero()[0]) for row in expected] and not sampled[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", ["llama-tied-biased", "mistral", "gemma3", "qwen3", "phi3", "mixtral", "qwen3-moe", "gpt-oss"]
)
def test_families(case, dtype):
    found = next(name for name in CASES if name.startswith(case))
    harness = build(found, dtype)
    sequences = start(harness)
    check(harness, sequences)
    check(harness, sequences[:1])


def keep_in_mxfp4(weight: torch.Tensor) -> PackedMatrix:
    codes, scales = quantise_mxfp4(weight)
    raw = torch.cat((scales.unsqueeze(-1), codes.unflatten(-1, (-1, 16))), dim=-1)
    return pack_blocks([WeightBlocks("MXFP4_PAIRS", raw.flatten(1))])


@pytest.mark.parametrize("quantise", [quantise_int8_groups, quantise_int4, keep_in_mxfp4])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_quantised_weights_and_threads(quantise, threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        harness = build(
            "llama", store=lambda weight: PanelWeight(quantise(weight)), vocab_size=3001, hidden_size=64,
            intermediate_size=160
        )
        check(harness, start(harness, tuple(range(1, 8))))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3-moe"])
def test_members_of_a_team_agree(case, dtype):
    """Layers large enough for several members, with fewer rows than these and with more: step by step what one thread
    computes."""
    before, sizes = torch.get_num_threads(), {"hidden_size": 256, "intermediate_size": 640, "vocab_size": 4001}
    sizes |= {"moe_intermediate_size": 320} if "moe" in case else {}
    try:
        for count in (1, 2, 5):
            sampled = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                harness = build(case, dtype, **sizes)
                sequences, tokens = start(harness, LENGTHS[:count]), [9] * count
                for _ in range(6):
                    logits, _ = run(harness, sequences, tokens, is_greedy=False)
                    check(harness, sequences)
                    sampled.append(logits)
            for one, other in zip(sampled[:6], sampled[6:], strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avxvnni", "avx512", "amx"])
def test_instruction_sets(isa):
    if native.select_isa(isa) != isa:
        pytest.skip(f"this machine has no {isa}")
    try:
        harness = build("llama", torch.bfloat16)
        check(harness, start(harness, tuple(range(1, 8))))
    finally:
        native.select_isa()


def edit_head(harness: Harness, edit) -> None:
    """Change the head's weight [V, D]."""
    head = harness.model.head
    weight = unpack(head.stored.matrix, torch.float32)
    edit(weight)
    head.stored = keep_in_panels(weight)
    harness.model.notice_stored()


def test_of_equal_logits_the_first():
    harness = build("llama", vocab_size=2500)
    sequences = start(harness)
    _, sampled = run(harness, sequences, [5] * len(sequences), is_greedy=True)
    best = sampled[0].tolist()

    def repeat(weight: torch.Tensor) -> None:
        for i, token in enumerate(best):  # whoever was last is now first, too, and in between
            weight[1100 + i], weight[40 + i], weight[2400 + i] = (
                weight[token].clone(), weight[token].clone(), weight[token].clone()
            )

    edit_head(harness, repeat)
    check(harness, sequences)
    assert run(harness, sequences, [5] * len(sequences), is_greedy=True)[1][0].max() < 1100


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(value):
    harness = build("llama", vocab_size=2500)
    sequences = start(harness)
    edit_head(harness, lambda weight: weight[1777].fill_(value))
    _, sampled = run(harness, sequences, [5] * len(sequences), is_greedy=True)
    assert sampled[1].all() and (sampled[0] >= 0).all() and (sampled[0] < 2500).all()


def test_what_is_of_another_kind_is_not_joined():
    harness = build("llama")
    harness.model.head.softcap = 3.0
    harness.model.notice_stored()
    assert harness.model.fuse_decode() is None
    name, overrides = CASES["llama"]
    oracle = make_oracle(name, overrides)
    assert build_harness(config_json(oracle), oracle.state_dict()).model.fuse_decode() is None


def test_what_does_not_fit_is_refused():
    harness = build("llama")
    sequences = start(harness)
    for wrong in (replace(sequences[0], length=10**4), replace(sequences[0], length=-1)):
        with pytest.raises(RuntimeError, match="too long"):
            run(harness, [wrong], [5], is_greedy=True)
    with pytest.raises(RuntimeError, match="no such token"):
        run(harness, sequences, [10**6] * len(sequences), is_greedy=True)
