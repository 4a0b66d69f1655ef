"""adapter_config.json of PEFT: which modules an adapter changes, and by what factor. Every field is applied, known to
have no effect on inference, or refused by name. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.base.errors import AdapterError, UnsupportedFeature
from headrace.models.adapters.patterns import compile_pattern

MAX_RANK = 4096
MAX_CONFIG_BYTES = 1 << 20
MAX_NAMES = 16384
"""Names, patterns or token ids in one field."""

NO_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "task_type",
})
"""About training, about the file itself, or about how the base stores its weights: A and B are alike with
``fan_in_fan_out``."""

REFUSED = {
    "alora_invocation_tokens": "activated LoRA changes the model in the middle of a prompt",
    "arrow_config": "Arrow routes among several adapters",
    "kasa_config": "KaSA changes the base model's weights; merge the adapter into its model and serve that",
    "layer_replication": "it makes a model of more layers; merge the adapter into its model and serve that",
    "lora_bias": "the factor B has a bias of its own; merge the adapter into its model and serve that",
    "megatron_config": "convert the adapter to one for the Hugging Face model",
    "monteclora_config": "its weights are sampled",
    "use_bdlora": "block-diagonal factors are stored in another layout; train without it",
    "use_qalora": "its inputs are pooled; merge the adapter into its model and serve that",
    "velora_config": "train without it",
}
"""Refused where they are set, and why."""

OTHER_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Initialisations that change the base model's weights: the saved adapter fits only that changed model."""

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What inference needs of a LoRA adapter's configuration. ``target_modules`` is a list of name endings, a pattern,
    or None for all that the file has. Names are those of the Hugging Face model, without ``base_model.model.``.
    ``token_ids``: rows that are replaced, by the name of the embedding or head; "" is the embedding's."""

    r: int
    alpha: float
    target_modules: tuple[str, ...] | str | None = None
    exclude_modules: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_patterns: tuple[str, ...] = ()
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    target_parameters: tuple[str, ...] = ()
    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    bias: str = "none"
    is_rank_stabilised: bool = False
    has_magnitudes: bool = False
    ties_weights: bool = False

    def rank_of(self, name: str) -> int:
        """The rank that the file must have for a module or stacked parameter."""
        return _look_up(self.rank_pattern, name, "rank_pattern", self.r)

    def scale_of(self, name: str) -> float:
        """What the product of B and A is multiplied by."""
        rank, alpha = self.rank_of(name), _look_up(self.alpha_pattern, name, "alpha_pattern", self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def saves(self, name: str) -> bool:
        """Whether a module is replaced as a whole, or is in one that is."""
        return any(
            compile_pattern(rf"(.*\.)?({saved})(\..*)?", "modules_to_save").matches(name)
            for saved in self.modules_to_save
        )

    def why_untargeted(self, name: str) -> str | None:
        """The field that says that a module has no LoRA; None if it has."""
        if self._is_excluded(name):
            return "exclude_modules"
        if self.saves(name):
            return "modules_to_save"
        if self.target_modules is None:
            return "target_parameters" if self.target_parameters else None
        if isinstance(self.target_modules, str):
            is_all = self.target_modules.lower() == ALL_LINEAR
            found = is_all or compile_pattern(self.target_modules, "target_modules").matches(name)
            return None if found else "target_modules"
        if name in self.target_modules:
            return None
        if not any(name.endswith(f".{target}") for target in self.target_modules):
            return "target_modules"
        return None if self.layers is None or self._layer_of(name) in self.layers else "layers_to_transform"

    def targets_parameter(self, name: str) -> bool:
        """Whether ``target_parameters`` has a parameter."""
        return any(name == target or name.endswith(f".{target}") for target in self.target_parameters)

    def unmatched_targets(self, names: Iterable[str]) -> list[str]:
        """The entries of ``target_modules`` that are no ending of any of these names."""
        if not isinstance(self.target_modules, tuple):
            return []
        known = list(names)
        return [
            target for target in self.target_modules
            if not any(name == target or name.endswith(f".{target}") for name in known)
        ]

    def _is_excluded(self, name: str) -> bool:
        if isinstance(self.exclude_modules, str):
            return compile_pattern(self.exclude_modules, "exclude_modules").matches(name)
        return any(name == excluded or name.endswith(f".{excluded}") for excluded in self.exclude_modules)

    def _layer_of(self, name: str) -> int | None:
        """The number of the layer: the first number behind a name, or behind one that ``layers_pattern`` has."""
        parts = name.split(".")
        for index in range(1, len(parts) - 1):
            if not (parts[index].isascii() and parts[index].isdigit()):
                continue
            path = ".".join(parts[:index])
            # without a pattern, the list's own name needs one before it, as in PEFT
            is_layer = index > 1 if not self.layers_patterns else any(
                compile_pattern(pattern, "layers_pattern").matches_end(path) for pattern in self.layers_patterns
            )
            if is_layer:
                return int(parts[index])
        return None


def _look_up(patterns: dict[str, Any], name: str, field_name: str, default: Any) -> Any:
    """The value of the first pattern that matches the name, or what is behind one of its dots."""
    for pattern, value in patterns.items():
        if pattern == name or compile_pattern(pattern, field_name).matches_end(name):
            return value
    return default


def parse_config(text: str | bytes) -> PeftConfig:
    """The configuration; raises `AdapterError`, or `UnsupportedFeature` for what is known and not served."""
    if len(text) > MAX_CONFIG_BYTES:
        raise AdapterError(f"adapter_config.json has {len(text)} bytes, at most {MAX_CONFIG_BYTES} are read")
    try:
        stated = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"adapter_config.json is no JSON: {error}") from error
    if not isinstance(stated, dict):
        raise AdapterError(f"adapter_config.json must be an object, got {str(stated)[:80]}")
    fields = _Fields(stated)
    _refuse_others(fields)
    init = stated.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(OTHER_BASE):
        raise _unsupported(
            "init_lora_weights", f"{init!r} changed the base model; save the adapter again with "
            "path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    return PeftConfig(
        r=fields.integer("r", 8, low=1, high=MAX_RANK), alpha=fields.number("lora_alpha", 8.0),
        target_modules=fields.names_or_pattern("target_modules"),
        exclude_modules=fields.names_or_pattern("exclude_modules") or (), layers=fields.layers(),
        layers_patterns=_as_names(fields.names_or_pattern("layers_pattern")),
        rank_pattern={name: fields.check_rank(name, value) for name, value in fields.table("rank_pattern").items()},
        alpha_pattern={name: fields.check_alpha(name, value) for name, value in fields.table("alpha_pattern").items()},
        modules_to_save=_as_names(fields.names_or_pattern("modules_to_save")),
        target_parameters=_as_names(fields.names_or_pattern("target_parameters")), token_ids=fields.token_ids(),
        bias=fields.choice("bias", ("none", "all", "lora_only")), is_rank_stabilised=fields.flag("use_rslora"),
        has_magnitudes=fields.flag("use_dora"), ties_weights=fields.flag("ensure_weight_tying"),
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def _refuse_others(fields: _Fields) -> None:
    kind = fields.stated.get("peft_type", "LORA")
    if kind != "LORA":
        raise _unsupported("peft_type", f"{str(kind)[:40]!r} is not served; LORA is")
    known = NO_EFFECT | REFUSED.keys() | _READ
    for name, value in fields.stated.items():
        is_set = value not in (None, False, "", [], {})
        if is_set and name in REFUSED:
            raise _unsupported(name, REFUSED[name])
        if is_set and name not in known:
            raise _unsupported(
                str(name)[:80], "the field is not known here; leave it out if it has no effect on inference"
            )


_READ = frozenset({
    "alpha_pattern", "bias", "ensure_weight_tying", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "modules_to_save", "peft_type", "r",
    "rank_pattern", "target_modules", "target_parameters", "trainable_token_indices", "use_dora", "use_rslora",
})


def _unsupported(name: str, why: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"adapter_config.json: {name} is not supported: {why}", param="lora_path")


def _as_names(given: tuple[str, ...] | str | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else given or ()


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_NAMES and all(isinstance(item, str) for item in value)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) <= MAX_NAMES and all(
        type(item) is int and 0 <= item < 2**31 for item in value
    )


class _Fields:
    """Typed access; None stands for a field that is not there, as in PEFT's own files."""

    def __init__(self, stated: dict[str, Any]):
        self.stated = stated

    def _refuse(self, name: str, wants: str) -> AdapterError:
        given = f", got {str(self.stated[name])[:80]!r}" if name in self.stated else ""
        return AdapterError(f"adapter_config.json: {name} must be {wants}{given}")

    def integer(self, name: str, default: int, *, low: int, high: int) -> int:
        value = self.stated.get(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self._refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.stated.get(name)
        return default if value is None else self._check_number(name, value)

    def _check_number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e6 <= value <= 1e6:
            raise self._refuse(name, "a number from -1e6 to 1e6")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.stated.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return bool(value)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self.stated.get(name)
        if value is not None and value not in choices:
            raise self._refuse(name, f"one of {', '.join(choices)}")
        return value or choices[0]

    def names_or_pattern(self, name: str) -> tuple[str, ...] | str | None:
        """A list of names; or a text, which some fields take for a pattern."""
        value = self.stated.get(name)
        if value is None or isinstance(value, str):
            return value
        if not _is_names(value):
            raise self._refuse(name, f"text, or a list of at most {MAX_NAMES} texts")
        return tuple(dict.fromkeys(value))

    def layers(self) -> tuple[int, ...] | None:
        """``layers_to_transform``; an empty list is no choice."""
        value = self.stated.get("layers_to_transform")
        if value is None or value == []:
            return None
        value = [value] if type(value) is int else value
        if not _is_ids(value):
            raise self._refuse("layers_to_transform", "a layer's number, or a list of them")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self.stated.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_NAMES:
            raise self._refuse(name, f"an object of at most {MAX_NAMES} names")
        return value

    def check_rank(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            raise AdapterError(
                f"adapter_config.json: rank_pattern[{name[:80]!r}] must be an integer from 1 to {MAX_RANK}"
            )
        return value

    def check_alpha(self, name: str, value: object) -> float:
        return self._check_number(f"alpha_pattern[{name[:80]!r}]", value)

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        value = self.stated.get("trainable_token_indices")
        if value is None:
            return {}
        table = value if isinstance(value, dict) else {"": value}
        for ids in table.values():
            if not _is_ids(ids) or len(set(ids)) < len(ids):
                raise self._refuse("trainable_token_indices", "different token ids, or such a list for each module")
        return {name: tuple(ids) for name, ids in table.items()}
