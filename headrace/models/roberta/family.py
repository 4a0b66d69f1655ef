"""RoBERTa and XLM-RoBERTa: BERT with positions that start after the padding token's id, and a different classifier
head."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import ENCODER_NAMES, CheckpointNames
from headrace.layers.spec import EncoderSpec, encoder_cache_specs
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_encoder
from headrace.models.family import Family

USES = ("Model", "ForMaskedLM", "ForSequenceClassification")
NAMES = {
    **{theirs: ours for theirs, ours in ENCODER_NAMES.items() if not ours.startswith("scores.")},
    "classifier.dense": "scores.dense",
    "classifier.out_proj": "scores.output",
}


def read_config(config: dict[str, Any]) -> EncoderSpec:
    """The first token's position is ``pad_token_id`` + 1."""
    pad = config.get("pad_token_id")
    return read_encoder(
        Fields({"type_vocab_size": 1, **config}), first_position=(1 if pad is None else pad) + 1, norm_eps=1e-12
    )


FAMILY = Family(
    name="roberta",
    architectures=tuple(kind + use for kind in ("Roberta", "XLMRoberta") for use in USES),
    read_config=read_config,
    cache_specs=encoder_cache_specs,
    names=CheckpointNames(NAMES, renames={"roberta.": ""}),
    model="headrace.layers.encoder:Encoder",
    generates=False,
)
