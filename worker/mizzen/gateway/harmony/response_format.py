# SPDX-License-Identifier: Apache-2.0
"""Shows the schema of an answer to models of the harmony format, at the end of the developer message.

The section is that of https://github.com/openai/harmony/blob/main/docs/format.md#structured-output. The chat
templates of gpt-oss have no place for it, so that it is added to the prompt that they render.
"""

from __future__ import annotations

import json
from typing import Any

from mizzen.gateway.harmony.markers import END, MESSAGE, START

HEADING = "# Response Formats"
DEVELOPER = f"{START}developer{MESSAGE}"
"""Beginning of the message with instructions and tools; it follows the system message."""


def describe_format(name: str, description: str | None, schema: dict[str, Any] | bool) -> str:
    """Return the section that describes a JSON schema by its name."""
    lines = [f"// {line}".rstrip() for line in (description or "").splitlines()]
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"{HEADING}\n\n## {name}\n\n" + "\n".join([*lines, text])


def add_format(prompt: str, section: str) -> str:
    """Return a prompt whose developer message ends with a section.

    A prompt without this message gets one behind the system message, or at its beginning.
    """
    at = prompt.find(END) + len(END) if prompt.startswith(f"{START}system") and END in prompt else 0
    if not prompt.startswith(DEVELOPER, at):
        return f"{prompt[:at]}{DEVELOPER}{section}{END}{prompt[at:]}"
    end = prompt.find(END + START, at)
    if end < 0:
        return prompt
    return f"{prompt[:end].rstrip()}\n\n{section}{prompt[end:]}"
