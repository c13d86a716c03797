# SPDX-License-Identifier: Apache-2.0
"""Supported architectures, and functions that read the configuration of a model folder."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from mizzen.common.model_task import Task
from mizzen.layers.quantized.shard_check import check_merged_layers
from mizzen.models.config import ModelConfig, read_token_ids
from mizzen.models.encoders.families import ENCODER_FAMILIES, EncoderReader
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.model_families import FAMILIES, ConfigReader
from mizzen.models.parameters import count_parameters
from mizzen.models.pooling.labels import read_labels, read_score_activation
from mizzen.models.pooling.modules import read_modules
from mizzen.models.quantization import check_blocks
from mizzen.models.text_part import TEXT_PARTS, read_text_part
from mizzen.models.transformers_backend.generic_config import GENERATING, read_generic_config
from mizzen.models.unsupported import explain_unsupported
from mizzen.models.vision.fields import with_normalisation
from mizzen.quantization.reader import load_fields

SENTENCE_CONFIG = "sentence_bert_config.json"
"""File in which sentence-transformers stores the limit of prompts, up to version 5."""
TOKENIZER_CONFIG = "tokenizer_config.json"
"""File in which later versions of sentence-transformers store this limit, as `model_max_length`."""
PREPROCESSOR_CONFIG = "preprocessor_config.json"
"""File in which Transformers stores how the pixels of images are resized and normalised."""
READERS: dict[str, ConfigReader] = {
    name: reader for family in FAMILIES for name, reader in family.readers.items()
}
"""Config reader for each name that config.json may list under `architectures`."""
HEADLESS_READERS: dict[str, ConfigReader] = {
    name: reader for family in FAMILIES for name, reader in family.headless_readers.items()
}
"""Config reader by name of the architecture, for embedding models, whose checkpoints have no output head."""
ENCODER_READERS: dict[str, EncoderReader] = {
    name: family.reader for family in ENCODER_FAMILIES for name in family.architectures
}
"""Config reader by name of the architecture, for encoders."""
CLASSIFIER_READERS: dict[str, ConfigReader] = {
    name: reader for family in FAMILIES for name, reader in family.classifier_readers.items()
}
"""Config reader by name of the architecture, for models with a classification head."""

SUPPORTED = tuple(sorted({*READERS, *HEADLESS_READERS, *CLASSIFIER_READERS, *TEXT_PARTS, *ENCODER_READERS}))
"""Names of all architectures that are served, at least with their text part."""


def read_config(folder: Path, implementation: str = "auto") -> ModelConfig:
    """Read the configuration of a model folder, with its modules of sentence-transformers; see `read_model`.

    Raises:
        ConfigError: a field is missing, invalid or not supported, or a module is. The message names it.
    """
    config, modules = read_model(load_fields(folder), implementation), read_modules(folder)
    config = replace(config, pooling=modules.pooling or config.pooling, dense=modules.dense)
    if config.vision is not None and (folder / PREPROCESSOR_CONFIG).is_file():
        preprocessor = Fields.load(folder, PREPROCESSOR_CONFIG)
        config = replace(config, vision=with_normalisation(config.vision, preprocessor))
    return config if config.encoder is None else limit_prompts(config, folder)


def limit_prompts(config: ModelConfig, folder: Path) -> ModelConfig:
    """Return the configuration of an encoder with the limit that sentence-transformers has for its prompts.

    Raises:
        ConfigError: `max_seq_length` is neither null nor a positive integer.
    """
    if not (folder / SENTENCE_CONFIG).is_file():
        return config
    limit = Fields.load(folder, SENTENCE_CONFIG).optional_integer("max_seq_length")
    if limit is None and (folder / TOKENIZER_CONFIG).is_file():
        stored = Fields.load(folder, TOKENIZER_CONFIG).values.get("model_max_length")
        # Tokenizers without a limit have a very large number here, as an integer or in exponential notation.
        limit = int(stored) if isinstance(stored, int | float) and 1 <= stored < math.inf else None
    return replace(config, context_length=min(config.context_length, limit or config.context_length))


def read_model(fields: Fields, implementation: str = "auto") -> ModelConfig:
    """Read the configuration of a model from the fields of its config.json.

    Args:
        fields: Fields of config.json.
        implementation: "native" for Mizzen's own models, "transformers" for those of Transformers, or "auto"
            for Transformers if no listed architecture has a native implementation. In Transformers, the
            first architecture counts whose name is that of a causal language model.

    Raises:
        ConfigError: a field is missing, invalid or not supported. The message names the field; for an unknown
            architecture, it says what is not supported, or lists the supported ones.
    """
    names = fields.strings("architectures")
    known = any(name in SUPPORTED for name in names)
    generating = next((name for name in names if name.endswith(GENERATING)), None)
    if implementation == "native":
        return read_native(fields, generating)
    if implementation == "transformers" and generating is None and known:
        raise fields.unsupported(
            "architectures",
            f"lists {', '.join(names)}, but --model-implementation transformers serves only architectures "
            f"whose names end with {' or '.join(GENERATING)}: use --model-implementation auto",
        )
    if generating is None or (known and implementation != "transformers"):
        return read_fields(fields)
    return read_for_transformers(fields, generating)


def read_for_transformers(fields: Fields, architecture: str) -> ModelConfig:
    """Read the configuration of a model that runs through Transformers.

    Parameters are counted as in the native implementation, if there is one that can read the fields.

    Raises:
        ConfigError: see `read_model`.
    """
    config = read_generic_config(fields, architecture)
    try:
        native = READERS[architecture](fields)
    except (KeyError, ConfigError):
        return config
    return replace(config, transformers_parameters=count_parameters(native))


def read_native(fields: Fields, generating: str | None) -> ModelConfig:
    """Read the configuration of a model for `--model-implementation native`.

    Args:
        fields: Fields of config.json.
        generating: Architecture that Transformers may serve; None if it can serve no listed one.

    Raises:
        ConfigError: see `read_model`; the message says whether Transformers may serve the model.
    """
    try:
        return read_fields(fields)
    except ConfigError as error:
        if generating is None or any(name in SUPPORTED for name in fields.strings("architectures")):
            raise
        try:
            read_generic_config(fields, generating)
        except ConfigError:
            raise error from None
        raise ConfigError(
            f"{error}, or --model-implementation auto, which runs the model's code in Transformers"
        ) from error


def read_fields(fields: Fields) -> ModelConfig:
    """Read the configuration of a model with a native implementation from the fields of its config.json.

    Raises:
        ConfigError: see `read_model`.
    """
    names = fields.values.get("architectures")
    for name in names if isinstance(names, list) else []:
        if not isinstance(name, str):
            break
        if (config := _read_native(fields, name)) is not None:
            check_blocks(config)
            check_merged_layers(config)
            return config
    raise explain_unsupported(fields, ", ".join(SUPPORTED))


def _read_native(fields: Fields, name: str) -> ModelConfig | None:
    """Read the configuration of the architecture `name`; None if it has no native implementation."""
    if name in ENCODER_READERS:
        return ENCODER_READERS[name](fields, name)
    if name in READERS:
        return READERS[name](fields)
    if name in HEADLESS_READERS:
        return replace(HEADLESS_READERS[name](fields), tie_embeddings=True, task=Task.EMBED)
    if name in CLASSIFIER_READERS:
        return read_classifier(fields, CLASSIFIER_READERS[name])
    return read_text_part(fields, name) if name in TEXT_PARTS else None


def read_classifier(fields: Fields, reader: ConfigReader) -> ModelConfig:
    """Read the configuration of a model with a classification head; `reader` reads that of its decoder.

    Raises:
        ConfigError: see `read_model`.
    """
    labels = read_labels(fields)
    return replace(
        reader(fields),
        tie_embeddings=True,
        task=Task.CLASSIFY,
        labels=labels,
        score_activation=read_score_activation(fields, len(labels)),
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
