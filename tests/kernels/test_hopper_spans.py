"""Attention within spans by own CUDA C++ for Hopper: values against float64, what it leaves alone, when it is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from devices import ON_GPU, relative_error
from test_span_attention import attend_exactly, make_spans

pytest.importorskip("triton")

from headrace.kernels.cuda_source import MOST_BYTES, CudaSourceError
from headrace.kernels.operation import KernelQuery
from headrace.kernels.span_attention import SPAN_ATTENTION, hopper, triton

DIMS = (16, 40, 64, 72, 80, 88, 96, 104, 112, 120, 128)
LENGTHS = {
    "one": [1], "odd": [1, 65, 7, 193, 64, 2, 300], "even": [256, 128, 384], "one-more": [129, 257, 385],
    "long": [1500, 577], "many": [70 + i % 5 for i in range(90)],
}
KINDS = [
    *((dim, name) for dim in DIMS for name in ("odd", "one-more")),
    *((dim, name) for dim in (64, 72) for name in LENGTHS),
]


@pytest.fixture
def on_hopper():
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")


def draw(lengths: list[int], dim: int, dtype: torch.dtype, heads: int = 3, seed: int = 0) -> torch.Tensor:
    """q, k and v [T, 3, heads, dim] on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), 3, heads, dim, generator=generator).to(dtype).cuda()


def attend(qkv: torch.Tensor, lengths: list[int], groups: int) -> torch.Tensor:
    """What tiles of so many warpgroups find, with scale 0.3; checks that claims are left as zeros."""
    q, k, v = qkv.unbind(1)
    assert hopper.takes(q, k, v, 0.3)
    kernel = hopper.find_kernels(q.shape[2], q.dtype, q.device)[groups]
    spans = replace(make_spans(lengths, "cuda"), claims=torch.zeros(2, dtype=torch.int32, device="cuda"))
    out = hopper.attend(q, k, v, spans, 0.3, kernel, groups)
    assert spans.claims is not None and spans.claims.tolist() == [0, 0], "the next layer counts from zero"
    return out


@pytest.mark.cuda
@pytest.mark.parametrize(("device", "dtype", "most"), ON_GPU)
@pytest.mark.parametrize(("dim", "name"), KINDS)
def test_values(dim: int, name: str, device: str, dtype: torch.dtype, most: float, on_hopper: None):
    lengths = LENGTHS[name]
    qkv = draw(lengths, dim, dtype)
    expected = attend_exactly(qkv, lengths, 0.3, None)
    for groups in hopper.list_groups(dim):
        out = attend(qkv, lengths, groups)
        assert relative_error(out, expected) < most
        assert torch.equal(attend(qkv, lengths, groups), out), "whichever program takes a tile"


@pytest.mark.cuda
@pytest.mark.parametrize("groups", [2, 3])
def test_more_tiles_than_programs(groups: int, on_hopper: None):
    lengths = [700, 70, 2000, 129]
    qkv = draw(lengths, 72, torch.bfloat16, heads=40)
    assert relative_error(attend(qkv, lengths, groups), attend_exactly(qkv, lengths, 0.3, None)) < 1e-2


@pytest.mark.cuda
def test_steep_logits(on_hopper: None):
    """Of rows whose highest logit grows from block to block."""
    lengths = [900]
    qkv = draw(lengths, 64, torch.float16)
    qkv[:, 1] *= torch.linspace(0.1, 8, 900, device="cuda", dtype=torch.float16)[:, None, None]
    for groups in (2, 3):
        assert relative_error(attend(qkv, lengths, groups), attend_exactly(qkv, lengths, 0.3, None)) < 2e-3


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_spans_do_not_see_numbers_of_others(dim: int, on_hopper: None):
    lengths = [130, 65, 200]
    qkv = draw(lengths, dim, torch.bfloat16)
    for groups in hopper.list_groups(dim):
        before = attend(qkv, lengths, groups)
        spoilt = qkv.clone()
        spoilt[130:195] = float("nan")
        out = attend(spoilt, lengths, groups)
        assert torch.equal(out[:130], before[:130]) and torch.equal(out[195:], before[195:])
        assert bool(out[130:195].isnan().all())


@pytest.mark.cuda
def test_heads_do_not_see_dims_of_others(on_hopper: None):
    """Boxes of 16 columns reach over 72 dims into the next head's memory."""
    lengths = [150]
    qkv = draw(lengths, 72, torch.float16)
    expected = attend_exactly(qkv, lengths, 0.3, None)
    qkv[:, :, 1] = float("inf")
    for groups in (2, 3):
        out = attend(qkv, lengths, groups)
        assert relative_error(out[:, 0::2], expected[:, 0::2]) < 2e-3


