# SPDX-License-Identifier: Apache-2.0
"""Generate the table of served models in docs/models.md from the families of models.

    python scripts/model_table.py

A test checks that the page is up to date.
"""

from __future__ import annotations

from generated_pages import read_page, replace_part, write_pages

from mizzen.models.features import list_features
from mizzen.models.hf_fields import Fields
from mizzen.models.model_families import FAMILIES, Family

PAGE = "docs/models.md"
MODELS_BEGIN = "<!-- scripts/model_table.py generates the table below -->"
MODELS_END = "<!-- end of the generated table -->"
TYPICAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
}
"""Fields of config.json from which the features of a family are read; other fields have their defaults."""


def family_features(family: Family) -> str:
    """Return in which ways a family differs from Llama, for each of its architectures if they are unequal."""
    texts = {
        name: ", ".join(list_features(read(Fields({**TYPICAL, "architectures": [name]})))) or "–"
        for name, read in family.readers.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name.removesuffix('ForCausalLM')}: {text}" for name, text in texts.items())


def models_page() -> str:
    """Return the text of docs/models.md: its handwritten parts, and between two marks the generated table."""
    rows = [
        "| family | `architectures` in `config.json` | examples | differences from Llama |",
        "|---|---|---|---|",
    ]
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.readers)
        if family.text_parts:
            names += "; text part of " + ", ".join(f"`{name}`" for name in family.text_parts)
        rows.append(f"| {family.name} | {names} | {family.examples} | {family_features(family)} |")
    return replace_part(read_page(PAGE), MODELS_BEGIN, rows, MODELS_END)


PAGES = {PAGE: models_page}

if __name__ == "__main__":
    write_pages(PAGES)
