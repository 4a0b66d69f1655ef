"""The flashinfer backend: what it hands to the library, against a stand-in that reads it as the library would; values
on a GPU."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from attention_cases import Case, make_problem

pytest.importorskip("triton")

from headrace.base.errors import ConfigError, PluginError
from headrace.kernels.attention.reference import attend_densely
from headrace.layers import attention
from headrace.layers.attention import ATTENTION_BACKENDS, flashinfer, reason_against_flashinfer
from headrace.layers.attention.contract import AttentionGeometry

MIXED = ((1, 1), (1, 75), (7, 7), (20, 75), (3, 64))
SHAPE = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
H200 = AttentionGeometry("cuda", "bfloat16", "bfloat16", (9, 0), 16, 8, 128, 128, 64)


class FakeWrapper:
    """Keeps a plan and computes what it means, reading lengths from the host's arrays and pages from the device's."""

    made: list[FakeWrapper]

    def __init__(self, workspace, layout, backend):
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.kind, self.plans = backend, []
        FakeWrapper.made.append(self)

    def plan(self, query_start, page_start, pages, last_lens, heads, kv_heads, dim, page_size, *, causal, q_data_type,
             kv_data_type, seq_lens,
             max_token_per_sequence):
        assert causal and q_data_type == kv_data_type
        assert {t.dtype for t in (query_start, page_start, pages, last_lens, seq_lens)} == {torch.int32}
        lens = ((page_start.diff() - 1) * page_size + last_lens).tolist()
        assert lens == seq_lens.tolist() and len(pages) == page_start[-1]
        assert max_token_per_sequence == query_start.diff().max()
        self.plans.append((query_start.tolist(), page_start.tolist(), pages, lens, (heads, kv_heads, dim)))

    def run(self, q, pages, *, q_scale, out, enable_pdl):
        query_start, page_start, ids, lens, (heads, kv_heads, dim) = self.plans[-1]
        k, v = pages
        assert q.shape == out.shape == (query_start[-1], heads, dim) and k.shape[2:] == (kv_heads, dim)
        for row, length in enumerate(lens):
            own = ids[page_start[row] : page_start[row + 1]].long()
            keys, values = (t[own].flatten(0, 1)[:length] for t in (k, v))
            at = slice(query_start[row], query_start[row + 1])
            out[at] = attend_densely(q[at].float(), keys, values, scale=q_scale * dim**-0.5).to(out.dtype)


class FakeEvent:
    is_over = True

    def query(self) -> bool:
        return self.is_over

    def record(self) -> None:
        pass


@pytest.fixture
def library(monkeypatch):
    FakeWrapper.made = []
    fake = types.ModuleType("flashinfer")
    fake.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(flashinfer, "LEAST_QUERIES", 16)  # or the interpreter would need minutes
    return FakeWrapper


def make_backend(problem):
    return flashinfer.FlashinferAttention(problem.geometry, torch.device("cpu"))


@pytest.mark.interpreted
@pytest.mark.parametrize("case,plans", [
    (Case(MIXED, **SHAPE), 1), (Case(MIXED[3:4], **SHAPE), 1), (Case(MIXED[2:3], **SHAPE), 0),
    (Case(MIXED[:2], **SHAPE), 0),
    (Case(((1, 9), (32, 96), (16, 16)), **SHAPE), 1),
], ids=["mixed", "one-chunk", "short-chunk", "decode", "whole-pages"])  # fmt: skip
def test_hands_over_lengths_and_pages(case, plans, library):
    problem = make_problem(case, "cpu", torch.float16)
    backend = make_backend(problem)
    assert problem.error(problem.run(backend)) < 2e-3
    assert len(library.made) == 1 and len(library.made[0].plans) == 1 + plans, (
        "one plan when it is made, to compile; then one a step"
    )


@pytest.mark.interpreted
def test_layers_with_a_window_build_nothing_and_take_the_fallback(library):
    problem = make_problem(Case(MIXED, **SHAPE, window=9), "cpu", torch.float16)
    assert problem.error(problem.run(make_backend(problem))) < 2e-3
    assert not library.made


def test_open_steps_and_decodes_are_not_planned(library):
    problem = make_problem(Case(((20, 75),), **SHAPE), "cpu", torch.float16)
    backend = make_backend(problem)
    for inputs, is_planned in (
        (problem.inputs, True), (replace(problem.inputs, has_dynamic_lengths=True), False),
        (replace(problem.inputs, num_decodes=1), False)
    ):
        backend.prepare(inputs)
        assert (backend._planned is not None) == is_planned


def test_a_chunk_that_the_library_takes_is_planned_by_it_alone(library):
    """Asking whether rotation and attention are one kernel plans nothing for the fallback."""
    problem = make_problem(Case(((20, 75),), **SHAPE), "cpu", torch.float16)
    backend = make_backend(problem)
    backend.prepare(problem.inputs)
    assert backend.rotate_and_attend(problem.q.flatten(1), None, problem.pages, problem.params) is None
    assert backend._planned is not None and backend._fallback.inputs is None


def test_a_scale_of_the_models_own_reaches_the_kernel(library):
    problem = make_problem(Case(((20, 75), (33, 33)), **SHAPE), "cpu", torch.float16)
    params = replace(problem.params, scale=0.31)
    backend = make_backend(problem)
    backend.prepare(problem.inputs)
    out = backend.attend(problem.q, problem.pages, params)
    pages = problem.inputs.page_table[1, :3].long()
    keys, values = (t[pages].flatten(0, 1)[:33] for t in (problem.pages.k, problem.pages.v))
    expected = attend_densely(problem.q[20:].float(), keys, values, scale=0.31)
    assert (out[20:] - expected).abs().max() < 2e-3


def test_a_plan_whose_copy_is_under_way_is_not_overwritten(library):
    """The copy reads the wrapper's pinned buffer; with two steps in flight the second must plan on another one."""
    problem = make_problem(Case(((20, 75),), **SHAPE), "cpu", torch.float16)
    backend = make_backend(problem)
    event = backend._planners._planners[0][1]
    event.is_over = False
    backend.prepare(problem.inputs)
    first, second = library.made
    assert backend._planned is second and len(first.plans) == 1
    event.is_over = True
    backend.prepare(problem.inputs)
    assert backend._planned is first and len(library.made) == 2


