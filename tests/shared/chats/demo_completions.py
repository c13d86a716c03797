# SPDX-License-Identifier: Apache-2.0
"""Requests to a gateway whose engine runs the demo model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai

DEMO_MODEL = Path(__file__).parents[3] / "models/demo"
USER: list[Any] = [{"role": "user", "content": "What is Mizzen?"}]
PROMPT = "Mizzen is a"
EXTRA = {
    "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "guided_regex", "guided_choice",
    "return_token_ids", "skip_special_tokens", "return_tokens_as_token_ids", "add_special_tokens", "regex",
    "guided_json", "json_schema", "ebnf", "structured_outputs", "response_format",
}  # fmt: skip
"""Fields of a request that OpenAI's client does not know."""


async def complete(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    """Complete a prompt; fields in EXTRA are passed as `extra_body`."""
    extra = {key: options.pop(key) for key in list(options) if key in EXTRA}
    return await client.completions.create(model="demo", prompt=prompt, extra_body=extra, **options)
