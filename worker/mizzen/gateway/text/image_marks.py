# SPDX-License-Identifier: Apache-2.0
"""Marks of images in rendered chat templates, which a client's text cannot imitate.

A chat template writes the text of the placeholder token for each image, and a client may write the same text
in a message. To tell them apart, the placeholder is renamed, in the source of the template and in a copy of
the tokenizer, to a secret text of this process: the mark. The tokenizer makes the placeholder's token of
marks only, and tokenizes the placeholder's own text like any other text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mizzen.images.rules import read_added_tokens

_BEGIN, _END = "\ue000", "\ue001"
"""Characters of private use around a mark, so that no other token of the tokenizer overlaps its ends."""


@dataclass(frozen=True, slots=True, repr=False)
class ImageMark:
    """The placeholder of a model's images, and the secret text that replaces it in prompts."""

    placeholder: str
    """Text of the placeholder token."""
    text: str
    """The secret text."""


def new_mark(placeholder: str) -> ImageMark:
    """Return a mark with a new secret text for a placeholder."""
    return ImageMark(placeholder, f"{_BEGIN}{secrets.token_hex(16)}{_END}")


def added_tokens(tokenizer_json: bytes) -> dict[str, int]:
    """Return the ids of the added tokens of a `tokenizer.json` by their texts; empty if it is malformed."""
    try:
        tokenizer = json.loads(tokenizer_json)
    except ValueError:
        return {}
    return read_added_tokens(tokenizer) if isinstance(tokenizer, dict) else {}


def rename_token(tokenizer_json: bytes, old: str, new: str) -> bytes:
    """Return a `tokenizer.json` in which the added token `old` has the text `new`, and the same id.

    Raises:
        ValueError: there is no such added token.
    """
    tokenizer = json.loads(tokenizer_json)
    renamed = [token for token in tokenizer.get("added_tokens", ()) if token.get("content") == old]
    if not renamed:
        raise ValueError(f"it has no added token {old!r}, which stands for images")
    for token in renamed:
        token["content"] = new
    model = tokenizer.get("model", {})
    if "vocab" in model:
        model["vocab"] = _rename_entry(model["vocab"], old, new)
    return json.dumps(tokenizer, ensure_ascii=False).encode()


def _rename_entry(vocabulary: Any, old: str, new: str) -> Any:
    """Rename a token of a vocabulary, which maps tokens to ids or lists tokens with scores."""
    if isinstance(vocabulary, Mapping):
        return {new if token == old else token: number for token, number in vocabulary.items()}
    return [[new, *entry[1:]] if entry[0] == old else entry for entry in vocabulary]
