"""Dispatchers, experts and adapters: every pair computes the same, and a pair that cannot be joined is explained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headrace.base.errors import ConfigError
from headrace.kernels import native
from headrace.kernels.block_scaled import dequantise_mxfp4
from headrace.kernels.moe import LINEAR_ROUTE, NORM_ROUTE
from headrace.kernels.operation import KernelQuery
from headrace.kernels.packed_linear.forms import keep_in_panels
from headrace.layers.build import Build
from headrace.layers.moe import ADAPTERS, DISPATCHERS, EXPERTS, grouped, mxfp4
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.moe.contract import ChosenTokens
from headrace.layers.moe.layer import MoeMlp
from headrace.layers.moe.mxfp4 import Mxfp4ExpertWeights
from headrace.layers.moe.pairing import choose_pair, find_adapter, list_pairs
from headrace.layers.moe.weights import ExpertWeights
from headrace.layers.norm import RmsNorm
from headrace.layers.quantization.contract import SchemeQuery
from headrace.layers.quantization.integer import Int8
from headrace.layers.quantization.storage import find_storable, store_fastest
from headrace.layers.residual import Residual
from headrace.layers.spec import MlpSpec, MoeSpec, RoutingSpec, SwigluClamp

CPU = torch.device("cpu")
QUERY = KernelQuery("cpu", "float32", shape={"ranks": 1})
WIDTH, NUM_EXPERTS, TOP_K = 16, 5, 2


def build_layer(experts: str = "auto", dtype: torch.dtype = torch.float32, **options: Any) -> MoeMlp:
    routing = RoutingSpec(NUM_EXPERTS, TOP_K, renormalise=True, bias=True)
    expert = MlpSpec(24, **options)
    layer = MoeMlp(MoeSpec(routing, expert, MlpSpec(8)), WIDTH, Build(CPU, dtype, moe_experts=experts))
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return layer


def compute_densely(layer: MoeMlp, x: torch.Tensor, clamp: SwigluClamp | None) -> torch.Tensor:
    """Every expert on every token, in float64."""
    x, w = x.double(), {name: p.double() for name, p in layer.named_parameters()}
    logits = x @ w["router.logits.weight"].T + w["router.logits.bias"]
    chosen = torch.zeros_like(logits).scatter_(1, logits.topk(TOP_K).indices, 1).bool()
    weights = logits.masked_fill(~chosen, float("-inf")).softmax(-1)
    gate, up = (
        torch.einsum("td,xfd->txf", x, w["experts.gate_up.weight"]) + w.get("experts.gate_up.bias", 0)
    ).chunk(2, -1)
    if clamp:
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + clamp.up_offset
    hidden = gate * torch.sigmoid(gate * (clamp.alpha if clamp else 1.0)) * up
    out = torch.einsum("txf,xdf->txd", hidden, w["experts.down.weight"]) + w.get("experts.down.bias", 0)
    gate, up = (x @ w["shared.gate_up.weight"].T).chunk(2, -1)
    return (out * weights[..., None]).sum(1) + (F.silu(gate) * up) @ w["shared.down.weight"].T


@pytest.mark.parametrize("experts", ["reference", "grouped", "stored", "auto"])
@pytest.mark.parametrize("clamp", [None, SwigluClamp(0.7, 1.702, 1.0)])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_layer_equals_all_experts_on_all_tokens(experts: str, clamp: SwigluClamp | None, num_tokens: int):
    layer = build_layer(experts, bias=clamp is not None, clamp=clamp)
    x = torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(num_tokens))
    torch.testing.assert_close(layer(x).double(), compute_densely(layer, x, clamp), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("at_once", [1, 2, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 90])
def test_experts_in_four_bits_are_their_matrices_dequantised(
    num_tokens: int, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    """A few pairs, and more than `mxfp4.FEW_PAIRS`, some experts without any; a few matrices at a time."""
    monkeypatch.setattr(mxfp4, "CHUNK_ELEMENTS", at_once * 64 * 32)
    spec, build, draw = (
        MlpSpec(32, clamp=SwigluClamp(0.7)), Build(CPU, torch.float32), torch.Generator().manual_seed(num_tokens)
    )
    kept, plain = Mxfp4ExpertWeights(7, spec, 32, build), ExpertWeights(7, spec, 32, build)
    for name in ("gate_up", "down"):
        stacked = getattr(kept, name)
        stacked.randomise(0.3, draw)
        stacked.scales.sub_(torch.randint(0, 3, stacked.scales.shape, generator=draw, dtype=torch.uint8))
        getattr(plain, name).weight.copy_(dequantise_mxfp4(stacked.codes, stacked.scales, torch.float32))
    assert 0.1 < float(plain.down.weight.std()) < 0.5
    ids = torch.stack([torch.randperm(4, generator=draw)[:3] for _ in range(num_tokens)]) * 2
    tokens = ChosenTokens(
        torch.randn(num_tokens, 32, generator=draw), ids, torch.rand(num_tokens, 3, generator=draw), 7
    )
    expected = EXPERTS.load("reference")(plain, spec, build).run(tokens)
    out = find_adapter("choices", "grouped")(tokens, EXPERTS.load("mxfp4")(kept, spec, build).run)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("largest", [125, 130])
def test_experts_in_four_bits_are_put_in_order_of_kernels_once(largest: int):
    """As loaded, dequantised; after moves and after other weights were loaded too. A scale of more than 2 is kept as a
    float."""
    draw = torch.Generator().manual_seed(1)
    spec, build = MlpSpec(128, clamp=SwigluClamp(0.7)), Build(CPU, torch.float32)
    kept, plain = Mxfp4ExpertWeights(3, spec, 256, build), ExpertWeights(3, spec, 256, build)
    experts = EXPERTS.load("mxfp4_fused")(kept, spec, build)
    tokens = ChosenTokens(torch.randn(5, 256, generator=draw), torch.tensor([[0, 2]] * 5), torch.rand(5, 2), 3)
    for _ in range(2):
        for name in ("gate_up", "down"):
            stacked = getattr(kept, name)
            stacked.randomise(0.3, draw)
            stacked.scales.random_(largest - 8, largest + 1, generator=draw)
            getattr(plain, name).weight.copy_(dequantise_mxfp4(stacked.codes, stacked.scales, torch.float32))
        expected = EXPERTS.load("reference")(plain, spec, build).run(tokens)
        for _ in range(2):
            torch.testing.assert_close(experts.run(tokens), expected, atol=1e-4, rtol=1e-4)
            kept.gate_up.codes.data = kept.gate_up.codes.data.clone()
    narrow = KernelQuery("cuda", "bfloat16", (9, 0), {"width": 96, "expert_width": 128, "mxfp4": 1})
    assert "steps of 128" in EXPERTS.reason_against("mxfp4_fused", narrow)


@pytest.mark.parametrize("experts", ["reference", "grouped", "stored"])
def test_nobody_adds_nothing(experts: str):
    """Choices masked, all of a token's or one of them; what others get is what they got. Rows of nobody may come out as
    NaN."""
    layer = build_layer(experts)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(2))
    ids, weights = layer.router(x)
    expected = layer.routed.run(ChosenTokens(x, ids, weights, NUM_EXPERTS))
    masked = ids.clone()
    masked[4:] = -1
    padded = layer.routed.run(ChosenTokens(x, masked, weights, NUM_EXPERTS, has_padding=True))
    torch.testing.assert_close(padded[:4], expected[:4])
    assert (padded[4:] == 0).all()
    masked[1, 0] = -1
    alone = layer.routed.run(ChosenTokens(x, masked, weights, NUM_EXPERTS, has_padding=True))
    torch.testing.assert_close(
        alone[1], layer.routed.run(ChosenTokens(x[1:2], ids[1:2, 1:], weights[1:2, 1:], NUM_EXPERTS))[0]
    )
    torch.testing.assert_close(alone[2:], padded[2:])


@pytest.mark.parametrize("experts", ["reference", "grouped", "stored"])
def test_experts_that_are_elsewhere_are_masked(experts: str):
    """A mask of a layer's experts says which are here; two places with the two halves add up to all of them."""
    layer = build_layer(experts)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(4))
    ids, weights = layer.router(x)
    expected = layer.routed.run(ChosenTokens(x, ids, weights, NUM_EXPERTS))
    for number in (0, 1, NUM_EXPERTS // 2, NUM_EXPERTS):
        is_here = torch.zeros(NUM_EXPERTS, dtype=torch.bool)
        is_here[torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(number))[:number]] = True
        parts = [
            layer.routed.run(
                ChosenTokens(x, torch.where(mask[ids], ids, -1), weights, NUM_EXPERTS, has_padding=True)
            )
            for mask in (is_here, ~is_here)
        ]
        torch.testing.assert_close(parts[0] + parts[1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_matrices_one_after_the_other(dtype: torch.dtype):
    """As they are stored while requests run, and plain again."""
    if native.build().status != "ready":
        pytest.skip("no native library")
    layer = build_layer("stored", dtype, bias=True)
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)
    before, expected = {name: p.clone() for name, p in layer.named_parameters()}, layer(x)
    stacks = [weight for weight in find_storable(layer) if weight.is_stack]
    assert [tuple(weight.weight.shape) for weight in stacks] == [(NUM_EXPERTS * 48, WIDTH), (NUM_EXPERTS * WIDTH, 24)]
    for weight in stacks:
        weight.store(keep_in_panels(weight.weight.detach()))
        torch.testing.assert_close(
            layer(x), expected, atol=1e-5 if dtype is torch.float32 else 0.05,
            rtol=1e-5 if dtype is torch.float32 else 0.02
        )
    assert not any("experts" in name and name.endswith("weight") for name, _ in layer.named_parameters())
    for name in ("gate_up", "down"):
        assert torch.equal(getattr(layer.experts, name).unpack(dtype), before[f"experts.{name}.weight"])


@pytest.mark.parametrize(
    ("width", "expert_width", "experts"),
    [(16, 20, "auto"), (24, 16, "auto"), (16, 16, "grouped"), (16, 16, "reference")]
)
def test_matrices_that_are_read_as_they_are_stay_plain(width: int, expert_width: int, experts: str):
    """Where one of the two is no whole panels, or other experts were asked for."""
    layer = MoeMlp(
        MoeSpec(RoutingSpec(NUM_EXPERTS, TOP_K), MlpSpec(expert_width), None), width,
        Build(CPU, torch.float32, moe_experts=experts)
    )
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape))
    x = torch.randn(3, width)
    expected = layer(x)
    Int8(SchemeQuery("cpu", "float32")).finish(layer)
    store_fastest(layer)
    assert not [weight for weight in find_storable(layer) if weight.is_stack]
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("has_padding", [False, True])
def test_fused_experts_with_few_tokens_and_many(is_few: bool, has_padding: bool, monkeypatch: pytest.MonkeyPatch):
    """Which choose them only on a GPU; here their kernels' references do."""
    monkeypatch.setattr(grouped, "is_few", lambda *_: is_few)
    layer = build_layer("reference")
    x = torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(5))
    ids, weights = layer.router(x)
    if has_padding:
        ids[3], ids[5, 1] = -1, -1
    tokens = ChosenTokens(x, ids, weights, NUM_EXPERTS, has_padding=has_padding)
    out = grouped.FusedExperts(layer.experts, MlpSpec(24), Build(CPU, torch.float32)).run(tokens)
    torch.testing.assert_close(out, layer.routed.run(tokens), atol=1e-5, rtol=1e-5)


