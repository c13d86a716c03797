# SPDX-License-Identifier: Apache-2.0
"""A chat request and its streamed answer, for tests of the gateway."""

from __future__ import annotations

from typing import Any

import openai

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}


async def text_of(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, str | None]:
    stream = await client.chat.completions.create(**CHAT, stream=True, **options)
    parts: list[str] = []
    reason = None
    async for chunk in stream:
        parts.append(chunk.choices[0].delta.content or "")
        reason = chunk.choices[0].finish_reason or reason
    return "".join(parts), reason
