"""The cuDNN backend: what it hands to cuDNN, against a stand-in that reads it as cuDNN would; values on a GPU."""

from __future__ import annotations

import random
import sys
import threading
import types
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from attention_cases import Case, make_problem

pytest.importorskip("triton")

from headrace.kernels.attention.reference import attend_densely
from headrace.kernels.late import LateKernels

PATIENCE_S = 60.0
MIXED = ((1, 1), (1, 75), (7, 7), (20, 75), (3, 64))
SHAPE = dict(num_heads=4, num_kv_heads=2, head_dim=64, page_size=16)


class FakeGraph:
    """Computes what a graph of these bounds means, from the same tensors."""

    def __init__(self, bounds, handle):
        self.bounds, self.workspace_bytes = bounds, 3 * bounds.requests

    def run(self, tensors, workspace):
        assert workspace.numel() >= self.workspace_bytes
        names = import_module("headrace.kernels.attention.cudnn")
        b = self.bounds
        if b.is_exact:
            q, k, v = (tensors[name] for name in (names.Q, names.K, names.V))
            assert (len(q), len(k), len(v)) == (b.queries, b.keys, b.keys)
            tensors[names.OUT].copy_(attend_densely(q, k, v, scale=b.scale, window=b.window))
            return
        assert tensors[names.TABLE].stride(0) == b.table_stride and tensors[names.K].shape[0] == b.num_pages
        assert (
            tensors[names.TABLE].shape[1] * b.page_size >= b.keys
            or tensors[names.TABLE].stride(0) * b.page_size >= b.keys
        )
        q, out = tensors[names.Q].flatten(), tensors[names.OUT].view(-1)
        for request in range(b.requests):
            count, length = int(tensors[names.QUERY_LENS][request]), int(tensors[names.KV_LENS][request])
            assert count <= b.queries and length <= b.keys
            if not count:
                continue
            row, out_row = b.num_heads * b.head_dim, b.num_heads * b.value_dim
            start, out_start = (int(tensors[name][request]) for name in (names.Q_OFFSETS, names.OUT_OFFSETS))
            ids = tensors[names.TABLE][request, : -(-length // 128) * 128 // b.page_size].long()
            k, v = (tensors[name][ids].flatten(0, 1) for name in (names.K, names.V))
            assert k[length:].isfinite().all() and v[length:].isfinite().all(), (
                "a tile reaches beyond the keys, and what it reads there must be numbers"
            )
            k, v = k[:length], v[:length]
            queries = q[start : start + count * row].view(count, b.num_heads, b.head_dim)
            result = attend_densely(queries, k, v, scale=b.scale, window=b.window)
            out[out_start : out_start + count * out_row] = result.flatten()


class InPlace:
    """A thread that has ended when it has started."""

    def __init__(self, target, args, **_):
        self.start, self.join = (lambda: target(*args)), lambda: None


@pytest.fixture
def backend_class(monkeypatch):
    fake = types.ModuleType("cudnn")
    fake.create_handle = lambda: None
    fake.cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})
    if not find_spec("cudnn"):
        monkeypatch.setitem(sys.modules, "cudnn", fake)
    kernel = import_module("headrace.kernels.attention.cudnn")
    backend = import_module("headrace.layers.attention.cudnn")
    monkeypatch.setattr(backend, "LEAST_QUERIES", 16)  # or the interpreter would need minutes
    monkeypatch.setattr(backend, "EXACT_STEP", 32)
    monkeypatch.setattr(backend.DependentLaunchTritonAttention, "pdl", False)  # the interpreter has no such launches
    monkeypatch.setattr(kernel.cudnn, "create_handle", lambda: None)
    monkeypatch.setattr(kernel, "SdpaGraph", FakeGraph)
    monkeypatch.setattr(kernel, "threading", types.SimpleNamespace(Thread=InPlace))
    yield backend.CudnnAttention
    if sys.modules.get("cudnn") is fake:
        for name in ("headrace.kernels.attention.cudnn", "headrace.layers.attention.cudnn"):
            sys.modules.pop(name, None)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", [
    Case(MIXED, **SHAPE), Case(MIXED[2:], **SHAPE), Case(MIXED[:2], **SHAPE), Case(MIXED, **SHAPE, window=9),
    Case(MIXED, **SHAPE | {"head_dim": 96}, value_dim=64),
    Case(((1, 9), (32, 96)), **SHAPE), Case(((32, 96),), **SHAPE, window=9),
], ids=["mixed", "prefill", "decode", "window", "value-dim", "round-chunk", "round-chunk-window"])  # fmt: skip
def test_hands_over_lengths_offsets_and_tables(case, backend_class):
    problem = make_problem(case, "cpu", torch.float16)
    backend = backend_class(problem.geometry, torch.device("cpu"))
    assert problem.error(problem.run(backend)) < 2e-3


