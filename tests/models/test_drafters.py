"""Multi-token prediction modules against plain torch, a model of its own against itself, and drafters of other
packages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_rig import DraftRig, load_both, write_folder
from family_cases import BASE, CASES, VOCAB, config_json, make_oracle, prompt

from headrace.base.errors import ConfigError, WeightError
from headrace.base.registry import Registry
from headrace.execution.draft_loading import DraftChoice
from headrace.layers.build import Build
from headrace.models.catalog import find_family
from headrace.models.drafters import contract
from headrace.models.drafters.mtp import MTP
from headrace.models.source import ModelSource

CLOSE = {"atol": 3e-4, "rtol": 3e-4}
SIZE = BASE["hidden_size"]
MTP_CASES = {
    "deepseek-v3": CASES["deepseek-v3"],
    "deepseek-v3, no query rank": CASES["deepseek-v3-halves"],
    "glm-4.5": CASES["glm4-moe"],
}


class MtpOracle:
    """The module in plain torch around transformers' own layer, which is run over all positions each time."""

    def __init__(self, model: Any):
        self.model, self.number = model, model.config.num_hidden_layers
        generator = torch.Generator().manual_seed(5)
        self.norms = {
            name: 1 + 0.2 * torch.randn(SIZE, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        self.projection = 0.2 * torch.randn(SIZE, 2 * SIZE, generator=generator)
        # one more layer of the last one's kind: a model with one layer more, made with another seed
        self.layer = type(model.model.layers[-1])(model.config, self.number - 1).eval()
        with torch.no_grad():
            for name, tensor in (*self.layer.named_parameters(), *self.layer.named_buffers()):
                tensor.copy_(("norm" in name) + 0.2 * torch.randn(tensor.shape, generator=generator))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the module, with copies of embedding and head, as published checkpoints have them."""
        prefix = f"model.layers.{self.number}."
        named = {f"{name}.weight": tensor for name, tensor in self.norms.items()} | self.layer.state_dict()
        named["eh_proj.weight"] = self.projection
        named["embed_tokens.weight"] = self.model.model.embed_tokens.weight.data
        named["shared_head.head.weight"] = self.model.lm_head.weight.data
        return {prefix + name: tensor for name, tensor in named.items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.norms[name]

    @torch.no_grad()
    def forward(self, tokens: list[int], inputs: torch.Tensor) -> torch.Tensor:
        """States after the final norm [T, D]; ``tokens[p]`` is the one after position p."""
        embedded = F.embedding(torch.tensor(tokens), self.model.model.embed_tokens.weight)
        x = torch.cat((self.norm(embedded, "enorm"), self.norm(inputs, "hnorm")), dim=1) @ self.projection.T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((1, 1, len(tokens), len(tokens)), float("-inf")).triu(1)
        rotary = self.model.model.rotary_emb(x[None], positions)
        out = self.layer(x[None], attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        return self.norm(out.reshape(len(tokens), SIZE), "shared_head.norm")

    def propose(self, tokens: list[int], inputs: torch.Tensor, count: int) -> list[int]:
        drafts: list[int] = []
        while True:
            hidden = self.forward([*tokens, *drafts], inputs)[-1:]
            drafts.append(int((hidden @ self.model.lm_head.weight.T).argmax()))
            if len(drafts) == count:
                return drafts
            inputs = torch.cat((inputs, hidden))


@pytest.fixture(scope="module", params=list(MTP_CASES))
def mtp(request: pytest.FixtureRequest) -> MtpOracle:
    return MtpOracle(make_oracle(*MTP_CASES[request.param]))


def write_mtp(folder: Path, oracle: MtpOracle, **changes: Any) -> Path:
    config = {**config_json(oracle.model), "num_nextn_predict_layers": 1, **changes}
    return write_folder(folder, config, {**oracle.model.state_dict(), **oracle.tensors()})


def test_multi_token_prediction_equals_plain_torch(mtp: MtpOracle, tmp_path: Path):
    """States and chains, over a prompt in chunks, decodes, and drafts that are overwritten."""
    loaded, draft = load_both(write_mtp(tmp_path, mtp), DraftChoice("mtp"))
    assert [len(group.layers) for group in draft.groups] == [mtp.number + 1], "it shares the target's cache group"
    rig, tokens = DraftRig(loaded, draft), prompt(0, 24)
    with torch.no_grad():
        states = mtp.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0]
    row, other = rig.start(tokens), rig.start(prompt(1, 24))
    for count in (7, 6, 1, 3, 1):
        begin, end = row.computed, row.computed + count
        own, hidden = rig.step(row, count)
        rig.step(other, count)
        torch.testing.assert_close(own, states[begin:end], **CLOSE)
        expected = mtp.forward(tokens[1 : end + 1], states[:end])
        torch.testing.assert_close(hidden, expected[begin:], **CLOSE)
        assert rig.propose(row, hidden[-1:], 4) == mtp.propose(tokens[1 : end + 1], states[:end], 4)


def test_the_last_layer_computes_what_is_wanted(mtp: MtpOracle, tmp_path: Path):
    rig = DraftRig(*load_both(write_mtp(tmp_path, mtp), DraftChoice("mtp")))
    if not rig.drafter.prunes_last_layer:
        pytest.skip("this kind of attention computes every token")
    tokens, inputs = prompt(0, 12), torch.randn(11, SIZE)
    row = rig.start(tokens)
    hidden = rig.run_wanted([(row, 0, tokens[1:])], inputs.clone())
    torch.testing.assert_close(hidden, mtp.forward(tokens[1:], inputs)[-1:], **CLOSE)


def test_a_checkpoint_without_its_module(mtp: MtpOracle, tmp_path: Path):
    config = config_json(mtp.model)
    stated = write_folder(tmp_path / "stated", {**config, "num_nextn_predict_layers": 1}, mtp.model.state_dict())
    with pytest.raises(WeightError, match=rf"no tensors model\.layers\.{mtp.number}\.\*.*left out when it was saved"):
        load_both(stated, DraftChoice("mtp"))
    plain = write_folder(tmp_path / "plain", {**config, "num_nextn_predict_layers": 0}, mtp.model.state_dict())
    with pytest.raises(ConfigError, match="no multi-token prediction module"):
        load_both(plain, DraftChoice("mtp"))
    with pytest.raises(ConfigError, match="takes no model"):
        load_both(stated, DraftChoice("mtp", str(plain)))
    half = {**mtp.model.state_dict(), **mtp.tensors()}
    del half[f"model.layers.{mtp.number}.eh_proj.weight"]
    with pytest.raises(WeightError, match="eh_proj"):
        load_both(write_folder(tmp_path / "half", {**config, "num_nextn_predict_layers": 1}, half), DraftChoice("mtp"))


def test_tensors_are_read_one_by_one(mtp: MtpOracle):
    """A tensor is valid only until the next one is requested: here it is overwritten then."""
    config = {**config_json(mtp.model), "num_nextn_predict_layers": 1}
    family = find_family(config["architectures"][0])
    spec, build = family.read_config(config), Build(torch.device("cpu"), torch.float32)
    source = ModelSource("model", "folder", Path(), config)
    target = contract.DraftTarget(source, family, spec, family.build_model(spec, build))
    drafter = MTP.build_model(contract.DraftQuery(source, frozenset(), target, replace(build), "float32"))

    def borrow() -> Any:
        for name, tensor in mtp.tensors().items():
            lent = tensor.clone()
            yield name, lent
            lent.fill_(float("nan"))

    drafter.load_weights(borrow())
    assert all(parameter.isfinite().all() for parameter in drafter.parameters())


def test_models_without_such_layers(tmp_path: Path):
    oracle = make_oracle(*CASES["llama"])
    folder = write_folder(tmp_path, {**config_json(oracle), "num_nextn_predict_layers": 1}, oracle.state_dict())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM\) brings no multi-token prediction module"):
        load_both(folder, DraftChoice("mtp"))


def test_models_whose_features_are_of_several_streams(tmp_path: Path):
    """Heads that read one hidden state of a layer cannot serve a family that has several; its own module can."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 8,
        "num_hidden_layers": 1, "compress_ratios": [0], "num_attention_heads": 2, "head_dim": 16,
        "qk_rope_head_dim": 8, "q_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "o_groups": 1,
        "o_lora_rank": 8, "max_position_embeddings": 512, "num_nextn_predict_layers": 1,
    }
    head = {
        "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2,
    }
    for name, written in (("target", config), ("head", head)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(written))
    eagle = DraftChoice("eagle3", str(tmp_path / "head"), load_format="dummy")
    with pytest.raises(ConfigError, match=r"family deepseek_v4 has 4; choose another method"):
        load_both(tmp_path / "target", eagle, load_format="dummy")
    _, own = load_both(tmp_path / "target", DraftChoice("mtp"), load_format="dummy")
    assert own.model.features.count == 4 and own.model.input_size == 64


# models of their own: another family, other heads, a window, a tied head
DRAFTERS = ("llama-tied-biased", "qwen3", "mistral-window", "gemma3", "deepseek-v3")


def write_model(folder: Path, name: str, tokens: dict[str, int] | None = None, **options: Any) -> tuple[Path, Any]:
    kind, known = CASES[name]
    oracle = make_oracle(kind, {**known, **options})
    write_folder(folder, config_json(oracle), oracle.state_dict())
    if tokens is not None:
        added = [{"id": VOCAB - 1, "content": "<end>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": added}))
    return folder, oracle


