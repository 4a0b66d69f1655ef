"""EAGLE-3 heads against plain torch, over the forms in which their checkpoints come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_rig import DraftRig, load_both, write_folder
from family_cases import BASE, VOCAB, config_json, make_oracle, prompt

from headrace.base.errors import ConfigError, ModelError, WeightError
from headrace.execution.draft_loading import DraftChoice
from headrace.layers.vocabulary import Embedding

TARGET_LAYERS, TARGET_SIZE = 6, BASE["hidden_size"]
CLOSE = {"atol": 2e-4, "rtol": 2e-4}

HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": VOCAB, "draft_vocab_size": 40, "hidden_size": 48,
    "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "hidden_act": "silu",
}
OUTSIDE = ("architectures", "draft_vocab_size")
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 40,
    "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "target_hidden_size": TARGET_SIZE,
    "transformer_layer_config": {name: value for name, value in HEAD.items() if name not in OUTSIDE},
    "speculators_config": {
        "algorithm": "eagle3", "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
    },
}
# config, options of `make_tensors`, and the layers whose inputs are read
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "one file": (HEAD, {}, [2, 3, 3]),
    "speculators": (SPECULATORS, {"layer": "layers.{i}", "embedding": True, "fc_bias": True}, [1, 3, 6]),
    "norms": (
        {**HEAD, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4,
         "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "norm_before_fc": True}},
        {"prefix": "model.", "norms_each": True, "norms_input": True}, [1, 3, 5],
    ),
    "last hidden state": (
        {**HEAD, "eagle_config": {"use_aux_hidden_state": False}, "head_dim": 16}, {"has_fc": False}, [],
    ),
    "two layers, two features, the target's head": (
        {**HEAD, "num_hidden_layers": 2, "attention_bias": True, "draft_vocab_size": None, "num_aux_hidden_states": 2,
         "eagle_aux_hidden_state_layer_ids": [0, 5]},
        {"layer": "layers.{i}", "head": False, "num_layers": 2, "bias": True}, [0, 5],
    ),
    "another width": (
        {**HEAD, "hidden_size": 32, "target_hidden_size": TARGET_SIZE, "num_attention_heads": 2,
         "num_key_value_heads": 1}, {"embedding": True}, [2, 3, 3],
    ),
    "tied, qk norms": (
        {**HEAD, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VOCAB, "tie_word_embeddings": True},
        {"embedding": True, "head": False, "d2t": False, "qk_norm": True}, [2, 3, 3],
    ),
}


def make_tensors(
    config: dict[str, Any], count: int, *, layer: str = "midlayer", prefix: str = "", embedding: bool = False,
    head: bool = True, fc_bias: bool = False, norms_each: bool = False, norms_input: bool = False, has_fc: bool = True,
    num_layers: int = 1, bias: bool = False, d2t: bool = True, qk_norm: bool = False,
) -> dict[str, torch.Tensor]:
    """A random head under its checkpoint names."""
    flat = {**config, **config.get("transformer_layer_config", {})}
    size, inner, heads, kv = (
        flat[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = flat.get("head_dim") or size // heads
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, mean: float = 0.0, scale: float = 0.2) -> torch.Tensor:
        return mean + scale * torch.randn(*shape, generator=generator)

    tensors: dict[str, torch.Tensor] = {"norm.weight": random(size, mean=1.0)}
    if has_fc:
        tensors["fc.weight"] = random(size, count * TARGET_SIZE, scale=0.1)
    if fc_bias:
        tensors["fc.bias"] = random(size)
    if norms_input:
        tensors["input_norm.weight"] = random(count * TARGET_SIZE, mean=1.0)
    if norms_each:
        tensors |= {f"fc_norm.{i}.weight": random(TARGET_SIZE, mean=1.0) for i in range(count)}
    for i in range(num_layers):
        own = layer.replace("{i}", str(i))
        width = 2 * size if i == 0 else size
        for name, rows, columns in (
            ("q", heads * dim, width), ("k", kv * dim, width), ("v", kv * dim, width), ("o", size, heads * dim)
        ):
            tensors[f"{own}.self_attn.{name}_proj.weight"] = random(rows, columns)
            if bias:
                tensors[f"{own}.self_attn.{name}_proj.bias"] = random(rows)
        for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            tensors[f"{own}.mlp.{name}_proj.weight"] = random(rows, columns)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            tensors[f"{own}.{name}.weight"] = random(size, mean=1.0)
        if qk_norm:
            tensors |= {f"{own}.self_attn.{name}_norm.weight": random(dim, mean=1.0) for name in "qk"}
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    if embedding:
        tensors["embed_tokens.weight"] = random(VOCAB, size, scale=0.5)
    if head:
        tensors["lm_head.weight"] = random(config["draft_vocab_size"], size)
    if head and d2t:
        ids = torch.randperm(VOCAB, generator=generator)[: config["draft_vocab_size"]].sort().values
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


class Oracle:
    """The head in plain torch, computed over all positions each time. ``inputs`` are the combined features, or the
    recycled states, of each position."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], target: Any):
        self.config = {**config, **config.get("transformer_layer_config", {})}
        self.eagle = config.get("eagle_config", {})
        self.t = {
            name.removeprefix("model.").replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()
        }
        self.embedding = self.t.get("embed_tokens.weight", target.model.embed_tokens.weight.data)
        self.head = self.t.get(
            "lm_head.weight", self.embedding if config.get("tie_word_embeddings") else target.lm_head.weight.data
        )

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.t[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        if "fc.weight" not in self.t:
            return features
        if "input_norm.weight" in self.t:
            features = self.norm(features, "input_norm")
        if "fc_norm.0.weight" in self.t:
            chunks = features.chunk(features.shape[1] // TARGET_SIZE, dim=1)
            features = torch.cat([self.norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], dim=1)
        return self.linear(features, "fc")

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [T, H, E] at positions 0 to T - 1."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * self.config["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def attend(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        heads, kv = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self.linear(x, f"{layer}.self_attn.{name}_proj").unflatten(1, (count, -1))
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        )
        if f"{layer}.self_attn.q_norm.weight" in self.t:
            q, k = self.norm(q, f"{layer}.self_attn.q_norm"), self.norm(k, f"{layer}.self_attn.k_norm")
        q, k = self.rotate(q), self.rotate(k)
        k, v = k.repeat_interleave(heads // kv, dim=1), v.repeat_interleave(heads // kv, dim=1)
        logits = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
        logits += torch.full(logits.shape[1:], float("-inf")).triu(1)
        out = torch.einsum("hts,shd->thd", logits.softmax(-1), v).flatten(1)
        return self.linear(out, f"{layer}.self_attn.o_proj")

    def forward(self, tokens: list[int], inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states before the final norm, [T, D]; ``tokens[p]`` is the one after position p."""
        embedded = F.embedding(torch.tensor(tokens), self.embedding)
        hidden = inputs
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            if i == 0:
                normed = self.norm(hidden, f"{layer}.hidden_norm")
                x = torch.cat((self.norm(embedded, f"{layer}.input_layernorm"), normed), dim=1)
                hidden = normed if self.config.get("norm_before_residual") else hidden
            else:
                x = self.norm(hidden, f"{layer}.input_layernorm")
            hidden = hidden + self.attend(x, layer)
            x = self.norm(hidden, f"{layer}.post_attention_layernorm")
            gate = F.silu(self.linear(x, f"{layer}.mlp.gate_proj")) * self.linear(x, f"{layer}.mlp.up_proj")
            hidden = hidden + self.linear(gate, f"{layer}.mlp.down_proj")
        return hidden

    def token(self, hidden: torch.Tensor) -> int:
        best = int((self.norm(hidden, "norm") @ self.head.T).argmax())
        return best + int(self.t["d2t"][best]) if "d2t" in self.t else best

    def recycle(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden, "norm") if self.config.get("norm_output") else hidden

    def propose(self, tokens: list[int], inputs: torch.Tensor, count: int) -> list[int]:
        """A chain after ``tokens`` (the ones after each position)."""
        drafts: list[int] = []
        while True:
            hidden = self.forward([*tokens, *drafts], inputs)[-1:]
            drafts.append(self.token(hidden))
            if len(drafts) == count:
                return drafts
            inputs = torch.cat((inputs, self.recycle(hidden)))


@pytest.fixture(scope="module")
def target() -> Any:
    return make_oracle("Llama", {"num_hidden_layers": TARGET_LAYERS})


@pytest.fixture(scope="module")
def target_folder(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("target"), config_json(target), target.state_dict())


def oracle_features(target: Any, tokens: list[int], layers: list[int]) -> torch.Tensor:
    """The hidden states that enter these layers (the number of layers: the final norm); of none, what leaves it."""
    seen: list[torch.Tensor] = []
    hook = target.model.norm.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][0]))
    with torch.no_grad():
        states = target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    entering = [*(state[0] for state in states[:-1]), seen[0]]
    return torch.cat([entering[i] for i in layers], dim=1) if layers else states[-1][0]


@pytest.mark.parametrize("case", CASES)
def test_drafts_equal_plain_torch(case: str, target: Any, target_folder: Path, tmp_path: Path):
    """Features, states and chains over a prompt in chunks, decodes, and drafts that were wrong and are overwritten."""
    config, options, layers = CASES[case]
    tensors = make_tensors(config, len(layers), **options)
    loaded, draft = load_both(
        target_folder, DraftChoice("eagle3", str(write_folder(tmp_path / "head", config, tensors)))
    )
    rig, oracle = DraftRig(loaded, draft), Oracle(config, tensors, target)
    tokens = prompt(0, 24)
    features = oracle_features(target, tokens, layers)
    inputs = oracle.combine(features)
    others = rig.start(prompt(1, 24))
    row = rig.start(tokens)
    for count in (7, 6, 1, 3, 1):  # chunks, then verified tokens
        begin, end = row.computed, row.computed + count
        own, hidden = rig.step(row, count)
        rig.step(others, count)
        torch.testing.assert_close(own, features[begin:end], **CLOSE)
        expected = oracle.forward(tokens[1 : end + 1], inputs[:end])
        torch.testing.assert_close(hidden, expected[begin:], **CLOSE)
        assert rig.propose(row, hidden[-1:], 5) == oracle.propose(tokens[1 : end + 1], inputs[:end], 5)
    assert draft.model.num_tokens == (3 if case == "speculators" else None)


def test_a_step_of_several_rows(target: Any, target_folder: Path, tmp_path: Path):
    config, options, layers = CASES["one file"]
    tensors = make_tensors(config, len(layers), **options)
    rig = DraftRig(*load_both(
        target_folder, DraftChoice("eagle3", str(write_folder(tmp_path / "head", config, tensors)))
    ))
    rows = [rig.start(prompt(seed, 12)) for seed in (0, 1)]
    apart = [rig.step(row, 10)[1] for row in rows]
    features = [oracle_features(target, row.tokens[:10], layers) for row in rows]
    with torch.inference_mode():
        inputs = rig.drafter.combine(torch.cat(features))
        batch = rig.batch("draft", [(row, 0, row.tokens[1:11]) for row in rows])
        torch.testing.assert_close(rig.drafter.forward(batch, inputs), torch.cat(apart), **CLOSE)


@pytest.mark.parametrize("case", ["one file", "two layers, two features, the target's head"])
def test_the_last_layer_computes_what_is_wanted(case: str, target: Any, target_folder: Path, tmp_path: Path):
    """And a later step finds keys and values of all tokens."""
    config, options, layers = CASES[case]
    tensors = make_tensors(config, len(layers), **options)
    rig = DraftRig(*load_both(
        target_folder, DraftChoice("eagle3", str(write_folder(tmp_path / "head", config, tensors)))
    ))
    assert rig.drafter.prunes_last_layer
    oracle, texts = Oracle(config, tensors, target), [prompt(0, 12), prompt(1, 9)]
    rows, inputs = [rig.start(text) for text in texts], [oracle_features(target, text[:-1], layers) for text in texts]
    combined = [oracle.combine(features) for features in inputs]
    expected = [oracle.forward(text[1:], x) for text, x in zip(texts, combined, strict=True)]
    spans = [(row, 0, text[1:-1]) for row, text in zip(rows, texts, strict=True)]
    hidden = rig.run_wanted(spans, torch.cat([x[:-1] for x in combined]))
    torch.testing.assert_close(hidden, torch.stack([states[-2] for states in expected]), **CLOSE)
    spans = [(row, len(text) - 2, text[-1:]) for row, text in zip(rows, texts, strict=True)]
    hidden = rig.run_wanted(spans, torch.cat([x[-1:] for x in combined]))
    torch.testing.assert_close(hidden, torch.stack([states[-1] for states in expected]), **CLOSE)


def test_equal_caches_share_a_group(target_folder: Path, tmp_path: Path):
    """The head's layer is numbered after the target's, and joins its group where the spec is the same."""
    groups = {}
    for name, changes in (("same", {"num_key_value_heads": 2}), ("other", {"num_key_value_heads": 4})):
        config = {**HEAD, **changes}
        folder = write_folder(tmp_path / name, config, make_tensors(config, 3))
        _, draft = load_both(target_folder, DraftChoice("eagle3", str(folder)))
        groups[name] = [group.layers for group in draft.groups]
        assert (draft.first_layer, draft.num_layers) == (TARGET_LAYERS, TARGET_LAYERS + 1)
        assert not any(isinstance(module, Embedding) for module in draft.model.modules()), "the target's, not its own"
    assert groups == {"same": [[*range(TARGET_LAYERS), TARGET_LAYERS]], "other": [[*range(TARGET_LAYERS)], [6]]}


def test_random_weights(target_folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    rig = DraftRig(*load_both(target_folder, DraftChoice("eagle3", str(tmp_path), load_format="dummy")))
    row = rig.start(prompt(0, 9))
    _, hidden = rig.step(row, 8)
    drafts = rig.propose(row, hidden[-1:], 4)
    assert hidden.isfinite().all() and all(0 <= token < 40 for token in drafts)


WRONG: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], type[Exception], str]] = {
    "another target": ({"target_hidden_size": 64}, {}, ConfigError, "64 numbers.*made for another model"),
    "layers beyond": (
        {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, {}, ConfigError, "layers 2, 5, 9 .* has 6"
    ),
    "too few layers": ({"num_aux_hidden_states": 4}, {}, ConfigError, "eagle_aux_hidden_state_layer_ids must list"),
    "layers of another type": ({"eagle_aux_hidden_state_layer_ids": "2"}, {}, ConfigError, "list of layer numbers"),
    "ids beyond": ({}, {"d2t": torch.full((40,), 90)}, WeightError, "d2t names tokens 90 to 129"),
    "ids of another length": ({}, {"d2t": torch.zeros(3, dtype=torch.int64)}, WeightError, "d2t must be 40"),
    "missing": ({}, {"fc.weight": torch.zeros(0)}, WeightError, "fc.weight"),
    "a wider vocabulary": ({"draft_vocab_size": 200}, {"d2t": None}, ConfigError, "made for another model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_serve_is_told(case: str, target_folder: Path, tmp_path: Path):
    changes, replaced, error, told = WRONG[case]
    tensors = {**make_tensors(HEAD, 3), **replaced}
    folder = write_folder(tmp_path, {**HEAD, **changes}, {k: t for k, t in tensors.items() if t is not None})
    with pytest.raises(error, match=told):
        load_both(target_folder, DraftChoice("eagle3", str(folder)))


def test_a_pickle_is_refused(target_folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle is opened")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle.*convert it to safetensors"):
        load_both(target_folder, DraftChoice("eagle3", str(tmp_path)))


def test_a_method_without_a_model(target_folder: Path):
    with pytest.raises(ConfigError, match="needs a model"):
        load_both(target_folder, DraftChoice("eagle3"))
    with pytest.raises(ConfigError, match="unknown drafter 'eagle4'"):
        load_both(target_folder, DraftChoice("eagle4"))


def test_ids_are_not_added_up_when_weights_are_loaded_again(target_folder: Path, tmp_path: Path):
    tensors = make_tensors(HEAD, 3)
    query_folder = write_folder(tmp_path, HEAD, tensors)
    _, draft = load_both(target_folder, DraftChoice("eagle3", str(query_folder)))
    for _ in range(2):
        assert torch.equal(draft.model.target_ids, torch.arange(40) + tensors["d2t"])
        list(draft.model._take_ids(tensors.items()))
