"""Finds the task of a checkpoint (generate, embed, classify), and how a pooling model pools. Torch-free.

Reads sentence-transformers folders (``modules.json``, ``1_Pooling``, ``2_Dense``) and the classifier fields of
config.json. Tensors belong to ``layers/pooling``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.base.errors import ConfigError, ModelError
from headrace.base.pooling import Activation, PoolingFacts, PoolingKind
from headrace.models.config_fields import CLASSIFIERS, read_num_classes
from headrace.models.family import Family
from headrace.models.source import ModelSource, read_json

Reduction = Literal["first", "last", "mean", "max"]

REDUCTIONS: dict[str, Reduction] = {
    "cls": "first", "lasttoken": "last", "mean": "mean", "max": "max",
    "pooling_mode_cls_token": "first", "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "first": "first", "last": "last",
}
GGUF_REDUCTIONS: dict[object, Reduction] = {1: "mean", 2: "first", 3: "last"}
"""Values of ``<architecture>.pooling_type`` in GGUF files of embedding models."""

DENSE_ACTIVATIONS = {
    "identity": "identity", "tanh": "tanh", "gelu": "gelu", "relu": "relu", "sigmoid": "sigmoid", "silu": "silu"
}
WITH_VOCABULARY, BARE = "ForCausalLM", "Model"


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer after the pooling; its weights are in ``folder``."""

    in_features: int
    out_features: int
    has_bias: bool
    activation: str
    folder: Path


@dataclass(frozen=True)
class PoolingPlan:
    """``reduction`` of a text's hidden states to one vector; then, for ``embed``, dense layers and normalisation to
    unit length, for ``classify`` the model's classifier. ``max_text_len``: the length in tokens to which the
    checkpoint truncates texts (0: not stated)."""

    kind: PoolingKind
    reduction: Reduction
    normalise: bool = False
    dense: tuple[DenseLayer, ...] = ()
    max_text_len: int = 0
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    takes_pairs: bool = False

    def facts(self, hidden_size: int) -> PoolingFacts:
        """What HTTP and the offline API need to know."""
        size = hidden_size
        if self.kind == "classify":
            size = len(self.labels)
        elif self.dense:
            size = self.dense[-1].out_features
        return PoolingFacts(
            self.kind, size, needs_all_tokens=self.reduction != "last", labels=list(self.labels),
            activation=self.activation, takes_pairs=self.takes_pairs,
        )


def read_task(source: ModelSource, family: Family, task: str) -> str:
    """``generate``, ``embed`` or ``classify``: the configured task; under ``auto``, the one the checkpoint was made
    for. Raises `ConfigError` for a task that the checkpoint cannot do."""
    architecture = source.architecture
    is_classifier = architecture.endswith(CLASSIFIERS)
    is_bare = not family.generates or architecture.endswith(BARE)
    is_embedder = (
        is_bare or _gguf_reduction(source) is not None
        or (source.kind == "folder" and (source.folder / "modules.json").is_file())
    )
    made_for = "classify" if is_classifier else "embed" if is_embedder else "generate"
    wanted = made_for if task == "auto" else task
    if (wanted == "classify") != is_classifier or (wanted == "generate" and is_bare):
        raise ConfigError(f"task must be {made_for} or auto: {architecture} cannot {wanted}", param="task")
    return wanted


def plan_pooling(source: ModelSource, family: Family, task: str) -> PoolingPlan | None:
    """How the model pools; None for a generating model. Raises `ConfigError` for pooling that is not supported."""
    if task == "generate":
        return None
    if task == "classify":
        return _plan_classifier(source, family)
    # decoders are pooled at the last token, the only one that has seen the whole text; encoders by the mean, but those
    # of texts and images, which project a token of the text themselves
    usual: Reduction = "last" if family.generates or family.media is not None else "mean"
    plan = PoolingPlan("embed", _gguf_reduction(source) or usual, normalise=True)
    if source.kind == "folder" and (source.folder / "modules.json").is_file():
        plan = _read_modules(source.folder, replace(plan, normalise=False))
    stated = source.config.get("pooling")
    if stated is not None:
        plan = replace(plan, reduction=_reduction(stated, "pooling"))
    return plan


def config_for(source: ModelSource, task: str) -> dict[str, Any]:
    """The config.json dict to build the model from: without the vocabulary's head for an embedding model."""
    if task != "embed" or not source.architecture.endswith(WITH_VOCABULARY):
        return source.config
    # FooForCausalLM to FooModel: the decoder is then built without an LM head
    return {**source.config, "architectures": [source.architecture.removesuffix(WITH_VOCABULARY) + BARE]}


