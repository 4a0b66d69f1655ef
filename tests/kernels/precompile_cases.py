"""Cases of `test_precompile`, run by it where Triton compiles: kernels found by a dry run, compiled for a GPU that need
not be there."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime import driver

from headrace.kernels import compile_workers, cuda_source, nvrtc
from headrace.kernels import precompile as precompile_module
from headrace.kernels.compile_workers import CompileWorkers
from headrace.kernels.late import LateKernels, note_compiled
from headrace.kernels.precompile import compile_ahead, is_dry_run, precompile

SOURCE = '''
import triton
from torch import nn
import triton.language as tl

@triton.jit
def scale(x_ptr, out_ptr, count, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, at < count) * FACTOR, at < count)
'''


class PretendedDriver:
    """A Hopper GPU that launches nothing but takes note of what it would."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, ...]] = []
        self.launchers: list[str] = []
        self.shared_bytes: dict[str, int] = {}
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def launcher_cls(self, src: object, metadata: object) -> object:
        self.launchers.append(metadata.name)
        return lambda *args: self.launched.append(args[:3])

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        assert binary[:4] == b"\x7fELF"
        self.shared_bytes[name] = shared
        return object(), object(), 0, 0, 1024


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedDriver:
    pretended = PretendedDriver()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "_active", pretended)
    return pretended


@pytest.fixture
def scale(tmp_path: Path) -> Any:
    (tmp_path / "scale_kernel.py").write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("scale_kernel", tmp_path / "scale_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.scale


CUDA = torch.device("cuda", 0)


def test_what_a_dry_run_wants_is_compiled_and_then_launched(gpu: PretendedDriver, scale: Any):
    outs = []

    def run() -> None:
        for count, factor in ((100, 2), (100, 2), (128, 2), (100, 3)):
            x = torch.ones(128)
            out = torch.empty_like(x)
            scale[(1,)](x, out, count, FACTOR=factor, BLOCK=128)
            outs.append(out)

    assert precompile(run, "a model", CUDA) == 3, (
        "100 and 128 differ in their divisors, 2 and 3 are constants"
    )
    assert gpu.launched == [] and gpu.launchers == ["scale"] * 3
    assert all(not out.any() for out in outs), "what no launch fills is zero"
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about)
    try:
        run()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert compiled == [] and gpu.launched == [(1, 1, 1)] * 4 and gpu.launchers == ["scale"] * 3


