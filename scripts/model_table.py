# SPDX-License-Identifier: Apache-2.0
"""Generate the table of served models in docs/models.md.

    python scripts/model_table.py

The families come from the registry of models. The sizes that were tried come from `known_models.json` of the
tests and from the tables of docs/benchmarks.md. A test checks that the page is up to date.
"""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from generated_pages import ROOT, read_page, replace_part, write_pages

from mizzen.engine.config import EngineOptions
from mizzen.inspection.inspect_model import Inspection, inspect_model
from mizzen.inspection.model_files import ModelFiles
from mizzen.models.encoders.families import ENCODER_FAMILIES
from mizzen.models.features import list_features
from mizzen.models.hf_fields import Fields
from mizzen.models.model_families import FAMILIES, Family
from mizzen.models.vision.families import VISION_READERS

PAGE = "docs/models.md"
MODELS_BEGIN = "<!-- scripts/model_table.py generates the table below -->"
MODELS_END = "<!-- end of the generated table -->"
ENCODERS_BEGIN = "<!-- scripts/model_table.py generates the table of encoders below -->"
ENCODERS_END = "<!-- end of the generated table of encoders -->"
KNOWN_MODELS = "tests/inspection/known_models.json"
BENCHMARKS = "docs/benchmarks.md"
SHAPES: dict[str, dict[str, Any]] = runpy.run_path(str(ROOT / "benchmarks/common_parts/shapes.py"))["SHAPES"]
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
    "num_experts": 64,
    "num_local_experts": 64,
    "n_routed_experts": 64,
    "moe_num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
}
"""Fields of config.json from which the features of a family are read; other fields have their defaults."""
HYBRID = {
    "layer_types": ["attention"] * TYPICAL["num_hidden_layers"],
    "num_local_experts": 0,
    "position_embedding_type": "rope",
}
SPARSEMIXER = {"num_experts_per_tok": 2}
SPECIAL = {
    "GraniteMoeHybridForCausalLM": HYBRID,
    "PhimoeForCausalLM": SPARSEMIXER,
    "PhiMoEForCausalLM": SPARSEMIXER,
}
"""Further fields of architectures that cannot be read with the defaults of all other fields."""
HEADER = (
    "family",
    "`architectures` in `config.json`",
    "models",
    "features that Llama lacks",
    "implementation",
    "sizes measured on a GPU",
    "sizes inspected",
    "tensor parallelism",
)
ENCODER_HEADER = (
    "family",
    "`architectures` in `config.json`",
    "models",
    "features",
    "sizes inspected",
)
NONE = "–"


@dataclass(frozen=True, slots=True)
class TransformersGroup:
    """Architectures without a native implementation that tests run through Transformers.

    Attributes:
        name: what the architectures have in common.
        prefixes: prefixes of Transformers' class names.
        sharded: whether several GPUs can share such a model.
    """

    name: str
    prefixes: tuple[str, ...]
    sharded: bool

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names that config.json lists under `architectures`."""
        return tuple(f"{prefix}{HEADS.get(prefix, 'ForCausalLM')}" for prefix in self.prefixes)


HEADS = {"GPT2": "LMHeadModel"}
"""Ends of class names other than `ForCausalLM`, by prefix."""
TRANSFORMERS_GROUPS = (
    TransformersGroup(
        "dense, with a plan for tensor parallelism",
        (*("Arcee", "Cwm", "Gemma", "GPTNeoX", "Helium", "Jais2", "Ministral", "NanoChat", "Olmo", "Phi"),),
        sharded=True,
    ),
    TransformersGroup(
        "dense, without such a plan", ("GPT2", "GPTBigCode", "OPT", "Persimmon"), sharded=False
    ),
    TransformersGroup("mixtures of experts", ("FlexOlmo", "GraniteMoeShared"), sharded=False),
)


def family_features(family: Family) -> str:
    """Return in which ways a family differs from Llama, for each of its architectures if they are unequal."""
    texts = {
        name: ", ".join(
            list_features(read(Fields({**TYPICAL, **SPECIAL.get(name, {}), "architectures": [name]})))
        )
        or NONE
        for name, read in family.readers.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{name.removesuffix('ForCausalLM')}: {text}" for name, text in texts.items())


def inspect(name: str, config: dict[str, Any]) -> Inspection:
    """Inspect a model with this config.json, as `mizzen inspect` does."""
    return inspect_model(ModelFiles(name=name, fields=Fields(config)), EngineOptions(model=name))


def inspected_models() -> Iterator[Inspection]:
    """Yield the models of `known_models.json` that are served."""
    for name, model in json.loads(read_page(KNOWN_MODELS)).items():
        if model["expect"]["implementation"] != "none":
            yield inspect(name.rpartition("/")[2], model["config"])


def measured_shapes(text: str) -> list[str]:
    """Return the shapes that tables of a page of benchmarks have figures of, in the order of `SHAPES`."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [row.split("|")[1] for row in rows]
    found = {name for cell in cells for name in re.findall(r"(?:--shape |^ `)([\w.-]+)", cell)}
    return [name for name in SHAPES if name in found]


