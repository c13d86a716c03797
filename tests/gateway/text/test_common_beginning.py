# SPDX-License-Identifier: Apache-2.0
"""Texts with a common beginning get the tokens that each text gets by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.gateway.text import common_beginning
from mizzen.gateway.text.common_beginning import LEAST_CHARACTERS, encode_alike, last_break
from mizzen.gateway.text.tokenizer import Tokenizer

PREFIX = "Which of the pods runs on a node of the cluster? " * 40
ENDINGS = ["", "yes", " yes", "no", " a pod on a node", "\n\nOf", "?", "s"]


class CountingTokenizer(Tokenizer):
    """A tokenizer that counts the characters it encodes."""

    characters = 0

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.characters += sum(map(len, texts))
        return super().encode_batch(texts, add_special_tokens)


def make_tokenizer(kind: str) -> CountingTokenizer:
    """Train a byte-level BPE, or one of the kind of Llama 2, which marks the begin of a text as a space."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Replace("▁", " ")
        alphabet = sorted(set(PREFIX + "".join(ENDINGS) + "▁"))
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([PREFIX, *ENDINGS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return CountingTokenizer.from_files({"tokenizer.json": tokenizer.to_str().encode()})


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_tokens_equal_those_of_each_text(kind: str, add_special_tokens: bool) -> None:
    tokenizer = make_tokenizer(kind)
    for prefix in (PREFIX, PREFIX.rstrip(), "Which ", "x" * 3000, " " * 3000, PREFIX + "一二三"):
        texts = [prefix + ending for ending in ENDINGS]
        expected = [tokenizer.encode(text, add_special_tokens) for text in texts]
        assert encode_alike(tokenizer, texts, add_special_tokens=add_special_tokens) == expected


def test_a_long_beginning_is_tokenized_once() -> None:
    tokenizer = make_tokenizer("bytes")
    texts = [PREFIX + ending for ending in ENDINGS]
    encode_alike(tokenizer, texts)
    assert tokenizer.characters < 3 * len(PREFIX)
    tokenizer.characters = 0
    encode_alike(tokenizer, [PREFIX[: LEAST_CHARACTERS - 1] + ending for ending in ("a", "b")])
    assert tokenizer.characters == 2 * LEAST_CHARACTERS


def test_common_beginnings() -> None:
    assert common_beginning.common_beginning(["abcd", "abc", "abx"]) == "ab"
    assert common_beginning.common_beginning(["abc", "abc"]) == "abc"
    assert common_beginning.common_beginning(["abc", "ab", "b"]) == ""


@pytest.mark.parametrize(
    ("text", "end", "index"),
    [("a bc d", 5, 4), ("a bc d", 3, 1), ("a  b", 3, 1), (" ab", 2, -1), ("", 4, -1), ("ab ", 9, 2)],
)
def test_texts_are_split_before_a_space_after_another_character(text: str, end: int, index: int) -> None:
    assert last_break(text, end) == index
