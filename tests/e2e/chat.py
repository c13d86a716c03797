# SPDX-License-Identifier: Apache-2.0
"""Sends chats to a service from a pod of the cluster, through the gateway's Service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from product import CLIENT, NAME, PYTHON, TENANT, Product

from demo_model import QUESTION, STORY, trained_answer

END_SECONDS = 150
"""Time limit, in seconds, for the streams that are in flight when the load ends."""


def _load(
    service: dict[str, Any], question: str, concurrency: int, expected: str | None, tokens: int | None
) -> subprocess.Popen[str]:
    url, name = service["status"]["url"], service["metadata"]["name"]
    command = ["kubectl", "exec", "-i", "-n", TENANT, CLIENT, "--", PYTHON, "/client/load.py", url]
    expected = trained_answer(question) if expected is None else expected
    options = ["--model", name, "--prompt", question, "--expect", expected]
    if tokens is not None:
        options += ["--max-tokens", str(tokens)]
    return subprocess.Popen(
        [*command, *options, "--concurrency", str(concurrency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def streams(
    product: Product,
    question: str = STORY,
    concurrency: int = 3,
    name: str = NAME,
    expected: str | None = None,
    tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Send streams during the block; at its end, check that each stream ended with the expected text.

    The expected text is by default the trained one; `tokens` limits its length. After the block, the yielded
    dictionary contains the counts of `load.py`.
    """
    counts: dict[str, Any] = {}
    load = _load(product.status(name), question, concurrency, expected, tokens)
    try:
        assert load.stdout is not None
        assert load.stdout.readline() == "started\n"
        yield counts
    finally:
        output, _ = load.communicate(timeout=END_SECONDS)
    counts.update(json.loads(output.splitlines()[-1]))
    print(f"streams: {json.dumps(counts)}")
    assert counts["streams"] == counts["good"] > 0, counts


def answers(product: Product, name: str, expected: str | None = None, tokens: int | None = None) -> bool:
    """Send one question repeatedly; return whether it was answered.

    Check that each answer is the expected one, by default the trained one; `tokens` limits its length.
    """
    with streams(product, QUESTION, 1, name, expected, tokens) as counts:
        pass
    return counts["good"] > 0