def test_a_token_does_not_depend_on_the_others():
    layer = build_layer()
    x = torch.randn(9, WIDTH)
    torch.testing.assert_close(layer(x)[3:5], layer(x[3:5]))


def test_choices_cross_the_adapter_in_order():
    """Each row goes to its own expert, and comes back to its own token with its own weight."""
    adapt = find_adapter("choices", "grouped")
    ids = torch.tensor([[3, 0], [1, 3], [0, 4], [3, 1]])
    weights = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]])
    seen = {}

    def run(tokens: Any) -> torch.Tensor:
        seen["ends"], seen["experts"] = tokens.ends.tolist(), tokens.experts.tolist()
        return tokens.hidden * 100 + tokens.experts[:, None]

    out = adapt(ChosenTokens(torch.arange(4.0)[:, None], ids, weights, 6), run)
    assert seen == {"ends": [2, 4, 4, 7, 8, 8], "experts": [0, 0, 1, 1, 3, 3, 3, 4]}
    expected = [sum(float(w) * (100 * t + int(x)) for w, x in zip(weights[t], ids[t], strict=True)) for t in range(4)]
    assert out.flatten().tolist() == expected


def test_the_best_pair_is_chosen_and_a_name_overrules():
    assert choose_pair(QUERY) == ("none", "grouped")
    assert choose_pair(QUERY, experts="reference") == ("none", "reference")
    assert list_pairs(QUERY) == [("none", "grouped"), ("none", "reference")]