@pytest.mark.cuda
@pytest.mark.parametrize(("dim", "lengths"), [(72, [400, 65]), (80, [64, 3]), (128, [70])])
@pytest.mark.parametrize(("device", "dtype", "most"), ON_GPU)
def test_rotation(dim: int, lengths: list[int], device: str, dtype: torch.dtype, most: float, on_hopper: None):
    qkv = draw(lengths, dim, dtype)
    angles = torch.randn(len(qkv), dim // 2, dtype=torch.float64, device="cuda") * 3
    expected = attend_exactly(qkv, lengths, 0.3, angles)
    q, k, v = qkv.unbind(1)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).float()
    assert relative_error(hopper.span_attention(q, k, v, make_spans(lengths, "cuda"), 0.3, cos_sin), expected) < most


@pytest.mark.cuda
def test_captured_calls(on_hopper: None):
    lengths = [300, 100]
    qkv, spans = draw(lengths, 72, torch.float16), make_spans(lengths, "cuda")
    spans = replace(spans, claims=torch.zeros(2, dtype=torch.int32, device="cuda"))
    q, k, v = qkv.unbind(1)
    hopper.span_attention(q, k, v, spans, 0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [hopper.span_attention(q, k, v, spans, 0.3) for _ in range(3)]
    for seed in (1, 2):
        qkv.copy_(draw(lengths, 72, torch.float16, seed=seed))
        graph.replay()
        expected = attend_exactly(qkv, lengths, 0.3, None)
        assert all(relative_error(out, expected) < 2e-3 for out in outs)


@pytest.mark.cuda
@pytest.mark.usefixtures("breaks_kernels")
def test_without_a_compiler(on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fail(*args: object, **macros: object) -> None:
        raise CudaSourceError("no compiler")

    monkeypatch.setattr(hopper, "load_kernel", fail)
    lengths = [100, 300]
    qkv = draw(lengths, 56, torch.float16)  # no other test has these dims, whose kernels are kept
    q, k, v = qkv.unbind(1)
    for _ in range(2):
        out = hopper.span_attention(q, k, v, make_spans(lengths, "cuda"), 0.3)
        assert relative_error(out, attend_exactly(qkv, lengths, 0.3, None)) < 2e-3
    assert caplog.text.count("flash attention: no compiler") == 2, "once for each kernel"


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "is_own"),
    [((9, 0), "bfloat16", 72, True), ((9, 0), "float16", 128, True), ((9, 0), "float32", 72, False),
     ((9, 0), "bfloat16", 84, False), ((9, 0), "bfloat16", 136, False), ((8, 9), "bfloat16", 72, False),
     ((10, 0), "bfloat16", 72, False)],
)
def test_choice(capability: tuple[int, int], dtype: str, dim: int, is_own: bool):
    chosen = SPAN_ATTENTION.choose(KernelQuery("cuda", dtype, capability, {"head_dim": dim}))
    assert (chosen is hopper.span_attention) == is_own


def test_short_spans_and_odd_strides_take_others(monkeypatch: pytest.MonkeyPatch):
    taken: list[list[int]] = []
    monkeypatch.setattr(triton, "span_attention", lambda q, k, v, spans, *others: taken.append(spans.lengths))
    monkeypatch.setattr(hopper, "find_kernels", lambda *args: {})
    qkv = torch.zeros(64, 3, 2, 72, dtype=torch.bfloat16)
    hopper.span_attention(*qkv.unbind(1), make_spans([64], "cpu"), 0.3)
    assert taken == [[64]]
    assert hopper.takes(*qkv.unbind(1), 0.3)
    assert not hopper.takes(*qkv.unbind(1), -0.3)
    assert not hopper.takes(*qkv[..., :71].unbind(1), 0.3)
    assert not hopper.takes(*torch.zeros(4, 3, 2, 76, dtype=torch.bfloat16)[..., :72].unbind(1), 0.3)
    assert not hopper.takes(*qkv.float().unbind(1), 0.3)


@pytest.mark.parametrize("dim", DIMS)
def test_shared_memory_fits(dim: int):
    assert all(hopper.count_shared_bytes(dim, groups) <= MOST_BYTES for groups in hopper.list_groups(dim))


def test_tiles_of_fewer_rows_where_large_ones_come_out_uneven():
    assert hopper.choose_groups([4096], 16, 72, 132) == 2, "3.9 tiles a multiprocessor, not 2.7"
    assert hopper.choose_groups([192] * 132, 1, 64, 132) == 3
    assert hopper.choose_groups([4096], 16, 80, 132) == 2, "registers are too few for three"