def test_what_a_step_waits_for_is_named_and_counted(
    gpu: PretendedDriver, scale: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    seen = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: seen.append(about["cache_hit"]))
    late, other = LateKernels(CUDA), LateKernels(CUDA)

    def launch(count: int, factor: int) -> None:
        x = torch.ones(128)
        scale[(1,)](x, torch.empty_like(x), count, FACTOR=factor, BLOCK=128)

    launch(100, 2)
    with late.watch():
        launch(100, 2)
    assert late.count == 0, "compiled before the step"
    with late.watch():
        launch(128, 2)
        launch(128, 2)
        with ThreadPoolExecutor(1) as beside:
            beside.submit(launch, 100, 3).result()
        note_compiled("plain_rows.cu", 0.25)
    launch(100, 4)
    assert (late.count, other.count) == (2, 0)
    scale.device_caches.clear()
    with late.watch():
        launch(128, 2)
    assert late.count == 2, "on the disk"
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2 and "scale(FACTOR=2, BLOCK=128)" in lines[0] and "250 ms" in lines[1]
    assert seen == [False] * 4 + [True], "another listener goes on"


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 7, 8, 32])
def test_any_number_of_decodes_takes_kernels_that_the_start_compiles(
    gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch, kv_heads: int
):
    """Steps with prefill have numbers of decodes that are not captured: 33 beside 8 kv heads once compiled a kernel of
    its own."""
    from headrace.execution.graph_sizes import GraphSizes, bucket_sizes
    from headrace.execution.warmup import _thin
    from headrace.kernels.attention.blocks import Head
    from headrace.kernels.attention.decodes import DecodeStep, DecodeWorkspace, decode

    dtype, longest, most = torch.bfloat16, 8192, 512
    workspace = replace(DecodeWorkspace.allocate(132, 4, 128, torch.device("cpu")), is_roomy=True)
    pages = (torch.zeros(2, 64, kv_heads, 128, dtype=dtype),) * 2
    table, lens = torch.zeros(most, longest // 64, dtype=torch.int32), torch.ones(most, dtype=torch.int32)
    q = torch.zeros(most, 4 * kv_heads, 128, dtype=dtype)

    def find(count: int, reach: int) -> set[str]:
        keys = set()

        def submit(key: str, *_: Any) -> Any:
            keys.add(key)
            return precompile_module._StandIn(Future(), lambda kernel: None)

        with ThreadPoolExecutor(1) as pool, precompile_module._dry_run(pool, submit):
            step = DecodeStep(lens[:count], table[:count], count, reach)
            decode(q[:count], pages, torch.empty_like(q[:count]), workspace, Head(0.1, 0, 0.0, None), step)
        return keys

    token = precompile_module._is_dry.set(True)
    try:
        sizes = _thin(GraphSizes(bucket_sizes(most), [64])).decodes
        compiled = find(1, 3).union(*(find(count, longest) for count in sizes))
        for count in range(1, most + 1):
            for reach in (3, 64, 65, longest):
                assert find(count, reach) <= compiled, f"{count} decodes of up to {reach} keys"
    finally:
        precompile_module._is_dry.reset(token)


def test_tables_of_any_width_take_kernels_that_the_start_compiles(gpu: PretendedDriver):
    """Steps with prefill have as many pages as their longest request, and those of a cache group may begin anywhere."""
    from headrace.kernels.latents.decodes import decode_state_pdl, decode_windows_pdl, list_entries_pdl

    def run(requests: int, pages: int, width: int, at: int, count: int) -> None:
        table = torch.zeros(at + requests * width, dtype=torch.int32)[at:].view(requests, width)[:, :pages]
        kv_lens = torch.ones(requests, dtype=torch.int32)
        list_entries_pdl(table, count=count, per_page=64)
        decode_windows_pdl(table, kv_lens, window=128, per_page=64)
        decode_state_pdl(table, kv_lens, ratio=4, block=4, ring=8, per_page=64)

    assert precompile(lambda: run(1, 1, 2, 0, 0), "tables", CUDA) == 3, "a request of three tokens has no entries"
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        for requests, pages, width, at, count in ((1, 1, 1, 0, 1), (16, 16, 16, 1, 32), (33, 9, 35, 3, 512)):
            run(requests, pages, width, at, count)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled and len(gpu.launchers) == 3


def test_plans_of_chunks_are_compiled_with_and_without_splits(gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch):
    """A step of the start is as short as can be: whether keys are divided depends on lengths that come later."""
    from headrace.kernels.attention import hopper
    from headrace.layers.attention import hopper as backends
    from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs

    monkeypatch.setattr(hopper, "is_compiled", lambda *_: True)
    monkeypatch.setattr(backends, "count_processors", lambda _: 132)
    geometry = AttentionGeometry("cuda", "bfloat16", "bfloat16", (9, 0), 32, 8, 128, 128, 64)
    backend = backends.HopperAttention(geometry, torch.device("cpu"))

    def prepare(*lens: tuple[int, int], at: int = 0) -> bool:
        counts, kv_lens = [n for n, _ in lens], [n for _, n in lens]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.zeros(len(lens) + at, dtype=torch.int32)[at:]  # not aligned as torch's own
        backend.prepare(AttentionInputs(
            sum(counts), 0, counts, kv_lens, max(counts), max(kv_lens), starts, lengths, starts, starts
        ))
        return backend._plan.workspace is not None

    assert precompile(lambda: prepare((3, 3)), "plans of chunks", CUDA) == 2
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        found = [prepare((3, 3)), prepare((64, 8256)), prepare((1, 8193), (16, 9000), at=1), prepare((8192, 8192))]
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert found == [False, True, True, False] and not compiled


def test_chunks_over_pages_of_8_bits_are_compiled_with_and_without_room(
    gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch
):
    """A step of the start has few keys; those of later ones may be more than are expanded."""
    from headrace.kernels.attention import hopper
    from headrace.kernels.attention.expanded import ExpandedPages
    from headrace.layers.attention import hopper as backends
    from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages
    from headrace.layers.attention.expanded import ExpandingAttention

    monkeypatch.setattr(hopper, "is_compiled", lambda *_: True)
    monkeypatch.setattr(hopper, "prefill", lambda *_, **__: None)
    monkeypatch.setattr(backends, "count_processors", lambda _: 132)
    geometry = AttentionGeometry("cuda", "bfloat16", "float8_e4m3fn", (9, 0), 8, 2, 64, 64, 16)
    backend = ExpandingAttention(geometry, torch.device("cpu"))
    backend._expanded = ExpandedPages(16, 2, 64, torch.bfloat16, torch.device("cpu"), room_bytes=4 * 16 * 128 * 4)
    pages = torch.zeros(20, 16, 2, 64).to(torch.float8_e4m3fn)

    def attend(*lens: tuple[int, int], at: int = 0) -> bool:
        counts, kv_lens = [n for n, _ in lens], [n for _, n in lens]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        table = torch.zeros(len(lens), 20 + at, dtype=torch.int32)[:, at:]
        backend.prepare(AttentionInputs(
            sum(counts), 0, counts, kv_lens, max(counts), max(kv_lens), starts,
            torch.tensor(kv_lens, dtype=torch.int32), table, starts
        ))
        q = torch.zeros(sum(counts), 8, 64, dtype=torch.bfloat16)
        backend.attend(q, KvPages(pages, pages), AttentionParams(0.1))
        return backend._step is not None

    precompile(lambda: attend((3, 3)), "chunks over codes", CUDA)
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        found = [attend((3, 3)), attend((3, 40), at=3), attend((5, 100)), attend((5, 100), (9, 9))]
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert found == [True, True, False, False] and not compiled


def test_sparse_attention_is_compiled_once_for_steps_of_any_size(gpu: PretendedDriver):
    """Lengths and numbers of splits are arguments: nothing is left to compile when a chunk has other ones."""
    from headrace.kernels.latents.slots import Slots
    from headrace.kernels.sparse_attention import EntryView, Queries, SeenSlots, paired_scores
    from headrace.kernels.sparse_attention.indexer import index_scores, select_entries
    from headrace.kernels.sparse_attention.rows import attend_rows
    from headrace.kernels.sparse_attention.triton import attend_slots

    slots, cos_sin, dtype = Slots(torch.zeros(4, 16, 64, dtype=torch.bfloat16)), torch.zeros(99, 16), torch.bfloat16
    rows = Slots(torch.zeros(4, 16, 48, dtype=dtype))
    pages = torch.zeros(4, 64 * 132, dtype=torch.uint8)
    keys = Slots(pages[:, : 64 * 128].unflatten(1, (64, 128)), pages[:, 64 * 128 :].unflatten(1, (64, 4)))

    def step(tokens: int, window: int, entries: int, at: int = 0) -> None:
        positions = torch.zeros(at + tokens).long()[at:]  # behind those of decodes, which are not a multiple of two
        queries = Queries(torch.zeros(tokens, 16, 64, dtype=dtype), positions, cos_sin, 1e-6)
        counts, numbers = torch.ones(tokens).long(), torch.zeros(tokens, max(window, entries)).long()
        seen = [SeenSlots(slots, numbers[:, :width].contiguous(), counts) for width in (window, entries)]
        attend_slots(queries, *seen, sinks=torch.zeros(16), scale=1.0)
        attend_rows(torch.zeros(tokens, 16, 48, dtype=dtype), seen[1]._replace(slots=rows), value_dim=32, scale=1.0)
        view = EntryView(torch.zeros(1, 9, dtype=torch.int32), counts, counts, entries, 0, [])
        for tokens_of in (slice(0, tokens), slice(1, tokens)):
            scores = index_scores(
                queries, torch.zeros(tokens, 16, dtype=dtype), slots, view, scale=1.0, top_k=8, tokens=tokens_of
            )
            select_entries(scores, view, top_k=8, per_page=16, tokens=tokens_of)
        if tokens >= paired_scores.LEAST_TOKENS:
            queries = queries._replace(q=torch.zeros(tokens, 16, 128, dtype=dtype))
            paired_scores.index_scores(
                queries, torch.zeros(tokens, 16, dtype=dtype), keys, view, scale=1.0, top_k=8, tokens=slice(1, tokens)
            )

    def run() -> None:
        for sizes in ((2, 128, 2048), (4500, 128, 512), (16, 128, 512)):  # most splits, none, few
            step(*sizes)

    assert precompile(run, "sparse attention", CUDA) == 2 + 2 + 2 + 2 + 1 + 1 + 2, "attention, sums, scores, selection"
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        for sizes in ((3, 127, 601), (5, 64, 77), (40, 17, 1031), (133, 100, 8000), (4301, 100, 77)):
            step(*sizes)
            step(*sizes, at=1)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled


def test_swaps_of_hot_slots_are_compiled_once_for_requests_of_any_length(gpu: PretendedDriver):
    """A token of a short request wants all of its entries, whose number grows with the step's longest request."""
    from headrace.kernels.hot_slots import EntryParts, HotSlots, Loads
    from headrace.kernels.hot_slots.triton import find_swaps, load_entries

    hot = HotSlots.allocate(3, 5, 1023, 9000, torch.device("cpu"), ratio=4)
    host, slots = (torch.zeros(pages, 32, 576, dtype=torch.uint8) for pages in (50, 170))
    parts = EntryParts.of([host], [slots])

    def step(count: int, wanted: int, layer: int = 0, width: int = 300) -> None:
        entries, found = torch.zeros((2, count, wanted), dtype=torch.int64)
        loads = Loads.allocate(count, wanted, torch.device("cpu"))
        rows, kv_lens = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int32)
        find_swaps(hot.layer(layer), rows, entries, kv_lens, found, loads)
        load_entries(parts, torch.zeros(count, width, dtype=torch.int32)[:, 1:], loads)

    assert precompile(lambda: step(2, 512), "hot slots", CUDA) == 2
    compiled = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    try:
        for count, wanted, layer, width in ((1, 1, 0, 16), (3, 77, 1, 33), (5, 16, 2, 300), (4, 511, 1, 7)):
            step(count, wanted, layer, width)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled and len(gpu.launchers) == 2


