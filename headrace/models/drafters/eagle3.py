"""EAGLE-3 (arXiv:2503.01840): one layer, sometimes more, over hidden states of three layers of the target.

Serves checkpoints with one config.json for all (architectures LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM) and those
of the "speculators" form, where ``transformer_layer_config`` holds what describes the layer.
T tokens, D hidden size of the drafter, F size of the target's features, n rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.base.errors import ConfigError, WeightError
from headrace.layers.attention.contract import KvPages
from headrace.layers.batch import FeatureSpec, ForwardBatch
from headrace.layers.build import Build
from headrace.layers.decoder.block import Block, make_block
from headrace.layers.draft import DraftModel
from headrace.layers.linear import Linear
from headrace.layers.loading import fill_targets, find_targets
from headrace.layers.mlp import GatedMlp
from headrace.layers.names import SPLIT_NAMES
from headrace.layers.norm import RmsNorm
from headrace.layers.residual import Residual
from headrace.layers.rotary import RotaryTable
from headrace.layers.self_attention import Attention
from headrace.layers.spec import AttentionSpec, DecoderSpec, MlpSpec
from headrace.layers.vocabulary import Embedding, Head
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_attention, read_decoder
from headrace.models.drafters.contract import DraftKind, DraftQuery, DraftTarget
from headrace.models.source import ModelSource

NESTED = "transformer_layer_config"
"""Key of the "speculators" form."""

NAMES = {
    **{
        theirs.removeprefix("model."): ours for theirs, ours in SPLIT_NAMES.items()
        if theirs not in ("model.embed_tokens", "lm_head")
    },
    "layers.0.input_layernorm": "layers.0.embedding_norm",
    "layers.0.hidden_norm": "layers.0.attention_norm",
    "fc": "fc", "input_norm": "fc_input_norm", "embed_tokens": "embedding", "lm_head": "head",
}
"""Names without ``model.``, and with ``layers.0`` for ``midlayer``."""
HARMLESS = ("rotary_emb.inv_freq", "t2d", "hidden_norm.weight", "lm_head.weight", "embed_tokens.weight")
"""Unused: the inverse of ``d2t``, the second norm that later layers may have, copies of what is tied or shared."""


@dataclass(frozen=True)
class Eagle3Spec:
    """``decoder`` describes layers and vocabulary; of its head, ``draft_vocab_size`` rows exist. ``has_fc``: features
    go through a matrix, before which one norm over all of them (``norms_input``) or one for each (``norms_each``) may
    stand. ``norm_before_residual``: the residual starts with normalised features. ``norm_output``: the next step of a
    chain gets the output after the final norm instead of before it. ``fc_bias`` as it says."""

    decoder: DecoderSpec
    features: FeatureSpec
    target_hidden_size: int
    draft_vocab_size: int
    has_fc: bool
    fc_bias: bool
    norms_input: bool
    norms_each: bool
    norm_before_residual: bool
    norm_output: bool
    num_tokens: int | None


def read_config(config: dict[str, Any], query: DraftQuery) -> Eagle3Spec:
    """The spec of either form; raises `ConfigError`."""
    nested = Fields(config).section(NESTED)
    eagle = Fields(Fields(config).section("eagle_config"))
    # the layer's description lies beside or below the other keys; absent ones are Llama's
    fields = Fields({**config, **nested})
    outer = Fields(config)
    target = query.target
    has_fc = eagle_flag(eagle, outer, "use_aux_hidden_state", True)
    features = _read_features(outer, eagle, target) if has_fc else FeatureSpec(has_final=True)
    attention = read_attention(fields, **({"qk_norm": "head"} if query.has("self_attn.q_norm.weight") else {}))
    decoder = read_decoder(Fields({**fields.config, "architectures": []}), attention=attention)
    spec = Eagle3Spec(
        decoder, features, outer.integer("target_hidden_size", decoder.hidden_size),
        outer.integer("draft_vocab_size", fields.integer("vocab_size")),
        has_fc=has_fc, fc_bias=query.has("fc.bias"),
        norms_input=eagle_flag(eagle, outer, "norm_before_fc", False), norms_each=outer.flag("fc_norm", False),
        norm_before_residual=outer.flag("norm_before_residual", False), norm_output=outer.flag("norm_output", False),
        num_tokens=_read_num_tokens(outer),
    )
    _check(spec, target)
    return spec


def eagle_flag(eagle: Fields, outer: Fields, name: str, default: bool) -> bool:
    """A flag of ``eagle_config``, or of the config itself."""
    return eagle.flag(name, outer.flag(name, default))


def _read_features(outer: Fields, eagle: Fields, target: DraftTarget) -> FeatureSpec:
    """Which layers' inputs are read. Hazard: ``eagle_config.eagle_aux_hidden_state_layer_ids`` numbers layers whose
    output is read, as training frameworks do; the key of the same name outside of it (the "speculators" form) numbers
    hidden states, so its i is what enters layer i."""
    name = "eagle_aux_hidden_state_layer_ids"
    inner, stated = _read_ids(eagle, name), _read_ids(outer, name)
    layers = tuple(i + 1 for i in inner) if inner else stated
    count = outer.integer("num_aux_hidden_states", len(layers) or 3)
    if not layers and count == 3:
        layers = (2, target.num_layers // 2, target.num_layers - 3)
    if len(layers) != count:
        raise ConfigError(
            f"config.json of the drafter: num_aux_hidden_states is {count}, so {name} must list as many layers; it "
            f"lists {len(layers)}", param=name,
        )
    return FeatureSpec(layers)


def _read_ids(fields: Fields, name: str) -> tuple[int, ...]:
    value = fields.config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise ConfigError(
            f"config.json of the drafter: {name} must be a list of layer numbers, got {value!r:.200}", param=name
        )
    return tuple(value)


def _read_num_tokens(outer: Fields) -> int | None:
    """``speculative_tokens`` of the "speculators" form's first proposal method."""
    methods = Fields(outer.section("speculators_config")).config.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    return Fields(first).integer("speculative_tokens") if first.get("speculative_tokens") is not None else None