@pytest.mark.parametrize(("experts", "is_capturable"), [("reference", False), ("grouped", True)])
def test_steps_with_experts_that_wait_for_the_device_are_not_captured(experts: str, is_capturable: bool):
    assert build_layer(experts).is_capturable == is_capturable
    assert EXPERTS.waits("mxfp4") and not EXPERTS.waits("mxfp4_fused")


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plug-ins from elsewhere: experts nobody can talk to, experts that fail to load, and ones that serve nothing
    here."""
    for registry in (DISPATCHERS, EXPERTS):
        for name in ("_entries", "_formats", "_loaded", "_failures"):
            monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    EXPERTS.add("alien", "nowhere:Alien", speaks="packed", priority=99)
    EXPERTS.add("broken", "nowhere:Broken", priority=50)
    EXPERTS.add("picky", "nowhere:Picky", priority=40, supports=lambda query: "needs a moon")


def test_a_pair_that_cannot_be_joined_lists_those_that_can(strangers: None):
    with pytest.raises(ConfigError) as caught:
        choose_pair(QUERY, experts="alien")
    assert caught.value.param == "moe_experts"
    assert "dispatcher 'none' speaks choices, experts 'alien' speak packed" in str(caught.value)
    assert "none + broken, none + grouped, none + reference" in str(caught.value)


class MaskedDispatcher:
    """A stand-in for one that receives into buffers of fixed size: each expert's tokens [X, M, D] and how many there
    are."""

    is_capturable = True

    def __init__(self, build: Build):
        pass

    def dispatch(self, tokens: ChosenTokens) -> dict[str, torch.Tensor]:
        self.tokens = tokens
        self.chosen = (tokens.ids[:, :, None] == torch.arange(NUM_EXPERTS)).any(1).T
        return {"hidden": tokens.hidden * self.chosen[..., None], "counts": self.chosen.sum(1)}

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        weights = torch.zeros(
            self.tokens.hidden.shape[0], NUM_EXPERTS
        ).scatter_(1, self.tokens.ids, self.tokens.weights)
        return torch.einsum("xmd,mx->md", results, weights)


class MaskedExperts:
    """A stand-in for a kernel over such buffers."""

    def __init__(self, weights: ExpertWeights, spec: MlpSpec, build: Build):
        self.weights = weights

    def run(self, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
        gate, up = torch.bmm(tokens["hidden"], self.weights.gate_up.weight.transpose(1, 2)).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.weights.down.weight.transpose(1, 2))


def test_dispatcher_and_experts_of_a_format_of_their_own(strangers: None):
    """They work together, and with nobody else, as no adapter knows their format."""
    EXPERTS.add("masked", f"{__name__}:MaskedExperts", speaks="masked")
    DISPATCHERS.add(
        "masked", f"{__name__}:MaskedDispatcher", speaks="masked",
        supports=lambda query: None if query.shape.get("masked") else "moves no tokens"
    )
    query = KernelQuery("cpu", "float32", shape={"ranks": 1, "masked": 1})
    assert choose_pair(query, dispatcher="masked", experts="masked") == ("masked", "masked")
    assert choose_pair(query, dispatcher="masked")[1] == "masked" and ("masked", "masked") in list_pairs(query)
    layer, x = build_layer("reference"), torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
    ids, weights = layer.router(x)
    dispatcher, tokens = MaskedDispatcher(Build(CPU, torch.float32)), ChosenTokens(x, ids, weights, NUM_EXPERTS)
    experts = MaskedExperts(layer.experts, MlpSpec(24), Build(CPU, torch.float32))
    out = dispatcher.combine(find_adapter("masked", "masked")(dispatcher.dispatch(tokens), experts.run))
    torch.testing.assert_close(out, layer.routed.run(tokens), atol=1e-5, rtol=1e-5)
    for pair in ({"dispatcher": "masked", "experts": "grouped"}, {"dispatcher": "none", "experts": "masked"}):
        with pytest.raises(ConfigError, match=r"no adapter joins the two.*masked \+ masked"):
            choose_pair(query, **pair)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("picky", "needs a moon"), ("broken", "failed to load"),
        ("nobody", "there is no MoE experts 'nobody', only alien, broken")
    ],
)
def test_experts_that_cannot_serve_are_explained(strangers: None, name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        choose_pair(QUERY, experts=name)


def test_automatic_choice_passes_over_what_cannot_serve(strangers: None):
    assert choose_pair(QUERY) == ("none", "grouped")


def test_experts_on_several_ranks_need_a_dispatcher_that_knows_them():
    query = KernelQuery("cpu", "float32", shape={"ranks": 4})
    assert choose_pair(query)[0] == "replicated"
    with pytest.raises(ConfigError, match="the experts are on 4"):
        choose_pair(query, dispatcher="none")
    with pytest.raises(ConfigError, match="here they are not"):
        choose_pair(QUERY, dispatcher="replicated")


def test_start_up_error_names_the_option():
    with pytest.raises(ConfigError, match="there is no MoE experts 'no-such'"):
        build_layer("no-such")


def test_every_adapter_joins_formats_that_someone_speaks():
    spoken = [{registry.format_of(entry.name) for entry in registry} for registry in (DISPATCHERS, EXPERTS)]
    for entry in ADAPTERS:
        outer, _, inner = entry.name.partition("->")
        assert outer in spoken[0] and inner in spoken[1]
        assert callable(ADAPTERS.load(entry.name))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_waits_on_a_gpu_and_the_layer_can_be_captured(dtype: torch.dtype):
    device = torch.device("cuda")
    spec = MoeSpec(RoutingSpec(8, 2, renormalise=True), MlpSpec(64))
    layer = MoeMlp(spec, 64, Build(device, dtype))
    for parameter in layer.parameters():
        parameter.normal_(std=0.2)
    x = torch.randn(5, 64, device=device, dtype=dtype)
    expected = layer(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("has_pending", [True, False])
def test_norm_and_choice_in_one_kernel_are_used_where_something_is_pending(has_pending: bool):
    layer, norm = build_layer(), RmsNorm(Build(CPU, torch.float32), WIDTH, 1e-5)
    norm.weight.copy_(torch.rand(WIDTH))
    stream, pending = torch.randn(3, WIDTH), torch.randn(2, 3, WIDTH) if has_pending else None
    separate, fused = (Residual(stream.clone(), pending) for _ in range(2))
    layer.add(norm, separate)
    calls: list[int] = []

    def norm_route(x: torch.Tensor, *rest: Any, **shape: Any) -> Any:
        calls.append(len(x))
        return NORM_ROUTE.load("reference")(x, *rest, **shape)

    layer.router._norm_route = norm_route
    layer.add(norm, fused)
    assert len(calls) == has_pending
    torch.testing.assert_close(fused.stream, separate.stream)
    torch.testing.assert_close(fused.pending, separate.pending)
    layer.router._norm_route = lambda *_, **__: None  # not for such a step
    again = Residual(stream.clone(), pending)
    layer.add(norm, again)
    assert torch.equal(again.pending, separate.pending)


class SumOfTwoRanks:
    """Adds twice what one rank has, with the norm."""

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = stream + 2 * x
        return F.rms_norm(total, total.shape[-1:], weight + offset, eps), total


def test_router_and_choice_in_one_kernel_are_used_behind_a_sum_over_ranks():
    """Another kernel computes the norm."""
    layer, norm = build_layer(), RmsNorm(Build(CPU, torch.float32), WIDTH, 1e-5)
    norm.weight.copy_(torch.rand(WIDTH))
    stream, pending = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    calls: list[torch.Tensor] = []

    def linear_route(x: torch.Tensor, *rest: Any, **shape: Any) -> Any:
        calls.append(x)
        return LINEAR_ROUTE.load("reference")(x, *rest, **shape)

    def add() -> Residual:
        residual = Residual(stream.clone(), pending.clone())
        residual.group = SumOfTwoRanks()  # type: ignore[assignment]
        layer.add(norm, residual)
        return residual

    separate = add()
    layer.router._linear_route = linear_route
    fused = add()
    assert len(calls) == 1
    torch.testing.assert_close(calls[0], F.rms_norm(stream + 2 * pending, (WIDTH,), norm.weight, 1e-5))
    torch.testing.assert_close(fused.pending, separate.pending)
    assert torch.equal(fused.stream, separate.stream)
    layer.router._linear_route = lambda *_, **__: None  # not for such a step
    torch.testing.assert_close(add().pending, separate.pending)


@pytest.mark.parametrize("size", [5, 8, 16])
def test_stacked_experts_with_inputs_or_outputs_first(size: int):
    """A width of 8; of 8 intermediate dims both layouts of the last product have one shape, and published files win."""
    width = 8
    stacks = {"gate_up_proj": torch.randn(3, 2 * size, width), "down_proj": torch.randn(3, width, size)}
    published = [(f"p.experts.{name}", stack.transpose(1, 2)) for name, stack in stacks.items()]
    expected = dict(unstack_experts([(f"p.experts.{n}", s) for n, s in stacks.items()], "gate_first", width))
    layouts = [published] if size == width else [published, [(f"p.experts.{n}", s) for n, s in stacks.items()]]
    for tensors in layouts:
        found = dict(unstack_experts(tensors, "transposed", width))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
