"""DeepSeek-V4 against transformers on a tiny random config in float32, and its parts against formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from deepseek_v4_tiny import TINY, build_harness, make_oracle, oracle_logits, prompt, published_config
from harness import dequantise_blocks

from headrace.base.errors import ConfigError, WeightError
from headrace.kernels.block_scaled import dequantise_mxfp4
from headrace.kernels.coded_linear.device_codes import Fp8Rows
from headrace.kernels.collective import LentSum
from headrace.kernels.latents.reference import hadamard
from headrace.kernels.sparse_attention.reference import choose_entries
from headrace.kernels.streams.reference import balance, write_read_streams
from headrace.layers.build import Build
from headrace.layers.lora.parts import BankSizes
from headrace.layers.lora.sites import find_sites
from headrace.layers.norm import RmsNorm
from headrace.layers.rotary import RotaryTable
from headrace.models.catalog import find_family
from headrace.models.deepseek_v4.hyper_connections import HyperConnection, Streams
from headrace.models.deepseek_v4.naming import NAMES, is_of_other_expert
from headrace.models.deepseek_v4.spec import HyperSpec
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import Group, Lending
from headrace.parallel.share import Share

TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
LENGTH = 300
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return make_oracle()


@pytest.fixture(scope="module")
def expected(oracle: Any) -> torch.Tensor:
    return oracle_logits(oracle, prompt(0, LENGTH))


def run_in_chunks(harness: Any, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    sequence, pieces, start = harness.start(), [], 0
    for length in chunks:
        pieces.append(harness.step((sequence, tokens[start : start + length]))[0])
        start += length
    assert start == len(tokens)
    return torch.cat(pieces)


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("chunks", [
    [LENGTH],
    [150, 150],
    [133, 7, 60, *[1] * 10, 90],
    [1, 1, 1, 1, 1, 1, 1, 120, 1, 1, 1, 123, 1, 1, 1, 1, 41],
    [2, 3, 5, 246, 3, 41],
], ids=str)
def test_logits_however_prefill_is_cut(oracle: Any, expected: torch.Tensor, chunks: list[int], page_size: int):
    """Cuts fall inside and at the ends of windows of 4 and of 128 tokens, and of pages."""
    chunks = [*chunks[:-1], LENGTH - sum(chunks[:-1])]
    harness = build_harness(published_config(), oracle.state_dict(), page_size=page_size)
    torch.testing.assert_close(run_in_chunks(harness, prompt(0, LENGTH), chunks), expected, **TOLERANCE)


def test_chunks_are_one_pass(oracle: Any):
    """Nearer to each other than to the oracle: cuts inside windows of 4 and of 128 tokens, then decodes."""
    text = prompt(0, LENGTH)
    whole = run_in_chunks(build_harness(published_config(), oracle.state_dict()), text, [LENGTH])
    cut = run_in_chunks(build_harness(published_config(), oracle.state_dict()), text, [130, 1, 1, 125, 3, 35, *[1] * 5])
    torch.testing.assert_close(cut, whole, atol=1e-5, rtol=1e-5)


def test_mixed_batches(oracle: Any):
    """Decodes at different places of their windows together with chunks of others."""
    harness = build_harness(published_config(), oracle.state_dict(), page_size=256)
    texts = [prompt(1, 270), prompt(2, 9), prompt(3, 140)]
    wanted = [oracle_logits(oracle, text) for text in texts]
    first, second, third = (harness.start() for _ in texts)
    harness.step((first, texts[0][:254]), (second, texts[1][:2]))
    at = [254, 2, 0]
    for chunk in (3, 125, 1, 1, 10):
        spans = [(first, 0, 1), (second, 1, 1), (third, 2, chunk)]
        outs = harness.step(*((s, texts[i][at[i] : at[i] + n]) for s, i, n in spans))
        for out, (_, i, n) in zip(outs, spans, strict=True):
            torch.testing.assert_close(out, wanted[i][at[i] : at[i] + n], **TOLERANCE)
            at[i] += n


@pytest.mark.parametrize("options", [
    {"compress_ratios": [128, 128, 4, 128, 4], "num_hash_layers": 0},
    {"compress_ratios": [0, 0], "num_hidden_layers": 2, "num_hash_layers": 2, "sliding_window": 5},
    {"swiglu_limit": 0.03, "routed_scaling_factor": 2.5, "n_routed_experts": 5, "num_experts_per_tok": 3},
    {"num_attention_heads": 8, "o_groups": 4, "hc_mult": 2, "index_topk": 400},
], ids=str)
def test_other_shapes(options: dict[str, Any]):
    oracle, text = make_oracle(**options), prompt(4, 140)
    harness = build_harness(published_config(**options), oracle.state_dict())
    torch.testing.assert_close(run_in_chunks(harness, text, [131, 1, 8]), oracle_logits(oracle, text), **TOLERANCE)


def test_bfloat16_is_as_near_as_transformers_is(oracle: Any, expected: torch.Tensor):
    text = prompt(0, LENGTH)[:100]
    harness = build_harness(published_config(), oracle.state_dict(), dtype=torch.bfloat16, kv_dtype="bfloat16")
    ours, exact = run_in_chunks(harness, text, [70, 30]), expected[:100]
    theirs = oracle_logits(make_oracle().bfloat16(), text).float()
    assert ours.dtype == torch.float32
    assert (ours - exact).norm() <= 1.5 * (theirs - exact).norm()


@pytest.mark.cuda
@pytest.mark.parametrize("chunks", [[LENGTH], [133, 7, 60, *[1] * 10, 90], [2, 3, 5, 246, 3, 41]], ids=str)
def test_a_gpu_says_the_same(oracle: Any, expected: torch.Tensor, chunks: list[int]):
    device = torch.device("cuda")
    harness = build_harness(published_config(), oracle.state_dict(), page_size=256, device=device)
    torch.testing.assert_close(run_in_chunks(harness, prompt(0, LENGTH), chunks), expected, **TOLERANCE)
    halved = build_harness(
        published_config(), oracle.state_dict(), page_size=256, device=device, dtype=torch.bfloat16, kv_dtype="bfloat16"
    )
    theirs = oracle_logits(make_oracle().bfloat16(), prompt(0, LENGTH)[:100]).float()
    ours = run_in_chunks(halved, prompt(0, LENGTH)[:100], [70, 30])
    assert (ours - expected[:100]).norm() <= 2 * (theirs - expected[:100]).norm()


@pytest.mark.cuda
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_fused_kernels_say_the_same(kv_dtype: str):
    """A shape for which a GPU has kernels of its own: as near to float32 as plain torch in the same types is, for
    prefill and decodes in one batch, over plain and packed slots."""
    options = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 64}
    state, text = make_oracle(**options).state_dict(), prompt(5, LENGTH)
    logits = []
    for device, dtype in ((CPU, torch.float32), (CPU, torch.bfloat16), (torch.device("cuda"), torch.bfloat16)):
        harness = build_harness(
            published_config(**options), state, page_size=256, device=device, dtype=dtype, kv_dtype=kv_dtype
        )
        first, second = harness.start(), harness.start()
        outs = [harness.step((first, text[:130]))[0]]
        for at in range(130, 137):  # decodes at every place of a window of 4, beside a chunk
            outs += harness.step((first, text[at : at + 1]), (second, text[(at - 130) * 20 : (at - 129) * 20]))
        logits.append(torch.cat([out.float().cpu() for out in outs]))
    exact, plain, ours = logits
    assert (ours - exact).norm() <= 1.5 * (plain - exact).norm() < 0.5 * exact.norm()


# -- configuration ------------------------------------------------------------------------------------------------


def test_both_spellings_of_the_configuration_read_alike(oracle: Any):
    read = find_family("DeepseekV4ForCausalLM").read_config
    assert (
        read(published_config(compress_ratios=[*TINY["compress_ratios"], 0]))
        == read({**oracle.config.to_dict(), "architectures": ["DeepseekV4ForCausalLM"]})
    )


@pytest.mark.parametrize(("options", "named"), [
    ({"compress_ratios": [0, 4]}, "compress_ratios"), ({"compress_ratios": [0, 4, 8, 4, 0]}, "compress_ratios"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"o_groups": 3}, "o_groups"), ({"scoring_func": "tanh"}, "scoring_func"), ({"q_lora_rank": None}, "q_lora_rank"),
])
def test_values_that_cannot_be_served_are_named(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named) as caught:
        find_family("DeepseekV4ForCausalLM").read_config(published_config(**options))
    assert caught.value.param == named


class FirstOfTwo(Group):
    """The first of two ranks, alone."""

    size = 2


def test_ranks_divide_groups_of_heads_and_experts():
    """Half of what two ranks can divide, and all of the rest; MXFP4 experts as whole ones alone."""
    family = find_family("DeepseekV4ForCausalLM")

    def count(expert_dtype: str | None, group: Group, experts: Group) -> tuple[int, int, int]:
        spec = family.read_config(published_config(expert_dtype=expert_dtype))
        build = Build(torch.device("meta"), torch.float32, 512, tensor=group, experts=ExpertRanks(experts))
        layer = family.build_model(spec, build).layers[1]
        parts = (layer.attention.q_up, layer.attention.mix, layer.mlp.experts)
        return tuple(sum(t.numel() for t in (*part.parameters(), *part.buffers())) for part in parts)

    for expert_dtype in (None, "fp4"):
        whole = count(expert_dtype, Group(), Group())
        assert [2 * part for part in count(expert_dtype, FirstOfTwo(), FirstOfTwo())] == list(whole)
    assert [2 * part for part in count(None, FirstOfTwo(), Group())] == list(count(None, Group(), Group()))
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        count("fp4", FirstOfTwo(), Group())


def test_a_rank_reads_its_own_experts():
    """Under either spelling, also where it has room for copies; of all else, and of stacks, everything."""
    family = find_family("DeepseekV4ForCausalLM")
    spec = family.read_config(published_config(expert_dtype="fp4"))
    count, group = spec.moe.routing.num_experts, FirstOfTwo()
    build = Build(
        torch.device("meta"), torch.float32, 512, tensor=group, experts=ExpertRanks(group), redundant_experts=2,
    )
    model = family.build_model(spec, build)
    assert len(model.layers[1].mlp.experts.gate_up.codes) == count // 2 + 1
    for name in ("layers.1.ffn.experts.{}.w2.scale", "model.layers.0.mlp.experts.{}.gate_proj.weight"):
        assert [model.wants(name.format(x)) for x in range(count)] == [x < count // 2 for x in range(count)]
    others = ("layers.1.ffn.gate.weight", "layers.0.ffn.gate.tid2eid", "model.layers.1.mlp.experts.down_proj")
    assert all(map(model.wants, others))
    own = Share(count, 0, count // 2)
    assert [is_of_other_expert(f"mtp.0.ffn.experts.{x}.w1.weight", own) for x in (0, count - 1)] == [False, True]


def test_a_rank_takes_its_own_of_stacked_experts(oracle: Any):
    """As transformers saves them: what is left out was not needed."""
    family, group, state = find_family("DeepseekV4ForCausalLM"), FirstOfTwo(), oracle.state_dict()
    spec = family.read_config(published_config())
    count = spec.moe.routing.num_experts

    def build_half() -> Any:
        build = Build(
            CPU, torch.float32, 512, tensor=group, experts=ExpertRanks(group), redundant_experts=count % 2 + 2
        )
        return family.build_model(spec, build)

    narrowed, whole = build_half(), build_half()
    kept = {name: tensor.clone() for name, tensor in narrowed.find_narrowing().keep(state.items())}
    stacks = [name for name in state if name.endswith("experts.gate_up_proj")]
    for stack in stacks:
        numbers = {int(name[len(stack) - 12 :].split(".")[0]) for name in kept if name.startswith(stack[:-12])}
        assert numbers == set(range(count // 2)) and state[stack].shape[0] == count
    narrowed.load_weights(kept.items())
    whole.load_weights(state.items())
    parts = zip((*narrowed.parameters(), *narrowed.buffers()), (*whole.parameters(), *whole.buffers()), strict=True)
    assert stacks and all(torch.equal(one, other) for one, other in parts)
    assert family.build_model(spec, Build(CPU, torch.float32, 512)).find_narrowing() is None


def test_adapters_find_the_parts_that_each_layer_has():
    """Layers without an indexer have no index weights."""
    family = find_family("DeepseekV4ForCausalLM")
    spec = family.read_config(published_config())
    model = family.build_model(spec, Build(CPU, torch.float32, 512, adapters=BankSizes(2, 8)))
    sites = find_sites(model, NAMES, spec.num_layers)
    assert {0, 4, 128} == {layer.ratio for layer in spec.layers}
    for i, layer in enumerate(spec.layers):
        assert (f"layers.{i}.attn.compressor.wkv" in sites) == bool(layer.ratio)
        assert (f"layers.{i}.attn.indexer.weights_proj" in sites) == (layer.ratio == 4)
        if layer.ratio == 4:
            assert sites[f"layers.{i}.attn.indexer.weights_proj"].out_features == spec.indexer.num_heads


# -- checkpoints --------------------------------------------------------------------------------------------------

RENAMES = {
    "self_attn.q_a_proj": "attn.wq_a", "self_attn.q_a_norm": "attn.q_norm", "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm", "self_attn.o_a_proj": "attn.wo_a", "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    **{
        f"self_attn.compressor.{theirs}{name}": f"attn.{ours}compressor.{published}"
        for theirs, ours in (("", ""), ("indexer.", "indexer."))
        for name,
        published in (("position_bias", "ape"), ("kv_proj", "wkv"), ("gate_proj", "wgate"), ("kv_norm", "norm"))
    },
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias", "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3", "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    **{f"{part}_hc.{kind}": f"hc_{part}_{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")},
}
OUTSIDE = {
    "model.embed_tokens.weight": "embed.weight", "lm_head.weight": "head.weight", "model.norm.weight": "norm.weight",
    **{f"model.hc_head.hc_{kind}": f"hc_head_{kind}" for kind in ("fn", "base", "scale")},
}


def publish(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' tensors under the names of published checkpoints, written out here once more."""
    published = {}
    for name, tensor in state.items():
        if name in OUTSIDE:
            published[OUTSIDE[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest == "mlp.experts.gate_up_proj":
            for x, both in enumerate(tensor):
                published[
                    f"layers.{layer}.ffn.experts.{x}.w1.weight"
                ], published[f"layers.{layer}.ffn.experts.{x}.w3.weight"] = both.chunk(2)
        elif rest == "mlp.experts.down_proj":
            published |= {f"layers.{layer}.ffn.experts.{x}.w2.weight": own for x, own in enumerate(tensor)}
        else:
            stem, _, kind = rest.rpartition(".")
            published[
                f"layers.{layer}.{RENAMES[rest]}" if rest in RENAMES else f"layers.{layer}.{RENAMES[stem]}.{kind}"
            ] = tensor
    return published


def quantise(published: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As published files are: 4-bit experts, 8-bit matrices, else bfloat16 and float32; and the same without
    quantisation."""
    stored, plain = {}, {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in published.items():
        scale = name.replace(".weight", ".scale")
        if ".ffn.experts." in name:
            shape = (tensor.shape[0], tensor.shape[1] // 2)
            codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            exponents = torch.full((tensor.shape[0], tensor.shape[1] // 32), 123, dtype=torch.uint8)
            stored[name], stored[scale] = codes.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
            plain[name] = dequantise_mxfp4(codes, exponents, torch.float32)
        elif (
            f".{name}".rsplit(".", 2)[-2] in ("wq_a", "wq_b", "wo_a", "wo_b", "w1", "w2", "w3")
            or name.endswith("attn.wkv.weight")
        ):
            exponents = torch.full(tuple(-(-n // 128) for n in tensor.shape), 121, dtype=torch.uint8)
            stored[name], stored[scale] = (tensor * 64).to(torch.float8_e4m3fn), exponents.view(torch.float8_e8m0fnu)
            plain[name] = dequantise_blocks(stored[name], stored[scale])
        else:
            stored[name] = plain[name] = tensor
    return stored, plain


def test_published_checkpoints(oracle: Any, expected: torch.Tensor):
    text = prompt(0, LENGTH)[:40]
    published = publish(oracle.state_dict())
    harness = build_harness(
        published_config(),
        {**published, "mtp.0.e_proj.weight": torch.ones(3, 3), "mtp.0.e_proj.scale": torch.ones(1, 1)}
    )
    torch.testing.assert_close(run_in_chunks(harness, text, [40]), expected[:40], **TOLERANCE)
    stored, plain = quantise(published)
    assert len(stored) > len(plain)
    results = [run_in_chunks(build_harness(published_config(), tensors), text, [40]) for tensors in (plain, stored)]
    assert torch.equal(*results)
    kept = build_harness(published_config(expert_dtype="fp4"), stored)
    assert not [name for name, _ in kept.model.named_parameters() if ".experts." in name]
    torch.testing.assert_close(run_in_chunks(kept, text, [40]), results[0], **TOLERANCE)
    del stored["layers.3.ffn.experts.7.w2.scale"]
    with pytest.raises(WeightError, match=r"layers\.3\.ffn\.experts\.7\.w2"):
        build_harness(published_config(expert_dtype="fp4"), stored)


def test_a_checkpoint_that_transformers_saved(oracle: Any, expected: torch.Tensor, tmp_path: Any):
    from safetensors.torch import load_file

    oracle.save_pretrained(tmp_path)
    harness = build_harness(published_config(), load_file(tmp_path / "model.safetensors"))
    torch.testing.assert_close(run_in_chunks(harness, prompt(0, LENGTH)[:40], [40]), expected[:40], **TOLERANCE)


def test_missing_tensors_are_named(oracle: Any):
    for name in ("layers.0.ffn.gate.tid2eid", "layers.1.attn.indexer.compressor.ape"):
        published = publish(oracle.state_dict())
        del published[name]
        with pytest.raises(WeightError, match=name):
            build_harness(published_config(), published)


@pytest.mark.parametrize("expert", [-1, 1000, "that of its other choice"])
def test_hash_tables_name_experts_that_exist_and_none_twice(oracle: Any, expert: int | str):
    published = publish(oracle.state_dict())
    table = published["layers.0.ffn.gate.tid2eid"] = published["layers.0.ffn.gate.tid2eid"].clone()
    table[5, 0] = expert if isinstance(expert, int) else table[5, 1]
    with pytest.raises(WeightError, match=r"layers\.0\.ffn\.gate\.tid2eid"):
        build_harness(published_config(), published)


# -- parts ----------------------------------------------------------------------------------------------------------


def test_mixing_matrices_are_doubly_stochastic():
    spec = HyperSpec(4, 20, 1e-6)
    build = Build(CPU, torch.float32)
    connection, norm = HyperConnection(spec, 8, 1e-6, build), RmsNorm(build, 8, 1e-6)
    generator = torch.Generator().manual_seed(0)
    for parameter in (*connection.parameters(), *norm.parameters()):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    streams = Streams(torch.randn(50, 4, 8, generator=generator))
    connection.read(streams, norm)
    post, mix = streams.post, streams.mix
    assert post is not None and mix is not None
    assert ((mix.sum(1) - 1).abs() < 1e-4).all() and ((mix.sum(2) - 1).abs() < 1e-4).all()
    assert ((post > 0) & (post < 2)).all()
    assert torch.allclose(balance(torch.eye(4)[None] + 1e-9, spec.iterations, spec.eps), torch.eye(4)[None], atol=1e-5)


def test_streams_that_are_not_mixed_stay_as_they_are():
    streams = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
    connection = HyperConnection(HyperSpec(4, 20, 1e-6), 8, 1e-6, Build(CPU, torch.float32))
    new = connection.settle(Streams(streams, torch.ones(5, 8), torch.zeros(5, 4), torch.eye(4).expand(5, 4, 4)))
    assert torch.equal(new, streams)


def test_frequencies_of_published_models():
    """Interpolated below one turn in the trained length, kept above 32 turns, blended between."""
    rope = find_family("DeepseekV4ForCausalLM").read_config(published_config(
        head_dim=512, qk_rope_head_dim=64, rope_parameters=YARN_PUBLISHED, max_position_embeddings=1048576,
    )).compressed_rope
    table = RotaryTable(rope, length=2, device=CPU).cos_sin
    assert torch.equal(table[0], torch.cat((torch.ones(32), torch.zeros(32)))), "cosines are not stretched"
    low, high = (
        f(64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(160000))) for f,
        turns in ((math.floor, 32), (math.ceil, 1))
    )
    for i in (0, low, low + 1, high, 31):
        plain = 160000.0 ** (-2 * i / 64)
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert float(table[1, 32 + i]) == pytest.approx(math.sin(plain / 16 * ramp + plain * (1 - ramp)), abs=1e-6)


YARN_PUBLISHED = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_choosing_entries_equals_topk_as_a_set(top_k: int):
    scores = torch.randn(40, 20, generator=torch.Generator().manual_seed(0))
    visible = torch.arange(40) % 21
    chosen = choose_entries(scores, visible, top_k)
    for row, num in enumerate(map(int, visible)):
        if num <= top_k:
            assert chosen[row].tolist() == [*range(num), *[-1] * (top_k - num)]
        else:
            assert set(chosen[row].tolist()) == set(scores[row, :num].topk(top_k).indices.tolist())


def test_hadamard_turns_without_stretching():
    matrix = hadamard(128, CPU)
    assert torch.allclose(matrix @ matrix.T, torch.eye(128), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full((128, 128), 128**-0.5))


class _Lending(Group, Lending):
    """A group of two ranks with equal parts. ``sums``: of kernels of their own."""

    size = 2

    def __init__(self, lent: LentSum | None):
        self.lent, self.sums, self.lending = lent, 0, self

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        self.sums += 1
        return 2 * super().all_reduce(x.clone(), more)

    def find_sum(self, num_bytes: int, dtype: torch.dtype) -> LentSum | None:
        assert num_bytes == 3 * 64 * 4 and dtype == torch.float32
        return self.lent


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("is_lent", [True, False])
@pytest.mark.parametrize("has_more", [True, False])
def test_a_read_adds_up_over_ranks_what_is_pending(has_more: bool, is_lent: bool, is_taken: bool):
    """In the same kernel where there is one that takes it, else before; each output once."""
    lent, taken = LentSum(2, None, list), []
    layer, norm = HyperConnection(HyperSpec(4, 5, 1e-6), 64, 1e-6, Build(CPU, torch.float32)), RmsNorm(
        Build(CPU, torch.float32), 64, 1e-6
    )
    draw = torch.Generator().manual_seed(0)
    for parameter in (*layer.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    own, out, more = torch.randn(3, 4, 64, generator=draw), *torch.randn(2, 3, 64, generator=draw)
    post, mix = torch.rand(3, 4, generator=draw), torch.rand(3, 4, 4, generator=draw)
    whole = 2 * (out + more if has_more else out)

    rounded = Fp8Rows.allocate(3, 64, 32, CPU)

    def write_read(
        streams: torch.Tensor, pending: Any, *rest: Any, ranks: LentSum | None = None, group: int | None = None
    ) -> Any:
        if ranks is None:
            return write_read_streams(streams, pending, *rest, group=group)
        assert ranks is lent and group == 32
        if not is_taken:
            return None
        taken.append(ranks)
        return *write_read_streams(streams, pending._replace(out=2 * pending.whole, more=None), *rest), rounded

    layer._write_read = write_read
    group = _Lending(lent if is_lent else None)
    streams = Streams(own, out.clone(), post, mix, more.clone() if has_more else None, group)
    x, rows = layer.read(streams, norm, 32)
    assert rows is (rounded if taken else None), "plain torch makes none"
    expected = Streams(own, whole, post, mix)
    assert torch.allclose(x, layer.read(expected, norm)[0], atol=1e-6)
    assert torch.allclose(streams.own, expected.own, atol=1e-6) and streams.out is streams.group is streams.more is None
    assert (len(taken), group.sums) == ((1, 0) if is_lent and is_taken else (0, 1))
    settled = layer.settle(Streams(own, out.clone(), post, mix, more.clone() if has_more else None, group))
    assert torch.allclose(settled, layer.settle(Streams(own, whole, post, mix)), atol=1e-6)
