"""Engines over a tiny checkpoint with LoRA adapters, and engines over the same weights with an adapter merged."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headrace.base.adapters import AdapterConfig
from headrace.base.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.parallel import DeviceConfig
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.service.build import build_engine
from headrace.service.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "execution"))

from tiny_checkpoint import write_tiny_checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB = 199


def write_adapter(base: Path, folder: Path, seed: int, *, rank: int = 4, targets: tuple[str, ...] = TARGETS) -> Path:
    """An adapter of PEFT for a checkpoint, with random weights large enough to change what it says."""
    generator, weights = torch.Generator().manual_seed(seed), load_file(base / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if name.rpartition(".weight")[0].rpartition(".")[2] in targets:
            module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(base: Path, adapter: Path, folder: Path) -> Path:
    """A checkpoint with an adapter merged into its weights."""
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in tensors if "lora_A" in name]:
        own = name.removeprefix("base_model.model.").replace(".lora_A", "")
        weights[own] = weights[own] + 2.0 * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


@dataclass
class Answer:
    """What came of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def error(self) -> str:
        finish = self.outputs[-1].finish
        return finish.error.kind if finish is not None and finish.error is not None else ""


def ask(
    request_id: str, prompt: list[int], adapter: str = "", *, max_tokens: int = 8, sampling: SamplingSpec | None = None
) -> EngineRequest:
    spec = sampling or SamplingSpec(num_logprobs=0)
    return EngineRequest(request_id, prompt, spec, StopSpec(max_tokens=max_tokens), adapter=adapter)


def drain(engine: Engine, answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    """Run until nothing is left."""
    answers = {} if answers is None else answers
    while engine.has_work:
        take(engine.step(), answers)
    engine.check()
    return answers


def take(outputs: list[RequestOutput], answers: dict[str, Answer]) -> None:
    for output in outputs:
        answer = answers.setdefault(output.request_id, Answer())
        answer.outputs.append(output)
        answer.token_ids += output.token_ids
        answer.logprobs += [entry.logprob for entry in output.logprobs or []]


def make_config(
    model: Path, *, adapters: AdapterConfig | None = None, device: str = "cpu", dtype: str = "float32",
    **options: object
) -> EngineConfig:
    scheduler = {"max_running_requests": 8, "max_step_tokens": 24, **options}
    cache = CacheConfig(page_size=4 if device == "cpu" else None, kv_pages=120)
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype=dtype, skip_tokenizer=True),
        cache=cache, device=DeviceConfig(device=device, threads=1),
        scheduler=SchedulerConfig(**scheduler), adapters=adapters or AdapterConfig(),
    )


class Rig:
    """``num_adapters`` adapters of different ranks, named a0, a1 and so on, and oracles with each merged."""

    def __init__(
        self, folder: Path, *, num_adapters: int = 3, max_loras: int = 2, shape: dict[str, int] | None = None,
        **options: object
    ):
        self.folder, self.base = folder, write_tiny_checkpoint(folder / "base", 5, **(shape or {}))
        self._options = options
        self.paths = [
            write_adapter(self.base, folder / f"a{i}", i, rank=1 + 3 * i, targets=TARGETS[i % 3 :])
            for i in range(num_adapters)
        ]
        modules = " ".join(f"a{i}={path}" for i, path in enumerate(self.paths))
        adapters = AdapterConfig(enable_lora=True, max_loras=max_loras, lora_modules=modules)
        self.engine = build_engine(make_config(self.base, adapters=adapters, **options))
        self._oracles: dict[str, Engine] = {}

    def expect(self, adapter: str, request: EngineRequest) -> Answer:
        """What the model with that adapter merged says to a request, alone."""
        if adapter not in self._oracles:
            path = self.base
            if adapter:
                path = merge(self.base, self.folder / adapter, self.folder / f"{adapter}-merged")
            self._oracles[adapter] = build_engine(make_config(path, **self._options))
        engine = self._oracles[adapter]
        alone = EngineRequest(request.request_id, request.prompt_token_ids, request.sampling, request.stop)
        engine.submit(alone)
        return drain(engine)[request.request_id]

    def close(self) -> None:
        for engine in (self.engine, *self._oracles.values()):
            engine.close()


def check_answer(found: Answer, expected: Answer) -> None:
    """The same tokens with the same probabilities."""
    assert found.token_ids == expected.token_ids
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(expected.logprobs), atol=2e-3, rtol=2e-3)
