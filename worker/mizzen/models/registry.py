"""Supported architectures, and functions that read the configuration of a model folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mizzen.models import llama, mistral, qwen2, qwen3
from mizzen.models.config import ModelConfig, read_token_ids
from mizzen.models.hf_fields import ConfigError, Fields

ConfigReader = Callable[[Fields], ModelConfig]

READERS: dict[str, ConfigReader] = {
    family.ARCHITECTURE: family.parse_config for family in (llama, mistral, qwen2, qwen3)
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
    raise fields.error("architectures", f"must list one of {', '.join(sorted(READERS | HEADLESS_READERS))}")


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
