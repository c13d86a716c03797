"""Mistral (arXiv 2310.06825): Llama with an optional sliding window in every layer."""

from __future__ import annotations

from mizzen.models.config import ModelConfig, read_decoder_config
from mizzen.models.hf_fields import Fields

ARCHITECTURE = "MistralForCausalLM"


def parse_config(fields: Fields) -> ModelConfig:
    """Read the config.json of a Mistral model.

    If `sliding_window` is null, attention is full; if it is absent, the window is 4096 tokens.
    """
    full = "sliding_window" in fields.values and fields.values["sliding_window"] is None
    window = None if full else fields.integer("sliding_window", 4096)
    return read_decoder_config(fields, ARCHITECTURE, window=window, context_length=131072)