def format_names(models: Iterable[Inspection]) -> str:
    """Return the names of models, separated by commas."""
    return ", ".join(model.model for model in models) or NONE


def format_tensor_sizes(models: list[Inspection]) -> str:
    """Return the numbers of GPUs that may share models, and apart the models that allow fewer numbers."""
    sizes = {m.model: ", ".join(str(s.tensor) for s in m.tensor_sizes if s.possible) for m in models}
    if not sizes:
        return "as the sizes allow"
    usual = max(sizes.values(), key=len)
    others: dict[str, list[str]] = {}
    for name, text in sizes.items():
        if text != usual:
            others.setdefault(text, []).append(name)
    return "; ".join([usual, *(f"{', '.join(names)}: {text}" for text, names in others.items())])


def native_rows(inspected: list[Inspection], measured: list[Inspection]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each family with a native implementation."""
    for family in FAMILIES:
        names = ", ".join(f"`{name}`" for name in family.readers)
        for what, served in (("with images", True), ("text part of", False)):
            parts = [f"`{name}`" for name in family.text_parts if (name in VISION_READERS) is served]
            names += f"; {what} {', '.join(parts)}" if parts else ""
        known = [model for model in inspected if model.family == family.name]
        shapes = [model for model in measured if model.family == family.name]
        yield (
            family.name,
            names,
            family.examples,
            family_features(family),
            "native",
            format_names(shapes),
            format_names(known),
            format_tensor_sizes([*known, *shapes]),
        )


def transformers_rows(inspected: list[Inspection]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each group of architectures without a native implementation."""
    for group in TRANSFORMERS_GROUPS:
        known = [model for model in inspected if set(model.architectures) & set(group.architectures)]
        yield (
            group.name,
            ", ".join(f"`{name}`" for name in group.architectures),
            NONE,
            "as in Transformers",
            "Transformers",
            NONE,
            format_names(known),
            format_tensor_sizes(known) if group.sharded else "1",
        )


def models_page() -> str:
    """Return the text of docs/models.md: its handwritten parts, and between marks the generated tables."""
    inspected = list(inspected_models())
    measured = [inspect(name, SHAPES[name]) for name in measured_shapes(read_page(BENCHMARKS))]
    rows = format_rows(HEADER, [*native_rows(inspected, measured), *transformers_rows(inspected)])
    page = replace_part(read_page(PAGE), MODELS_BEGIN, rows, MODELS_END)
    return replace_part(
        page, ENCODERS_BEGIN, format_rows(ENCODER_HEADER, encoder_rows(inspected)), ENCODERS_END
    )


def encoder_rows(inspected: list[Inspection]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each family of encoders."""
    for family in ENCODER_FAMILIES:
        known = [model for model in inspected if model.family == family.name]
        yield (
            family.name,
            ", ".join(f"`{name}`" for name in family.architectures),
            family.examples,
            next((", ".join(model.features) for model in known), NONE),
            format_names(known),
        )


def format_rows(header: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table."""
    rows = [f"| {' | '.join(row)} |" for row in (header, *cells)]
    return [rows[0], "|---" * len(header) + "|", *rows[1:]]


PAGES = {PAGE: models_page}

if __name__ == "__main__":
    write_pages(PAGES)