def test_a_round_chunk_by_itself_takes_the_exact_graph(backend_class):
    for spans, is_exact in ((((1, 9), (32, 96)), True), (((32, 95),), False), (((32, 64), (32, 96)), False)):
        problem = make_problem(Case(spans, **SHAPE), "cpu", torch.float16)
        backend = backend_class(problem.geometry, torch.device("cpu"))
        backend.prepare(problem.inputs)
        assert (backend._exact is not None) == is_exact


@pytest.mark.interpreted
def test_pages_in_a_row_are_read_where_they_lie(backend_class):
    problem = lay_last_in_a_row(make_problem(Case(((1, 9), (32, 96)), **SHAPE), "cpu", torch.float16))
    backend = backend_class(problem.geometry, torch.device("cpu"))
    assert problem.error(problem.run(backend)) < 2e-3
    assert backend._exact.pages == slice(
        problem.inputs.last_run, problem.inputs.last_run + 96 // problem.geometry.page_size
    )


def lay_last_in_a_row(problem):
    """The problem with the pages of its last request copied behind all others, in their order."""
    inputs, pages = problem.inputs, problem.pages
    count, first = inputs.kv_lens_cpu[-1] // problem.geometry.page_size, pages.k.shape[0]
    ids = inputs.page_table[-1, :count].long()
    pages.k, pages.v = (torch.cat((t, t[ids])) for t in (pages.k, pages.v))
    inputs.page_table[-1, :count] = torch.arange(first, first + count)
    inputs.last_run = first
    return problem


@pytest.mark.interpreted
def test_what_is_planned_ahead_is_not_built_within_steps(backend_class):
    kernel = import_module("headrace.kernels.attention.cudnn")
    problems = [
        make_problem(Case(spans, **SHAPE), "cpu", torch.float16)
        for spans in (MIXED, ((1, 9), (32, 96)), ((1, 9), (31, 90)), ((20, 20), (9, 100)), ((2, 2),) * 7 + ((17, 30),))
    ]
    for problem in problems:
        late, backend = LateKernels(torch.device("cpu")), backend_class(problem.geometry, torch.device("cpu"))
        with late.watch():
            problem.run(backend)
        assert late.count > 0
        late, backend = LateKernels(torch.device("cpu")), backend_class(problem.geometry, torch.device("cpu"))
        ahead = backend.plan_ahead(problem.pages, problem.params, 32, 128)
        assert all(ahead) and len(backend._graphs._graphs) == len(set(backend._graphs._graphs)) > 5
        with late.watch():
            assert problem.error(problem.run(backend)) < 2e-3
        assert late.count == 0
    assert isinstance(next(iter(backend._graphs._graphs.values())), kernel.SdpaGraph)