def _gguf_reduction(source: ModelSource) -> Reduction | None:
    metadata = source.gguf_metadata
    return GGUF_REDUCTIONS.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))


def _plan_classifier(source: ModelSource, family: Family) -> PoolingPlan:
    config = source.config
    names = config.get("id2label") or {}
    labels = tuple(str(names.get(str(i), names.get(i, f"LABEL_{i}"))) for i in range(read_num_classes(config)))
    return PoolingPlan(
        "classify", "last" if family.generates else "first", labels=labels,
        activation=_score_activation(config, len(labels)),
        max_text_len=_max_text_len(source.folder), takes_pairs=not family.generates,
    )


def _score_activation(config: dict[str, Any], num_classes: int) -> Activation:
    """The activation a cross-encoder states, else the one transformers' pipelines apply."""
    stated = (
        (config.get("sentence_transformers") or {}).get("activation_fn")
        or config.get("sbert_ce_default_activation_function")
    )
    if isinstance(stated, str):
        name = stated.rpartition(".")[2].lower()
        if name not in ("identity", "sigmoid", "softmax"):
            raise ConfigError(
                f"config.json: the activation of scores is {stated}; Identity, Sigmoid and Softmax are served",
                param="activation_fn"
            )
        return name  # type: ignore[return-value]
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_classes == 1 or problem == "multi_label_classification" else "softmax"


def _max_text_len(folder: Path) -> int:
    path = folder / "sentence_bert_config.json"
    stated = read_json(path).get("max_seq_length") if path.is_file() else None
    return stated if isinstance(stated, int) and stated > 0 else 0


def _read_modules(folder: Path, plan: PoolingPlan) -> PoolingPlan:
    """Follow ``modules.json``: one transformer, one pooling, any dense layers, perhaps unit length at the end."""
    plan = replace(plan, max_text_len=_max_text_len(folder))
    for module in _read_list(folder / "modules.json"):
        kind, place = str(module.get("type", "")).rpartition(".")[2], _inside(folder, str(module.get("path", "")))
        if kind == "Pooling":
            plan = replace(plan, reduction=_read_reduction(read_json(place / "config.json"), place))
        elif kind == "Dense":
            plan = replace(plan, dense=(*plan.dense, _read_dense(place)))
        elif kind == "Normalize":
            plan = replace(plan, normalise=True)
        elif kind not in ("Transformer", "Dropout"):
            raise ConfigError(
                f"{folder / 'modules.json'}: a module of type {kind} is not served; Transformer, Pooling, Dense and "
                "Normalize are",
                param="modules"
            )
    return plan


def _read_list(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} cannot be read as a list of modules: {error}") from error


def _inside(folder: Path, name: str) -> Path:
    """A module's folder; ``name`` comes from a downloaded file and may not lead outside ``folder``."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{folder / 'modules.json'} names a folder outside its own: {name}")
    return folder / name


def _read_reduction(config: dict[str, Any], place: Path) -> Reduction:
    stated = config.get("pooling_mode")
    chosen = (
        [stated] if isinstance(stated, str)
        else [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    )
    if len(chosen) != 1:
        raise ConfigError(
            f"{place / 'config.json'}: one pooling mode is served at a time, this has {', '.join(chosen) or 'none'}",
            param="pooling_mode"
        )
    return _reduction(chosen[0], str(place / "config.json"))


def _reduction(name: Any, where: str) -> Reduction:
    if name not in REDUCTIONS:
        raise ConfigError(f"{where}: pooling {name!r} is not served; cls, mean, max and lasttoken are", param="pooling")
    return REDUCTIONS[name]


def _read_dense(place: Path) -> DenseLayer:
    config = read_json(place / "config.json")
    activation = str(config.get("activation_function", "Identity")).rpartition(".")[2].lower()
    sizes = [size for name in ("in_features", "out_features") if isinstance(size := config.get(name), int) and size > 0]
    if activation not in DENSE_ACTIVATIONS or len(sizes) != 2:
        raise ConfigError(
            f"{place / 'config.json'}: a dense layer needs in_features, out_features and one of "
            f"{', '.join(DENSE_ACTIVATIONS)}",
            param="modules"
        )
    return DenseLayer(sizes[0], sizes[1], config.get("bias", True) is not False, DENSE_ACTIVATIONS[activation], place)