def test_own_cuda_is_compiled_beside_kernels(gpu: PretendedDriver, scale: Any, monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(precompile_module, "compile_source", lambda *source: done.append(source))
    monkeypatch.setattr(nvrtc, "open_nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "locate", lambda *_: Path("/nowhere"))

    def run() -> None:
        for _ in range(2):
            assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == cuda_source.NOT_YET
        scale[(1,)](torch.ones(128), torch.empty(128), 128, FACTOR=2, BLOCK=128)

    assert precompile(run, "with own CUDA", CUDA) == 2
    assert done == [("streams", ("-arch=sm_90a",))]


def test_processes_compile_into_the_cache(
    gpu: PretendedDriver, scale: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Those that a process can import are found in the cache; others, and those that a process fails at, are compiled
    here."""
    from headrace.kernels.rowwise.triton import rms_norm

    workers = CompileWorkers(2, tmp_path / "workers")
    monkeypatch.setattr(precompile_module, "find_workers", lambda: workers)
    found = {}
    triton.knobs.compilation.listener = lambda src, cache_hit, **_: found.update({src.name: cache_hit})

    def run() -> None:
        rms_norm(torch.ones(3, 64), torch.ones(64), 1e-6)
        scale[(1,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=8)

    try:
        assert precompile(run, "a model", CUDA) == 2
    finally:
        triton.knobs.compilation.listener = None
    assert found == {"_rms_norm_kernel": True, "scale": False} and len(gpu.launchers) == 2


def test_launchers_are_loaded_one_at_a_time(gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch):
    """Triton before 3.7 has modules of one name for all of them, which threads would fill for each other."""
    module = SimpleNamespace(launch=None)
    barrier = Barrier(2)

    def load(src: str, metadata: object) -> str:
        module.launch = src
        with suppress(BrokenBarrierError):
            barrier.wait(0.2)  # here another thread may load
        return module.launch

    monkeypatch.setattr(gpu, "launcher_cls", load)
    precompile_module._load_launchers_alone()
    precompile_module._load_launchers_alone()
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(gpu.launcher_cls, ("one", "other"), (None, None))) == ["one", "other"]


def test_a_process_that_compiles_builds_the_launcher_too(gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch):
    """Of a Triton that generates one in C: whoever launches the kernel only loads it."""
    from triton.backends.nvidia import driver as nvidia

    from headrace.kernels.rowwise.triton import rms_norm

    built: list[tuple[str, str]] = []
    monkeypatch.setattr(nvidia, "make_launcher", None, raising=False)
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda source, metadata: built.append((source.name, metadata.name)))
    asked: list[bytes] = []
    workers = SimpleNamespace(count=1, start=lambda: True, compile=asked.append)
    monkeypatch.setattr(precompile_module, "find_workers", lambda: workers)
    precompile(lambda: rms_norm(torch.ones(3, 300), torch.ones(300), 1e-6), "a model", CUDA)
    assert [compile_workers.answer(message) for message in asked] == [b"done\n"]
    assert built == [("_rms_norm_kernel", "_rms_norm_kernel")]


class PretendedWorkers:
    """Fail at every job, so that this process compiles; ``may_end`` holds up each."""

    count = 2

    def __init__(self) -> None:
        self.may_end = Event()

    def start(self) -> bool:
        return True

    def compile(self, message: bytes) -> bool:
        assert self.may_end.wait(60)
        return False


def test_what_is_found_ahead_is_compiled_beside_other_work(
    gpu: PretendedDriver, scale: Any, monkeypatch: pytest.MonkeyPatch
):
    """A launch waits for its kernel alone; what was found ahead is not looked for again."""
    workers = PretendedWorkers()
    monkeypatch.setattr(precompile_module, "find_workers", lambda: workers)
    ran: list[str] = []

    def multiply(factor: int) -> None:
        scale[(factor,)](torch.ones(8), torch.ones(8), 8, FACTOR=factor, BLOCK=8)

    def products() -> None:
        ran.append("products")
        assert is_dry_run()
        multiply(2)

    def steps() -> None:
        ran.append("steps")
        multiply(2)
        multiply(3)

    def sketch() -> None:
        precompile(products, "products", CUDA)
        precompile(steps, "steps", CUDA)
        raise RuntimeError("this sketch cannot go on")

    with compile_ahead(sketch, "a sketch", CUDA):
        assert ran == ["products", "steps"] and gpu.launchers == [] and not is_dry_run()
        assert precompile(products, "products", CUDA) == 0
        workers.may_end.set()
        multiply(2)
        assert gpu.launched == [(2, 1, 1)]
        assert precompile(steps, "steps", CUDA) == 0
        assert precompile(lambda: multiply(5), "others", CUDA) == 3, "those found ahead, and one more"
    assert ran == ["products", "steps"] and sorted(gpu.launchers) == ["scale"] * 3
    for factor in (2, 3, 5):
        multiply(factor)
    assert gpu.launched == [(2, 1, 1), (2, 1, 1), (3, 1, 1), (5, 1, 1)] and len(gpu.launchers) == 3
    with compile_ahead(lambda: pytest.fail("it is known"), "a sketch", CUDA):
        assert precompile(steps, "steps", CUDA) == 0
    assert ran == ["products", "steps"]


def test_own_cuda_found_ahead_is_waited_for(gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    workers, path = PretendedWorkers(), tmp_path / "streams.cubin"
    monkeypatch.setattr(precompile_module, "find_workers", lambda: workers)
    monkeypatch.setattr(precompile_module, "compile_source", lambda *source: path.write_bytes(b"code"))
    monkeypatch.setattr(nvrtc, "open_nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "locate", lambda *_: path)

    def run() -> None:
        assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == cuda_source.NOT_YET

    with compile_ahead(run, "own CUDA", CUDA):
        Timer(0.05, workers.may_end.set).start()
        assert cuda_source.compile_source("streams", ("-arch=sm_90a",)) == b"code"


def test_it_runs_once_for_each_model(gpu: PretendedDriver):
    ran = []
    for about in ("a model", "a model", "another"):
        assert precompile(lambda about=about: ran.append(about), about, CUDA) == 0
    assert ran == ["a model", "another"]


def test_a_cache_that_cannot_be_written_is_only_slower(
    gpu: PretendedDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "headrace").touch()  # in place of a folder
    ran = []
    for _ in range(2):
        assert precompile(lambda: ran.append(1), "a model", CUDA) == 0
    assert len(ran) == 2 and "cannot be written" in caplog.text


def test_a_dry_run_that_fails_compiles_what_it_had_found(
    gpu: PretendedDriver, scale: Any, caplog: pytest.LogCaptureFixture
):
    def run() -> None:
        scale[(1,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=8)
        raise RuntimeError("shapes do not fit")

    assert precompile(run, "a model", CUDA) == 1
    assert "shapes do not fit" in caplog.text and gpu.launchers == ["scale"]
    outcome = scale[(2,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=8)
    assert outcome.name == "scale" and gpu.launched == [(2, 1, 1)]


def test_a_kernel_that_does_not_compile_hurts_no_other(
    gpu: PretendedDriver, scale: Any, caplog: pytest.LogCaptureFixture
):
    def run() -> None:
        for block in (100, 128):  # a power of two is needed
            scale[(1,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=block)

    assert precompile(run, "a model", CUDA) == 2
    assert "could not be precompiled" in caplog.text and gpu.launchers == ["scale"]
    scale[(4,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=128)
    with pytest.raises(CompilationError):
        scale[(1,)](torch.ones(8), torch.ones(8), 8, FACTOR=2, BLOCK=100)
    assert gpu.launched == [(4, 1, 1)]


def test_there_is_nothing_to_do_on_a_cpu():
    assert precompile(lambda: pytest.fail("called"), "a model", torch.device("cpu")) == 0


def test_prefill_of_large_heads_fits_the_shared_memory_of_desktops(
    gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch
):
    from headrace.kernels.attention.blocks import Head
    from headrace.kernels.attention.prefill import plan_prefill, prefill, prefill_tile

    room = 99 << 10
    monkeypatch.setattr(gpu, "get_current_target", lambda: GPUTarget("cuda", 89, 32))
    starts, pages = torch.tensor([0, 9], dtype=torch.int32), torch.zeros(2, 16, 1, 256, dtype=torch.bfloat16)
    q, table = torch.zeros(9, 2, 256, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int32)
    plan = plan_prefill(starts, [9], first=0, group=2, tile=prefill_tile(256, 2, room))
    prefill(q, (pages, pages), torch.empty_like(q), plan, Head(0.1), (starts, starts[1:], table))
    assert 0 < gpu.shared_bytes["_prefill_kernel"] <= room


def test_codes_become_operands_from_ampere_on(gpu: PretendedDriver, monkeypatch: pytest.MonkeyPatch):
    """Its bfloat16 arithmetic is fma alone: the assembler refuses any other."""
    from headrace.kernels.coded_linear import pieces
    from headrace.kernels.coded_linear.device_codes import pack_for_device
    from headrace.kernels.coded_linear.quantise import quantise_fp4, quantise_integer
    from headrace.kernels.coded_linear.triton import skinny

    monkeypatch.setattr(gpu, "get_current_target", lambda: GPUTarget("cuda", 80, 32))
    monkeypatch.setattr(pieces, "has_fast_path", lambda weight, dtype: True)  # as on a GPU
    plain, x = torch.randn(64, 256), torch.zeros(9, 256, dtype=torch.bfloat16)
    for matrix in (quantise_integer(plain, 4, 128), quantise_fp4(plain)):
        weight = pack_for_device(matrix)
        assert weight is not None
        skinny(x, weight, None, 1)
    assert gpu.launchers == ["_skinny_kernel"] * 2


def test_threads_that_parse_at_the_same_time_parse_again(gpu: PretendedDriver):
    """A kernel that failed for good would fail each step that launches it."""
    own, kernel, tried, installed = precompile_module._Compilations(CUDA), SimpleNamespace(run=print), [], []

    def compile_kernel(most: int) -> Any:
        tried.append(most)
        if tried.count(most) <= most:
            raise SystemError("AST constructor recursion depth mismatch (before=36, after=158)")
        return kernel

    stand_ins = [
        own._submit(str(most), lambda most=most: compile_kernel(most), installed.append) for most in (3, 99)
    ]
    own.close()
    assert [stand_in.has_failed for stand_in in stand_ins] == [False, True] and installed[-1] is kernel
    assert [tried.count(most) for most in (3, 99)] == [4, precompile_module.PARSES]


def test_a_dry_run_leaves_torch_as_it_was(gpu: PretendedDriver):
    """Whatever it ends with, and for each way in which a tensor is made without contents."""
    functions = [getattr(owner, name) for owner, name in precompile_module.UNFILLED]
    own = "new_empty" in vars(torch.Tensor)
    base, made = torch.ones(3, 4), []

    def run() -> None:
        made.extend([
            torch.empty(3, dtype=torch.int64), torch.empty((2, 3), dtype=torch.bfloat16), torch.empty_like(base),
            torch.empty_strided((3, 2), (1, 3)), base.new_empty(5), base.new_empty_strided((2, 2), (2, 1)),
            nn.Parameter(torch.empty(4)),
        ])
        assert base.shape == (3, 4) and base.eq(1).all()
        raise ValueError("a step failed")

    precompile(run, "a model", CUDA)
    assert len(made) == 7 and not any(tensor.any() for tensor in made)
    assert [tensor.stride() for tensor in made[3:6:2]] == [(1, 3), (2, 1)] and made[0].dtype == torch.int64
    assert all(getattr(owner, name) is function for (owner, name), function in zip(
        precompile_module.UNFILLED[:3], functions[:3], strict=True
    ))
    assert ("new_empty" in vars(torch.Tensor)) == own and base.new_empty.__self__ is base