def test_sizes_of_steps_are_planned(backend_class):
    """Against the sizes that `prepare` pads to, of random steps of up to two long chunks, and of several short ones."""
    backend = import_module("headrace.layers.attention.cudnn")
    planned = set(backend.list_paged_sizes(60, 3000))
    assert len(planned) == len(backend.list_paged_sizes(60, 3000)), "none twice"
    rng = random.Random(0)
    for _ in range(2000):
        count = rng.choice([1, 2, 2, 3, 6])
        lens = [rng.randint(1, 60 // count) for _ in range(count - 1)]
        lens.append(rng.randint(16, max(16, 60 - sum(lens))))
        before = rng.choice([0, 0, rng.randint(0, 2900)]) if count <= 2 else 0
        keys = max(1024, 1 << (max(lens) + before - 1).bit_length())
        assert (1 << (count - 1).bit_length(), max(16, 1 << (max(lens) - 1).bit_length()), keys) in planned
    assert set(backend.list_exact_sizes(64, 200)) == {(64, 64), (32, 32), (64, 128), (64, 192)}
    assert backend.list_exact_sizes(60, 200) == [(32, 32)]
    assert backend.list_exact_sizes(20, 200) == []
    windowed = backend_class(
        make_problem(Case(MIXED, **SHAPE, window=9), "cpu", torch.float16).geometry, torch.device("cpu")
    )
    assert list(windowed.plan_ahead(None, None, 64, 200)) == [], "these are left to other kernels"


def test_who_needs_a_graph_waits_for_those_that_are_being_built(backend_class, monkeypatch):
    kernel = import_module("headrace.kernels.attention.cudnn")
    monkeypatch.setattr(kernel, "threading", threading)
    may_end, built = threading.Event(), []

    class Slow(FakeGraph):
        def __init__(self, bounds, handle):
            super().__init__(bounds, handle)
            assert may_end.wait(PATIENCE_S)
            built.append(threading.current_thread())

    monkeypatch.setattr(kernel, "SdpaGraph", Slow)
    graphs = kernel.SdpaGraphs(torch.device("cpu"))
    wanted = [
        kernel.Bounds(
            1, keys, keys, 2, 1, 64, 64, 16, num_pages=0, table_stride=0, scale=1.0, window=0, dtype=torch.float16
        )
        for keys in (1024, 2048)
    ]
    graphs.build_early(wanted)
    threading.Timer(0.05, may_end.set).start()
    assert all(isinstance(graphs.find(bounds), Slow) for bounds in wanted)
    assert len(built) == 2 and threading.current_thread() not in built


@pytest.mark.interpreted
def test_refused_graphs_fall_back(backend_class, monkeypatch):
    kernel = import_module("headrace.kernels.attention.cudnn")

    def refuse(*_):
        raise RuntimeError("not here")

    monkeypatch.setattr(kernel, "SdpaGraph", refuse)
    problem = make_problem(Case(MIXED, **SHAPE), "cpu", torch.float16)
    assert problem.error(problem.run(backend_class(problem.geometry, torch.device("cpu")))) < 2e-3


GPU_CASES = {
    "mixed": Case(MIXED, num_heads=8, num_kv_heads=2, head_dim=128, page_size=64),
    "mixed-small-pages": Case(MIXED, **SHAPE),
    "prefill": Case(
        ((130, 130), (1, 1), (700, 3000), (64, 2112)), num_heads=8, num_kv_heads=8, head_dim=128, page_size=64,
        num_decodes=0
    ),
    "decode": Case(tuple((1, 1 + 97 * i) for i in range(33)), num_heads=16, num_kv_heads=8, head_dim=128, page_size=64),
    "decode-long": Case(((1, 131072), (1, 5)), num_heads=32, num_kv_heads=8, head_dim=128, page_size=64),
    "exact": Case(((1, 700), (1024, 1024)), num_heads=16, num_kv_heads=8, head_dim=128, page_size=64),
    "exact-chunk": Case(((1024, 3072),), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64),
    "round-window": Case(((1024, 2048),), num_heads=8, num_kv_heads=2, head_dim=64, page_size=64, window=300),
    "dim-80": Case(((1, 200), (300, 500)), num_heads=4, num_kv_heads=4, head_dim=80, page_size=64),
    "dim-256": Case(((1, 200), (300, 500)), num_heads=8, num_kv_heads=1, head_dim=256, page_size=64),
    "window": Case(((1, 900), (300, 900)), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, window=256),
    "window-decode": Case(((1, 900), (1, 100)), num_heads=8, num_kv_heads=2, head_dim=128, page_size=64, window=256),
}


@pytest.mark.cuda
@pytest.mark.skipif(not find_spec("cudnn"), reason="needs nvidia-cudnn-frontend")
@pytest.mark.parametrize("dtype,tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("name", GPU_CASES)
def test_values_on_a_gpu(name, dtype, tolerance):
    from headrace.layers.attention.cudnn import CudnnAttention

    problem = make_problem(GPU_CASES[name], "cuda", dtype)
    backend = CudnnAttention(problem.geometry, torch.device("cuda"))
    assert problem.error(problem.run(backend)) < tolerance
    refused = [bounds for bounds, graph in backend._graphs._graphs.items() if graph is None]
    assert not refused, "cuDNN refused what the backend claims"


@pytest.mark.cuda
@pytest.mark.skipif(not find_spec("cudnn"), reason="needs nvidia-cudnn-frontend")
def test_pages_in_a_row_give_the_same_on_a_gpu():
    from headrace.layers.attention.cudnn import CudnnAttention

    problem = make_problem(GPU_CASES["exact-chunk"], "cuda", torch.bfloat16)
    gathered = problem.run(CudnnAttention(problem.geometry, torch.device("cuda")))
    assert torch.equal(lay_last_in_a_row(problem).run(CudnnAttention(problem.geometry, torch.device("cuda"))), gathered)


@pytest.mark.cuda
@pytest.mark.skipif(not find_spec("cudnn"), reason="needs nvidia-cudnn-frontend")
def test_decode_replays_in_a_graph_with_other_lengths():
    from headrace.layers.attention.cudnn import CudnnAttention

    shape = dict(num_heads=32, num_kv_heads=8, head_dim=128, page_size=64, max_kv_len=8192)
    problem = make_problem(Case(((1, 12), (1, 8000), (1, 1)), **shape), "cuda", torch.bfloat16)
    other = make_problem(Case(((1, 700), (1, 129), (1, 3000)), **shape), "cuda", torch.bfloat16)
    backend = CudnnAttention(problem.geometry, torch.device("cuda"))
    problem.check_replays(other, backend, 1e-2)
