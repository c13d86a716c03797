# SPDX-License-Identifier: Apache-2.0
"""A real tokenizer with 128,000 entries and text for it, both generated deterministically.

The tokenizer is byte-level BPE with the pre-tokenization of GPT-4's and Qwen's tokenizers. The `tokenizers`
library trains it on invented words of one to three syllables; frequent words are short, as in natural
languages. Training takes a few seconds, so the file is kept in the temporary folder.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

SIZE = 128_000
VERSION = 2
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ONSETS = """
    b bl br c ch cl cr d dr f fl fr g gl gr h j k kn l m n p ph pl pr qu r s sc sh sk sl sm sn sp st str
    t th tr tw v w wh wr y z ß ж п 世 好
"""
VOWELS = "a e i o u ai ea ee ie oa oo ou é ü о"
CODAS = "b ck d f g l ll m mp n nd ng nk nt p r rd rk rm rn rt s sh sk sp ss st t th x"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|start|>", "<|end|>")


def chat_text(content: str) -> str:
    """Return the output of the chat template for one user message."""
    return f"<|start|>user\n{content}<|end|>\n<|start|>assistant\n"


class Language:
    """Generator of random text from invented words; `words` lists them, the most frequent first."""

    def __init__(self, words: int = 150_000) -> None:
        rng = random.Random(20)
        onsets, vowels, codas = ONSETS.split(), VOWELS.split(), ["", *CODAS.split()]
        syllables = [a + b + c for a in onsets for b in vowels for c in codas]
        rng.shuffle(syllables)
        unique: dict[str, None] = {}
        while len(unique) < words:
            count = 1 + (len(unique) > 3000) * rng.choice((0, 1)) + (len(unique) > 12_000)
            unique["".join(rng.choice(syllables) for _ in range(count))] = None
        self.words = list(unique)

    def text(self, rng: random.Random, words: int) -> str:
        """Return `words` random words with punctuation and line ends.

        The frequency of a word decreases with its rank by a power law.
        """
        last = len(self.words) - 1
        parts = [self.words[min(last, int(rng.paretovariate(0.6) * 4) - 4)] for _ in range(words)]
        for at in range(17, words, 17):
            parts[at] += rng.choice((".", ",", ".\n", "; 42", " 🙂", " – "))
        return " ".join(parts)

    def corpus(self) -> Iterator[str]:
        """Yield lines to train the tokenizer on; they contain all words, and frequent words more often."""
        for start in range(0, len(self.words), 1000):
            line = " " + " ".join(self.words[start : start + 1000])
            for _ in range(max(1, 40_000 // (start + 1000))):
                yield line


class Vocabulary:
    """The tokenizer, its files, and the tokens that simulated engines reply with."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / "mizzen-gateway-load"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"tokenizer-{VERSION}-{tokenizers.__version__}.json"
        self.language = Language()
        if not self.path.is_file():
            unfinished = self.path.with_suffix(".part")
            train(self.language).save(str(unfinished))
            unfinished.replace(self.path)

    @cached_property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """Tokenizer of the client, which computes expected answers independently of the gateway's code."""
        return tokenizers.Tokenizer.from_file(str(self.path))

    @cached_property
    def files(self) -> dict[str, bytes]:
        """Tokenizer files that an engine serves, by name."""
        config = {"chat_template": TEMPLATE, "eos_token": "<|end|>"}
        return {
            "tokenizer.json": self.path.read_bytes(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, rng: random.Random, tokens: int) -> str:
        """Return a random text of about `tokens` tokens."""
        text = self.language.text(rng, 32 + tokens)
        ids = self.encode(text[: 12 * tokens + 64])[:tokens]
        return self.tokenizer.decode(ids)

    def replies(self, length: int = 50_000) -> list[int]:
        """Return `length` reply tokens; the reply of an engine is a run of consecutive reply tokens."""
        return self.encode(self.language.text(random.Random(7), length))[:length]


def train(language: Language) -> tokenizers.Tokenizer:
    """Train the tokenizer on the corpus of a language, and return it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(language.corpus(), trainer)
    if tokenizer.get_vocab_size() < 100_000:
        raise RuntimeError(f"the tokenizer has only {tokenizer.get_vocab_size()} entries")
    return tokenizer
