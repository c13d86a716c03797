# SPDX-License-Identifier: Apache-2.0
"""The families of encoders that are served, with the config reader of each.

`scripts/model_table.py` generates the table of encoders in docs/models.md from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.models.encoders import bert, gte, modern_bert, nomic_bert
from mizzen.models.hf_fields import Fields

EncoderReader = Callable[[Fields, str], ModelConfig]
"""Function that reads the configuration of a named architecture from the fields of config.json."""


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """A family of encoders.

    Attributes:
        name: name of the family.
        examples: models of the family, for the documentation.
        architectures: names that config.json may list under `architectures`.
        reader: config reader of these architectures.
    """

    name: str
    examples: str
    architectures: tuple[str, ...]
    reader: EncoderReader


ENCODER_FAMILIES: tuple[EncoderFamily, ...] = (
    EncoderFamily(
        "BERT",
        "bge v1.5, e5, all-MiniLM, gte, snowflake-arctic-embed; ms-marco-MiniLM",
        bert.BERT,
        bert.parse_bert,
    ),
    EncoderFamily(
        "RoBERTa",
        "bge-m3, multilingual-e5, snowflake-arctic-embed-l-v2.0; bge-reranker",
        bert.ROBERTA,
        bert.parse_roberta,
    ),
    EncoderFamily(
        "ModernBERT",
        "gte-modernbert-base, modernbert-embed-base; gte-reranker-modernbert-base",
        modern_bert.ARCHITECTURES,
        modern_bert.parse_config,
    ),
    EncoderFamily(
        "Nomic BERT",
        "nomic-embed-text-v1 and v1.5, snowflake-arctic-embed-m-long",
        nomic_bert.ARCHITECTURES,
        nomic_bert.parse_config,
    ),
    EncoderFamily(
        "GTE",
        "gte-base-en-v1.5 and gte-large-en-v1.5, gte-multilingual-base, snowflake-arctic-embed-m-v2.0; "
        "gte-multilingual-reranker-base",
        gte.ARCHITECTURES,
        gte.parse_config,
    ),
)
"""Families in the order of the documentation."""


def find_encoder_family(architecture: str) -> EncoderFamily | None:
    """Return the family of an encoder's architecture."""
    return next((family for family in ENCODER_FAMILIES if architecture in family.architectures), None)
