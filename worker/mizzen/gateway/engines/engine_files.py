# SPDX-License-Identifier: Apache-2.0
"""Loads an engine's text model (tokenizer and chat template) from files that the engine sends."""

from __future__ import annotations

from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.tokenizer import select_files
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.messages import Welcome


async def load_text_model(link: EngineLink, texts: TextModels, welcome: Welcome) -> TextModel:
    """Return the cached text model of an engine, or build it from files that `link` fetches.

    Raises:
        StreamLost: the engine did not send the files.
        ValueError, MalformedFrame: the files are malformed or not supported.
    """
    name = welcome.tokenizer_hash
    text = texts.get(name)
    if text is None:
        files = await link.fetch_files(select_files(welcome.files))
        text = await texts.get_or_build(name, files)
    return text
