"""Loads the text model that requests to an engine must be made with, from the engine's own files."""

from __future__ import annotations

from mizzen.gateway.text.model import TextModel, TextModels
from mizzen.gateway.text.tokenizer import select_files
from mizzen.wire.client.engine_client import EngineLink
from mizzen.wire.messages import Welcome


async def load_text_model(link: EngineLink, texts: TextModels, welcome: Welcome) -> TextModel:
    """Return a cached text model, or make one from the files that `link` fetches.

    Raises:
        StreamLost: the engine did not send them.
        ValueError, MalformedFrame: no text model can be made from them.
    """
    name = welcome.tokenizer_hash
    text = texts.get(name)
    if text is None:
        files = await link.fetch_files(select_files(welcome.files))
        text = await texts.get_or_build(name, files)
    return text