def continue_greedily(model: Any, tokens: list[int], count: int) -> list[int]:
    with torch.no_grad():
        return model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)[0, len(tokens) :].tolist()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_model_of_its_own_drafts_what_it_would_say(name: str, tmp_path: Path):
    """Every proposal equals the drafter's greedy continuation of all that the row has, the newest token included:
    after chunks of a prompt, after decodes, and after drafts that the target did not take."""
    target, _ = write_model(tmp_path / "target", "llama")
    folder, drafter = write_model(tmp_path / "drafter", name)
    rig, tokens = DraftRig(*load_both(target, DraftChoice("draft_model", str(folder)))), prompt(0, 24)
    row, other = rig.start(tokens), rig.start(prompt(1, 24))
    for count in (7, 6, 1, 3, 1):
        _, hidden = rig.step(row, count)
        rig.step(other, count)
        known = tokens[: row.computed + 1]
        assert rig.propose(row, hidden[-1:], 5) == continue_greedily(drafter, known, 5)


def test_caches_of_other_numbers_of_heads_are_apart(tmp_path: Path):
    """A backend serves one number of query heads, so equal caches are then two groups: as in small and large models of
    one family."""
    target, _ = write_model(tmp_path / "target", "llama")
    found = {}
    for name, heads in (("alike", 4), ("other", 6)):
        folder, drafter = write_model(tmp_path / name, "llama", num_attention_heads=heads, head_dim=12)
        rig = DraftRig(*load_both(target, DraftChoice("draft_model", str(folder))))
        found[name] = [group.layers for group in rig.groups]
        assert len({group.spec for group in rig.groups}) == 1
        row = rig.start(prompt(0, 9))
        _, hidden = rig.step(row, 8)
        assert rig.propose(row, hidden[-1:], 3) == continue_greedily(drafter, row.tokens, 3)
    assert found == {"alike": [[0, 1, 2, 3]], "other": [[0, 1], [2, 3]]}


