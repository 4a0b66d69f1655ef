"""A router's product and its choice in one launch, on values: see ``csrc/cuda/linear_route.cu``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from headrace.kernels.cuda_source import MOST_BYTES
from headrace.kernels.moe import LINEAR_ROUTE, ROUTE, RUN_EXPERTS, RouteShape, linear_route
from headrace.kernels.moe.reference import make_scores
from headrace.kernels.operation import KernelQuery
from headrace.kernels.rowwise import RMS_NORM, Gate

BF16 = torch.bfloat16
SHAPE = RouteShape(top_k=8, score="softmax", renormalise=True, scale=1.0, num_groups=1, top_groups=1, group_best=1)
ROUTERS = {
    "qwen3-30b-a3b": (128, 2048, 8, "softmax", True, False), "qwen3-235b-a22b": (128, 4096, 8, "softmax", True, False),
    "gpt-oss-20b": (32, 2880, 4, "softmax", True, True), "mixtral": (8, 4096, 2, "softmax", True, False),
    "256-experts": (256, 2048, 8, "sigmoid", True, False), "odd": (60, 1544, 6, "sqrt_softplus", False, True),
    "one-choice": (16, 64, 1, "softmax", False, False),
}
"""Experts, hidden size, choices, score, whether weights are renormalised, whether there are biases."""


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=generator)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 65, 128, 129, 250, 256])
@pytest.mark.parametrize("name", ROUTERS)
def test_product_and_choice_in_one_kernel(num_tokens: int, name: str):
    num_experts, width, top_k, score, renormalise, has_bias = ROUTERS[name]
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x = draw(generator, num_tokens, width + 8).to(BF16)[:, :width]  # rows apart
    router = (draw(generator, num_experts, width) * 4 * width**-0.5).to(BF16)
    bias = draw(generator, num_experts).to(BF16) if has_bias else None
    choice_bias = draw(generator, num_experts) if has_bias and score != "softmax" else None
    shape = RouteShape(
        **{**SHAPE, "top_k": top_k, "score": score, "renormalise": renormalise, "scale": 1.5}  # type: ignore[typeddict-item]
    )
    found = linear_route.linear_route(x, router, bias, choice_bias, **shape)
    assert found is not None
    ids, weights = found
    assert ids.dtype == torch.int64 and ids.shape == weights.shape == (num_tokens, top_k)
    logits = x.double() @ router.double().T + (0 if bias is None else bias.double())
    # the kernel rounds logits to bfloat16 before the choice, which may swap experts that are nearly as good
    scores = make_scores(logits.float(), score).double()
    choice = logits if score == "softmax" else scores if choice_bias is None else scores + choice_bias
    assert all(len(set(row)) == top_k for row in ids.tolist()) and 0 <= int(ids.min()) <= int(ids.max()) < num_experts
    assert (choice.gather(1, ids) >= choice.topk(top_k).values[:, -1:] - 0.13).all()
    chosen = scores.gather(1, ids)
    expected = chosen / (chosen.sum(1, keepdim=True) if renormalise else 1.0) * 1.5
    torch.testing.assert_close(weights.double(), expected, rtol=0.15, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 40, 250])
def test_choices_are_those_of_rounded_logits(num_tokens: int):
    """Of integers, whose products are exact whatever the order: each id and weight."""
    generator = torch.Generator("cuda").manual_seed(3)
    x = torch.randint(-2, 3, (num_tokens, 2048), device="cuda", generator=generator).to(BF16)
    router = (torch.randint(-1, 2, (128, 2048), device="cuda", generator=generator) / 32).to(BF16)
    found = LINEAR_ROUTE.load("cuda")(x, router, None, None, **SHAPE)
    logits = (x.double() @ router.double().T).to(BF16)
    expected = ROUTE.load("triton")(logits, None, **SHAPE)  # of equal logits it takes the first too
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("num_tokens", [1, 12, 96, 200])
def test_captured_chains_of_norms_routers_and_experts(num_tokens: int):
    """Each kernel begins before the one ahead of it has ended, and memory of earlier steps is used again: what is
    replayed is what one kernel at a time gives."""
    generator = torch.Generator("cuda").manual_seed(1)
    stacks = [
        ((draw(generator, 32, 2 * 256, 512).mul_(0.05).to(BF16), None),
         (draw(generator, 32, 512, 256).mul_(0.05).to(BF16), None)) for _ in range(3)
    ]
    routers = [draw(generator, 32, 512).to(BF16) for _ in range(3)]
    norm, start = torch.ones(512, device="cuda", dtype=BF16), torch.zeros(num_tokens, 512, device="cuda", dtype=BF16)
    query = KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability(), {"width": 512, "expert_width": 256})
    normalise, route, run = (each.choose(query) for each in (RMS_NORM, LINEAR_ROUTE, RUN_EXPERTS))
    shape = RouteShape(**{**SHAPE, "top_k": 4})  # type: ignore[typeddict-item]

    def go(*, waits: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x, chosen = start.clone(), []
        for i in range(9):
            steps = normalise(x, norm, 1e-6, 0.0)
            if waits:
                torch.cuda.synchronize()
            ids, weights = route(steps, routers[i % 3], None, None, **shape)
            if waits:
                torch.cuda.synchronize()
            x = run(steps, ids, weights, *stacks[i % 3], Gate("silu"))
            if waits:
                torch.cuda.synchronize()
            chosen.append(ids)
        return x, torch.stack(chosen)

    start.normal_()
    go(waits=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = go(waits=False)
    for _ in range(3):
        start.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(captured, go(waits=True), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(("num_experts", "width", "num_tokens", "form"), [
    (128, 2048, 1, (1, 8, 8, 8)), (128, 2048, 128, (1, 8, 8, 8)), (128, 2048, 129, (1, 8, 8, 16)),
    (128, 4096, 1, (1, 16, 8, 8)), (32, 2880, 1, (1, 16, 6, 8)), (256, 2048, 1, (2, 16, 4, 8)),
    (256, 4096, 1, None), (384, 7168, 1, None), (512, 2048, 1, None), (384, 1024, 128, (4, 16, 2, 8)),
    (384, 1024, 129, None),
])
def test_rows_of_a_router_fit_in_registers_and_sums_in_shared_memory(
    num_experts: int, width: int, num_tokens: int, form: tuple[int, ...] | None
):
    found = linear_route.find_form(num_experts, width, num_tokens)
    assert found == (None if form is None else linear_route.Form(*form))
    if found is not None:
        blocks = found.count_blocks(num_experts)
        assert blocks <= linear_route.MOST_CLUSTER and 16 * found.tiles * blocks >= num_experts
        assert 32 * found.warps * found.steps >= width
        # two blocks on a multiprocessor, so that clusters of eight find room for all of 256 tokens
        assert found.warps > 8 or 2 * (found.shared_bytes + (16 << 10)) <= MOST_BYTES


def test_what_the_kernel_takes(monkeypatch: pytest.MonkeyPatch):
    """Nothing is compiled for the rest, and None is returned."""
    asked: list[linear_route.Form] = []
    monkeypatch.setattr(linear_route, "_find_kernel", lambda num_experts, form, *rest: asked.append(form))

    def is_asked(
        num_tokens: int = 3, width: int = 64, dtype: torch.dtype = BF16, choice: torch.dtype = torch.float32,
        x: torch.Tensor | None = None, **shape: int
    ) -> bool:
        asked.clear()
        x = torch.zeros(num_tokens, width, dtype=dtype) if x is None else x
        weight, bias = torch.zeros(16, width, dtype=dtype), torch.zeros(16, dtype=choice)
        own = RouteShape(**{**SHAPE, **shape})  # type: ignore[typeddict-item]
        assert linear_route.linear_route(x, weight, None, bias, **own) is None
        return len(asked) == 1

    assert is_asked() and is_asked(1) and is_asked(linear_route.MOST_TOKENS)
    assert not is_asked(0) and not is_asked(linear_route.MOST_TOKENS + 1)
    assert not is_asked(width=60) and not is_asked(dtype=torch.float16) and not is_asked(choice=BF16)
    assert not is_asked(num_groups=2) and not is_asked(top_k=17)
    assert not is_asked(x=torch.zeros(64, 3, dtype=BF16).T) and is_asked(x=torch.zeros(3, 72, dtype=BF16)[:, :64])
    assert not is_asked(x=torch.zeros(3, 72, dtype=BF16)[:, 1:65])  # not aligned
    assert not is_asked(x=torch.zeros(3, 68, dtype=BF16)[:, :64])


@pytest.mark.parametrize(("device", "dtype", "capability", "is_own"), [
    ("cuda", "bfloat16", (9, 0), True), ("cuda", "float16", (9, 0), False), ("cuda", "bfloat16", (8, 0), False),
    ("cuda", "bfloat16", (10, 0), False), ("cpu", "bfloat16", (0, 0), False),
])
def test_it_is_chosen_on_hopper(device: str, dtype: str, capability: tuple[int, int], is_own: bool):
    """A rank asks as one GPU does: each has the whole router."""
    query = KernelQuery(device, dtype, capability, {"num_experts": 128, "top_k": 8, "num_groups": 1})
    expected = LINEAR_ROUTE.load("cuda" if is_own else "reference")
    assert LINEAR_ROUTE.choose(query) is expected
