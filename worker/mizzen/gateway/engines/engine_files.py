# SPDX-License-Identifier: Apache-2.0
"""Loads an engine's text model (tokenizer and chat template) and its model's properties."""

from __future__ import annotations

from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.model_properties import FILES as PROPERTY_FILES
from mizzen.gateway.text.model_properties import ModelProperties, read_model_properties
from mizzen.gateway.text.tokenizer import select_files
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.messages import Welcome


async def load_text_model(
    link: EngineLink, texts: TextModels, welcome: Welcome
) -> tuple[TextModel, ModelProperties]:
    """Return an engine's text model, cached or built from fetched files, and its model's properties.

    Raises:
        StreamLost: the engine did not send the files.
        ValueError, MalformedFrame: the files are malformed or not supported.
    """
    properties = read_model_properties(welcome, await link.fetch_files(PROPERTY_FILES))
    name = welcome.tokenizer_hash
    text = texts.get(name)
    if text is None:
        files = await link.fetch_files(select_files(welcome.files))
        text = await texts.get_or_build(name, files)
    return text, properties
