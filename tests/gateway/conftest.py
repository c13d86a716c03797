"""Tokenizers and templates that the tests of this folder share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from mizzen.gateway.text.tokenizer import Tokenizer

CORPUS = [
    "Mizzen serves language models on Kubernetes. The gateway tokenizes, routes, and detokenizes.",
    "Ein Schiff mit drei Masten: Fock-, Groß- und Besanmast. Çà et là, œuvre naïve.",
    "你好,世界。こんにちは世界。Привет, мир! 🙂🚀 family: 👨‍👩‍👧",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # stop here",
] * 4
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]


def byte_level_bpe(bos: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer of GPT-2's, Llama 3's and Qwen's kind, trained on a few lines."""
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    built.add_tokens(["<tool_call>", "Größe"])
    if bos:
        built.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))]
        )
    return built


def byte_fallback_bpe(strip: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer of Llama 2's (with `strip`) or Gemma's kind: text pieces and 256 byte tokens."""
    words = sorted({"▁" + word for line in CORPUS[:4] for word in line.split()})
    letters = sorted({letter for word in words for letter in word if ord(letter) < 0x2000} | {"▁"})
    tokens = SPECIAL + [f"<0x{value:02X}>" for value in range(256)] + letters
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges: list[tuple[str, str]] = []
    for word in (word for word in words if set(word) <= set(letters)):
        for end in range(1, len(word)):
            pair = (word[:end], word[end])
            if word[: end + 1] not in vocabulary:
                merges.append(pair)
                vocabulary[word[: end + 1]] = len(vocabulary)
    built = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    built.add_special_tokens(SPECIAL)
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    return built


def metaspace() -> tokenizers.Tokenizer:
    """Return a tokenizer with a decoder that only the windowed detokenizer covers."""
    built = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Metaspace()
    built.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


def word_piece() -> tokenizers.Tokenizer:
    """Return BERT's kind, whose decoder changes spaces between words."""
    built = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    built.train_from_iterator(CORPUS, trainer)
    return built


BUILDERS = {
    "byte-level": byte_level_bpe,
    "byte-fallback": byte_fallback_bpe,
    "byte-fallback-no-strip": lambda: byte_fallback_bpe(strip=False),
    "metaspace": metaspace,
    "word-piece": word_piece,
}


@pytest.fixture(scope="session", params=BUILDERS)
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(BUILDERS[request.param]())


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, bytes]:
    """Return a model's tokenizer files: byte-level BPE that adds a BOS, and Qwen's template form."""
    template = (
        "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    return {
        "tokenizer.json": byte_level_bpe(bos=True).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer_files: dict[str, bytes]) -> Path:
    for name, content in tokenizer_files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path
