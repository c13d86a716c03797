# SPDX-License-Identifier: Apache-2.0
"""Building blocks of xgrammar's structural tags, which describe the output that an engine allows.

A structural tag refers to special tokens by their ids, because they have no text in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.errors import invalid
from mizzen.gateway.text.tokenizer import Tokenizer

Format = dict[str, Any]
"""Element of a structural tag: the format of the output, or of a part of it, as JSON."""

ANY_OBJECT: Format = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: Format = {"type": "object", "properties": {}, "additionalProperties": False}
COMPACT = 0
"""Maximum number of white space characters between JSON elements.

Mizzen's engine accepts 0; in xgrammar itself, the minimum is 1.
"""


def structural_tag_grammar(format: Format) -> Grammar:
    """Return the grammar that constrains output to a format.

    Raises:
        ApiError: 400 if a schema in the format is nested too deeply.
    """
    try:
        text = msgspec.json.encode({"type": "structural_tag", "format": format}).decode()
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def json_value(schema: Format | bool) -> Format:
    """Return the format of a JSON value that conforms to a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": COMPACT}


def text(value: str) -> Format:
    """Return the format of a fixed text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    """Return the format of several elements in sequence."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    """Return the format of any one of several elements."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Return the format of optional content."""
    return {"type": "optional", "content": content}


def repeated(items: Sequence[Format], separator: str, allow_parallel: bool) -> Format:
    """Return the format of one item or, with `allow_parallel`, of several items joined by a separator.

    Unlike `separated`, it allows items that are not tags.
    """
    item = either(*items)
    if not allow_parallel:
        return item
    return sequence(item, {"type": "star", "content": sequence(text(separator), item)})


def any_text(*excludes: str) -> Format:
    """Return the format of free text that does not contain certain strings."""
    return {"type": "any_text", "excludes": list(excludes)}


def tag(begin: str | Format, content: Format, end: str | Format) -> Format:
    """Return the format of content between two markers."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Format], separator: str, allow_parallel: bool) -> Format:
    """Return the format of one tag or, with `allow_parallel`, of several tags joined by a separator."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not allow_parallel,
    }


def tag_marker(tokenizer: Tokenizer, value: str) -> str | Format:
    """Return a marker for the beginning or end of a tag: its text, or its id if it is a special token."""
    token = tokenizer.special_token_id(value)
    return value if token is None else {"type": "token", "token": token}


def marker_format(tokenizer: Tokenizer, value: str) -> Format:
    """Return the format of output that consists of a marker."""
    marker = tag_marker(tokenizer, value)
    return text(marker) if isinstance(marker, str) else marker
