# SPDX-License-Identifier: Apache-2.0
"""Incremental detokenization: text is returned as tokens arrive; the pieces add up to the decoded sequence.

Tokens may end in the middle of a UTF-8 character, and most decoders treat the first token of a text
differently, so tokens cannot be decoded one by one. Decoding all tokens again for each new one would take
quadratic time. The two decoders that nearly all models use are therefore reproduced exactly, with a table
that maps each token to its bytes or text. Any other decoder is run on a short window of tokens.

- Byte-level BPE (GPT-2, Llama 3, Qwen, Mistral's Tekken): tokens are bytes, which are joined and decoded;
  U+FFFD replaces invalid bytes.
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): tokens are text, except byte tokens such as
  `<0x0A>`. A run of byte tokens is decoded as a unit, and becomes one U+FFFD per byte if it is not valid
  UTF-8. Its text is therefore known only when the run ends.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\ufffd"
METASPACE = "\u2581"
"""SentencePiece's character for a space."""
WINDOW_LIMIT = 64
"""Maximum number of tokens that the window decoder holds back; it bounds the cost per token."""


class Detokenizer(Protocol):
    """Incremental converter of one stream of token ids to text.

    The concatenated results of all calls of `add`, and of `flush` at the end, are the full text.
    """

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return the new text that later tokens cannot change."""
        ...

    def flush(self) -> str:
        """At the end of the stream, return the text that has been held back."""
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
        """Create empty tables; `shown` holds special tokens that are never skipped."""
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
        """Return the bytes of a token of a byte-level vocabulary; empty if it is skipped or unknown."""
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
        """Return the text of a token of a byte-fallback vocabulary, or the byte (0 to 255) of a byte token.

        None means a skipped or unknown token, which does not end a run of byte tokens.
        """
        if token not in self._texts:
            content = None if token in self._skipped else self.tokenizer.id_to_token(token)
            self._texts[token] = None if content is None else self._decoder_kind.convert_piece(content)
        return self._texts[token]


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens, by the text of the token."""
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
    """Return the bytes of a byte-level token; for an added token in plain text, its UTF-8 bytes."""
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
        """Return the text of a byte-fallback token, or the byte (0 to 255) of a byte token."""
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
    """Detokenizer of byte-level vocabularies; holds back a character until all its bytes have arrived."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return their text up to the last complete character."""
        return self._decode(b"".join(map(self._table.raw_bytes, ids)))

    def flush(self) -> str:
        """Return U+FFFD if the stream ended within a character, else an empty string."""
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Detokenizer of byte-fallback vocabularies; holds back a run of byte tokens until it ends."""

    __slots__ = ("_run", "_strip", "_strips_left", "_table")

    def __init__(self, table: TokenTable, strip: tuple[str, int]) -> None:
        self._table = table
        self._strip, self._strips_left = strip
        self._run = bytearray()

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return the new text, without the text of a run of byte tokens that has not ended."""
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
        """Return the text of the byte tokens at the end of the stream; empty if no byte token is there."""
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
    """Detokenizer for all other decoders: decodes the last few tokens with and without the new token.

    `_ids[:_returned]` are tokens whose text has been returned; they remain as left context of the next
    tokens.
    """

    __slots__ = ("_ids", "_returned", "_table", "_text")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._returned = 0
        self._text = ""

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return the new text that later tokens cannot change."""
        return "".join([self._next(token) for token in ids if not self._table.is_skipped(token)])

    def flush(self) -> str:
        """At the end of the stream, return the text that has been held back."""
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


class MarkingDetokenizer:
    """Detokenizer that replaces certain tokens by characters; the tokens between them are separate texts."""

    __slots__ = ("_inner", "_marks", "_new")

    def __init__(self, new: Callable[[], Detokenizer], marks: Mapping[int, str]) -> None:
        """Begin a stream; `new` returns a detokenizer, and `marks` maps the ids of tokens to characters."""
        self._new = new
        self._marks = marks
        self._inner = new()

    def add(self, ids: Iterable[int]) -> str:
        """Add tokens; return the new text, in which the text before a mark is complete."""
        parts: list[str] = []
        for token in ids:
            mark = self._marks.get(token)
            if mark is None:
                parts.append(self._inner.add((token,)))
            else:
                parts += [self._inner.flush(), mark]
                self._inner = self._new()
        return "".join(parts)

    def flush(self) -> str:
        """At the end of the stream, return the text that has been held back."""
        return self._inner.flush()
