"""Reads the bytes that a model's tokens stand for from its `tokenizer.json`.

The tokenizer's decoder tells three kinds of vocabularies apart: byte-level BPE (GPT-2's alphabet, one
character per byte), SentencePiece with byte fallback (`<0x..>`, and U+2581 for a space), and plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mizzen.engine.grammar.errors import GrammarError

UNREACHABLE = b"\xff"
"""First byte of special tokens: no UTF-8 text contains it, so no text rule lets them through."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from characters of byte-level vocabularies to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if value not in printable)
    alphabet.update({chr(256 + i): value for i, value in enumerate(others)})
    return alphabet


def read_vocabulary(folder: Path, vocab_size: int) -> list[bytes]:
    """Return the bytes of each token id; empty for ids without a token, which are never sampled.

    Special tokens stand for no text: their bytes begin with `UNREACHABLE`, and a grammar can name them only
    by id.

    Raises:
        GrammarError: The folder has no tokenizer.json, or an unreadable one.
    """
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise GrammarError("the model has no tokenizer.json, which structured output needs") from None
    except (OSError, ValueError) as error:
        raise GrammarError(f"the model's tokenizer.json cannot be read: {error}") from None
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
    """Yield tokens and ids of a vocabulary: a map (BPE, WordPiece) or a list of pairs (Unigram)."""
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((entry[0], index) for index, entry in enumerate(vocab))


def _decoder(content: dict[str, Any]) -> Any:
    """Return the function from a token to its bytes."""
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
    """Yield the steps of a decoder or pre-tokenizer, with sequences flattened."""
    if not description:
        return
    if description.get("type") == "Sequence":
        for step in description.get("decoders") or description.get("pretokenizers") or []:
            yield from _steps(step)
    else:
        yield description
