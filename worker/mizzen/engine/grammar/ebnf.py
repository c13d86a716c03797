"""Converts a JSON schema to EBNF rules, written so that masks within strings stay the same."""

from __future__ import annotations

import xgrammar

SEPARATORS = (",", ":")
_PLAIN = r"[^\0-\x1f\"\\\r\n]"
REWRITTEN_PREFIXES = {
    # A rule that recurses for each character starts again with each, which changes the mask key every time.
    rf'basic_string_sub ::= (("\"") | ({_PLAIN} basic_string_sub) | ("\\" basic_escape basic_string_sub))': (
        rf'basic_string_sub ::= (({_PLAIN}* "\"") | ({_PLAIN}* "\\" basic_escape basic_string_sub))'
    ),
    # The compiler ignores the requested separators where no schema describes the content.
    'basic_array_items ::= ((", " basic_any))': 'basic_array_items ::= (("," basic_any))',
    'basic_object_properties ::= ((", " basic_string': 'basic_object_properties ::= (("," basic_string',
}
"""Beginnings of the compiler's rules, and their replacements here."""


def json_schema_to_ebnf(schema: str) -> str:
    """Return EBNF rules of JSON that conforms to a schema, without whitespace between its parts.

    Raises:
        RuntimeError: The compiler cannot use the schema.
    """
    grammar = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=SEPARATORS)
    return "\n".join(_rewritten(line) for line in str(grammar).split("\n"))


def _rewritten(line: str) -> str:
    for old, new in REWRITTEN_PREFIXES.items():
        if line.startswith(old):
            return new + line[len(old) :]
    return line
