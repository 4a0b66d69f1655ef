"""Paged attention problems with their answers: pages dealt in random order, everything outside them poisoned with NaN."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.kernels.attention.reference import attend_densely
from headrace.layers.attention.contract import AttentionGeometry, AttentionInputs, AttentionParams, KvPages


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
    shared_pages: int = 0  # that all requests begin with
    steepness: float = 1.0  # what logits are multiplied with beside the usual scale

    @property
    def decodes(self) -> int:
        if self.num_decodes >= 0:
            return self.num_decodes
        return next((i for i, (n, _) in enumerate(self.spans) if n > 1), len(self.spans))


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

    def error(self, out: torch.Tensor) -> float:
        """||out - expected|| / ||expected||; NaN never passes a comparison."""
        return float((out.double() - self.expected).norm() / self.expected.norm())


def make_problem(case: Case, device: str, dtype: torch.dtype, *, seed: int = 0) -> Problem:
    """Draw q, k, v and a page table, and compute the answer in float64 from what the tensors hold."""
    value_dim = case.value_dim or case.head_dim
    rng = torch.Generator().manual_seed(seed)
    counts = [-(-length // case.page_size) for _, length in case.spans]
    num_pages = sum(counts) + 2
    shuffled = torch.randperm(num_pages - 1, generator=rng) + 1
    table = torch.zeros(len(counts), max(max(counts), -(-case.max_kv_len // case.page_size)), dtype=torch.int32)
    for row, ids in enumerate(shuffled[: sum(counts)].split(counts)):
        table[row, : len(ids)] = ids
    table[1:, : case.shared_pages] = table[0, : case.shared_pages]
    shape = (num_pages, case.page_size, case.num_kv_heads)
    k, v = (torch.full((*shape, dim), float("nan"), dtype=dtype) for dim in (case.head_dim, value_dim))
    num_tokens = sum(n for n, _ in case.spans)
    q = torch.randn(num_tokens, case.num_heads, case.head_dim, generator=rng).to(dtype)
    sinks = torch.randn(case.num_heads, generator=rng) if case.has_sinks else None
    params = AttentionParams(case.steepness * case.head_dim**-0.5, case.window, case.softcap, sinks)
    expected, start = [], 0
    for row, (query_len, kv_len) in enumerate(case.spans):
        at = torch.arange(kv_len)
        slots = table[row].long()[at // case.page_size] * case.page_size + at % case.page_size
        keys = torch.randn(kv_len, case.num_kv_heads, case.head_dim, generator=rng).to(dtype)
        values = torch.randn(kv_len, case.num_kv_heads, value_dim, generator=rng).to(dtype)
        if row == 0:
            common = case.shared_pages * case.page_size
            common_keys, common_values = keys[:common], values[:common]
        keys[: len(common_keys)], values[: len(common_values)] = common_keys, common_values
        seen = max(0, kv_len - query_len - case.window + 1) if case.window else 0
        k.view(-1, case.num_kv_heads, case.head_dim)[slots[seen:]] = keys[seen:]
        v.view(-1, case.num_kv_heads, value_dim)[slots[seen:]] = values[seen:]
        expected.append(attend_densely(
            q[start : start + query_len].float(), keys, values, scale=params.scale, window=case.window, softcap=case.softcap, sinks=sinks
        ).double())
        start += query_len
    return _on_device(case, device, dtype, (k, v, q, table, params, torch.cat(expected)))


def _on_device(case: Case, device: str, dtype: torch.dtype, tensors: tuple) -> Problem:
    k, v, q, table, params, expected = tensors
    query_lens, kv_lens = [n for n, _ in case.spans], [n for _, n in case.spans]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    name = str(dtype).removeprefix("torch.")
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    geometry = AttentionGeometry(
        device, name, name, capability, case.num_heads, case.num_kv_heads, case.head_dim, case.value_dim or case.head_dim, case.page_size,
        case.window, case.softcap > 0, case.has_sinks,
    )
    inputs = AttentionInputs(
        q.shape[0], case.decodes, query_lens, kv_lens, max(query_lens), max(*kv_lens, case.max_kv_len), starts,
        torch.tensor(kv_lens, dtype=torch.int32, device=device), table.to(device), torch.zeros(q.shape[0], dtype=torch.int64, device=device),
    )
    sinks = params.sinks.to(device) if params.sinks is not None else None
    params = AttentionParams(params.scale, params.window, params.softcap, sinks)
    return Problem(geometry, inputs, KvPages(k.to(device), v.to(device)), params, q.to(device), expected.to(device))
