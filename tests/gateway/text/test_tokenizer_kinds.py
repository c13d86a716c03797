# SPDX-License-Identifier: Apache-2.0
"""Incremental decoding equals decoding all tokens at once, for the kinds of tokenizers of real models.

Each tokenizer has the pre-tokenizer, normalizer and decoder of the models' files, and is trained on text in
several scripts. The reference is the library's `decode` of all tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.gateway.text.stop import StopStrings
from mizzen.gateway.text.stream import TextStream
from mizzen.gateway.text.tokenizer import Tokenizer

CORPUS = [
    "The ship has three masts: fore, main and mizzen. It's 1,024 tonnes; isn't it?",
    "Ein Schiff mit drei Masten: Fock-, Groß- und Besanmast. Çà et là, œuvre naïve.",
    "你好,世界。こんにちは世界。안녕하세요 세계. Привет, мир! مرحبا بالعالم שלום",
    "🙂🚀 family: 👨‍👩‍👧 flag: 🇫🇷 e\u0301 combined \u200d joined",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # stop here\r\n",
] * 3
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def gpt2() -> tokenizers.Tokenizer:
    """Return a tokenizer like GPT-2's: byte-level BPE that splits texts by a built-in regular expression."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return byte_level(built)


def qwen() -> tokenizers.Tokenizer:
    """Return a tokenizer like those of Qwen and Llama 3.

    Texts are normalized to NFC, split by a regular expression, and encoded by byte-level BPE. The
    post-processor adds BOS.
    """
    built = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    byte_level(built)
    bos = built.token_to_id("<s>")
    built.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)]),
        ]
    )
    return built


def byte_level(built: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    built.train_from_iterator(CORPUS, trainer)
    return built


def sentence_piece(prepend: str, strip: bool) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer with byte fallback.

    With `prepend` "first" and `strip`, it is like the tokenizers of Llama 2 and Mistral; with `prepend`
    "never" and without `strip`, it is like Gemma's.
    """
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL + BYTES, show_progress=False)
    trained.train_from_iterator(CORPUS[:2], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    built = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    built.add_special_tokens(SPECIAL)
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return built


def unigram(byte_fallback: bool) -> tokenizers.Tokenizer:
    """Return a Unigram tokenizer.

    With `byte_fallback`, it is like the Unigram models that SentencePiece exports. Without it, it is like the
    tokenizers of T5 and XLM-R, whose decoder is Metaspace.
    """
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.normalizer = normalizers.NFKC()
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    if not byte_fallback:
        trained.decoder = decoders.Metaspace()
        return trained
    model = json.loads(trained.to_str())["model"]
    vocabulary = [(piece, score) for piece, score in model["vocab"]]
    built = tokenizers.Tokenizer(
        models.Unigram([*vocabulary, *((piece, -20.0) for piece in BYTES)], model["unk_id"], True)
    )
    built.add_special_tokens(SPECIAL)
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return built


BUILDERS = {
    "gpt2": gpt2,
    "qwen": qwen,
    "llama2": lambda: sentence_piece("first", strip=True),
    "gemma": lambda: sentence_piece("never", strip=False),
    "unigram": lambda: unigram(byte_fallback=False),
    "unigram-bytes": lambda: unigram(byte_fallback=True),
}
TEXTS = st.text(
    alphabet=st.one_of(
        st.sampled_from("ab .\n\t'1😀é世▁界👨\u200d\u0301\ufffd"), st.characters(codec="utf-8")
    ),
    max_size=50,
) | st.sampled_from(CORPUS)


@pytest.fixture(scope="module", params=BUILDERS)
def kind(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BUILDERS[request.param]())


def split_ids(data: st.DataObject, ids: Sequence[int]) -> list[list[int]]:
    """Return `ids`, split into pieces of random sizes; pieces may be empty."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [list(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def cut_at_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """Check every prefix of a text, and cut the text at the stop string that is completed first.

    Returns:
        The text before the stop string; None if the text contains no stop string.
    """
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@settings(max_examples=80)
@given(data=st.data())
def test_any_tokens_join_to_the_full_decoding(kind: Tokenizer, data: st.DataObject) -> None:
    """Random tokens include partial characters, single bytes, special tokens and unknown ids."""
    near = st.integers(0, kind.vocab_size + 2)
    bytewise = [kind.token_id(byte) for byte in BYTES]
    low = st.sampled_from([byte for byte in bytewise if byte is not None] or [0, 1])
    ids = data.draw(st.lists(st.one_of(near, low), max_size=30))
    skip = data.draw(st.booleans())
    stream = kind.detokenizer(skip)
    assert "".join([*map(stream.add, split_ids(data, ids)), stream.flush()]) == kind.decode(ids, skip)


@settings(max_examples=80)
@given(text=TEXTS, data=st.data())
def test_encoded_texts_join_to_the_full_decoding(kind: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = kind.encode(text)
    stream = kind.detokenizer()
    assert "".join([*map(stream.add, split_ids(data, ids)), stream.flush()]) == kind.decode(ids)


@settings(max_examples=60)
@given(text=TEXTS)
def test_streamed_text_is_always_a_prefix_of_the_full_text(kind: Tokenizer, text: str) -> None:
    """The text is streamed token by token."""
    ids = kind.encode(text)
    full_text, so_far = kind.decode(ids), ""
    stream = kind.detokenizer()
    for token in ids:
        so_far += stream.add((token,))
        assert full_text.startswith(so_far)


@settings(max_examples=80)
@given(text=TEXTS, data=st.data())
def test_stop_strings_cut_as_in_the_full_text_of_every_kind(
    kind: Tokenizer, text: str, data: st.DataObject
) -> None:
    """The stop strings span tokens, lie within one token, overlap, or do not occur."""
    ids = kind.encode(text)
    full_text = kind.decode(ids)
    piece = st.text(min_size=1, max_size=3)
    if full_text:
        ends = st.tuples(st.integers(0, len(full_text) - 1), st.integers(1, 6))
        piece |= ends.map(lambda at: full_text[at[0] : at[0] + at[1]])
    stops = tuple(data.draw(st.lists(piece, min_size=1, max_size=3)))
    stream = TextStream(kind, stops)
    delivered, used = "", 0
    for chunk in split_ids(data, ids):
        if stream.stopped:
            break
        more, count = stream.add(chunk)
        delivered, used = delivered + more, used + count
    ended = stream.stopped
    delivered += stream.flush()
    expected = cut_at_stop(full_text, stops)
    assert delivered == (full_text if expected is None else expected)
    if ended:
        assert cut_at_stop(kind.decode(ids[:used]), stops) is not None or used == len(ids)
    else:
        assert used == len(ids)


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3).map(tuple),
)
def test_only_possible_stop_prefixes_are_held_back(text: str, stops: tuple[str, ...]) -> None:
    stopper, delivered = StopStrings(stops), ""
    for end, letter in enumerate(text, 1):
        delivered += stopper.add(letter)
        if stopper.matched is not None:
            return
        held_back = text[len(delivered) : end]
        assert not held_back or any(stop.startswith(held_back) for stop in stops)


def test_tokenizers_are_of_the_intended_kinds(kind: Tokenizer) -> None:
    """Each tokenizer keeps all letters, and encodes unseen characters or marks them as unknown."""
    text = "The ship has three masts"
    assert kind.decode(kind.encode(text)) == text
