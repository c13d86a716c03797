# SPDX-License-Identifier: Apache-2.0
"""Convert text to token ids and back, with the `tokenizers` library and a model's own `tokenizer.json`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import decoders, models, normalizers

from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.common.tokenizer_json import FILE as TOKENIZER
from mizzen.common.tokenizer_json import TokenizerConversionError, read_tokenizer_json
from mizzen.gateway.text.detokenize import (
    DecoderKind,
    Detokenizer,
    MarkingDetokenizer,
    TokenTable,
    special_tokens,
)
from mizzen.gateway.text.image_marks import ImageMark, rename_token

FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    POOLING_FILE,
)
"""Files from which a text model is built; only the first is required."""
TEMPLATES_FOLDER = "additional_chat_templates"
"""Folder of additional chat templates; each template is named after its file."""
GIL_FREE_TOKENS = 4096
"""Number of tokens above which decoding uses the library's batch call, which releases the GIL."""
MAX_NFC_CHARACTERS = 4
"""Maximum number of characters that NFC composes into a single one (Unicode Standard Annex 15, table 4)."""

NO_MARKS: Mapping[int, str] = MappingProxyType({})


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded; the message says what is missing or wrong."""


def is_chat_template(name: str) -> bool:
    """Return whether `name`, a path relative to the model's folder, names an additional chat template."""
    return name.startswith(f"{TEMPLATES_FOLDER}/") and name.endswith(".jinja")


def select_files(names: Iterable[str]) -> list[str]:
    """Select from `names` the files from which a text model is built."""
    return [name for name in names if name in FILES or is_chat_template(name)]


def read_files(folder: Path) -> dict[str, bytes]:
    """Read the files that `select_files` selects in a model's folder; return their contents by name.

    If the folder has no `tokenizer.json` but another format that can be converted, it is converted.

    Raises:
        TokenizerError: the tokenizer cannot be converted.
    """
    names = [
        *FILES,
        *sorted(f"{TEMPLATES_FOLDER}/{path.name}" for path in (folder / TEMPLATES_FOLDER).glob("*.jinja")),
    ]
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    if TOKENIZER not in files:
        try:
            converted = read_tokenizer_json(folder)
        except TokenizerConversionError as error:
            raise TokenizerError(str(error)) from error
        if converted is not None:
            files[TOKENIZER] = converted
    return files


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(self, inner: tokenizers.Tokenizer, encoder: tokenizers.Tokenizer | None = None) -> None:
        """Create a tokenizer that decodes with `inner`, and encodes with `encoder` if that is given."""
        encoder = encoder or inner
        for part in (inner, encoder):
            part.no_truncation()
            part.no_padding()
        self._inner = inner
        self._encoder = encoder
        self._special = special_tokens(inner)
        self._special_count = inner.num_special_tokens_to_add(False)
        self._decoder_kind = DecoderKind(inner)
        self._token_tables: dict[tuple[bool, tuple[str, ...]], TokenTable] = {}
        self._all_tokens = TokenTable(inner, self._decoder_kind, False)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], mark: ImageMark | None = None) -> Tokenizer:
        """Build a tokenizer from the `tokenizer.json` among a model's files.

        `files` maps the files' names to their contents. With `mark`, only the mark's secret text becomes the
        placeholder of an image; the placeholder's own text is tokenized like any other text.

        Raises:
            TokenizerError: `tokenizer.json` is missing, or the `tokenizers` library cannot read it.
        """
        content = files.get(TOKENIZER)
        if content is None:
            raise TokenizerError(
                "the model has no tokenizer.json, and no tokenizer.model or tekken.json to convert; "
                "save it with Transformers' fast tokenizer (save_pretrained)"
            )
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
            if mark is None:
                return cls(inner)
            renamed = rename_token(content, mark.placeholder, mark.text)
            return cls(inner, tokenizers.Tokenizer.from_buffer(renamed))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Build the tokenizer of the model in a folder.

        Raises:
            TokenizerError: `tokenizer.json` is missing, or the `tokenizers` library cannot read it.
        """
        return cls.from_files(read_files(Path(folder)))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including added tokens."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def characters_per_token(self) -> int:
        """Maximum number of characters in the text of one token; 0 if unbounded.

        Byte-level BPE has a bound, because it never drops a byte, and never maps a run of unknown characters
        to a single token.
        """
        inner = self._inner
        if not isinstance(inner.model, models.BPE) or not isinstance(inner.decoder, decoders.ByteLevel):
            return 0
        if not isinstance(inner.normalizer, normalizers.NFC | None):
            return 0
        if any(token.lstrip or token.rstrip for token in inner.get_added_tokens_decoder().values()):
            return 0  # such tokens absorb any number of spaces
        longest = max(map(len, inner.get_vocab()), default=0)  # each character of a token is one byte
        return longest * (MAX_NFC_CHARACTERS if inner.normalizer else 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        `add_special_tokens` adds the tokens of the model's post-processor (such as a leading BOS). Pass False
        for text rendered by a chat template, which already contains them.
        """
        # The batch call releases the GIL and skips the offsets, which are not needed.
        batch = self._encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, max_tokens: int = 0
    ) -> list[list[int]]:
        """Return the token ids of each text, of at most `max_tokens` tokens (0: no limit).

        A longer text is cut at its end; the special tokens at the end of a prompt, such as EOS, are kept.
        """
        if not max_tokens:
            encodings = self._encoder.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        room = max(0, max_tokens - (self._special_count if add_special_tokens else 0))
        ids = []
        for encoding in self._encoder.encode_batch_fast(list(texts), add_special_tokens=False):
            if len(encoding) > room:
                encoding.truncate(room)
            ids.append(self._encoder.post_process(encoding, None, add_special_tokens).ids)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and the index of the first token of the second type.

        The post-processor joins the texts. If it gives all tokens the same type, the index is 0.
        """
        pair = self._encoder.encode_batch_fast([first, second], add_special_tokens=False)
        joined = self._encoder.post_process(pair[0], pair[1], True)
        types = joined.type_ids
        return joined.ids, types.index(1) if 1 in types else 0

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text, at most about `max_tokens` tokens; it ends with a whole token."""
        encoding = self._encoder.encode_batch([text], add_special_tokens=False)[0]
        if len(encoding) <= max_tokens:
            return text
        return text[: encoding.offsets[max_tokens - 1][1]] if max_tokens else ""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, given their ids; ids outside the vocabulary are ignored."""
        if len(ids) > GIL_FREE_TOKENS:  # the batch call releases the GIL
            return self._inner.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of the token with exactly this content; None if there is no such token."""
        return self._inner.token_to_id(token)

    def token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a single token; they may contain part of a character."""
        return self._all_tokens.utf8_bytes(token)

    def special_token_id(self, token: str) -> int | None:
        """Return the id of the special token with exactly this content; None if no special token has it."""
        return self._special.get(token)

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        shown: tuple[str, ...] = (),
        marks: Mapping[int, str] = NO_MARKS,
    ) -> Detokenizer:
        """Return a detokenizer for one stream of tokens.

        Its results, joined, equal the result of `decode` for all tokens of the stream.
        `shown` holds special tokens that stay in the text even if special tokens are skipped. `marks` maps
        the ids of tokens to characters that replace their text.
        """
        key = (skip_special_tokens, tuple(token for token in shown if token in self._special))
        table = self._token_tables.get(key)
        if table is None:
            table = self._token_tables[key] = TokenTable(self._inner, self._decoder_kind, *key)
        return MarkingDetokenizer(table.detokenizer, marks) if marks else table.detokenizer()
