# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models to find words: a classifier of texts, and a cross-encoder of queries and documents.

Both rules are exact, so the right answers to texts that training does not use are known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Encoding, Tokenizer

from encoders.twins import WORDS

LABELS = ("neither", "paris", "berlin")
"""Labels of the classifier: the city that a text names, if any. No text names both."""
QUERIES = ("city", "capital", "france", "paris")
"""Queries of the cross-encoder: a document is relevant if it has the word."""
LENGTHS = (4, 5, 6)
"""Numbers of words in a text."""
BATCH = 32
GOOD_LOSS = 0.02
GOOD_BATCHES = 30
MAX_BATCHES = 3000


def draw_text(draw: random.Random, length: int) -> str:
    """Return a text of different words in random order; at most one is a city."""
    left_out = draw.choice(LABELS[1:])
    return " ".join(draw.sample([word for word in WORDS if word != left_out], length))


def draw_held_out() -> tuple[str, ...]:
    """Return texts that training does not use."""
    draw = random.Random(99)
    return tuple(draw_text(draw, length) for length in LENGTHS for _ in range(8))


HELD_OUT = draw_held_out()


def label_of(text: str) -> int:
    """Return the index of a text's label in `LABELS`."""
    return next((index for index, label in enumerate(LABELS) if label in text.split()), 0)


def is_relevant(query: str, document: str) -> int:
    """Return 1 for a relevant document, else 0."""
    return int(query in document.split())


def train_classifier(model: Any, tokenizer: Tokenizer, seed: int = 0) -> None:
    """Train a model with `LABELS` as labels to name the city in a text."""

    def encode(draw: random.Random, text: str) -> tuple[Encoding, int]:
        return tokenizer.encode(text), label_of(text)

    fit(model, encode, torch.nn.functional.cross_entropy, seed)


def train_reranker(model: Any, tokenizer: Tokenizer, seed: int = 0) -> None:
    """Train a model with one label to tell whether a document is relevant to a query."""

    def encode(draw: random.Random, text: str) -> tuple[Encoding, int]:
        relevant = draw.randrange(2)
        queries = [query for query in QUERIES if is_relevant(query, text) == relevant]
        query = draw.choice(queries or QUERIES)
        return tokenizer.encode(query, text), is_relevant(query, text)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels.float())

    fit(model, encode, loss_of, seed)


def fit(
    model: Any,
    encode: Callable[[random.Random, str], tuple[Encoding, int]],
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    seed: int,
) -> None:
    """Train a model until the loss of `GOOD_BATCHES` new batches in succession is below `GOOD_LOSS`.

    Args:
        model: Classifier of Transformers, without dropout; it is left in evaluation mode.
        encode: Returns the tokens of a prompt with a text, and the prompt's label.
        loss_of: Loss of logits, float32 [batch, labels], and labels, int64 [batch].
        seed: Seed of the texts.

    Raises:
        RuntimeError: the loss stays above for `MAX_BATCHES` batches.
    """
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    several = getattr(model.config, "type_vocab_size", 1) > 1
    good = 0
    for batch in range(MAX_BATCHES):
        texts = [draw_text(draw, LENGTHS[batch % len(LENGTHS)]) for _ in range(BATCH)]
        encodings, labels = zip(*(encode(draw, text) for text in texts if text not in HELD_OUT), strict=True)
        inputs = {"input_ids": torch.tensor([encoding.ids for encoding in encodings])}
        if several:
            inputs["token_type_ids"] = torch.tensor([encoding.type_ids for encoding in encodings])
        loss = loss_of(model(**inputs).logits, torch.tensor(labels))
        good = good + 1 if loss.item() < GOOD_LOSS else 0
        if good == GOOD_BATCHES:
            model.eval()
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise RuntimeError(f"training did not bring the loss below {GOOD_LOSS} in {MAX_BATCHES} batches")
