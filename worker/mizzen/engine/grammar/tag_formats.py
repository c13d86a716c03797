# SPDX-License-Identifier: Apache-2.0
"""Converts the JSON schemas and regular expressions in structural tags to EBNF rules.

xgrammar would convert them differently from those of other grammars, and less exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mizzen.common.json_schema import LENGTHS
from mizzen.common.schema_check import is_count
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.regex_rules import check_pattern, regex_to_ebnf
from mizzen.engine.grammar.schema_rules import json_schema_to_ebnf
from mizzen.engine.grammar.schema_support import check_schema

_SCHEMA_FIELDS = {"type", "json_schema", "style", "max_whitespace_cnt"}


def check_formats(tag: Any) -> None:
    """Reject a structural tag with a schema or regular expression that would not be enforced completely.

    Raises:
        GrammarError: The structural tag is rejected; the message names the construct.
    """
    for part in _formats(tag):
        if "json_schema" in part:
            check_schema(part["json_schema"])
        elif part.get("type") == "regex":
            try:
                check_pattern(_pattern(part), quoted=False)
            except GrammarError as error:
                raise GrammarError(f"the regex {error}") from None


def convert_formats(tag: Any) -> Any:
    """Return a structural tag whose schemas and regular expressions are replaced by EBNF rules.

    Schemas in another style than JSON stay; see `bound_strings_by_pattern`.

    Raises:
        GrammarError: A grammar cannot enforce a schema or a regular expression.
        RuntimeError: xgrammar cannot convert a schema.
    """
    if isinstance(tag, list):
        return [convert_formats(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    rules = _convert_format(tag)
    if rules is not None:
        return {"type": "grammar", "grammar": rules}
    return {
        key: bound_strings_by_pattern(part) if key == "json_schema" else convert_formats(part)
        for key, part in tag.items()
    }


def bound_strings_by_pattern(schema: Any) -> Any:
    """Return a schema with the limits on string lengths replaced by patterns.

    The compiler's own rules for lengths would allow any characters, including markers that end a text in the
    style of the schema.
    """
    if isinstance(schema, list):
        return [bound_strings_by_pattern(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: bound_strings_by_pattern(part) for key, part in schema.items()}
    if "pattern" in kept or "format" in kept or not any(name in kept for name in LENGTHS):
        return kept
    low, high = kept.pop("minLength", 0), kept.pop("maxLength", None)
    if not is_count(low) or not (high is None or is_count(high)):
        return schema  # the properties of an object may have these names
    return kept | {"pattern": rf'^[^\x00-\x1f"\\<]{{{int(low)},{"" if high is None else int(high)}}}$'}


def _convert_format(part: dict[str, Any]) -> str | None:
    """Return the EBNF rules of a format; None if the format stays as it is."""
    if part.get("type") == "regex":
        return regex_to_ebnf(_pattern(part))
    is_schema = part.get("type") == "json_schema" and "json_schema" in part
    if not is_schema or part.get("style", "json") != "json" or part.keys() - _SCHEMA_FIELDS:
        return None
    return json_schema_to_ebnf(part["json_schema"], part.get("max_whitespace_cnt"))


def _pattern(part: dict[str, Any]) -> str:
    if not isinstance(part.get("pattern"), str):
        raise GrammarError('the "pattern" of a format of type regex must be text')
    return part["pattern"]


def _formats(tag: Any) -> Iterator[dict[str, Any]]:
    """Yield all formats of a structural tag that have no formats inside."""
    if isinstance(tag, list):
        for part in tag:
            yield from _formats(part)
    elif isinstance(tag, dict):
        if "json_schema" in tag or tag.get("type") == "regex":
            yield tag
            return
        for part in tag.values():
            yield from _formats(part)
