"""Incremental decoding: text as tokens come, equal to decoding the whole at the end.

Tokens end in the middle of UTF-8 characters, and most decoders treat the first token of a text differently,
so text cannot be decoded token by token. Decoding everything again for each token is quadratic. Instead, the
two decoders that nearly all models use are followed exactly, by a table from token to bytes or text; any
other one is asked about a short window of tokens.

- byte-level BPE (GPT-2, Llama 3, Qwen, Mistral's Tekken): tokens are bytes, joined and decoded with
  replacement of invalid ones;
- SentencePiece with byte fallback (Llama 2, Mistral, Gemma): tokens are text, except `<0x..>`, runs of which
  are decoded as one; a run that is not UTF-8 as a whole gives one U+FFFD a byte, so a run's text is known
  only where the run ends.
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
"""SentencePiece's sign for a space."""
WINDOW_LIMIT = 64
"""Tokens that the windowed decoder holds back at most, so that its cost a token stays bounded."""


class Detokenizer(Protocol):
    """Turns one stream of token ids into text. What `add` and then `flush` return joins to the whole text."""

    def add(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text that is certain now."""
        ...

    def flush(self) -> str:
        """Return the text that was held back; the stream has ended."""
        ...


class Pieces:
    """What tokens stand for, looked up once a token id and kept; shared by all streams of a tokenizer."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        form: DecoderForm,
        skip_special_tokens: bool,
        shown: Collection[str] = (),
    ) -> None:
        """Build empty tables; `shown` are special tokens that are not skipped."""
        self.tokenizer = tokenizer
        special = special_tokens(tokenizer)
        self._skipped = {i for token, i in special.items() if skip_special_tokens and token not in shown}
        self._form = form
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | int | None] = {}

    def detokenizer(self) -> Detokenizer:
        """Return a decoder for one stream."""
        if self._form.byte_level:
            return ByteLevelDetokenizer(self)
        if self._form.byte_fallback:
            return ByteFallbackDetokenizer(self, self._form.strip)
        return WindowDetokenizer(self)

    def skipped(self, token: int) -> bool:
        """Tell whether a token is left out of the text."""
        return token in self._skipped

    def raw(self, token: int) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            content = "" if token in self._skipped else self.tokenizer.id_to_token(token) or ""
            found = self._bytes[token] = token_bytes(content)
        return found

    def data(self, token: int) -> bytes:
        """Return what a token stands for by itself, whatever the vocabulary's kind."""
        if self._form.byte_level:
            return self.raw(token)
        if self._form.byte_fallback:
            piece = self.text(token)
            return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
        content = self.tokenizer.id_to_token(token) or ""
        if METASPACE in content:
            return content.replace(METASPACE, " ").encode()
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def text(self, token: int) -> str | int | None:
        """Return the text of a token of a byte-fallback vocabulary, or its value when it is a byte.

        None is a token that is left out, or no token at all: it does not even end a run of bytes.
        """
        if token not in self._texts:
            content = None if token in self._skipped else self.tokenizer.id_to_token(token)
            self._texts[token] = None if content is None else self._form.piece(content)
        return self._texts[token]


def special_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by their content."""
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: i for i, token in added.items() if token.special}


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from characters of byte-level vocabularies to bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in alphabet)
    alphabet.update({chr(256 + i): value for i, value in enumerate(list(others))})
    return alphabet


_ALPHABET = byte_alphabet()


def token_bytes(content: str) -> bytes:
    """Return what a byte-level token stands for; an added token outside the alphabet is its own text."""
    try:
        return bytes([_ALPHABET[character] for character in content])
    except KeyError:
        return content.encode()


class DecoderForm:
    """Which of the known decoders a tokenizer has, from its description in `tokenizer.json`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        decoder = tokenizer.decoder  # its state alone: the whole description holds the vocabulary
        steps = flatten(None if decoder is None else json.loads(decoder.__getstate__()))
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

    def piece(self, content: str) -> str | int:
        """Return a byte-fallback token's text, or its value when it is a byte."""
        for old, new in self._replacements:
            content = content.replace(old, new)
        match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", content)
        return int(match[1], 16) if match else content


def flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a decoder's steps, sequences opened."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in flatten(inner)]
    return [decoder]


class ByteLevelDetokenizer:
    """Joins token bytes; characters cut by a token's end wait for the rest."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        return self._decode(b"".join(map(self._pieces.raw, ids)))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Joins token texts; a run of byte tokens waits for its end."""

    __slots__ = ("_pieces", "_run", "_strip", "_strips")

    def __init__(self, pieces: Pieces, strip: tuple[str, int]) -> None:
        self._pieces = pieces
        self._strip, self._strips = strip
        self._run = bytearray()

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        parts: list[str] = []
        for token in ids:
            piece = self._pieces.text(token)
            if isinstance(piece, int):
                self._run.append(piece)
            elif piece is not None:
                parts.append(self._end_run())
                parts.append(piece)
        return self._start("".join(parts))

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._start(self._end_run())

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(self._run)
        finally:
            self._run.clear()

    def _start(self, text: str) -> str:
        """Drop the leading characters that the whole text's decoder would drop."""
        while self._strips and text:
            if not text.startswith(self._strip):
                self._strips = 0
                break
            text = text[len(self._strip) :]
            self._strips -= 1
        return text


class WindowDetokenizer:
    """Asks the decoder about the last few tokens, with and without the new ones.

    `_ids[:_read]` is text that was returned, kept as the left neighbour of what follows.
    """

    __slots__ = ("_ids", "_pieces", "_read", "_text")

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._ids: list[int] = []
        self._read = 0
        self._text = ""

    def add(self, ids: Iterable[int]) -> str:
        """See `Detokenizer`."""
        return "".join([self._next(token) for token in ids if not self._pieces.skipped(token)])

    def flush(self) -> str:
        """See `Detokenizer`."""
        return self._decode(self._ids)[len(self._text) :]

    def _next(self, token: int) -> str:
        self._ids.append(token)
        whole = self._decode(self._ids)
        held = len(self._ids) - self._read
        settled = not whole.endswith(REPLACEMENT) and whole.startswith(self._text)
        if not settled and held < WINDOW_LIMIT:
            return ""
        new = whole[len(self._text) :]
        neighbours = self._ids[self._read :]
        text = self._decode(neighbours)
        if text or len(self._ids) >= WINDOW_LIMIT:  # a neighbour without text would pass for the first token
            self._ids, self._text = neighbours, text
        else:
            self._text = whole
        self._read = len(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._pieces.tokenizer.decode(ids, skip_special_tokens=False)
