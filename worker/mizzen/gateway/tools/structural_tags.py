"""Parts of xgrammar's structural tags: what an engine lets a model write.

Special tokens have no text there: they are named by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from mizzen.core.sampling_params import Grammar, GrammarKind
from mizzen.gateway.errors import invalid
from mizzen.gateway.text.tokenizer import Tokenizer

Format = dict[str, Any]

ANY_OBJECT: Format = {"type": "object", "additionalProperties": True}
NO_ARGUMENTS: Format = {"type": "object", "properties": {}, "additionalProperties": False}
COMPACT = 0
"""White space characters between the parts of a JSON text. The engine knows 0; xgrammar begins with 1."""


def grammar(format: Format) -> Grammar:
    """Return a format as what an answer must conform to.

    Raises:
        ApiError: 400, a schema in it is nested too deeply.
    """
    try:
        text = msgspec.json.encode({"type": "structural_tag", "format": format}).decode()
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


def json_value(schema: Format | bool) -> Format:
    """Return the format of JSON that conforms to a schema."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": COMPACT}


def text(value: str) -> Format:
    """Return the format of a fixed text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    """Return the format of one thing after another."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    """Return the format of one of several things."""
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """Return the format of something that may be left out."""
    return {"type": "optional", "content": content}


def any_text(*excludes: str) -> Format:
    """Return the format of free text without certain words."""
    return {"type": "any_text", "excludes": list(excludes)}


def tag(begin: str | Format, content: Format, end: str | Format) -> Format:
    """Return the format of something between two marks."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def separated(tags: Sequence[Format], separator: str, many: bool) -> Format:
    """Return the format of one of several tags, or of several."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def mark(tokenizer: Tokenizer, value: str) -> str | Format:
    """Return a mark of a tag: its text, or its token where it is a special one."""
    token = tokenizer.special_token_id(value)
    return value if token is None else {"type": "token", "token": token}


def marked(tokenizer: Tokenizer, value: str) -> Format:
    """Return the format of a mark that stands alone."""
    found = mark(tokenizer, value)
    return text(found) if isinstance(found, str) else found
