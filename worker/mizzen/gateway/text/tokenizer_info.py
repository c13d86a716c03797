# SPDX-License-Identifier: Apache-2.0
"""Describes a model's tokenizer for clients that render prompts themselves, such as lm-evaluation-harness.

The shape is that of vLLM's /tokenizer_info.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen.gateway.text.template import FILE as TEMPLATE_FILE
from mizzen.gateway.text.template import SPECIAL_TOKENS, read_json, special_token_map

CONFIG = "tokenizer_config.json"
LOCAL_FIELDS = ("name_or_path", "tokenizer_file", "special_tokens_map_file", "auto_map")
"""Fields of the configuration that name files on the machine where it was written, or code to run."""
DEFAULT_CLASS = "PreTrainedTokenizerFast"


def describe_tokenizer(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the tokenizer's configuration, with its special tokens as texts and its chat template.

    `files` holds the contents of the files of a text model, by name.

    Raises:
        TemplateError: a file is not a JSON object.
    """
    config = read_json(files, CONFIG)
    special = special_token_map(read_json(files, "special_tokens_map.json"), config)
    described = {name: value for name, value in config.items() if name not in LOCAL_FIELDS}
    described |= {name: special.get(name) for name in SPECIAL_TOKENS if name in config or name in special}
    described.setdefault("tokenizer_class", DEFAULT_CLASS)
    template = files.get(TEMPLATE_FILE)
    if template is not None:
        described["chat_template"] = template.decode(errors="replace")
    return described
