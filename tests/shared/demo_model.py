# SPDX-License-Identifier: Apache-2.0
"""Questions and answers on which the demo model was trained, and scores of texts by Transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUESTION, STORY = "What is Mizzen?", "Tell me a long story about a ship."


def training_entries() -> list[dict[str, Any]]:
    """Return all entries of the training data, each with `questions` and their `answer`."""
    paths = sorted((ROOT / "scripts/demo_data").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def trained_answers() -> dict[str, str]:
    """Return the trained answer of each question."""
    answers: dict[str, str] = {}
    for entry in training_entries():
        answers |= dict.fromkeys(entry["questions"], entry["answer"])
    return answers


def trained_answer(question: str) -> str:
    """Return the trained answer of a question.

    Raises:
        KeyError: the demo model was not trained on the question.
    """
    return trained_answers()[question]


def score_continuation(model: Any, tokens: Sequence[int], start: int) -> tuple[float, bool]:
    """Return the log-likelihood of the tokens from `start` > 0 on, and whether greedy decoding chooses them.

    `model` is a causal language model of Transformers.
    """
    import torch

    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0, start - 1 : -1].log_softmax(-1)
    ids = torch.tensor(tokens[start:])
    return logprobs.gather(1, ids[:, None]).sum().item(), bool((logprobs.argmax(-1) == ids).all())
