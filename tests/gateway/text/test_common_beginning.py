# SPDX-License-Identifier: Apache-2.0
"""Texts with a common beginning get the tokens that each text gets by itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.gateway.text import common_beginning
from mizzen.gateway.text.common_beginning import LEAST_CHARACTERS, MAX_BEGINNINGS, PrefixEncoder, last_break
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


def encode(encoder: PrefixEncoder, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
    return [ids.tolist() for ids in encoder.encode(texts, add_special_tokens=add_special_tokens)]


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_tokens_equal_those_of_each_text(kind: str, add_special_tokens: bool) -> None:
    tokenizer = make_tokenizer(kind)
    encoder = PrefixEncoder(tokenizer)
    for prefix in (PREFIX, PREFIX.rstrip(), "Which ", "x" * 3000, " " * 3000, PREFIX + "一二三", 2 * PREFIX):
        texts = [prefix + ending for ending in ENDINGS]
        expected = [tokenizer.encode(text, add_special_tokens) for text in texts]
        assert encode(encoder, texts, add_special_tokens) == expected
        for text, ids in zip(texts, expected, strict=True):
            assert encode(encoder, [text], add_special_tokens) == [ids]


def test_beginnings_with_and_without_special_tokens_are_kept_apart() -> None:
    tokenizer = make_tokenizer("bytes")
    encoder = PrefixEncoder(tokenizer)
    for special in (True, False, True, False):
        assert encode(encoder, [PREFIX], special) == [tokenizer.encode(PREFIX, special)]


def test_a_long_beginning_is_tokenized_once() -> None:
    tokenizer = make_tokenizer("bytes")
    encoder, prefix = PrefixEncoder(tokenizer), 10 * PREFIX
    encoder.encode([prefix + ending for ending in ENDINGS])
    assert tokenizer.characters < 1.2 * len(prefix)
    tokenizer.characters = 0
    encoder.encode([prefix + ending for ending in ENDINGS])
    assert tokenizer.characters < 0.1 * len(prefix)
    encoder.encode([prefix + PREFIX])
    assert tokenizer.characters < 0.3 * len(prefix)
    tokenizer.characters = 0
    PrefixEncoder(tokenizer).encode([PREFIX[: LEAST_CHARACTERS - 1] + ending for ending in ("a", "b")])
    assert tokenizer.characters == 2 * LEAST_CHARACTERS


def test_forks_of_a_text_share_its_tokens() -> None:
    tokenizer = make_tokenizer("bytes")
    encoder = PrefixEncoder(tokenizer)
    for fork in range(8):
        text = f"{PREFIX}{fork} {PREFIX[:400]}"
        assert encode(encoder, [text]) == [tokenizer.encode(text)]
    assert tokenizer.characters < 4 * len(PREFIX) + 8 * 1000


def test_a_text_that_cannot_be_split_is_tokenized_once() -> None:
    tokenizer = make_tokenizer("spaces")
    PrefixEncoder(tokenizer).encode([10 * PREFIX])
    assert tokenizer.characters < 1.1 * len(10 * PREFIX)


def test_the_beginnings_used_last_are_kept() -> None:
    tokenizer = make_tokenizer("bytes")
    encoder = PrefixEncoder(tokenizer)
    for number in range(MAX_BEGINNINGS + 1):
        encoder.encode([str(number) * 2 + PREFIX])
        encoder.encode(["00" + PREFIX])
    tokenizer.characters = 0
    encoder.encode(["00" + PREFIX])
    assert tokenizer.characters < len(PREFIX) / 2
    tokenizer.characters = 0
    encoder.encode(["11" + PREFIX])
    assert tokenizer.characters > len(PREFIX)


def test_common_beginnings() -> None:
    assert common_beginning.common_beginning(["abcd", "abc", "abx"]) == "ab"
    assert common_beginning.common_beginning(["abc", "abc"]) == "abc"
    assert common_beginning.common_beginning(["abc", "ab", "b"]) == ""
    for size in (255, 256, 257, 700):
        assert len(common_beginning.common_beginning(["a" * size, "a" * size + "b"])) == size
        assert common_beginning.count_common_tokens([[1] * size + [2], [1] * size + [3, 4]]) == size
        assert common_beginning.count_common_tokens([np.ones(size, np.int32), [1] * size + [2]]) == size


@pytest.mark.parametrize(
    ("text", "end", "index"),
    [("a bc d", 5, 4), ("a bc d", 3, 1), ("a  b", 3, 1), (" ab", 2, -1), ("", 4, -1), ("ab ", 9, 2)],
)
def test_texts_are_split_before_a_space_after_another_character(text: str, end: int, index: int) -> None:
    assert last_break(text, end) == index
