# SPDX-License-Identifier: Apache-2.0
"""BERT (arXiv 1810.04805), RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116)."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_layer_count
from mizzen.models.encoders.config import (
    check_absolute_positions,
    encoder_config,
    is_classifier,
    read_encoder_activation,
)
from mizzen.models.encoders.description import EncoderConfig, EncoderNames, HeadConfig
from mizzen.models.hf_fields import Fields

BERT = ("BertModel", "BertForSequenceClassification")
ROBERTA = (
    "RobertaModel",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
    "CamembertModel",
    "CamembertForSequenceClassification",
)


def parse_bert(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a BERT."""
    head = None
    if is_classifier(architecture):
        head = HeadConfig(dense="bert.pooler.dense")
    positions = fields.integer("max_position_embeddings", 512)
    encoder = EncoderConfig(
        names=EncoderNames(prefix="bert."),
        positions=positions,
        token_types=fields.integer("type_vocab_size", 2),
        head=head,
    )
    return _parse(fields, architecture, encoder, positions)


def parse_roberta(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a RoBERTa, whose positions begin after the id of its padding token."""
    head = None
    if is_classifier(architecture):
        head = HeadConfig(dense="classifier.dense", classifier="classifier.out_proj")
    padding = fields.values.get("pad_token_id", 1)
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise fields.error("pad_token_id", "must be the id of the padding token")
    positions = fields.integer("max_position_embeddings", 514)
    first = padding + 1
    if positions <= first:
        raise fields.error("max_position_embeddings", f"must be above {first}, the first token's position")
    encoder = EncoderConfig(
        names=EncoderNames(prefix="roberta."),
        positions=positions,
        first_position=first,
        padding_token=padding,
        token_types=fields.integer("type_vocab_size", 1),
        head=head,
    )
    return _parse(fields, architecture, encoder, positions - first)


def _parse(fields: Fields, architecture: str, encoder: EncoderConfig, prompt_tokens: int) -> ModelConfig:
    check_absolute_positions(fields)
    if fields.flag("is_decoder"):
        raise fields.error("is_decoder", "must be false: encoders see all tokens of their prompt")
    return encoder_config(
        fields,
        architecture,
        encoder,
        hidden=fields.integer("hidden_size"),
        heads=fields.integer("num_attention_heads"),
        layers=read_layer_count(fields),
        intermediate=fields.integer("intermediate_size"),
        prompt_tokens=prompt_tokens,
        norm_epsilon=fields.number("layer_norm_eps", 1e-12),
        activation=read_encoder_activation(fields, "hidden_act"),
    )