def _check(spec: Eagle3Spec, target: DraftTarget) -> None:
    target.check_features("eagle3", spec.features)
    decoder = spec.decoder
    if not isinstance(decoder.attention, AttentionSpec) or not isinstance(decoder.mlp, MlpSpec):
        raise ConfigError("eagle3 serves layers with plain attention and a gated MLP", param="speculative_config")
    wanted = target.spec.hidden_size
    if spec.target_hidden_size != wanted:
        raise ConfigError(
            f"the drafter reads hidden states of {spec.target_hidden_size} numbers, and {target.source.name} has "
            f"{wanted}: it was made for another model", param="speculative_config",
        )
    if not spec.has_fc and decoder.hidden_size != wanted:
        raise ConfigError(
            f"the drafter takes hidden states as they are, and its hidden size of {decoder.hidden_size} is not the "
            f"{wanted} of {target.source.name}", param="speculative_config",
        )


class FirstBlock(Block):
    """The layer that reads a token's embedding and a hidden state, each normalised, side by side: 2 D inputs."""

    def __init__(self, spec: Eagle3Spec, rotary: RotaryTable | None, build: Build):
        super().__init__()
        decoder, eps = spec.decoder, spec.decoder.norm.eps
        assert isinstance(decoder.attention, AttentionSpec) and isinstance(decoder.mlp, MlpSpec)
        self.step, self.norm_before_residual = build.step, spec.norm_before_residual
        self.embedding_norm = RmsNorm(build, decoder.hidden_size, eps)
        self.attention_norm = RmsNorm(build, decoder.hidden_size, eps)
        self.attention = Attention(
            decoder.attention, decoder.layers[0], hidden_size=decoder.hidden_size, norm=decoder.norm, rotary=rotary,
            build=build, input_size=2 * decoder.hidden_size,
        )
        self.mlp_norm = RmsNorm(build, decoder.hidden_size, eps)
        self.mlp = GatedMlp(decoder.mlp, decoder.hidden_size, build)

    def begin(self, embedded: torch.Tensor, inputs: torch.Tensor) -> Residual:
        """The residual after this layer, of ``embedded`` [T, D] and ``inputs`` [T, D], which may be overwritten."""
        normed = self.attention_norm(inputs)
        x = self.attention(torch.cat((self.embedding_norm(embedded), normed), dim=1))
        residual = Residual(normed if self.norm_before_residual else inputs)
        residual.keep_rows(self.step.batch.queries)
        residual.pending = x
        if len(x):
            self.mlp.add(self.mlp_norm, residual)
        return residual


