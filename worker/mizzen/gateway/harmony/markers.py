# SPDX-License-Identifier: Apache-2.0
"""Special tokens that separate the messages of the harmony format, and the parts of a message.

    <|start|>ROLE<|channel|>CHANNEL to=RECIPIENT <|constrain|>TYPE<|message|>TEXT<|end|>

Detokenization replaces each of these tokens by a mark: a lone surrogate, which no decoded text contains. So
an answer that spells out a marker stays text.
"""

from __future__ import annotations

import re

from mizzen.gateway.text.tokenizer import Tokenizer

START, END, MESSAGE = "<|start|>", "<|end|>", "<|message|>"
CHANNEL, CONSTRAIN = "<|channel|>", "<|constrain|>"
RETURN, CALL = "<|return|>", "<|call|>"
"""Tokens that end the model's turn, and with it its last message: after an answer, and after a call."""
CLOSING = (END, RETURN, CALL)
"""Tokens that end a message."""
REQUIRED = (START, END, MESSAGE, CHANNEL)
"""Tokens that every vocabulary of the format has."""

MARKS = {
    marker: chr(0xDC00 + number)
    for number, marker in enumerate((START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL))
}
"""Marks by the text of the token."""
MARKERS = {mark: marker for marker, mark in MARKS.items()}
ANY_MARK = re.compile(f"([{''.join(MARKERS)}])")


def find_marks(tokenizer: Tokenizer) -> dict[int, str] | None:
    """Return the mark of each of the format's tokens by its id; None if a required token is missing."""
    ids = {marker: tokenizer.token_id(marker) for marker in MARKS}
    if any(ids[marker] is None for marker in REQUIRED):
        return None
    return {token: MARKS[marker] for marker, token in ids.items() if token is not None}
