"""Attention over latents (MLA) on values: decodes, rows of drafts, chunks, and steps that only the device knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, Problem, make_problem
from devices import DEVICES, ON_GPU, in_turns

pytest.importorskip("triton")

from headrace.kernels.attention.latents import LatentWorkspace
from headrace.layers.attention import ATTENTION_BACKENDS, reason_against_latents
from headrace.layers.attention.contract import AttentionGeometry
from headrace.layers.attention.latents import LatentTritonAttention
from headrace.layers.attention.reference import ReferenceAttention

SMALL = dict(num_kv_heads=1, head_dim=48, value_dim=32, values_in_keys=True)
WHOLE = dict(num_kv_heads=1, head_dim=576, value_dim=512, values_in_keys=True, page_size=64)
MIXED = ((1, 1), (1, 75), (7, 7), (20, 75))
CASES = {
    "mixed": Case(MIXED, **SMALL),
    "deepseek": Case(((1, 150), (1, 64), (9, 140)), num_heads=16, **WHOLE),
    "many-heads": Case(((1, 70), (1, 3), (5, 66)), num_heads=128, **SMALL),
    "odd-heads": Case(MIXED, num_heads=5, **SMALL),
    "more-heads-than-a-tile": Case(MIXED, num_heads=72, **SMALL),
    "odd-dims": Case(MIXED, num_heads=4, num_kv_heads=1, head_dim=34, value_dim=24, values_in_keys=True),
    "small-pages": Case(MIXED, page_size=4, **SMALL),
    "big-pages": Case(MIXED, page_size=128, **SMALL),
    "drafts": Case(((1, 61), (1, 62), (1, 63), (1, 64), (1, 65), (1, 9)), **SMALL),
    "long-tables": Case(((1, 3), (1, 170)), max_kv_len=4096, **SMALL),
    "many": Case(tuple((1, 1 + 29 * i % 90) for i in range(21)), **SMALL),
    "chunks": Case(((33, 33), (40, 200), (2, 130), (65, 65)), **SMALL),
    "prefill-of-one-token": Case(((1, 30), (1, 30)), num_decodes=0, **SMALL),
}


def run(problem: Problem, programs: int = 0) -> torch.Tensor:
    """``programs``: decodes are split for so many, if not for as many as the device has room for."""
    device = problem.q.device
    backend = LatentTritonAttention(problem.geometry, device)
    if programs:
        shape = problem.geometry.num_heads, problem.geometry.value_dim
        backend._workspace = LatentWorkspace.allocate(programs // 2, *shape, device)
    return problem.run(backend)


@pytest.mark.parametrize("name,device,dtype,tolerance", in_turns(CASES))
def test_matches_dense_attention(name, device, dtype, tolerance):
    problem = make_problem(CASES[name], device, dtype)
    assert problem.error(run(problem)) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
@pytest.mark.parametrize("programs", [2, 6, 30, 400])
def test_decodes_split_over_keys(programs, device, dtype, tolerance):
    """Some that are cut and some that are not, in fewer and more programs than there are blocks."""
    problem = make_problem(Case(((1, 1), (1, 300), (1, 70)), num_heads=3, **SMALL), device, dtype)
    out = run(problem, programs)
    assert problem.error(out) < tolerance
    assert torch.equal(out, run(problem, programs)), "the same every time"


def test_the_reference_says_the_same():
    problem = make_problem(CASES["mixed"], "cpu", torch.float32)
    assert problem.error(problem.run(ReferenceAttention(problem.geometry, torch.device("cpu")))) < 1e-5


def open_problem(case: Case, device: str, dtype: torch.dtype, spare: int) -> Problem:
    problem = make_problem(case, device, dtype)
    problem.open(spare)
    return problem


@pytest.mark.parametrize("name,device,dtype,tolerance", in_turns(
    ["mixed", "deepseek", "odd-heads", "drafts", "chunks", "prefill-of-one-token"]
))
@pytest.mark.parametrize("programs", [0, 16])
def test_open_steps(programs, name, device, dtype, tolerance):
    problem = open_problem(CASES[name], device, dtype, spare=3)
    assert problem.error(run(problem, programs)[: len(problem.expected)]) < tolerance


@pytest.mark.parametrize("device,dtype,tolerance", DEVICES)
def test_padding_of_a_captured_step_is_no_nan(device, dtype, tolerance):
    """Requests of length 0 among decodes."""
    problem = make_problem(CASES["drafts"], device, dtype)
    problem.inputs.kv_lens[-1] = 0
    out = run(problem, 8)
    assert not out[-1].any()
    problem.expected[-1] = 0
    assert problem.error(out) < tolerance


@pytest.mark.parametrize("name,device,dtype,tolerance", in_turns(["mixed", "deepseek", "chunks", "long-tables"]))
def test_pages_of_8_bit_floats(name, device, dtype, tolerance):
    """As exact as plain pages are for what the pages hold."""
    problem = make_problem(CASES[name], device, dtype, kv_dtype=torch.float8_e4m3fn)
    assert problem.pages.k.dtype == torch.float8_e4m3fn
    assert problem.error(run(problem)) < tolerance


@pytest.mark.cuda
@pytest.mark.parametrize("device,dtype,tolerance", ON_GPU)
@pytest.mark.parametrize("num_heads", [8, 16, 32, 64, 128])
def test_long_contexts(num_heads, device, dtype, tolerance):
    spans = ((1, 5000), (1, 1), (1, 257), (600, 3000), (130, 130))
    problem = make_problem(Case(spans, num_heads=num_heads, **WHOLE), device, dtype)
    assert problem.error(run(problem)) < tolerance


@pytest.mark.cuda
def test_captured_decodes_follow_the_device():
    """Lengths of a replay are those that are then in the tensors, not those of the capture."""
    problem = make_problem(Case(((1, 700), (1, 90)), num_heads=16, **WHOLE), "cuda", torch.bfloat16)
    backend = LatentTritonAttention(problem.geometry, torch.device("cuda"))
    lengths, longest = problem.inputs.kv_lens.clone(), replace(problem.inputs, max_kv_len=4096)
    problem.inputs = longest
    problem.run(backend)
    graph = torch.cuda.CUDAGraph()
    problem.inputs.kv_lens.fill_(1)
    with torch.cuda.graph(graph):
        out = problem.run(backend)
    problem.inputs.kv_lens.copy_(lengths)
    graph.replay()
    assert problem.error(out) < 1e-2


def test_what_is_taken():
    geometry = AttentionGeometry("cuda", "bfloat16", "bfloat16", (9, 0), 16, 1, 576, 512, 64, values_in_keys=True)
    assert ATTENTION_BACKENDS.choose(geometry).__name__ == "DependentLaunchLatentTritonAttention"
    assert ATTENTION_BACKENDS.choose(replace(geometry, capability=(8, 0))).__name__ == "LatentTritonAttention"
    assert reason_against_latents(replace(geometry, kv_dtype="float8_e4m3fn")) is None
    # beside 512 dims of a latent, what 128 more take does not fit a block
    assert reason_against_latents(replace(geometry, head_dim=384, value_dim=256)) is None
    assert "up to 64 rotated" in str(reason_against_latents(replace(geometry, head_dim=640, value_dim=512)))
    for changed, named in (
        ({"capability": (8, 0), "kv_dtype": "float8_e4m3fn"}, "8.9"), ({"window": 9}, "window"),
        ({"values_in_keys": False}, "values"), ({"value_dim": 576}, "512"), ({"kv_dtype": "float32"}, "float32"),
    ):
        assert named in str(reason_against_latents(replace(geometry, **changed)))


def test_nothing_is_combined_that_was_not_split():
    """By a dry run, which may launch the second kernel alone, over memory that holds anything."""
    torch.use_deterministic_algorithms(True)  # fills new memory with what nobody expects
    try:
        assert torch.empty(1, dtype=torch.int32).item() != 0
        workspace = LatentWorkspace.allocate(3, 4, 16, torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert workspace.shares.shape == (12, 2) and not workspace.shares.any()
