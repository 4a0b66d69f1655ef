"""Two ranks do all that one does: what requests may ask for, drafts, forms of weights and caches, pooling, and changes
of a running engine. One pair of CPU ranks serves them all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np
import pytest
import torch
import transformers
from execution.draft_checkpoints import TARGETS, VOCAB, write_head, write_target
from layers import format_writers as writers
from parallel.rank_processes import RankProcesses
from safetensors.torch import save_file

from headrace import LLM, Grammar, SamplingParams
from headrace.kernels import native
from headrace.service import build

T = TypeVar("T")
BASE = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "kv_pages": 240, "page_size": 4, "threads": 1}
SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["abacus", "absent"]}, "b": {"type": "boolean"}},
    "required": ["name", "b"], "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tensor", "stages"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(*request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets by kind, and a head for the Llama."""
    root = tmp_path_factory.mktemp("ranked")
    made = {kind: write_target(root / kind, kind, has_module=kind != "Llama") for kind in TARGETS}
    return {"head": write_head(root / "head", made["Llama"], "one file"), **{kind: root / kind for kind in TARGETS}}


class Pair:
    """Runs the same on one rank and on two."""

    def __init__(self, ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch):
        self._ranks, self._monkeypatch = ranks, monkeypatch
        self.has_stages = ranks.ranks.layout.pipeline > 1

    def one(self, run: Callable[[LLM], T], **options: Any) -> T:
        """What ``run`` returns of a model on one rank."""
        with LLM(**options) as llm:
            return run(llm)

    def two(self, run: Callable[[LLM], T], own: dict[str, Any] | None = None, **options: Any) -> T:
        """The same, divided. ``own``: options of the ranks alone."""
        with self._monkeypatch.context() as patch:
            patch.setattr(build, "build_executor", self._ranks.builder({**options, **(own or {})}))
            return self.one(run, **options)


@pytest.fixture
def pair(ranks: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> Pair:
    return Pair(ranks, monkeypatch)


def draw_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    chance = random.Random(7)
    greedy = {"temperature": 0.0, "ignore_eos": True}
    params = [
        SamplingParams(max_tokens=30, **greedy),
        SamplingParams(max_tokens=20, temperature=0.7, top_p=0.9, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=20, repetition_penalty=1.05, presence_penalty=0.4, frequency_penalty=0.1, **greedy),
        SamplingParams(max_tokens=16, logprobs=3, prompt_logprobs=1, **greedy),
        SamplingParams(max_tokens=20, min_tokens=8, temperature=0.6, seed=3, stop_token_ids=list(range(3, 60))),
        SamplingParams(max_tokens=20, logit_bias={17: 4.0, 30: 3.5}, **greedy),
        SamplingParams(max_tokens=1, **greedy),
        SamplingParams(max_tokens=16, n=3, temperature=0.5, top_k=20, seed=9, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.0, bad_words=["b", "cd"], stop=["e"], ignore_eos=True),
    ]
    params += [
        SamplingParams(max_tokens=60, temperature=0.0, grammar=Grammar.json_schema(SCHEMA)),
        SamplingParams(max_tokens=30, temperature=0.8, seed=5, grammar=Grammar.regex("[ab]{3,9}c{12}"), logprobs=2),
    ]
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 40))] for _ in params]
    prompts[2] = [*prompts[0], 9, 8]  # a prefix that another one has
    return prompts, params


def generate(llm: LLM, *, num_rounds: int = 2) -> list[Any]:
    """The second round finds prompts in the cache."""
    prompts, params = draw_requests()
    rounds = [llm.generate(prompt_token_ids=prompts, sampling_params=params) for _ in range(num_rounds)]
    llm.check()
    assert llm.stats().num_used_pages == llm.stats().num_running == 0
    assert num_rounds == 1 or llm.stats().cached_tokens_total > 0
    return [output for outputs in rounds for output in outputs]


def compare(alone: list[Any], together: list[Any]) -> None:
    for index, (one, two) in enumerate(zip(alone, together, strict=True)):
        for its, mine in zip(one.outputs, two.outputs, strict=True):
            assert mine.token_ids == its.token_ids, index
            assert (mine.text, mine.finish_reason, mine.stop_reason) == (its.text, its.finish_reason, its.stop_reason)
            assert [e.top_ids for e in mine.logprobs or []] == [e.top_ids for e in its.logprobs or []], index
        pairs = [(e, o) for e, o in zip(two.prompt_logprobs or [], one.prompt_logprobs or [], strict=True) if o]
        for mine, its in pairs:
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-3), index