class Eagle3Model(DraftModel):
    """See `DraftModel`. Hidden states are those before the final norm, which `compute_ids` applies."""

    def __init__(self, spec: Eagle3Spec, query: DraftQuery):
        decoder, build = spec.decoder, query.build
        super().__init__(
            spec.features, decoder.hidden_size,
            [(layer.attention or decoder.attention).cache_spec(layer, query.kv_dtype) for layer in decoder.layers],
        )
        self.spec, self.step, self.num_tokens = spec, build.step, spec.num_tokens
        self.max_model_len = decoder.max_model_len
        self._schemes, self._target_vocab = build.schemes, query.target.spec.vocab_size
        rope = decoder.layers[0].rope
        rotary = RotaryTable(
            rope, length=build.max_model_len or decoder.max_model_len, device=build.device
        ) if rope else None
        first = FirstBlock(spec, rotary, build)
        self._begin = first.begin
        self._blocks: list[Block] = [
            first, *(make_block(decoder, layer, rotary, build) for layer in decoder.layers[1:])
        ]
        self.layers = nn.ModuleList(self._blocks)
        self._build_fc(spec, build)
        self.norm = RmsNorm(build, decoder.hidden_size, decoder.norm.eps)
        self._build_vocabulary(query)

    def _build_fc(self, spec: Eagle3Spec, build: Build) -> None:
        size, eps = spec.target_hidden_size, spec.decoder.norm.eps
        self.fc = self.fc_input_norm = None
        if spec.has_fc:
            width = spec.features.count * size
            self.fc = Linear(build, width, spec.decoder.hidden_size, bias=spec.fc_bias)
            self.fc_input_norm = RmsNorm(build, width, eps) if spec.norms_input else None
        count = spec.features.count if spec.has_fc and spec.norms_each else 0
        self._fc_norms = [RmsNorm(build, size, eps) for _ in range(count)]
        self.fc_norm = nn.ModuleList(self._fc_norms)

    def _build_vocabulary(self, query: DraftQuery) -> None:
        """Embedding and head: its own where the checkpoint brings them or says that they are tied, else the target's.
        ``_vocabulary`` is a tuple, so that shared ones are no modules of the drafter."""
        self._vocabulary: tuple[Embedding, Head]
        spec, build, target = self.spec, query.build, query.target
        size, vocabulary = spec.decoder.hidden_size, spec.decoder.vocabulary
        has_embedding = query.has("embed_tokens.weight")
        has_head = query.tensors is None or query.has("lm_head.weight")
        self._is_tied = has_embedding and vocabulary.tied and not has_head
        shares_head = not has_head and not self._is_tied
        if (not has_embedding or shares_head) and size != target.spec.hidden_size:
            raise ConfigError(
                f"the drafter lacks an embedding or a head, and cannot share those of {target.source.name}: its hidden "
                f"size is {size}, not {target.spec.hidden_size}", param="speculative_config",
            )
        num_ids = spec.draft_vocab_size if has_head else vocabulary.size if self._is_tied else target.spec.vocab_size
        known = vocabulary.size if has_embedding else target.spec.vocab_size
        if known < target.spec.vocab_size or (num_ids > target.spec.vocab_size and not query.has("d2t")):
            raise ConfigError(
                f"the drafter knows {min(known, num_ids)} tokens and {target.source.name} {target.spec.vocab_size}: it "
                "was made for another model", param="speculative_config",
            )
        embedding = Embedding(build, vocabulary.size, size) if has_embedding else None
        head = None if shares_head else Head(
            build, num_ids, size, weight=embedding.weight if embedding is not None and self._is_tied else None
        )
        self.embedding, self.head = embedding, head
        if embedding is None or head is None:
            shared = target.share_vocabulary("eagle3")
            self._vocabulary = (embedding or shared[0], head or shared[1])
        else:
            self._vocabulary = (embedding, head)
        # target ids of the drafter's own, unless the checkpoint has a d2t
        self.target_ids = nn.Buffer(torch.arange(num_ids, device=build.device), persistent=False)

    @property
    def prunes_last_layer(self) -> bool:
        """See `DraftModel`."""
        return self._blocks[-1].attention.prunes_queries

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See `DraftModel`."""
        names = {**NAMES, **{f"fc_norm.{i}": f"fc_norm.{i}" for i in range(len(self._fc_norms))}}
        if self._is_tied:  # the embedding's tensor fills both
            del names["lm_head"]
        targets = find_targets(self, names)
        fill_targets(targets, self._rename(self._schemes.read(self._take_ids(tensors))), harmless=HARMLESS)

    def _take_ids(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Take the table ``d2t`` [draft vocabulary] int64, which holds the target's id minus the drafter's."""
        for name, tensor in tensors:
            if name.rpartition(".")[2] != "d2t":
                yield name, tensor
                continue
            if tensor.shape != self.target_ids.shape or tensor.is_floating_point():
                raise WeightError(
                    f"the drafter's d2t must be {len(self.target_ids)} whole numbers, as draft_vocab_size says; it is "
                    f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                )
            self.target_ids.copy_(torch.arange(len(tensor), device=tensor.device) + tensor)
            least, most = self.target_ids.aminmax()
            if not 0 <= int(least) <= int(most) < self._target_vocab:
                raise WeightError(
                    f"the drafter's d2t names tokens {int(least)} to {int(most)}, and the served model has "
                    f"{self._target_vocab}: it was made for another model"
                )

    def _rename(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            yield name.removeprefix("model.").replace("midlayer.", "layers.0."), tensor

    def bind_cache(self, pages: list[KvPages | None], group_of_layer: list[int | None]) -> None:
        """See `DraftModel`."""
        for block, block_pages, group in zip(self._blocks, pages, group_of_layer, strict=True):
            block.attention.bind(block_pages, group)

    def combine(self, features: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        if self.fc is None:
            return features
        if self.fc_input_norm is not None:
            features = self.fc_input_norm(features)
        if self._fc_norms:
            pieces = features.split(self.spec.target_hidden_size, dim=1)
            features = torch.cat(
                [norm(piece.contiguous()) for norm, piece in zip(self._fc_norms, pieces, strict=True)], dim=1
            )
        return self.fc(features)

    def forward(self, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        last = self._blocks[-1]
        # tokens' rows without the scale that some targets apply: heads are trained on the plain matrix
        embedded = self._vocabulary[0].look_up(batch.token_ids)
        self.step.batch = batch.for_last_layer(last.attention.group) if len(self._blocks) == 1 else batch
        residual = self._begin(embedded, inputs)
        for block in self._blocks[1:]:
            if block is last:
                self.step.batch = batch.for_last_layer(last.attention.group)
            block(residual)
        return residual.add_pending()

    def compute_ids(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        return self.target_ids.index_select(0, self._vocabulary[1](self.norm(hidden)).argmax(-1))

    def recycle(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DraftModel`."""
        return self.norm(hidden) if self.spec.norm_output else hidden


class Eagle3(DraftKind):
    """See `DraftKind`."""

    def fits(self, source: ModelSource) -> bool:
        """By the architecture, or by what the "speculators" form says of itself."""
        names = (source.architecture, str(source.config.get("speculators_model_type", "")))
        return any("eagle3" in name.lower() for name in names)

    def build_model(self, query: DraftQuery) -> Eagle3Model:
        """Raises `ConfigError`."""
        if query.source.kind != "folder":
            raise ConfigError(
                f"{query.source.path} is a {query.source.kind} file; eagle3 takes a folder with config.json and "
                "safetensors", param="speculative_config",
            )
        return Eagle3Model(read_config(query.source.config, query), query)


EAGLE3 = Eagle3()
