"""Texts read through the real engine on tiny random checkpoints, in chunks and beside generation, against
transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace.base.config import engine_config
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.pooling import PoolingSpec, unpack_floats
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.kernels.native.loading import NativeLibrary
from headrace.layers.quantization.storage import store_fastest
from headrace.service.build import build_engine
from headrace.service.engine import Engine

VOCAB, WIDTH = 97, 32
DECODER = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None,
}
ENCODER = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 96, "initializer_range": 0.3
}
CAUSAL: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {}, "GlmForCausalLM": {}, "Glm4ForCausalLM": {},
    "PhiForCausalLM": {"partial_rotary_factor": 1.0},
    **{
        f"Deepseek{generation}ForCausalLM": {
            "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
            "v_head_dim": 10, "q_lora_rank": None,
            "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        }
        for generation in ("V2", "V3")
    },
}
TEXTS = [random.Random(i).choices(range(3, VOCAB), k=length) for i, length in enumerate((23, 5, 41, 1, 17, 60, 23))]


def write_checkpoint(
    folder: Path, architecture: str, fields: dict[str, Any], *, modes: tuple[str, ...] = (), normalise: bool = False
) -> Any:
    """transformers' model, saved; ``modes`` makes it a sentence-transformers folder."""
    cls = getattr(transformers, architecture)
    torch.manual_seed(1)
    model = cls(cls.config_class(**fields)).eval()
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "architectures": [architecture], "dtype": "float32"})
    )
    if modes:
        kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if normalise else [])]
        (folder / "modules.json").write_text(json.dumps([{"path": path, "type": f"x.{kind}"} for path, kind in kinds]))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling/config.json").write_text(json.dumps(dict.fromkeys(modes, True)))
    return model


def start(folder: Path, **options: Any) -> Engine:
    return build_engine(
        engine_config(
            **{
                "model": str(folder), "page_size": 4, "kv_pages": 200, "max_step_tokens": 16, "max_running_requests": 6,
                **options
            }
        )
    )


def run(engine: Engine, requests: list[EngineRequest]) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        outputs |= {o.request_id: o for o in engine.step() if o.finish is not None}
    engine.check()
    assert all(o.finish.error is None for o in outputs.values()), outputs
    return outputs


def ask(name: str, ids: list[int], **spec: Any) -> EngineRequest:
    return EngineRequest(name, ids, SamplingSpec(), StopSpec(0), pooling=PoolingSpec(**spec))


def read(engine: Engine, texts: list[list[int]] = TEXTS, **spec: Any) -> list[torch.Tensor]:
    facts = engine.executor.facts.pooling
    outputs = run(
        engine, [ask(str(i), ids, needs_all_tokens=facts.needs_all_tokens, **spec) for i, ids in enumerate(texts)]
    )
    return [torch.tensor(unpack_floats(outputs[str(i)].pooled)) for i in range(len(texts))]


@torch.inference_mode()
def states(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).last_hidden_state[0]


REDUCE = {
    "pooling_mode_cls_token": lambda h: h[0], "pooling_mode_lasttoken": lambda h: h[-1],
    "pooling_mode_mean_tokens": lambda h: h.mean(0),
    "pooling_mode_max_tokens": lambda h: h.amax(0),
}


@pytest.mark.parametrize("mode", REDUCE)
def test_decoder_reads_in_chunks(tmp_path: Path, mode: str):
    """Sixteen tokens a step: texts come in chunks beside others, and again where pages of the first round are
    cached."""
    model = write_checkpoint(tmp_path, "Qwen3Model", DECODER, modes=(mode,), normalise=mode == "pooling_mode_lasttoken")
    engine = start(tmp_path)
    for _ in range(2):
        for ids, found in zip(TEXTS, read(engine), strict=True):
            expected = REDUCE[mode](states(model, ids))
            expected = torch.nn.functional.normalize(expected, dim=-1) if mode == "pooling_mode_lasttoken" else expected
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (engine.stats().cached_tokens_total > 0) == (mode == "pooling_mode_lasttoken")


