"""Adapters in every family: rows of a mixed batch against models whose weights have the adapter merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_cases import CASES, config_json, make_oracle, prompt
from harness import Harness, build_harness

from headrace.base.errors import AdapterError
from headrace.kernels.lora import (
    ADAPTED_LINEAR,
    ADAPTED_NORM,
    EXPAND,
    EXPAND_ADD_NORM,
    EXPAND_GATED,
    EXPAND_ROPE_WRITE,
    LINEAR_SHRINK,
    SHRINK,
)
from headrace.kernels.operation import KernelQuery, Operation
from headrace.layers import self_attention as attention_module
from headrace.layers.linear import Linear
from headrace.layers.lora import bank as bank_module
from headrace.layers.lora import staging as staging_module
from headrace.layers.lora.bank import LinearBank
from headrace.layers.lora.contract import AdaptedPart, AdapterSite, AdapterWeights
from headrace.layers.lora.extended import ExtendedWeight
from headrace.layers.lora.memory import AdapterMemory
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import AdapterBanks
from headrace.layers.moe.checkpoint import unstack_experts
from headrace.layers.self_attention import Attention
from headrace.models.adapters.contents import check_parts

SLOTS, MAX_RANK = 3, 20
NAMES = (
    "llama", "llama-tied-biased", "llama-mqa-odd-group", "mistral-window", "qwen2", "qwen3", "gemma3", "phi3", "olmo2",
    "granite-biased", "glm4", "starcoder2", "cohere", "mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3",
)
Plain = dict[str, torch.Tensor]


def find_case(name: str) -> str:
    """The case of that name, or the first that begins with it."""
    return name if name in CASES else next(other for other in CASES if other.startswith(name))


class Rig:
    """A tiny model with banks, and merged copies of it."""

    def __init__(self, name: str, **changes: object):
        oracle = make_oracle(CASES[name][0], {**CASES[name][1], **changes})
        self.config = config_json(oracle)
        sizes = BankSizes(SLOTS, MAX_RANK)
        self.harness = build_harness(self.config, oracle.state_dict(), num_sequences=12, adapters=sizes)
        model = self.harness.model
        sites = model.find_adapter_sites()
        assert sites is not None
        self.banks, self.sites = AdapterBanks(model, sites, sizes, model.step), sites.sites
        self.plain: Plain = {
            sites.rename(key): tensor.clone()
            for key, tensor in unstack_experts(oracle.state_dict().items(), sites.stacked_experts, sites.hidden_size)
        }
        self.is_tied = self.config.get("tie_word_embeddings", False)

    def load(self, slot: int, parts: list[AdaptedPart]) -> None:
        weights = AdapterWeights(parts, 0, "", [])
        self.banks.load(slot, self.banks.prepare(weights))

    def merge(self, changed: Plain) -> Harness:
        return build_harness(self.config, self.plain | changed)


def low_rank(site: AdapterSite, rank: int, generator: torch.Generator, scale: float = 0.7) -> AdaptedPart:
    """A random addition to a site, large enough to be seen."""
    inputs, outputs = site.in_features, site.out_features
    a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
    b = torch.randn(outputs, rank, generator=generator) * 0.3
    return AdaptedPart(site.module, site.part, site.expert, a, b, scale)


def added(part: AdaptedPart) -> torch.Tensor:
    assert part.a is not None and part.b is not None
    return part.scale * (part.b @ part.a)


def logits_of(harness: Harness, tokens: list[int], slot: int = -1) -> torch.Tensor:
    """A prefill and then two single tokens."""
    sequence = harness.start(slot)
    pieces = [harness.step((sequence, tokens[:-2]))[0]]
    pieces += [harness.step((sequence, [token]))[0] for token in tokens[-2:]]
    return torch.cat(pieces)


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_mixed_rows_equal_merged_weights(name: str):
    check_mixed(Rig(find_case(name)))


FUSED = {
    "few rows": ("llama", [EXPAND_GATED, EXPAND_ADD_NORM]), "a row": ("llama", [EXPAND_GATED, LINEAR_SHRINK]),
    "whole products": ("llama", [ADAPTED_LINEAR]), "whole products, norms behind": ("gemma3", [ADAPTED_LINEAR]),
    "many rows": ("llama", [EXPAND_GATED, ADAPTED_NORM]), "norms behind": ("gemma3", [EXPAND_GATED]),
    "rotated rows": ("llama", [EXPAND_GATED, EXPAND_ROPE_WRITE]),
    "rotated rows, norms of heads": ("qwen3", [EXPAND_GATED, EXPAND_ROPE_WRITE]),
}


@pytest.mark.parametrize("case", FUSED)
def test_additions_fused_with_what_is_around(case: str, monkeypatch: pytest.MonkeyPatch):
    """As GPUs do it: silu and gelu_tanh, norms, and rows without an adapter between the others."""
    name, fused = FUSED[case]
    monkeypatch.setattr(bank_module, "chains_norm", lambda _: True)
    monkeypatch.setattr(bank_module, "fits_norm", lambda _: case == "few rows")
    monkeypatch.setattr(attention_module, "precedes_attention", lambda _: True)
    rig, num_calls = Rig(find_case(name)), Counter[str]()

    def count_calls(operation: Operation) -> Callable[..., Any]:
        solution = operation.load("reference")

        def call(*args: Any) -> Any:
            num_calls[operation.noun] += 1
            return solution(*args)

        return call

    for layer in rig.harness.model.modules():
        if isinstance(layer, Attention) and EXPAND_ROPE_WRITE in fused:
            layer._expand_rope_write = count_calls(EXPAND_ROPE_WRITE)
    for bank in rig.harness.model.modules():
        if isinstance(bank, LinearBank):
            bank._shrink, bank._expand = SHRINK.load("reference"), EXPAND.load("reference")
            bank._expand_gated, bank._expand_add_norm = count_calls(EXPAND_GATED), count_calls(EXPAND_ADD_NORM)
            bank._linear_shrink = count_calls(LINEAR_SHRINK) if LINEAR_SHRINK in fused else None
            bank._adapted_norm = count_calls(ADAPTED_NORM) if ADAPTED_NORM in fused else None
            if ADAPTED_LINEAR in fused:
                bank._adapted_linear = count_calls(ADAPTED_LINEAR)
    check_mixed(rig)
    assert set(num_calls) == {operation.noun for operation in fused}


def test_products_with_additions_behind_the_weight(monkeypatch: pytest.MonkeyPatch):
    """As GPUs do it: a row is multiplied with the weight and all adapters of the first slots, and takes its own. The
    weight and what is behind it stay together when a model moves, and part when the weight is stored otherwise."""
    monkeypatch.setattr(bank_module, "is_dense", lambda *_: True)
    monkeypatch.setattr(bank_module, "fits_norm", lambda rows: rows % 2 == 0)
    rig, seen = Rig(find_case("qwen2")), Counter[str]()
    rig.harness.num_dense = SLOTS
    banks = {name: bank for name, bank in rig.harness.model.named_modules() if type(bank) is LinearBank}
    for name, bank in banks.items():
        layer = rig.harness.model.get_submodule(name.removesuffix(".lora"))
        extended = ExtendedWeight(layer, KernelQuery("cpu", "float32"), bank.a[..., 0].numel())
        extended._linear = count_products(name, extended._linear, seen)
        extended._linear_sums = count_products(name, extended._linear_sums, seen)
        extended.place(bank)
        bank._shrink, bank._expand = SHRINK.load("reference"), EXPAND.load("reference")
        bank._expand_gated, bank._expand_add_norm = EXPAND_GATED.load("reference"), EXPAND_ADD_NORM.load("reference")
    check_mixed(rig)
    assert seen.keys() == banks.keys()
    before = logits_of(rig.harness, prompt(5, 9), 0)
    rig.harness.model.double().float()
    assert all(bank.tensors.extended is not None for bank in banks.values())
    seen.clear()
    compare(logits_of(rig.harness, prompt(5, 9), 0), before)
    assert seen.keys() == banks.keys()
    for layer in rig.harness.model.modules():
        if isinstance(layer, Linear):
            layer.drop_weight()
    assert all(bank.tensors.extended is None for bank in banks.values())
    assert all(bank.a.untyped_storage().nbytes() == bank.a.nbytes for bank in banks.values())


def count_products(name: str, product: Callable[..., Any], seen: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        seen[name] += 1
        return product(*args, **kwargs)

    return call


def check_mixed(rig: Rig) -> None:
    generator = torch.Generator().manual_seed(3)
    merged = []
    for slot, rank in ((0, 3), (2, 20)):
        parts, changed = [], {}
        for key, site in rig.sites.items():
            if site.kind == "embedding" or (site.kind == "head" and rig.is_tied):
                continue
            parts.append(low_rank(site, max(1, rank - len(parts) % 3), generator))
            changed[f"{key}.weight"] = rig.plain[f"{key}.weight"] + added(parts[-1])
        assert parts
        rig.load(slot, parts)
        merged.append(rig.merge(changed))
    prompts = [prompt(seed, 9) for seed in range(3)]
    harnesses = (*merged, rig.harness)
    expected = [logits_of(harness, tokens) for harness, tokens in zip(harnesses, prompts, strict=True)]
    assert (expected[0] - logits_of(rig.harness, prompts[0])).abs().max() > 0.05, "the adapter is not seen"
    sequences = [rig.harness.start(slot) for slot in (0, 2, -1)]
    found = [rig.harness.step(*((s, p[:-2]) for s, p in zip(sequences, prompts, strict=True)))]
    found += [rig.harness.step(*((s, p[i : i + 1]) for s, p in zip(sequences, prompts, strict=True))) for i in (7, 8)]
    for i in range(3):
        compare(torch.cat([pieces[i] for pieces in found]), expected[i])


def check_alone(rig: Rig, parts: list[AdaptedPart], changed: Plain) -> None:
    """An adapter alone against merged weights, then the base model, which must be as before."""
    tokens = prompt(5, 9)
    base = logits_of(rig.harness, tokens)
    rig.load(1, parts)
    expected = logits_of(rig.merge(changed), tokens)
    assert (expected - base).abs().max() > 0.02, "the change is not seen"
    compare(logits_of(rig.harness, tokens, 1), expected)
    compare(logits_of(rig.harness, tokens), base)
    rig.load(1, [])
    compare(logits_of(rig.harness, tokens, 1), base)


def dora(part: AdaptedPart, weight: torch.Tensor) -> torch.Tensor:
    """Give a part random magnitudes; the weight that results."""
    whole = weight + (0 if part.a is None else added(part))
    part.magnitude = whole.norm(dim=1) * torch.linspace(0.5, 1.5, len(whole))
    return whole * (part.magnitude / whole.norm(dim=1))[:, None]


@pytest.mark.parametrize("name", ["llama-tied-biased", "qwen2", "phi3"])
def test_magnitudes_and_biases(name: str):
    rig = Rig(find_case(name))
    generator, parts, changed = torch.Generator().manual_seed(0), [], {}
    for key, site in rig.sites.items():
        if site.kind != "linear":
            continue
        parts.append(low_rank(site, 4, generator))
        changed[f"{key}.weight"] = dora(parts[-1], rig.plain[f"{key}.weight"])
        if f"{key}.bias" in rig.plain:
            parts[-1].bias = changed[f"{key}.bias"] = torch.randn(site.out_features, generator=generator) * 0.2
    check_alone(rig, parts, changed)


def replace_head(rig: Rig, generator: torch.Generator) -> tuple[list[AdaptedPart], Plain]:
    site, weight = rig.sites["lm_head"], rig.plain["lm_head.weight"]
    new = weight + torch.randn(weight.shape, generator=generator) * 0.3
    return [AdaptedPart(site.module, weight=new)], {"lm_head.weight": new}


def replace_embedding(rig: Rig, generator: torch.Generator) -> tuple[list[AdaptedPart], Plain]:
    site, weight = rig.sites["model.embed_tokens"], rig.plain["model.embed_tokens.weight"]
    new = weight + torch.randn(weight.shape, generator=generator) * 0.3
    return [AdaptedPart(site.module, weight=new)], {"model.embed_tokens.weight": new}


def adapt_embedding(rig: Rig, generator: torch.Generator) -> tuple[list[AdaptedPart], Plain]:
    part = low_rank(rig.sites["model.embed_tokens"], 4, generator, 5.0)
    return [part], {"model.embed_tokens.weight": rig.plain["model.embed_tokens.weight"] + added(part).t()}


def train_tokens(rig: Rig, generator: torch.Generator) -> tuple[list[AdaptedPart], Plain]:
    ids = torch.tensor(sorted({*prompt(5, 9)[:4], 3}))
    parts, changed = [], {}
    for key in ("model.embed_tokens", "lm_head"):
        weight = rig.plain[f"{key}.weight"].clone()
        weight[ids] = rows = torch.randn(len(ids), weight.shape[1], generator=generator)
        shuffled = torch.randperm(len(ids), generator=generator)
        parts.append(AdaptedPart(rig.sites[key].module, token_ids=ids[shuffled], token_rows=rows[shuffled]))
        changed[f"{key}.weight"] = weight
    return parts, changed


def replace_linear(rig: Rig, generator: torch.Generator) -> tuple[list[AdaptedPart], Plain]:
    key = "model.layers.0.self_attn.k_proj"
    site = rig.sites[key]
    new = torch.randn(site.out_features, site.in_features, generator=generator) * 0.3
    bias = torch.randn(site.out_features, generator=generator)
    return [AdaptedPart(site.module, site.part, weight=new, bias=bias)], {f"{key}.weight": new, f"{key}.bias": bias}


@pytest.mark.parametrize("make", [replace_head, replace_embedding, adapt_embedding, train_tokens, replace_linear])
def test_whole_modules_and_vocabulary(make: Callable[[Rig, torch.Generator], tuple[list[AdaptedPart], Plain]]):
    rig = Rig("llama-tied-biased", tie_word_embeddings=False)
    check_alone(rig, *make(rig, torch.Generator().manual_seed(1)))


def test_slots_are_overwritten_by_adapters_of_other_modules():
    rig = Rig("llama")
    generator, tokens = torch.Generator().manual_seed(2), prompt(1, 9)
    keys = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"]
    for key, rank in zip(keys, (20, 3, 17), strict=True):
        part = low_rank(rig.sites[key], rank, generator)
        rig.load(0, [part])
        merged = rig.merge({f"{key}.weight": rig.plain[f"{key}.weight"] + added(part)})
        compare(logits_of(rig.harness, tokens, 0), logits_of(merged, tokens))


def test_latent_attention_is_not_captured_with_an_adapted_up_projection():
    """What it adds to absorbed keys and values is by rows that the host knows, and in a captured step it does not."""
    rig, generator = Rig(find_case("deepseek-v3")), torch.Generator().manual_seed(1)
    for slot, ending in enumerate(("kv_b_proj", "o_proj")):
        rig.load(slot, [low_rank(site, 2, generator) for name, site in rig.sites.items() if name.endswith(ending)])
    assert rig.banks.has_extras(0) and not rig.banks.has_extras(1)
    rig.load(0, [])
    assert not rig.banks.has_extras(0)


def make_memory(piece_bytes: int = 4096) -> AdapterMemory:
    """As of a GPU, with what was there before."""
    return AdapterMemory(lambda num_bytes: torch.full((num_bytes,), 255, dtype=torch.uint8), piece_bytes)


@pytest.mark.parametrize("piece_bytes", [64, 4096])
def test_memory_of_an_adapter(piece_bytes: int):
    """Aligned, of nobody else, and in few pieces."""
    memory, sizes = make_memory(piece_bytes), [64, 1, 63, 4096, 100, 5000, 7]
    found = [memory.view(memory.allocate(size), torch.uint8, (size,)) for size in sizes]
    for number, (own, size) in enumerate(zip(found, sizes, strict=True)):
        assert len(own) == size
        own.fill_(number)
    assert all((own == number).all() for number, own in enumerate(found))
    places = [memory.locate(own.data_ptr() + len(own) - 1) for own in found]
    assert all(
        place is not None and memory.pieces[place.piece][place.begin] == number for number, place in enumerate(places)
    )
    assert all(memory.locate(own.data_ptr()).begin % 64 == 0 for own in found)
    assert sum(memory.used) == 64 + 64 + 64 + 4096 + 128 + 5056 + 64
    assert len(memory.pieces) == (7 if piece_bytes == 64 else 5)
    other = torch.arange(5)
    assert memory.locate(other.data_ptr()) is None and memory.keep(found[3])[0] is found[3]
    kept, place = memory.keep(other)
    assert torch.equal(kept, other) and memory.locate(kept.data_ptr()) == place


LAYER = "model.layers.0"


def list_mixed_parts(sites: dict[str, AdapterSite], generator: torch.Generator) -> list[AdaptedPart]:
    """Of several ranks, dtypes and scales; stacked outputs of which some have no addition; more than additions."""
    parts = []
    for i, (name, rank) in enumerate({
        "self_attn.q_proj": 5, "self_attn.v_proj": 16, "self_attn.o_proj": 20, "mlp.gate_proj": 17, "mlp.up_proj": 1,
        "mlp.down_proj": 3,
    }.items()):
        part = low_rank(sites[f"{LAYER}.{name}"], rank, generator, (1.0, 0.7, -2.0)[i % 3])
        dtype = (torch.float32, torch.bfloat16, torch.float16)[i // 2]
        part.a, part.b = part.a.to(dtype), part.b.to(dtype)
        parts.append(part)
    parts[-1].bias = torch.randn(sites[f"{LAYER}.mlp.down_proj"].out_features, generator=generator)
    site = sites["model.layers.1.mlp.down_proj"]
    parts.append(AdaptedPart(site.module, site.part, weight=torch.randn(site.out_features, site.in_features)))
    return parts


@pytest.mark.parametrize(("piece_bytes", "staged_bytes", "num_staged"), [
    (1 << 20, 1 << 20, 3), (1024, 8192, 3), (2048, 2048, 2), (64, 64, 0),
])
def test_an_adapter_is_loaded_through_memory_of_the_device(
    piece_bytes: int, staged_bytes: int, num_staged: int, monkeypatch: pytest.MonkeyPatch
):
    """As on a GPU: banks are left as by one part at a time, whatever was there, where pieces come all at once, one by
    one, or are partly or all too large."""
    monkeypatch.setattr(staging_module, "STAGED_BYTES", staged_bytes)
    rig, generator = Rig("llama-tied-biased"), torch.Generator().manual_seed(3)
    rig.banks.stage_loads()
    for slot in (0, 1):
        rig.load(slot, [low_rank(site, 19, generator) for site in rig.sites.values() if site.kind == "linear"])
    parts, memory = list_mixed_parts(rig.sites, generator), make_memory(piece_bytes)
    rig.load(0, parts)
    prepared = rig.banks.prepare(AdapterWeights(parts, 0, "", []), memory)
    rig.banks.load(1, prepared)
    assert prepared.staged is not None and len(prepared.staged.modules) == num_staged
    banks = {name: module for name, module in rig.harness.model.named_modules() if isinstance(module, LinearBank)}
    assert any(bank.ranks[1].any() for bank in banks.values())
    for name, bank in banks.items():
        assert torch.equal(bank.ranks[0], bank.ranks[1]), name
        assert bank.has_extras(0) == bank.has_extras(1) and (0 in bank._used) == (1 in bank._used)
        begin = 0
        for part, (rank, end) in enumerate(zip(bank.ranks[0].tolist(), bank.ends, strict=True)):
            padded = -(-rank // 16) * 16
            assert torch.equal(bank.a[0, part, :padded], bank.a[1, part, :padded]), name
            assert torch.equal(bank.b[0, :padded, begin:end], bank.b[1, :padded, begin:end]), name
            begin = end
    tokens = prompt(1, 9)
    assert torch.equal(logits_of(rig.harness, tokens, 0), logits_of(rig.harness, tokens, 1))
    rig.load(0, [])
    rig.banks.load(1, rig.banks.prepare(AdapterWeights(parts[:1], 0, "", []), make_memory()))
    compare(logits_of(rig.harness, tokens, 0), logits_of(rig.harness, tokens))
    merged = rig.merge({f"{LAYER}.self_attn.q_proj.weight": rig.plain[f"{LAYER}.self_attn.q_proj.weight"]
                        + added(parts[0])})
    compare(logits_of(rig.harness, tokens, 1), logits_of(merged, tokens))


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("is_scaled", [False, True])
def test_numbers_that_become_infinite_are_refused(is_scaled: bool, is_staged: bool):
    """By the scale, or in the model's dtype: other adapters' rows are multiplied with them, too."""
    rig = Rig("llama")
    if not is_scaled:
        rig.harness.model.half()
        for module in rig.harness.model.modules():
            if isinstance(module, LinearBank):
                module._weight_dtype = torch.float16
    rig.banks.stage_loads()

    def load(part: AdaptedPart) -> None:
        weights = AdapterWeights([part], 0, check_parts([part]), [])
        rig.banks.load(0, rig.banks.prepare(weights, make_memory() if is_staged else None))

    part = low_rank(rig.sites["model.layers.0.self_attn.q_proj"], 4, torch.Generator().manual_seed(1))
    part.b[3, 2], part.scale = (3e38, 2.0) if is_scaled else (7e4, 1.0)
    with pytest.raises(AdapterError, match=r"in b of .* too large by its scale"):
        load(part)
    part.b[3, 2] = 1e30 if is_scaled else 6e4
    load(part)