@pytest.mark.parametrize("options", [
    {"overlap_depth": 2, "max_step_tokens": 16}, {"overlap_depth": 1, "kv_pages": 43, "max_step_tokens": 12},
], ids=["chunks", "retraction"])
def test_requests_of_all_kinds(pair: Pair, folders: dict[str, Path], options: dict[str, Any]):
    stated = {"model": str(folders["Llama"]), **BASE, **options}
    compare(pair.one(generate, **stated), pair.two(generate, **stated))


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_the_model_has_as_many_parameters(pair: Pair, folders: dict[str, Path], kind: str):
    stated = {"model": str(folders[kind]), **BASE}
    alone = pair.one(lambda llm: llm.facts.num_parameters, **stated)
    assert pair.two(lambda llm: llm.facts.num_parameters, **stated) == alone > 1000


@pytest.mark.parametrize("kind", ["Llama", "DeepseekV3"])
def test_drafts(pair: Pair, folders: dict[str, Path], kind: str):
    """Tokens of two ranks that draft are those of one that does not."""
    methods: list[dict[str, Any]] = [{"method": "mtp"}]
    if kind == "Llama":
        methods = [
            {"method": "ngram"}, {"method": "suffix"}, {"method": "draft_model", "model": str(folders["Llama"])},
            {"method": "eagle3", "model": str(folders["head"])},
        ]
    if pair.has_stages:
        methods = methods[:2] if kind == "Llama" else []  # the others need all layers
    options = {"model": str(folders[kind]), **BASE, "overlap_depth": 2}
    alone = pair.one(partial(generate, num_rounds=1), **options)
    for method in methods:
        config = {**method, "num_speculative_tokens": 4}
        drafted: list[Any] = []

        def run(llm: LLM, drafted: list[Any] = drafted) -> list[Any]:
            outputs = generate(llm, num_rounds=1)
            drafted.append(llm.stats().speculation)
            return outputs

        divided = {"enable_expert_parallel": True} if method["method"] == "mtp" else {}
        compare(alone, pair.two(run, divided, **options, speculative_config=config))
        assert drafted[0].num_drafts > 10 and drafted[0].num_accepted_tokens > 0, method


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 2, "initializer_range": 0.2,
}
"""Two ranks have 48 inputs of the attention's output each, and 80 of the MLP's: no multiples of 32."""
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
PROMPTS = [[5, 9, 300, 41], list(range(3, 60)), [7], list(range(3, 70))]


def read_logprobs(llm: LLM) -> torch.Tensor:
    """Of the tokens of some prompts."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    llm.check()
    return torch.tensor([place.logprob for output in outputs for place in output.prompt_logprobs[1:]])


@pytest.mark.parametrize("more", [{}, EXPERTS], ids=["dense", "experts"])
def test_weights_and_pages_in_fewer_bits(pair: Pair, tmp_path: Path, more: dict[str, Any]):
    """Rounding is that of one rank where no group of 32 inputs is cut; else it is another one of the same size."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **more}))
    options = {
        "model": str(tmp_path), "load_format": "dummy", "skip_tokenizer": True, **BASE, "quantization": "none"
    }
    plain = pair.one(read_logprobs, **options)
    torch.testing.assert_close(pair.two(read_logprobs, **options), plain, atol=1e-4, rtol=1e-4)
    forms: list[dict[str, str]] = [{"quantization": "int4", "kv_dtype": "int8"}, {"quantization": "w8a8"}]
    if pair.has_stages:
        del forms[1:]  # they divide no weight
    elif not more:
        forms += [{"kv_dtype": "int8"}, {"quantization": "int8"}]
    for changes in forms:
        stated = {**options, **changes}
        lost = (pair.one(read_logprobs, **stated) - plain).abs().mean()
        assert 0 < (pair.two(read_logprobs, **stated) - plain).abs().mean() < 1.5 * lost + 1e-3, changes


