"""Incremental detokenization: text as tokens arrive, equal to decoding all tokens at the end.

Tokens may end in the middle of a UTF-8 character, and most decoders treat the first token of a text
differently, so text cannot be decoded token by token; decoding everything for each token would be quadratic.
The two decoders that nearly all models use are therefore reproduced exactly, with a table from token to bytes
or text. Any other decoder is run on a short window of tokens.

- Byte-level BPE (GPT-2, Llama 3, Qwen, Mistral's Tekken): tokens are bytes, which are joined and decoded;
  invalid ones are replaced.
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): tokens are text, except `<0x..>`. A run of those
  is decoded as one unit; a run that is not valid UTF-8 becomes one U+FFFD per byte, so its text is known only
  at its end.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
METASPACE = "\u2581"
"""SentencePiece's character for a space."""
WINDOW_LIMIT = 64
"""Maximum number of tokens that the window decoder holds back; it bounds the cost per token."""


class Detokenizer(Protocol):
    """Convert one stream of token ids to text.

    The results of `add` and of the final `flush` join to the full text.
    """

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is certain now."""
        ...

    def flush(self) -> str:
        """Return the text that was held back; the stream has ended."""
        ...


class TokenTable:
    """Bytes or text of each token, computed once per token id and shared by all streams of a tokenizer."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        decoder_kind: DecoderKind,
        skip_special_tokens: bool,
        shown: Collection[str] = (),
    ) -> None:
        """Create empty tables; `shown` lists special tokens that are not skipped."""
        self.tokenizer = tokenizer
        special = special_tokens(tokenizer)
        self._skipped = {i for token, i in special.items() if skip_special_tokens and token not in shown}
        self._decoder_kind = decoder_kind
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | int | None] = {}

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one stream."""
        if self._decoder_kind.byte_level:
            return ByteLevelDetokenizer(self)
        if self._decoder_kind.byte_fallback:
            return ByteFallbackDetokenizer(self, self._decoder_kind.strip)
        return WindowDetokenizer(self)

    def is_skipped(self, token: int) -> bool:
        """Return whether a token is left out of the text."""
        return token in self._skipped

    def raw_bytes(self, token: int) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary."""
        data = self._bytes.get(token)
        if data is None:
            content = "" if token in self._skipped else self.tokenizer.id_to_token(token) or ""
            data = self._bytes[token] = byte_level_bytes(content)
        return data

    def utf8_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a single token, for any kind of vocabulary."""
        if self._decoder_kind.byte_level:
            return self.raw_bytes(token)
        if self._decoder_kind.byte_fallback:
            piece = self.fallback_piece(token)
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
        content = self.tokenizer.id_to_token(token) or ""
        if METASPACE in content:
            return content.replace(METASPACE, " ").encode()
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def fallback_piece(self, token: int) -> str | int | None:
        """Return the text of a token of a byte-fallback vocabulary, or its value if it is a byte.

        None means a skipped or unknown token, which does not end a run of bytes.
        """
        if token not in self._texts:
            content = None if token in self._skipped else self.tokenizer.id_to_token(token)
            self._texts[token] = None if content is None else self._decoder_kind.convert_piece(content)
        return self._texts[token]


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by content."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from the characters of byte-level vocabularies to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in alphabet)
    alphabet.update({chr(256 + i): value for i, value in enumerate(list(others))})
    return alphabet


_ALPHABET = byte_alphabet()


def byte_level_bytes(content: str) -> bytes:
    """Return the bytes of a byte-level token; an added token outside the alphabet stands for its own text."""
    try:
        return bytes([_ALPHABET[character] for character in content])
    except KeyError:
        return content.encode()


class DecoderKind:
    """Kind of a tokenizer's decoder, determined from its description in `tokenizer.json`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder  # only the decoder's state: the full description includes the vocabulary
        steps = flatten_decoder(None if decoder is None else json.loads(decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        self.byte_level = kinds == ["ByteLevel"]
        self.strip: tuple[str, int] = ("", 0)
        self.byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        replaces = [step for step in steps if step["type"] == "Replace"]
        rest = [step for step in steps if step["type"] != "Replace"]
        shape = kinds[: len(replaces)] == ["Replace"] * len(replaces)
        if not shape or any("String" not in step["pattern"] for step in replaces):
            return
        if [step["type"] for step in rest] not in (
            ["ByteFallback", "Fuse"],
            ["ByteFallback", "Fuse", "Strip"],
        ):
            return
        if len(rest) == 3:
            if rest[2]["stop"]:
                return
            self.strip = (rest[2]["content"], rest[2]["start"])
        self._replacements = [(step["pattern"]["String"], step["content"]) for step in replaces]
        self.byte_fallback = True

    def convert_piece(self, content: str) -> str | int:
        """Return the text of a byte-fallback token, or its value if it is a byte."""
        for old, new in self._replacements:
            content = content.replace(old, new)
        match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", content)
        return int(match[1], 16) if match else content


def flatten_decoder(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a decoder, with nested sequences flattened."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in flatten_decoder(inner)]
    return [decoder]


class ByteLevelDetokenizer:
    """Join token bytes; a character that spans tokens is held back until it is complete."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        return self._decode(b"".join(map(self._table.raw_bytes, ids)))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Join token texts; a run of byte tokens is held back until it ends."""

    __slots__ = ("_run", "_strip", "_strips_left", "_table")

    def __init__(self, table: TokenTable, strip: tuple[str, int]) -> None:
        self._table = table
        self._strip, self._strips_left = strip
        self._run = bytearray()

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        parts: list[str] = []
        for token in ids:
            piece = self._table.fallback_piece(token)
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                parts.append(self._end_run())
                parts.append(piece)
        return self._strip_start("".join(parts))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)
        finally:
            self._run.clear()

    def _strip_start(self, text: str) -> str:
        """Drop leading characters that the decoder would drop from the full text."""
        while self._strips_left and text:
            if not text.startswith(self._strip):
                self._strips_left = 0
                break
            text = text[len(self._strip) :]
            self._strips_left -= 1
        return text


class WindowDetokenizer:
    """Run the decoder on the last few tokens, with and without the new ones.

    `_ids[:_returned]` are tokens whose text was returned; they are kept as left context of the following
    tokens.
    """

    __slots__ = ("_ids", "_returned", "_table", "_text")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._returned = 0
        self._text = ""

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        return "".join([self._next(token) for token in ids if not self._table.is_skipped(token)])

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(self._ids)[len(self._text) :]

    def _next(self, token: int) -> str:
        self._ids.append(token)
        window_text = self._decode(self._ids)
        new_tokens = len(self._ids) - self._returned
        is_final = not window_text.endswith(REPLACEMENT) and window_text.startswith(self._text)
        if not is_final and new_tokens < WINDOW_LIMIT:
            return ""
        new_text = window_text[len(self._text) :]
        context = self._ids[self._returned :]
        context_text = self._decode(context)
        # without text in the context, the next token would look like the first
        if context_text or len(self._ids) >= WINDOW_LIMIT:
            self._ids, self._text = context, context_text
        else:
            self._text = window_text
        self._returned = len(self._ids)
        return new_text

    def _decode(self, ids: list[int]) -> str:
        return self._table.tokenizer.decode(ids, skip_special_tokens=False)
