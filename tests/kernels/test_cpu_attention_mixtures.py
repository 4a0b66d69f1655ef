"""Own C++ attention over whatever mixture of requests comes: against attention written out, for every instruction
set."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, make_problem
from cpu_isas import isa  # noqa: F401
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.layers.attention.cpu import CpuAttention

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
request_lens = st.integers(1, 90).flatmap(lambda kv: st.tuples(st.integers(1, kv), st.just(kv)))


@pytest.mark.usefixtures("isa")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(request_lens, min_size=1, max_size=6), page_size=st.sampled_from([1, 2, 16]),
    window=st.sampled_from([0, 1, 3, 8, 64]), heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (12, 1)]),
    head_dim=st.sampled_from([8, 20, 64]), dtype=st.sampled_from(list(TOLERANCES)),
)
def test_any_mixture(lens, page_size, window, heads, head_dim, dtype):
    spans = tuple(sorted(lens, key=lambda pair: pair[0] > 1))
    problem = make_problem(
        Case(spans, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, page_size=page_size, window=window),
        "cpu", dtype
    )
    assert problem.error(problem.run(CpuAttention(problem.geometry, torch.device("cpu")))) < TOLERANCES[dtype]