def test_pages_running_out_change_nothing(tmp_path: Path):
    """Retracted requests begin anew; a mean must not count their first tokens twice."""
    model = write_checkpoint(tmp_path, "LlamaModel", DECODER, modes=("pooling_mode_mean_tokens",))
    engine = start(tmp_path, kv_pages=20, max_model_len=64, max_step_tokens=24)
    for ids, found in zip(TEXTS, read(engine), strict=True):
        torch.testing.assert_close(found, states(model, ids).mean(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("architecture", "more"), CAUSAL.items(), ids=list(CAUSAL))
def test_a_causal_model_embeds_when_told_to(tmp_path: Path, architecture: str, more: dict[str, Any]):
    """Its head is left in the file, and names with and without the prefix load alike. Of a family's generations each
    stays itself."""
    model = write_checkpoint(tmp_path, architecture, {**DECODER, "tie_word_embeddings": False, **more})
    for ids, found in zip(TEXTS, read(start(tmp_path, task="embed")), strict=True):
        torch.testing.assert_close(
            found, torch.nn.functional.normalize(states(model.model, ids)[-1], dim=-1), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForSequenceClassification", "Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification",
        "MistralForSequenceClassification", "Gemma2ForSequenceClassification"
    ]
)
def test_decoder_classifiers(tmp_path: Path, architecture: str):
    model = write_checkpoint(tmp_path, architecture, {**DECODER, "num_labels": 1 if "Mistral" in architecture else 3})
    for ids, found in zip(TEXTS, read(start(tmp_path)), strict=True):
        with torch.inference_mode():
            torch.testing.assert_close(found, model(torch.tensor([ids])).logits[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["LlamaForSequenceClassification", "BertForSequenceClassification"])
def test_classifiers_in_half_precision(tmp_path: Path, architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch):
    """With packed weights and, while kernels are being compiled, without."""
    model = write_checkpoint(
        tmp_path, architecture, {**(DECODER if "Llama" in architecture else ENCODER), "num_labels": 3}
    )
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(NativeLibrary, "find", lambda _: None)
        for ids, found in zip(TEXTS, read(start(tmp_path, dtype=dtype)), strict=True):
            with torch.inference_mode():
                torch.testing.assert_close(found, model(torch.tensor([ids])).logits[0], atol=0.2, rtol=0.05)


def test_dense_layers_behind_the_pooling(tmp_path: Path):
    model = write_checkpoint(tmp_path, "BertModel", ENCODER, modes=("pooling_mode_mean_tokens",))
    layers = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(
        json.dumps([*layers, {"path": "2_Dense", "type": "x.Dense"}, {"path": "3_Normalize", "type": "x.Normalize"}])
    )
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense/config.json").write_text(
        json.dumps(
            {
                "in_features": WIDTH, "out_features": 12, "bias": True,
                "activation_function": "torch.nn.modules.activation.Tanh"
            }
        )
    )
    dense = torch.nn.Linear(WIDTH, 12)
    save_file(
        {f"linear.{name}": tensor.detach() for name, tensor in dense.named_parameters()},
        tmp_path / "2_Dense/model.safetensors"
    )
    engine = start(tmp_path)
    assert engine.executor.facts.pooling.width == 12
    for is_stored in (False, True):
        if is_stored:  # as they are once kernels have been compiled
            store_fastest(engine.executor._runner._model)
        for ids, found in zip(TEXTS, read(engine), strict=True):
            with torch.inference_mode():
                expected = torch.nn.functional.normalize(torch.tanh(dense(states(model, ids).mean(0))), dim=-1)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_encoder_batches_whole_texts(tmp_path: Path):
    """Steps hold the longest text despite max_step_tokens 16; texts of a pair are distinguished; nothing is cached."""
    model = write_checkpoint(tmp_path, "BertForSequenceClassification", {**ENCODER, "num_labels": 1})
    engine = start(tmp_path, max_running_requests=8)
    assert engine.executor.config.scheduler.max_step_tokens == 96 and not engine.executor.layout.groups
    outputs = run(engine, [ask(str(i), ids, second_start=len(ids) // 3 + 1) for i, ids in enumerate(TEXTS)])
    for i, ids in enumerate(TEXTS):
        kinds = [int(place > len(ids) // 3) for place in range(len(ids))]
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).logits[0]
        torch.testing.assert_close(torch.tensor(unpack_floats(outputs[str(i)].pooled)), expected, atol=1e-5, rtol=1e-5)
    assert engine.stats().steps_total == 2
    assert engine.stats().cached_tokens_total == 0


def test_label_probabilities_beside_generation(tmp_path: Path):
    """A generating model gives probabilities of certain tokens; its other requests are not affected."""
    model = write_checkpoint(tmp_path, "LlamaForCausalLM", {**DECODER, "tie_word_embeddings": False})
    engine = start(tmp_path)
    labels = [[5, 9], [1], [7, 8, 96], [0, 3], [2, 4], [6], [11, 12]]
    writer = EngineRequest("writer", TEXTS[0], SamplingSpec(), StopSpec(20))
    alone = run(engine, [writer])
    tokens: list[int] = []
    for request in [writer, *(ask(str(i), ids, label_ids=labels[i]) for i, ids in enumerate(TEXTS))]:
        engine.submit(request)
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
            found |= {output.request_id: output} if output.finish else {}
    for i, ids in enumerate(TEXTS):
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)[labels[i]]
        torch.testing.assert_close(torch.tensor(unpack_floats(found[str(i)].pooled)), expected, atol=1e-5, rtol=1e-5)
    expected = model.generate(torch.tensor([TEXTS[0]]), max_new_tokens=20, do_sample=False)[0, len(TEXTS[0]):].tolist()
    assert tokens == expected
    assert alone["writer"].finish.reason == found["writer"].finish.reason == "length"


def test_numbers_that_are_not_finite_fail_alone(tmp_path: Path):
    model = write_checkpoint(tmp_path, "BertModel", ENCODER, modes=("pooling_mode_mean_tokens",))
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    tensors["embeddings.word_embeddings.weight"][50] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    engine = start(tmp_path)
    engine.submit(ask("bad", [5, 50, 6]))
    engine.submit(ask("good", [5, 51, 6]))
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        found |= {o.request_id: o for o in engine.step()}
    assert found["bad"].finish.error.kind == "step_failed" and "finite" in found["bad"].finish.error.message
    torch.testing.assert_close(
        torch.tensor(unpack_floats(found["good"].pooled)), states(model, [5, 51, 6]).mean(0), atol=1e-5, rtol=1e-5
    )
