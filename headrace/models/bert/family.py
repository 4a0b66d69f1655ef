"""BERT and models of the same architecture (MiniLM, BGE, GTE, E5): embedding models and cross-encoders."""

from __future__ import annotations

from typing import Any

from headrace.layers.names import ENCODER_NAMES, CheckpointNames
from headrace.layers.spec import EncoderSpec, encoder_cache_specs
from headrace.models.config_fields import Fields
from headrace.models.config_specs import read_encoder
from headrace.models.family import Family


def read_config(config: dict[str, Any]) -> EncoderSpec:
    """Positions count from 0."""
    return read_encoder(Fields(config), first_position=0, norm_eps=1e-12)


FAMILY = Family(
    name="bert",
    architectures=("BertModel", "BertForMaskedLM", "BertForSequenceClassification"),
    read_config=read_config,
    cache_specs=encoder_cache_specs,
    names=CheckpointNames(ENCODER_NAMES, renames={"bert.": ""}),
    model="headrace.layers.encoder:Encoder",
    generates=False,
)
