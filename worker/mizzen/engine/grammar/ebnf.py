"""Converts a JSON schema to EBNF rules that keep the token bitmask unchanged while a string is generated.

A bitmask that does not change need not be computed again (see `matchers`). Called by `xgrammar_backend`.
"""

from __future__ import annotations

import xgrammar

SEPARATORS = (",", ":")
_PLAIN = r"[^\0-\x1f\"\\\r\n]"
REWRITTEN_PREFIXES = {
    # A rule that recurses for each character begins again with each character, which changes the mask key.
    rf'basic_string_sub ::= (("\"") | ({_PLAIN} basic_string_sub) | ("\\" basic_escape basic_string_sub))': (
        rf'basic_string_sub ::= (({_PLAIN}* "\"") | ({_PLAIN}* "\\" basic_escape basic_string_sub))'
    ),
    # The compiler ignores the requested separators for content that no schema describes.
    'basic_array_items ::= ((", " basic_any))': 'basic_array_items ::= (("," basic_any))',
    'basic_object_properties ::= ((", " basic_string': 'basic_object_properties ::= (("," basic_string',
}
"""Maps the beginnings of some rules that the compiler generates to the texts that replace them."""


def json_schema_to_ebnf(schema: str) -> str:
    """Return EBNF rules for JSON that conforms to a schema and has no whitespace between its tokens.

    Raises:
        RuntimeError: xgrammar cannot convert the schema.
    """
    grammar = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=SEPARATORS)
    return "\n".join(_rewritten(line) for line in str(grammar).split("\n"))


def _rewritten(line: str) -> str:
    for old, new in REWRITTEN_PREFIXES.items():
        if line.startswith(old):
            return new + line[len(old) :]
    return line