def test_the_kernels_for_hopper_are_asked_for_there(library):
    for capability, kind in (((9, 0), "fa3"), ((8, 0), "fa2"), ((10, 0), "fa2")):
        flashinfer.FlashinferAttention(replace(H200, device="cpu", capability=capability), torch.device("cpu"))
        assert library.made[-1].kind == kind


def test_kernels_that_cannot_be_built_are_a_configuration_error(library, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(FakeWrapper, "plan", fail)
    with pytest.raises(ConfigError, match=r"Could not find nvcc.*flashinfer-jit-cache") as raised:
        flashinfer.FlashinferAttention(replace(H200, device="cpu"), torch.device("cpu"))
    assert raised.value.param == "attention_backend"


@pytest.mark.parametrize("change,reason", [
    ({}, None), ({"head_dim": 64, "value_dim": 64}, None), ({"head_dim": 256, "value_dim": 256, "window": 512}, None),
    ({"capability": (8, 0)}, None),
    ({"device": "cpu"}, "needs a cuda device"), ({"capability": (7, 5)}, "capability 8.0"),
    ({"dtype": "float32", "kv_dtype": "float32"}, "float16 or bfloat16"),
    ({"kv_dtype": "float8_e4m3fn"}, "all alike"), ({"has_softcap": True}, "no soft-cap"),
    ({"has_sinks": True}, "no sinks"),
    ({"values_in_keys": True}, "pages of their own"), ({"head_dim": 96, "value_dim": 96}, "64, 128, 256"),
    ({"value_dim": 64}, "keys and values alike"),
], ids=str)  # fmt: skip
def test_says_what_it_cannot_serve(change, reason, monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: object())
    found = reason_against_flashinfer(replace(H200, **change))
    assert (found is None) if reason is None else reason in found


def test_is_taken_by_name_only_and_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: None if name in ("flashinfer", "cudnn") else object())
    with pytest.raises(PluginError, match=r"pip install 'headrace\[flashinfer\]'"):
        ATTENTION_BACKENDS.choose(H200, "flashinfer")
    monkeypatch.setattr(attention, "find_spec", lambda name: None if name == "cudnn" else object())
    assert ATTENTION_BACKENDS.choose(H200, "flashinfer") is flashinfer.FlashinferAttention
    assert ATTENTION_BACKENDS.choose(H200) is not flashinfer.FlashinferAttention


GPU_CASES = {
    "mixed": Case(
        ((1, 1), (1, 75), (7, 7), (200, 755), (3, 64)), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64
    ),
    "mixed-small-pages": Case(
        ((1, 1), (1, 75), (7, 7), (200, 755), (130, 131)), num_heads=4, num_kv_heads=2, head_dim=64, page_size=16
    ),
    "prefill": Case(
        ((130, 130), (1, 1), (700, 3000), (64, 2112)), num_heads=8, num_kv_heads=8, head_dim=128, page_size=64,
        num_decodes=0
    ),
    "decode": Case(tuple((1, 1 + 97 * i) for i in range(33)), num_heads=16, num_kv_heads=8, head_dim=128, page_size=64),
    "long": Case(
        ((1, 131072), (150, 131072), (1, 5)), num_heads=4, num_kv_heads=1, head_dim=128, page_size=64, num_decodes=1
    ),
    "round-chunk": Case(((1, 700), (1024, 3072)), num_heads=16, num_kv_heads=8, head_dim=128, page_size=64),
    "dim-64": Case(((1, 200), (300, 500), (129, 4000)), num_heads=12, num_kv_heads=4, head_dim=64, page_size=64),
    "dim-256": Case(((1, 200), (300, 500)), num_heads=8, num_kv_heads=1, head_dim=256, page_size=64),
    "window": Case(((1, 900), (300, 900)), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, window=256),
}
needs_library = pytest.mark.skipif(not find_spec("flashinfer"), reason="needs flashinfer-python")


@pytest.mark.cuda
@needs_library
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", GPU_CASES)
def test_values_on_a_gpu(name, dtype, tolerance):
    problem = make_problem(GPU_CASES[name], "cuda", dtype)
    backend = flashinfer.FlashinferAttention(problem.geometry, torch.device("cuda"))
    assert problem.error(problem.run(backend)) < tolerance


@pytest.mark.cuda
@needs_library
def test_steps_in_flight_keep_their_own_plans():
    """The device is kept busy, so that no copy has begun when the next step is planned."""
    shape = dict(num_heads=8, num_kv_heads=2, head_dim=128, page_size=64)
    problems = [
        make_problem(Case(((200 + n, 300 + 50 * n), (1, 70)), **shape, num_decodes=0), "cuda", torch.bfloat16, seed=n)
        for n in range(4)
    ]
    backend = flashinfer.FlashinferAttention(problems[0].geometry, torch.device("cuda"))
    problems[0].run(backend)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    outs = [problem.run(backend) for problem in problems]
    assert len(backend._planners._planners) > 1
    assert all(problem.error(out) < 1e-2 for problem, out in zip(problems, outs, strict=True))
