"""Supported architectures, and functions that read the configuration of a model folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mizzen.models.config import ModelConfig, read_token_ids
from mizzen.models.families import (
    apertus,
    cohere,
    ernie,
    exaone4,
    gemma,
    glm,
    granite,
    hunyuan,
    llama,
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
from mizzen.models.hf_fields import ConfigError, Fields, show_value

ConfigReader = Callable[[Fields], ModelConfig]

READERS: dict[str, ConfigReader] = {
    apertus.ARCHITECTURE: apertus.parse_config,
    cohere.COHERE: cohere.parse_cohere,
    cohere.COHERE2: cohere.parse_cohere2,
    ernie.ARCHITECTURE: ernie.parse_config,
    exaone4.ARCHITECTURE: exaone4.parse_config,
    gemma.GEMMA2: gemma.parse_gemma2,
    gemma.GEMMA3: gemma.parse_gemma3,
    glm.GLM: glm.parse_glm,
    glm.GLM4: glm.parse_glm4,
    granite.ARCHITECTURE: granite.parse_config,
    hunyuan.ARCHITECTURE: hunyuan.parse_config,
    llama.ARCHITECTURE: llama.parse_config,
    mistral.ARCHITECTURE: mistral.parse_config,
    mistral.MINISTRAL3: mistral.parse_ministral3,
    nemotron.ARCHITECTURE: nemotron.parse_config,
    olmo.OLMO2: olmo.parse_olmo2,
    olmo.OLMO3: olmo.parse_olmo3,
    phi3.ARCHITECTURE: phi3.parse_config,
    qwen2.ARCHITECTURE: qwen2.parse_config,
    qwen3.ARCHITECTURE: qwen3.parse_config,
    seed_oss.ARCHITECTURE: seed_oss.parse_config,
    smollm3.ARCHITECTURE: smollm3.parse_config,
    starcoder2.ARCHITECTURE: starcoder2.parse_config,
}
"""Config reader for each name that config.json may list under `architectures`."""
HEADLESS_READERS: dict[str, ConfigReader] = {
    name.replace("ForCausalLM", "Model"): read for name, read in READERS.items()
}
"""Config reader by name of the architecture, for embedding models, whose checkpoints have no output head."""


def read_config(folder: Path) -> ModelConfig:
    """Read a model folder's config.json.

    Raises:
        ConfigError: a field is missing, invalid or not supported. The message names the field; for an unknown
            architecture, it lists the supported ones.
    """
    fields = Fields.load(folder)
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.error(
            "architectures", f"must list one of {', '.join(sorted(READERS | HEADLESS_READERS))}"
        )
    for name in names:
        if name in READERS:
            return READERS[name](fields)
        if name in HEADLESS_READERS:
            return replace(HEADLESS_READERS[name](fields), tie_embeddings=True, generates=False)
    raise ConfigError(
        f"{fields.source}: architectures {show_value(names)} is not supported: use a model whose "
        f"architectures list one of {', '.join(sorted(READERS | HEADLESS_READERS))}"
    )


def read_end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the token ids that end a generation, from generation_config.json or else from config.json.

    Raises:
        ConfigError: an id is not an integer, or lies outside the vocabulary.
    """
    ids = config.end_token_ids
    path = folder / "generation_config.json"
    if path.exists():
        ids = read_token_ids(Fields.load(folder, path.name)) or ids
    outside = [token for token in ids if token >= config.vocab_size]
    if outside:
        raise ConfigError(f"{folder}: eos_token_id {outside} is outside the vocabulary ({config.vocab_size})")
    return tuple(dict.fromkeys(ids))
