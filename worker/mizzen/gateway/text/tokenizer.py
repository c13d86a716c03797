"""Text to token ids and back, with the `tokenizers` library and a model's own `tokenizer.json`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers

from mizzen.gateway.text.detokenize import DecoderForm, Detokenizer, Pieces, special_tokens
from mizzen.gateway.text.pooling import FILE as POOLING_FILE

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    POOLING_FILE,
)
"""Files that a tokenizer, its chat template and the pooling are read from; the first is required."""
TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the default one, each named as its file."""
MANY_TOKENS = 4096
"""More are decoded with other threads running."""
COMPOSED = 4
"""Characters that NFC makes one of, at most (Unicode Standard Annex 15, table 4)."""


class TokenizerError(ValueError):
    """A tokenizer cannot be read; the text says what is missing or wrong."""


def is_template(name: str) -> bool:
    """Tell whether a file's name is that of an additional chat template."""
    return name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja")


def wanted(names: Iterable[str]) -> list[str]:
    """Return the files, of those that a model has, that its text side is made of."""
    return [name for name in names if name in FILES or is_template(name)]


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer files that a model's folder holds, by name."""
    names = [*FILES, *sorted(f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja"))]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self._special = special_tokens(inner)
        self._form = DecoderForm(inner)
        self._pieces: dict[tuple[bool, tuple[str, ...]], Pieces] = {}
        self._plain = Pieces(inner, self._form, False)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Build a tokenizer from file contents by name; `tokenizer.json` is needed.

        Raises:
            TokenizerError: the file is missing, or is not what `tokenizers` reads.
        """
        content = files.get("tokenizer.json")
        if content is None:
            raise TokenizerError(
                "the model has no tokenizer.json; save_pretrained of Transformers' fast tokenizer writes one"
            )
        try:
            return cls(tokenizers.Tokenizer.from_buffer(content))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Build the tokenizer of a model's folder.

        Raises:
            TokenizerError: as `from_files`.
        """
        return cls.from_files(read_files(Path(folder)))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens among them."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def characters_per_token(self) -> int:
        """Characters of a text that one token stands for at most; 0 where there is no bound.

        There is one for byte-level BPE: no byte of a text is left out there, and no run of them unknown.
        """
        inner = self._inner
        if not isinstance(inner.model, models.BPE) or not isinstance(inner.decoder, decoders.ByteLevel):
            return 0
        if not isinstance(inner.normalizer, normalizers.NFC | None):
            return 0
        if any(token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values()):
            return 0  # such tokens take any number of spaces along
        longest = max(map(len, inner.get_vocab()), default=0)  # a character of a token is a byte
        return longest * (COMPOSED if inner.normalizer else 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        `add_special_tokens` adds what the model's own post-processor adds (a leading BOS, say). Text rendered
        by a chat template already holds it: pass False.
        """
        # The batch call releases the GIL and skips the offsets, which nobody here reads.
        batch = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary stand for nothing."""
        if len(ids) > MANY_TOKENS:  # the batch call releases the GIL
            return self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact content."""
        return self._inner.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """Return what a token stands for by itself, in UTF-8; it may be a part of a character."""
        return self._plain.data(token)

    def special_token_id(self, token: str) -> int | None:
        """Return the id of a special token by its exact content; None for any other."""
        return self._special.get(token)

    def detokenizer(self, skip_special_tokens: bool = True, shown: tuple[str, ...] = ()) -> Detokenizer:
        """Return an incremental decoder for one stream of tokens; its texts join to `decode` of all ids.

        `shown` are special tokens that are in the text although special ones are skipped.
        """
        key = (skip_special_tokens, tuple(token for token in shown if token in self._special))
        pieces = self._pieces.get(key)
        if pieces is None:
            pieces = self._pieces[key] = Pieces(self._inner, self._form, *key)
        return pieces.detokenizer()
