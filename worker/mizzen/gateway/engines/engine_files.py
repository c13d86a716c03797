# SPDX-License-Identifier: Apache-2.0
"""Loads an engine's text model (tokenizer and chat template) and its model's properties."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from mizzen.gateway.text.model import IMAGE_FILES, TextModel, TextModels
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
    image_names = IMAGE_FILES if welcome.images else ()
    own_files = await link.fetch_files((*PROPERTY_FILES, *image_names))
    properties = read_model_properties(welcome, own_files)
    image_files = {name: own_files[name] for name in image_names if name in own_files}
    name = text_model_name(welcome.tokenizer_hash, image_files)
    text = texts.get(name)
    if text is None:
        files = await link.fetch_files(select_files(welcome.files))
        text = await texts.get_or_build(name, files | image_files)
    return text, properties


def text_model_name(tokenizer_hash: str, image_files: Mapping[str, bytes]) -> str:
    """Return the name of a text model: the hash of its tokenizer, and of its rules for images if it has any.

    Engines with the same tokenizer but other rules make other prompts of the same images.
    """
    if not image_files:
        return tokenizer_hash
    digest = hashlib.sha256()
    for name, content in sorted(image_files.items()):
        digest.update(b"%b\0%d\0%b" % (name.encode(), len(content), content))
    return f"{tokenizer_hash}-{digest.hexdigest()[:16]}"
