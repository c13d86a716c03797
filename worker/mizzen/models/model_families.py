# SPDX-License-Identifier: Apache-2.0
"""The model families that are served, with the config reader of each architecture.

`scripts/model_table.py` generates the table of docs/models.md from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mizzen.models.config import ModelConfig
from mizzen.models.families import (
    apertus,
    cohere,
    ernie,
    exaone4,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    minimax,
    mistral,
    nemotron,
    olmo,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
    starcoder2,
)
from mizzen.models.hf_fields import Fields

ConfigReader = Callable[[Fields], ModelConfig]

CAUSAL = "ForCausalLM"
CLASSIFIERS: Mapping[str, str] = {
    name + CAUSAL: name + "ForSequenceClassification"
    for name in (
        "Exaone4",
        "Gemma2",
        "Glm",
        "Glm4",
        "GptOss",
        "HunYuanDenseV1",
        "Llama",
        "Ministral3",
        "Mistral",
        "Mixtral",
        "Nemotron",
        "Olmo2",
        "Olmo3",
        "Phi3",
        "Phimoe",
        "Qwen2",
        "Qwen2Moe",
        "Qwen3",
        "Qwen3Moe",
        "SeedOss",
        "SmolLM3",
        "Starcoder2",
    )
} | {gemma.GEMMA3: "Gemma3TextForSequenceClassification"}
"""Architectures with a classification head, by that of the language model; Transformers has no others."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        name: name of the family.
        examples: models of the family, for the documentation.
        readers: config reader for each name that config.json may list under `architectures`.
        text_parts: architectures for images whose text part is of this family.
    """

    name: str
    examples: str
    readers: Mapping[str, ConfigReader]
    text_parts: tuple[str, ...] = ()

    @property
    def headless_readers(self) -> Mapping[str, ConfigReader]:
        """Config reader by name of the architecture, for checkpoints without output head."""
        return {name.replace(CAUSAL, "Model"): read for name, read in self.readers.items()}

    @property
    def classifier_readers(self) -> Mapping[str, ConfigReader]:
        """Config reader by name of the architecture, for checkpoints with a classification head."""
        return {CLASSIFIERS[name]: read for name, read in self.readers.items() if name in CLASSIFIERS}


FAMILIES: tuple[Family, ...] = (
    Family("Apertus", "Apertus 8B and 70B", {apertus.ARCHITECTURE: apertus.parse_config}),
    Family(
        "Command",
        "Command R and R+; Command R7B, Command A and Command A Vision",
        {cohere.COHERE: cohere.parse_cohere, cohere.COHERE2: cohere.parse_cohere2},
        ("Cohere2VisionForConditionalGeneration",),
    ),
    Family(
        "ERNIE 4.5",
        "ERNIE 4.5 0.3B, 21B-A3B and 300B-A47B",
        {
            ernie.ARCHITECTURE: ernie.parse_config,
            ernie.OLD_ARCHITECTURE: ernie.parse_config,
            ernie.MOE: ernie.parse_moe,
        },
    ),
    Family("EXAONE 4.0", "EXAONE 4.0 1.2B and 32B", {exaone4.ARCHITECTURE: exaone4.parse_config}),
    Family(
        "Gemma",
        "Gemma 2; Gemma 3 from 270M to 27B",
        {gemma.GEMMA2: gemma.parse_gemma2, gemma.GEMMA3: gemma.parse_gemma3},
        ("Gemma3ForConditionalGeneration",),
    ),
    Family(
        "GLM-4",
        "GLM-4 9B; GLM-4-0414 9B and 32B; GLM-4.5, 4.5-Air, 4.6 and 4.7",
        {glm.GLM: glm.parse_glm, glm.GLM4: glm.parse_glm4, glm.GLM4_MOE: glm.parse_moe},
    ),
    Family("gpt-oss", "gpt-oss 20B and 120B", {gpt_oss.ARCHITECTURE: gpt_oss.parse_config}),
    Family(
        "Granite",
        "Granite 3; Granite 3 1B-A400M and 3B-A800M; of Granite 4.0, 350M, 1B and Micro",
        {
            granite.GRANITE: granite.parse_granite,
            granite.GRANITE_MOE: granite.parse_moe,
            granite.GRANITE_HYBRID: granite.parse_hybrid,
        },
    ),
    Family("Hunyuan", "Hunyuan 0.5B to 7B", {hunyuan.ARCHITECTURE: hunyuan.parse_config}),
    Family(
        "Llama",
        "Llama 2 to 3.3, and models with the same architecture; LLaVA 1.5, LLaVA-NeXT and Pixtral",
        {llama.ARCHITECTURE: llama.parse_config},
        ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"),
    ),
    Family(
        "Mistral",
        "Mistral 7B, Nemo, Small 3 to 3.2; Ministral 8B; Mixtral; Ministral 3 in bfloat16",
        {
            mistral.ARCHITECTURE: mistral.parse_config,
            mistral.MIXTRAL: mistral.parse_mixtral,
            mistral.MINISTRAL3: mistral.parse_ministral3,
        },
        ("Mistral3ForConditionalGeneration",),
    ),
    Family("MiniMax", "MiniMax-M2", {minimax.ARCHITECTURE: minimax.parse_config}),
    Family("Nemotron", "Nemotron 4 and Minitron", {nemotron.ARCHITECTURE: nemotron.parse_config}),
    Family(
        "OLMo",
        "OLMo 2; OLMo 3; OLMoE",
        {olmo.OLMO2: olmo.parse_olmo2, olmo.OLMO3: olmo.parse_olmo3, olmo.OLMOE: olmo.parse_olmoe},
    ),
    Family(
        "Phi",
        "Phi-3, Phi-3.5, Phi-4 and Phi-4-mini; Phi-3.5-MoE",
        {phi3.ARCHITECTURE: phi3.parse_config, phi3.MOE: phi3.parse_moe, phi3.OLD_MOE: phi3.parse_moe},
    ),
    Family(
        "Qwen2",
        "Qwen2, Qwen2.5, QwQ, and their distillations; Qwen1.5-MoE, Qwen2-57B-A14B; Qwen2-VL and Qwen2.5-VL",
        {qwen2.ARCHITECTURE: qwen2.parse_config, qwen2.MOE: qwen2.parse_moe},
        ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    ),
    Family(
        "Qwen3",
        "Qwen3 from 0.6B to 32B; Qwen3-30B-A3B and 235B-A22B; Qwen3-VL",
        {qwen3.ARCHITECTURE: qwen3.parse_config, qwen3.MOE: qwen3.parse_moe},
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
    ),
    Family("Seed-OSS", "Seed-OSS 36B", {seed_oss.ARCHITECTURE: seed_oss.parse_config}),
    Family("SmolLM3", "SmolLM3 3B", {smollm3.ARCHITECTURE: smollm3.parse_config}),
    Family("StarCoder2", "StarCoder2 3B to 15B", {starcoder2.ARCHITECTURE: starcoder2.parse_config}),
)
"""Families in the order of the documentation."""


def find_family(architecture: str) -> Family | None:
    """Return the family of an architecture, which may have another head or none, or be one for images."""
    return next(
        (
            family
            for family in FAMILIES
            if architecture
            in {*family.readers, *family.headless_readers, *family.classifier_readers, *family.text_parts}
        ),
        None,
    )
