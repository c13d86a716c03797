# SPDX-License-Identifier: Apache-2.0
"""Rules for the fields of chat and completion requests that are not used.

They include fields of other APIs and servers that change the answer there: a client that sets one would miss
it.
"""

from __future__ import annotations

from mizzen.gateway.fields.rules import REFUSED, UNUSED, Rules, advise, refuse, unused

COMMON_RULES: Rules = {
    "service_tier": advise("auto", "default"),
    "store": advise(False),
    "metadata": UNUSED,
    "stream_options.include_obfuscation": unused(False),
    "logits_processors": refuse([]),
    "truncate_prompt_tokens": REFUSED,
    "use_beam_search": refuse(False),
    "spaces_between_special_tokens": refuse(True),
    "include_stop_str_in_output": refuse(False),
    "allowed_token_ids": REFUSED,
    "bad_words": refuse([]),
    "prompt_logprobs": REFUSED,
    "grammar": refuse("", reason="use guided_grammar"),
    "cache_salt": refuse(reason="the prefix cache is separated by API key"),
}
CHAT_RULES: Rules = {
    **COMMON_RULES,
    "verbosity": advise("medium"),
    "prediction": advise(),
    "prompt_cache_options": advise(),
    "prompt_cache_retention": advise("in_memory"),
    "safety_identifier": UNUSED,
    "max_output_tokens": refuse(reason="use max_tokens"),
    "instructions": refuse("", reason="use a system message"),
    "functions": refuse([]),
    "function_call": refuse("none", "auto"),
    "modalities": refuse(["text"]),
    "audio": REFUSED,
    "web_search_options": REFUSED,
    "moderation": REFUSED,
    "echo": refuse(False),
    "chat_template": REFUSED,
    "documents": refuse([]),
}
COMPLETION_RULES: Rules = {
    **COMMON_RULES,
    "suffix": refuse(""),
    "messages": refuse(reason="use /v1/chat/completions"),
    "tools": refuse([], reason="use /v1/chat/completions"),
    "max_completion_tokens": refuse(reason="use max_tokens"),
    "max_output_tokens": refuse(reason="use max_tokens"),
}
