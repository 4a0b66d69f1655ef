"""Paged attention problems with their answers: pages dealt in random order, everything outside them poisoned with
NaN."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from headrace.kernels.attention.reference import attend_densely, read_codes, write_codes
from headrace.layers.attention.contract import (
    AttentionBackend,
    AttentionGeometry,
    AttentionInputs,
    AttentionParams,
    KvPages,
)
from headrace.layers.attention.reference import ReferenceAttention


@dataclass(frozen=True)
class Case:
    """``spans`` are (query length, kv length) of each request, decodes first."""

    spans: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 0
    page_size: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    num_decodes: int = -1
    max_kv_len: int = 0
    shared_pages: int = 0  # that requests begin with
    leaders: tuple[int, ...] = ()  # by request, the first one of those that begin with its shared pages; () for 0
    steepness: float = 1.0  # what logits are multiplied with beside the usual scale
    values_in_keys: bool = False  # values are the first ``value_dim`` dims of keys

    @property
    def decodes(self) -> int:
        if self.num_decodes >= 0:
            return self.num_decodes
        return next((i for i, (n, _) in enumerate(self.spans) if n > 1), len(self.spans))


MIXED = ((1, 1), (1, 75), (7, 7), (20, 75))
SHARING = tuple((1, 130 + 37 * i) for i in range(7))
SHAPES = {
    "mixed": Case(MIXED),
    "mixed-big-pages": Case(MIXED, page_size=64),
    "multi-head": Case(MIXED, num_heads=3, num_kv_heads=3),
    "group-3": Case(MIXED, num_heads=9, num_kv_heads=3),
    "group-too-large-to-decode": Case(MIXED, num_heads=36, num_kv_heads=2),
    "dim-8": Case(MIXED, head_dim=8),
    "dim-80": Case(MIXED, head_dim=80),
    "dim-96": Case(MIXED, head_dim=96, page_size=32),
    "dim-128": Case(MIXED, head_dim=128, page_size=128),
    "dim-256": Case(((1, 40), (9, 50)), head_dim=256),
    "window": Case(MIXED, window=9),
    "window-of-one": Case(MIXED, window=1),
    "window-over-pages": Case(((1, 150), (33, 150)), window=50, page_size=64),
    "window-over-tiles": Case(((1, 700), (640, 700), (300, 650)), window=70, num_heads=2, num_kv_heads=1),
    "softcap": Case(MIXED, softcap=2.0),
    "sinks": Case(MIXED, has_sinks=True),
    "all": Case(MIXED, window=12, softcap=2.0, has_sinks=True, head_dim=80),
    "shared-pages": Case((*SHARING, (40, 400)), num_heads=9, num_kv_heads=3, shared_pages=8),
    "shared-pages-and-sinks": Case(
        SHARING, num_heads=8, num_kv_heads=1, head_dim=128, has_sinks=True, page_size=64, shared_pages=2
    ),
    "shared-pages-prompts": Case(
        ((1, 400), (1, 300), (2, 300), (8, 290), (5, 310), (16, 330), (40, 600)), num_heads=9, num_kv_heads=3,
        shared_pages=8
    ),
    "long": Case(((1, 1000), (300, 300), (130, 900)), num_heads=6, num_kv_heads=2),
}
"""What kernels for CPUs are tested on whatever their pages hold."""


@dataclass
class Problem:
    geometry: AttentionGeometry
    inputs: AttentionInputs
    pages: KvPages
    params: AttentionParams
    q: torch.Tensor
    expected: torch.Tensor = field(repr=False)

    def run(self, backend) -> torch.Tensor:
        backend.prepare(self.inputs)
        return backend.attend(self.q, self.pages, self.params)

    def check_replays(self, other: Problem, backend: AttentionBackend, tolerance: float) -> None:
        """A captured step is right each time that it is replayed, and then with what ``other`` has, see `take`."""
        self.run(backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.attend(self.q, self.pages, self.params)
        for _ in range(2):
            graph.replay()
            assert self.error(out) < tolerance
        self.take(other)
        graph.replay()
        assert other.error(out) < tolerance

    def take(self, other: Problem) -> None:
        """Have what ``other``, which is no larger, has: in the same tensors, which a captured graph reads."""
        self.q.copy_(other.q)
        self.inputs.kv_lens.copy_(other.inputs.kv_lens)
        self.inputs.page_table.copy_(other.inputs.page_table)
        count = other.pages.k.shape[0]
        self.pages.k[:count], self.pages.v[:count] = other.pages.k, other.pages.v

    def open(self, spare: int) -> None:
        """Have lengths known on the device alone, and room for so many more tokens, which are NaN, and requests."""
        inputs = self.inputs
        self.q = torch.cat((self.q, self.q.new_full((spare, *self.q.shape[1:]), float("nan"))))
        self.inputs = replace(
            inputs, has_dynamic_lengths=True, num_tokens=inputs.num_tokens + spare, num_decodes=0, query_lens_cpu=[],
            kv_lens_cpu=[], query_start=torch.cat((inputs.query_start, inputs.query_start[-1:].expand(spare))),
            kv_lens=F.pad(inputs.kv_lens, (0, spare)), page_table=F.pad(inputs.page_table, (0, 0, 0, spare)),
        )

    def error(self, out: torch.Tensor) -> float:
        """||out - expected|| / ||expected||; NaN never passes a comparison."""
        return float((out.double() - self.expected).norm() / self.expected.norm())


def make_problem(
    case: Case, device: str, dtype: torch.dtype, *, seed: int = 0, kv_dtype: torch.dtype | None = None
) -> Problem:
    """Draw q, k, v and a page table, and compute the answer in float64 from what the tensors hold. ``kv_dtype``: of
    pages, if not ``dtype``."""
    kv_dtype = kv_dtype or dtype
    value_dim = case.value_dim or case.head_dim
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // case.page_size) for _, length in case.spans]
    num_pages = sum(counts) + 2
    shuffled = torch.randperm(num_pages - 1, generator=rng) + 1
    table = torch.zeros(len(counts), max(max(counts), -(-case.max_kv_len // case.page_size)), dtype=torch.int32)
    for row, ids in enumerate(shuffled[: sum(counts)].split(counts)):
        table[row, : len(ids)] = ids
    leaders = torch.tensor(case.leaders or (0,) * len(counts))
    table[:, : case.shared_pages] = table[leaders, : case.shared_pages]
    shape = (num_pages, case.page_size, case.num_kv_heads)
    k, v = (torch.full((*shape, dim), float("nan"), dtype=dtype) for dim in (case.head_dim, value_dim))
    num_tokens = sum(n for n, _ in case.spans)
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=rng).to(dtype)
    sinks = torch.randn(case.num_heads, generator=rng) if case.has_sinks else None
    params = AttentionParams(case.steepness * case.head_dim**-0.5, case.window, case.softcap, sinks)
    expected, start, begun = [], 0, {}
    for row, (query_len, kv_len) in enumerate(case.spans):
        at = torch.arange(kv_len)
        slots = table[row].long()[at // case.page_size] * case.page_size + at % case.page_size
        keys = torch.randn(kv_len, case.num_kv_heads, case.head_dim, generator=rng).to(kv_dtype).to(dtype)
        values = torch.randn(kv_len, case.num_kv_heads, value_dim, generator=rng).to(kv_dtype).to(dtype)
        if case.values_in_keys:
            values = keys[..., :value_dim]
        common = case.shared_pages * case.page_size
        first_keys, first_values = begun.setdefault(int(leaders[row]), (keys[:common], values[:common]))
        keys[: len(first_keys)], values[: len(first_values)] = first_keys, first_values
        seen = max(0, kv_len - query_len - case.window + 1) if case.window else 0
        k.view(-1, case.num_kv_heads, case.head_dim)[slots[seen:]] = keys[seen:]
        v.view(-1, case.num_kv_heads, value_dim)[slots[seen:]] = values[seen:]
        expected.append(attend_densely(
            q[start : start + query_len].float(), keys, values, scale=params.scale, window=case.window,
            softcap=case.softcap, sinks=sinks
        ).double())
        start += query_len
    pages = (k.to(kv_dtype), v.to(kv_dtype))
    if case.values_in_keys:
        pages = (pages[0], pages[0][..., :value_dim])
    return _on_device(case, device, dtype, (*pages, q, table, params, torch.cat(expected)))


def _on_device(case: Case, device: str, dtype: torch.dtype, tensors: tuple) -> Problem:
    k, v, q, table, params, expected = tensors
    query_lens, kv_lens = [n for n, _ in case.spans], [n for _, n in case.spans]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    name = str(dtype).removeprefix("torch.")
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    geometry = AttentionGeometry(
        device, name, str(k.dtype).removeprefix("torch."), capability, case.num_heads, case.num_kv_heads, case.head_dim,
        case.value_dim or case.head_dim, case.page_size, case.window, case.softcap > 0, case.has_sinks,
        case.values_in_keys,
    )
    inputs = AttentionInputs(
        q.shape[0], case.decodes, query_lens, kv_lens, max(query_lens), max(*kv_lens, case.max_kv_len), starts,
        torch.tensor(kv_lens, dtype=torch.int32, device=device), table.to(device),
        torch.zeros(q.shape[0], dtype=torch.int64, device=device),
    )
    sinks = params.sinks.to(device) if params.sinks is not None else None
    params = AttentionParams(params.scale, params.window, params.softcap, sinks)
    k = k.to(device)
    v = k[..., : v.shape[-1]] if case.values_in_keys else v.to(device)
    return Problem(geometry, inputs, KvPages(k, v), params, q.to(device), expected.to(device))


def code_problem(case: Case, dtype: torch.dtype) -> Problem:
    """The same with pages of codes, and the answer for what these hold. What nobody wrote holds scales that are no
    numbers."""
    problem = make_problem(case, "cpu", torch.float32)
    k, v = problem.pages.k, problem.pages.v
    pages = empty_pages(*k.shape, v.shape[-1])
    written = ~k.isnan().flatten(2).any(-1).flatten()
    slots = torch.where(written)[0]
    write_codes((pages.k, pages.v), pages.scales, slots, k.flatten(0, 1)[slots], v.flatten(0, 1)[slots])
    exact = read_codes((pages.k, pages.v), pages.scales, torch.arange(len(k)))
    problem.q = problem.q.to(dtype)
    plain = KvPages(*(x.nan_to_num().unflatten(0, k.shape[:2]) for x in exact))
    backend = ReferenceAttention(problem.geometry, torch.device("cpu"))
    backend.prepare(problem.inputs)
    problem.expected = backend.attend(problem.q.float(), plain, problem.params).double()
    problem.pages = pages
    problem.geometry = replace(problem.geometry, dtype=str(dtype).removeprefix("torch."), kv_dtype="int8")
    return problem


def empty_pages(num_pages: int, page_size: int, num_kv_heads: int, dim: int, value_dim: int = 0) -> KvPages:
    shape = (num_pages, page_size, num_kv_heads)
    k, v = (torch.randint(-127, 128, (*shape, d), dtype=torch.int8) for d in (dim, value_dim or dim))
    return KvPages(k, v, torch.full((num_pages, 2, num_kv_heads, page_size), float("nan")))
