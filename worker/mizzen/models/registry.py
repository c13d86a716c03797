"""Which architectures are served, and how a model folder is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mizzen.models import llama, mistral, qwen2, qwen3
from mizzen.models.config import ModelConfig, read_token_ids
from mizzen.models.hf_fields import ConfigError, Fields

Reader = Callable[[Fields], ModelConfig]

READERS: dict[str, Reader] = {family.ARCHITECTURE: family.read for family in (llama, mistral, qwen2, qwen3)}
"""By the names that config.json lists under `architectures`."""
HEADLESS_READERS: dict[str, Reader] = {name.replace("ForCausalLM", "Model"): read for name, read in READERS.items()}
"""Checkpoints of embedding models that were saved without the head that generating needs."""


def read_config(folder: Path) -> ModelConfig:
    """Read a model folder's config.json.

    Raises:
        ConfigError: names the field; an unknown architecture gets the list of those served.
    """
    fields = Fields.load(folder)
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.error("architectures", f"must list one of {', '.join(sorted(READERS | HEADLESS_READERS))}")
    for name in names:
        if name in READERS:
            return READERS[name](fields)
        if name in HEADLESS_READERS:
            return replace(HEADLESS_READERS[name](fields), tie_embeddings=True, generates=False)
    raise fields.error("architectures", f"must list one of {', '.join(sorted(READERS | HEADLESS_READERS))}")


def read_end_tokens(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the ids that end an answer: generation_config.json's, else config.json's.

    Raises:
        ConfigError: an id is none, or lies outside the vocabulary.
    """
    ids = config.end_token_ids
    path = folder / "generation_config.json"
    if path.exists():
        ids = read_token_ids(Fields.load(folder, path.name)) or ids
    outside = [token for token in ids if token >= config.vocab_size]
    if outside:
        raise ConfigError(f"{folder}: eos_token_id {outside} is outside the vocabulary ({config.vocab_size})")
    return tuple(dict.fromkeys(ids))