def test_equal_tokenizers_may_be_padded_differently(tmp_path: Path):
    vocabulary = {f"t{i}": i for i in range(VOCAB - 1)}
    target, _ = write_model(tmp_path / "target", "llama", vocabulary)
    for name, size in (("more", VOCAB + 7), ("fewer", VOCAB - 5)):
        folder, _ = write_model(tmp_path / name, "qwen3", vocabulary, vocab_size=size)
        rig = DraftRig(*load_both(target, DraftChoice("draft_model", str(folder))))
        row = rig.start([VOCAB - 1, VOCAB - 2, *prompt(0, 8)])  # tokens that the smaller one has no embedding for
        _, hidden = rig.step(row, 9)
        assert all(0 <= token < min(size, VOCAB) for token in rig.propose(row, hidden[-1:], 4))


def test_another_tokenizer_is_refused(tmp_path: Path):
    target, _ = write_model(tmp_path / "target", "llama", {f"t{i}": i for i in range(VOCAB - 1)})
    renamed, _ = write_model(tmp_path / "renamed", "qwen3", {f"t{i}" if i != 5 else "t_5": i for i in range(VOCAB - 1)})
    rotated, _ = write_model(tmp_path / "rotated", "qwen3", {f"t{i}": (i + 1) % (VOCAB - 1) for i in range(VOCAB - 1)})
    load_both(target, DraftChoice("draft_model", str(renamed)))
    with pytest.raises(ConfigError, match=r"another tokenizer.*96 of 97 tokens differ, first 0: 't95', 't0'"):
        load_both(target, DraftChoice("draft_model", str(rotated)))
    unknown, _ = write_model(tmp_path / "unknown", "qwen3", vocab_size=VOCAB + 1)
    with pytest.raises(ConfigError, match="has 98 tokens and target 97"):
        load_both(target, DraftChoice("draft_model", str(unknown)))


OUTSIDE = '''
from headrace.models.drafters.contract import DraftKind
from headrace.models.drafters.own_model import OWN_MODEL

class Mine(DraftKind):
    {version}
    def build_model(self, query):
        return OWN_MODEL.build_model(query)

MINE = Mine()
'''


@pytest.mark.parametrize(("version", "told"), [("plugin_api = 1", ""), ("plugin_api = 7", "made for plug-in API 7")])
def test_a_kind_of_another_package(version: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / f"mine_{told[-1:]}.py").write_text(OUTSIDE.replace("{version}", version))
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[headrace.draft_models]\nmine = mine_{told[-1:]}:MINE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[contract.DraftKind] = Registry("drafter")
    monkeypatch.setattr(contract, "DRAFT_KINDS", registry)
    target, _ = write_model(tmp_path / "target", "llama")
    if told:
        with pytest.raises(ConfigError, match=told):
            load_both(target, DraftChoice("mine", str(target)))
    else:
        assert load_both(target, DraftChoice("mine", str(target)))[1].num_layers == 4
