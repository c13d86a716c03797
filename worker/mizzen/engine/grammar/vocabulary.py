# SPDX-License-Identifier: Apache-2.0
"""Reads the bytes of each token of a model from its `tokenizer.json`; `xgrammar_backend` calls it.

There are three kinds of vocabularies, which the `decoder` field distinguishes: byte-level BPE (GPT-2's
alphabet, one character per byte), SentencePiece with byte fallback (`<0x..>`, and U+2581 for a space), and
plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mizzen.common.tokenizer_json import read_tokenizer_json
from mizzen.engine.grammar.errors import GrammarError

UNREACHABLE = b"\xff"
"""First byte of special tokens; no UTF-8 text contains it, so a grammar's text rules never match them."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of byte-level vocabularies to byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in printable)
    alphabet.update({chr(256 + i): value for i, value in enumerate(others)})
    return alphabet


def read_vocabulary(folder: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token, by id; empty for ids without a token, which are never sampled.

    Special tokens stand for no text. Their bytes begin with `UNREACHABLE`, so a grammar can only allow them
    by their ids.

    Raises:
        GrammarError: The folder has no tokenizer, or it cannot be read.
    """
    try:
        text = read_tokenizer_json(folder)
        content = None if text is None else json.loads(text)
    except (OSError, ValueError) as error:
        raise GrammarError(f"the model's tokenizer cannot be read: {error}") from None
    if content is None:
        raise GrammarError("the model has no tokenizer.json, which structured output needs")
    tokens: list[bytes] = [b""] * vocab_size
    decode = _decoder(content)
    for token, index in _entries(content.get("model", {}).get("vocab", {})):
        if index < vocab_size:
            tokens[index] = decode(token)
    for added in content.get("added_tokens") or []:
        if added["id"] < vocab_size:
            text = added["content"].encode()
            tokens[added["id"]] = UNREACHABLE + text if added.get("special") else text
    return tokens


def _entries(vocab: Any) -> Iterator[tuple[str, int]]:
    """Yield each token of a vocabulary with its id; `vocab` is a map (BPE, WordPiece) or a list (Unigram)."""
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((entry[0], index) for index, entry in enumerate(vocab))


def _decoder(content: dict[str, Any]) -> Any:
    """Return a function that converts a token to its bytes."""
    steps = list(_steps(content.get("decoder"))) or list(_steps(content.get("pre_tokenizer")))
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def byte_level(token: str) -> bytes:
            try:
                return bytes([alphabet[character] for character in token])
            except KeyError:
                return token.encode()

        return byte_level

    replaced = [
        (step["pattern"]["String"], step["content"])
        for step in steps
        if step.get("type") == "Replace" and "String" in step.get("pattern", {})
    ]
    replaced += [(step.get("replacement", "▁"), " ") for step in steps if step.get("type") == "Metaspace"]

    def plain(token: str) -> bytes:
        if "ByteFallback" in kinds and (match := _BYTE.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return plain


def _steps(description: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder or pre-tokenizer; steps of type Sequence are flattened."""
    if not description:
        return
    if description.get("type") == "Sequence":
        for step in description.get("decoders") or description.get("pretokenizers") or []:
            yield from _steps(step)
    else:
        yield description
