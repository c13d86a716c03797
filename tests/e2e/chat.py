"""Chats with the service from a pod of the cluster, by the gateway's Service, as its users do."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from product import CLIENT, NAME, PYTHON, ROOT, TENANT, Product

QUESTION, STORY = "What is Mizzen?", "Tell me a long story about a ship."
END_SECONDS = 150
"""The longest that streams may take to end once no new one begins."""


def trained_answer(question: str) -> str:
    """Return the answer that the demo model was trained to give."""
    for path in sorted((ROOT / "scripts/demo_data").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if question in entry["questions"]:
                return entry["answer"]
    raise LookupError(question)


def _load(url: str, question: str, concurrency: int) -> subprocess.Popen[str]:
    command = ["kubectl", "exec", "-i", "-n", TENANT, CLIENT, "--", PYTHON, "/client/load.py", url]
    options = ["--model", NAME, "--prompt", question, "--expect", trained_answer(question)]
    return subprocess.Popen(
        [*command, *options, "--concurrency", str(concurrency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def streams(product: Product, question: str = STORY, concurrency: int = 3) -> Iterator[dict[str, Any]]:
    """Send streams while the block runs; afterwards every one must have ended well, with the trained text.

    The counts are in the dictionary after the block.
    """
    counts: dict[str, Any] = {}
    load = _load(product.status()["status"]["url"], question, concurrency)
    try:
        assert load.stdout is not None
        assert load.stdout.readline() == "started\n"
        yield counts
    finally:
        output, _ = load.communicate(timeout=END_SECONDS)
    counts.update(json.loads(output.splitlines()[-1]))
    print(f"streams: {json.dumps(counts)}")
    assert counts["streams"] == counts["good"] > 0, counts
