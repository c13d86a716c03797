"""What the demo model was trained to say."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUESTION, STORY = "What is Mizzen?", "Tell me a long story about a ship."


def trained_answers() -> dict[str, str]:
    """Every question that the demo model was trained on, with the one answer to it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "scripts/demo_data").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found |= dict.fromkeys(entry["questions"], entry["answer"])
    return found


def trained_answer(question: str) -> str:
    """The answer to a question that the demo model was trained on.

    Raises:
        KeyError: it was not.
    """
    return trained_answers()[question]
