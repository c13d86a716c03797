# SPDX-License-Identifier: Apache-2.0
"""Sends chats to a service from a pod of the cluster, through the gateway's Service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from product import CLIENT, NAME, PYTHON, TENANT, Product

from demo_model import QUESTION, STORY, trained_answer

END_SECONDS = 150
"""Time limit, in seconds, for the streams that are in flight when the load ends."""


@dataclass(frozen=True)
class Chat:
    """A question with the answer that is expected."""

    question: str = QUESTION
    expected: str | None = None
    """Expected text; None for the trained answer."""
    tokens: int | None = None
    """Maximum number of tokens of the answer."""
    image: str = ""
    """`data:` URL of an image before the question; if empty, the question has none."""

    @property
    def options(self) -> list[str]:
        """Return the options of `load.py`."""
        expected = trained_answer(self.question) if self.expected is None else self.expected
        options = ["--prompt", self.question, "--expect", expected]
        if self.tokens is not None:
            options += ["--max-tokens", str(self.tokens)]
        return [*options, "--image", self.image] if self.image else options


def _load(service: dict[str, Any], chat: Chat, concurrency: int) -> subprocess.Popen[str]:
    url, name = service["status"]["url"], service["metadata"]["name"]
    command = ["kubectl", "exec", "-i", "-n", TENANT, CLIENT, "--", PYTHON, "/client/load.py", url]
    options = ["--model", name, *chat.options]
    return subprocess.Popen(
        [*command, *options, "--concurrency", str(concurrency)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def streams(
    product: Product, chat: Chat = Chat(STORY), concurrency: int = 3, name: str = NAME
) -> Iterator[dict[str, Any]]:
    """Send streams during the block; at its end, check that each stream ended with the expected text.

    After the block, the yielded dictionary contains the counts of `load.py`.
    """
    counts: dict[str, Any] = {}
    load = _load(product.status(name), chat, concurrency)
    try:
        assert load.stdout is not None
        assert load.stdout.readline() == "started\n"
        yield counts
    finally:
        output, _ = load.communicate(timeout=END_SECONDS)
    counts.update(json.loads(output.splitlines()[-1]))
    print(f"streams: {json.dumps(counts)}")
    assert counts["streams"] == counts["good"] > 0, counts


def answers(product: Product, name: str, chat: Chat = Chat()) -> int:
    """Send one question repeatedly; check that each answer is the expected one, and return their number."""
    with streams(product, chat, 1, name) as counts:
        pass
    return counts["good"]
