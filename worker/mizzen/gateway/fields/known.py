# SPDX-License-Identifier: Apache-2.0
"""Names that the metric of ignored fields uses as label values, and the types of tools that OpenAI hosts."""

from __future__ import annotations

import re

OTHER_FIELD = "other"
"""Label value of all fields that `KNOWN_FIELDS` and `HOSTED_TOOLS` do not list."""

KNOWN_FIELDS = frozenset({
    "allowed_callers", "annotations", "async", "audio", "cache_control", "client_metadata",
    "context_management", "defer_loading", "description", "enable_thinking", "encrypted_content",
    "extra_body", "generate_summary", "image", "include", "include_obfuscation", "index", "internal_metadata",
    "length_penalty", "max_tool_calls", "metadata", "output_schema", "parsed", "parsed_arguments",
    "prediction", "prompt_cache_breakpoint", "prompt_cache_options", "prompt_cache_retention",
    "provider_options", "providerOptions", "refusal", "role", "safety_identifier", "service_tier", "store",
    "strict", "summary", "thinking", "title", "truncation", "user", "verbosity",
})  # fmt: skip
"""Fields that clients are known to send although they do not change the answer."""

HOSTED_TOOLS = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search",
    "web_search", "web_search_preview",
})  # fmt: skip
"""Types of OpenAI's built-in tools. Some types also exist with a date, such as `web_search_2025_08_26`."""

MESSAGES_HOSTED_TOOLS = frozenset({
    "advisor", "code_execution", "mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex",
    "web_fetch", "web_search",
})  # fmt: skip
"""Types of tools that Anthropic runs, without the date that ends most types, as in `web_search_20250305`."""

_DATE = re.compile(r"_20\d\d_\d\d_\d\d$", re.ASCII)
_COMPACT_DATE = re.compile(r"_20\d{6}$", re.ASCII)
_LEAF = re.compile(r"([^.\[\]]+)\]?$")


def is_hosted_tool(kind: str) -> bool:
    """Return whether a tool's type is one of OpenAI's built-in tools, with or without a date."""
    return _DATE.sub("", kind) in HOSTED_TOOLS


def is_messages_hosted_tool(kind: str) -> bool:
    """Return whether a tool's type is one of the tools that Anthropic runs, with or without a date."""
    return _COMPACT_DATE.sub("", kind) in MESSAGES_HOSTED_TOOLS


def field_label(path: str) -> str:
    """Return the label value for the path of an ignored field, such as `messages[].parsed`."""
    leaf = _LEAF.search(path)
    name = _COMPACT_DATE.sub("", _DATE.sub("", leaf[1])) if leaf else ""
    return name if name in KNOWN_FIELDS | HOSTED_TOOLS | MESSAGES_HOSTED_TOOLS else OTHER_FIELD
