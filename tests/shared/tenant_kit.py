# SPDX-License-Identifier: Apache-2.0
"""API keys of two tenants, and helpers to replace key files and to wait."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

USER: list[Any] = [{"role": "user", "content": "What is a mast?"}]
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789"


def key_file(*keys: dict[str, Any]) -> str:
    return json.dumps({"keys": keys})  # JSON is YAML


def replace_file(path: Path, content: str) -> None:
    """Replace a file atomically, as Kubernetes does."""
    path.with_suffix(".new").write_text(content)
    os.replace(path.with_suffix(".new"), path)


async def eventually(check: Callable[[], Awaitable[bool]], wanted: bool = True) -> None:
    """Wait until an asynchronous check returns `wanted`."""
    deadline = time.monotonic() + 60
    while await check() != wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
