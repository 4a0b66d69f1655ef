"""How dimensions are divided among ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.base.errors import ConfigError
from headrace.parallel.share import Share, share_experts, share_heads, share_units


@given(st.integers(1, 4096), st.integers(1, 16))
def test_shares_cover_a_dimension_once(size: int, ranks: int):
    if size < ranks:
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            share_units(size, ranks, 0, noun="dims")
        return
    shares = [share_units(size, ranks, rank, noun="dims") for rank in range(ranks)]
    assert [share.start for share in shares] == [0, *(share.stop for share in shares[:-1])]
    assert shares[-1].stop == size and all(share.length > 0 for share in shares)


@pytest.mark.parametrize(
    ("size", "ranks", "length"), [(14336, 2, 7168), (768, 2, 384), (128256, 4, 32064), (1536, 8, 192)]
)
def test_shares_are_even_where_kernels_like_it(size: int, ranks: int, length: int):
    assert {share_units(size, ranks, rank, noun="dims").length for rank in range(ranks)} == {length}


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 12))
def test_every_query_head_is_on_one_rank_with_its_kv_head(num_kv_heads: int, group: int, ranks: int):
    num_heads = num_kv_heads * group
    try:
        shares = [share_heads(num_heads, num_kv_heads, ranks, rank) for rank in range(ranks)]
    except ConfigError:
        assert num_kv_heads < ranks and num_heads < ranks * 2
        return
    heads = [head for q, _ in shares for head in range(q.start, q.stop)]
    assert heads == list(range(num_heads))
    for q, kv in shares:
        # the kernels' rule: query head i of a rank reads KV head i // (heads / KV heads)
        assert q.length % kv.length == 0
        own_group = q.length // kv.length
        assert all((q.start + i) // group == kv.start + i // own_group for i in range(q.length))


def test_experts_are_divided_whole():
    assert [share_experts(10, 4, rank).length for rank in range(4)] == [2, 3, 2, 3]
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        share_experts(2, 4, 0)


def test_shares_scale_with_the_dims_of_a_head():
    assert Share(8, 2, 4).times(64) == Share(512, 128, 256)