def write_gguf(path: Path, kind: str, heads: int = 4, width: int = 128, inner: int = 192) -> Path:
    """A Llama of random weights; those of matrices in blocks of ``kind``."""
    chance = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 2, "context_length": 256, "embedding_length": width, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": 2, "vocab_size": 320,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    sizes = {"attn_q": (width, width), "attn_k": (2 * width // heads, width), "attn_v": (2 * width // heads, width)}
    sizes |= {"attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
    sizes |= {"ffn_down": (width, inner)}
    matrices = {f"blk.{i}.{name}.weight": size for i in range(2) for name, size in sizes.items()}
    quantised = gguf.GGMLQuantizationType[kind]

    def encode(values: np.ndarray) -> np.ndarray:
        if kind != "Q4_K":
            return gguf.quantize(values, quantised)
        # the package has no encoder: random blocks under fixed scales d and dmin
        blocks = chance.integers(0, 256, (len(values), values.shape[1] // 256, 144), dtype=np.uint8)
        blocks[..., :4] = np.array([0.0008, 0.004], dtype=np.float16).view(np.uint8)
        return blocks.reshape(len(values), -1)

    for name, size in {"token_embd.weight": (320, width), "output.weight": (320, width), **matrices}.items():
        values = chance.normal(0, 0.15, size).astype(np.float32)
        writer.add_tensor(name, encode(values), raw_dtype=quantised)
    for name in ("output_norm", *(f"blk.{i}.{norm}_norm" for i in range(2) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "width", "inner"), [("Q8_0", 128, 192), ("Q4_1", 128, 192), ("Q4_0", 96, 160), ("Q4_K", 256, 512)]
)
def test_blocks_of_gguf_files(pair: Pair, tmp_path: Path, kind: str, width: int, inner: int):
    """Blocks of 32 inputs are divided whole, or, as the 160 and 96 here, dequantised where a rank's part ends in one;
    so are those of 256 that two ranks share."""
    if native.build().status != "ready":
        pytest.skip("no native library")
    if pair.has_stages and kind != "Q8_0":
        pytest.skip("stages divide no block: one kind will do")
    path = write_gguf(tmp_path / "model.gguf", kind, width=width, inner=inner)
    options = {"model": str(path), "skip_tokenizer": True, **BASE, "max_model_len": 128}
    plain = pair.one(read_logprobs, **options, quantization="none")
    alone, together = pair.one(read_logprobs, **options), pair.two(read_logprobs, **options)
    assert 0 < (together - plain).abs().mean() < 1.3 * (alone - plain).abs().mean() + 1e-3


WRITERS: dict[str, tuple[Callable[[torch.Tensor], writers.Written], dict[str, Any]]] = {
    "fp8": (writers.fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "gptq": (writers.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "awq": (writers.awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "nf4": (writers.nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}
WIDE = {**TINY, "hidden_size": 192, "head_dim": 32, "intermediate_size": 320, "tie_word_embeddings": False}
"""Two ranks have 96 inputs of the attention's output each, and 160 of the MLP's: no multiples of 128."""


@pytest.mark.parametrize("form", WRITERS)
def test_quantised_checkpoints(pair: Pair, tmp_path: Path, form: str):
    if pair.has_stages and form != "fp8":
        pytest.skip("stages divide no block: one form will do")
    write, stated = WRITERS[form]
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "_proj" in name:
            own, _ = write(tensor.detach())
            tensors |= {f"{name.removesuffix('.weight')}.{kind}": part.contiguous() for kind, part in own.items()}
        else:
            tensors[name] = tensor.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**WIDE, "quantization_config": stated}))
    options = {"model": str(tmp_path), "skip_tokenizer": True, **BASE}
    plain = pair.one(read_logprobs, **options, quantization="none")
    same = pair.two(read_logprobs, **options, quantization="none")
    torch.testing.assert_close(same, plain, atol=1e-3, rtol=1e-3)
    lost = (pair.one(read_logprobs, **options) - plain).abs().mean()
    assert (pair.two(read_logprobs, **options) - plain).abs().mean() < 1.3 * lost + 1e-3


ENCODER = {
    "model_type": "bert", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


@pytest.mark.parametrize(("architecture", "task"), [
    ("LlamaForCausalLM", "embed"), ("LlamaForSequenceClassification", "auto"), ("BertForSequenceClassification", "auto")
])
def test_pooling(pair: Pair, tmp_path: Path, architecture: str, task: str):
    config = {**(TINY if "Llama" in architecture else ENCODER), "architectures": [architecture]}
    labels = {"id2label": {str(i): f"label {i}" for i in range(3)}, "num_labels": 3, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps({**config, **labels}))
    prompts = [{"prompt_token_ids": [3 + i] * (5 + 7 * i)} for i in range(4)]

    def run(llm: LLM) -> list[list[float]]:
        return llm.embed(prompts) if task == "embed" else [list(found.values()) for found in llm.classify(prompts)]

    options = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "task": task}
    options |= {"device": "cpu", "threads": 1, "max_step_tokens": 16}
    for one, two in zip(pair.one(run, **options), pair.two(run, **options), strict=True):
        assert len(one) > 2 and two == pytest.approx(one, abs=1e-5)
