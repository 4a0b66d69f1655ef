"""Every field of PEFT through the whole engine: the prompt's log probabilities are those of PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft_rig as rig
import pytest
import torch
from test_peft import ATTENTION, FIELDS, MOE
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from headrace import LLM, LoRARequest, SamplingParams

pytest.importorskip("peft")

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0, logprobs=0)
PROMPT = rig.TOKENS[0].tolist()
OPTIONS: dict[str, Any] = {
    "skip_tokenizer": True, "dtype": "float32", "device": "cpu", "threads": 1, "kv_pages": 80, "page_size": 4,
    "max_running_requests": 4, "enable_lora": True, "max_loras": 3, "max_lora_rank": 16,
}


BERT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}

ENCODERS = {"bert": BertConfig, "roberta": RobertaConfig, "xlm-roberta": XLMRobertaConfig}


def serve(model: Any, folder: Path, **options: Any) -> LLM:
    model.save_pretrained(str(folder))
    return LLM(folder, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def llama() -> Any:
    return rig.make_model(LlamaConfig(**rig.LLAMA))


@pytest.fixture(scope="module")
def served(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with serve(llama, tmp_path_factory.mktemp("base")) as llm:
        yield llm


def logprobs_of(llm: LLM, request: LoRARequest | None) -> torch.Tensor:
    """Those of the prompt's tokens, from the second on."""
    (output,) = llm.generate([PROMPT], PARAMS, lora_request=request)
    assert output.prompt_logprobs is not None
    return torch.tensor([
        entry.logprob for entry in output.prompt_logprobs[1:] if entry is not None
    ])


def wanted_of(model: Any) -> torch.Tensor:
    logprobs = rig.outputs_of(model)[0].log_softmax(-1)
    return logprobs[:-1].gather(1, rig.TOKENS[0, 1:, None])[:, 0]


def check(llm: LLM, base: Any, folder: Path, **fields: Any) -> None:
    adapted = rig.adapt(base, folder, **fields)
    request = LoRARequest(folder.name, str(folder))
    found = logprobs_of(llm, request)
    torch.testing.assert_close(found, wanted_of(adapted), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logprobs_of(llm, None), wanted_of(base), rtol=1e-3, atol=1e-3)
    llm.adapters.unload(request.name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_served(served: LLM, llama: Any, tmp_path: Path, name: str):
    check(served, llama, tmp_path, **FIELDS[name])


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_served(tmp_path: Path, bias: str):
    model = rig.make_model(Qwen2Config(**rig.LLAMA))
    with serve(model, tmp_path / "base") as llm:
        check(llm, model, tmp_path / "adapter", target_modules=["q_proj", "k_proj", "o_proj"], bias=bias)


@pytest.mark.filterwarnings("ignore")
def test_a_tied_head_is_served(tmp_path: Path):
    model = rig.make_model(LlamaConfig(**{**rig.LLAMA, "tie_word_embeddings": True}))
    with serve(model, tmp_path / "base") as llm:
        for i, fields in enumerate((
            {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]},
            {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True},
            {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        )):
            check(llm, model, tmp_path / f"adapter{i}", **fields)


def test_experts_are_served(tmp_path: Path):
    model = rig.make_model(Qwen3MoeConfig(**MOE))
    with serve(model, tmp_path / "base") as llm:
        check(
            llm, model, tmp_path / "adapter", target_modules=ATTENTION,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        )


@pytest.mark.parametrize("kind", ["bert", "roberta", "decoder"])
def test_a_classifier_is_served(tmp_path: Path, kind: str):
    """PEFT saves the head of classes with the adapter."""
    config = ENCODERS[kind](**BERT, num_labels=3) if kind in ENCODERS else LlamaConfig(**rig.LLAMA, num_labels=3)
    model = rig.make_model(config, AutoModelForSequenceClassification)
    targets = ["query", "key"] if kind in ENCODERS else ATTENTION
    adapted = rig.adapt(model, tmp_path / "adapter", target_modules=targets, task_type="SEQ_CLS")
    with serve(model, tmp_path / "base") as llm:
        (found,) = llm.classify(
            [PROMPT], use_activation=False, lora_request=LoRARequest("a", str(tmp_path / "adapter"))
        )
        (plain,) = llm.classify([PROMPT], use_activation=False)
    torch.testing.assert_close(torch.tensor(list(found.values())), rig.outputs_of(adapted)[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(list(plain.values())), rig.outputs_of(model)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [*ENCODERS, "decoder"])
def test_embeddings_are_served(tmp_path: Path, kind: str):
    config = ENCODERS[kind](**BERT) if kind in ENCODERS else LlamaConfig(**rig.LLAMA)
    model = rig.make_model(config, AutoModel)
    targets = ["query", "key", "dense"] if kind in ENCODERS else ATTENTION
    adapted = rig.adapt(model, tmp_path / "adapter", target_modules=targets, task_type="FEATURE_EXTRACTION")
    adapted.merge_and_unload().save_pretrained(str(tmp_path / "merged"))
    with serve(model, tmp_path / "base", task="embed") as llm:
        found = llm.embed([PROMPT, PROMPT[:4]], lora_request=[LoRARequest("a", str(tmp_path / "adapter")), None])
        plain = llm.embed([PROMPT, PROMPT[:4]])
    with LLM(tmp_path / "merged", **{**OPTIONS, "enable_lora": False, "task": "embed"}) as llm:
        wanted = llm.embed([PROMPT])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(plain[1]), rtol=1e-3, atol=1e-3)
    assert (torch.tensor(found[0]) - torch.tensor(plain[0])).abs().max() > 1e-2
