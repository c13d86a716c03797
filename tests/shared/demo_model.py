# SPDX-License-Identifier: Apache-2.0
"""Questions and answers on which the demo model was trained."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUESTION, STORY = "What is Mizzen?", "Tell me a long story about a ship."


def trained_answers() -> dict[str, str]:
    """Return the trained answer of each question."""
    answers: dict[str, str] = {}
    for path in sorted((ROOT / "scripts/demo_data").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            answers |= dict.fromkeys(entry["questions"], entry["answer"])
    return answers


def trained_answer(question: str) -> str:
    """Return the trained answer of a question.

    Raises:
        KeyError: the demo model was not trained on the question.
    """
    return trained_answers()[question]
