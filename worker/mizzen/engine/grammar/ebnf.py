"""From a JSON schema to rules in EBNF, written so that masks within strings stay the same."""

from __future__ import annotations

import xgrammar

SEPARATORS = (",", ":")
_PLAIN = r"[^\0-\x1f\"\\\r\n]"
REWRITTEN = {
    # A rule that calls itself for each character begins anew with each, and so does its place in the grammar.
    rf'basic_string_sub ::= (("\"") | ({_PLAIN} basic_string_sub) | ("\\" basic_escape basic_string_sub))': (
        rf'basic_string_sub ::= (({_PLAIN}* "\"") | ({_PLAIN}* "\\" basic_escape basic_string_sub))'
    ),
    # The separators that were asked for are not used where no schema says what comes.
    'basic_array_items ::= ((", " basic_any))': 'basic_array_items ::= (("," basic_any))',
    'basic_object_properties ::= ((", " basic_string': 'basic_object_properties ::= (("," basic_string',
}
"""What rules of the compiler begin with, and what they begin with here."""


def json_rules(schema: str) -> str:
    """Return the rules of JSON that conforms to a schema, without blanks between its parts.

    Raises:
        RuntimeError: the compiler cannot use the schema.
    """
    made = xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, separators=SEPARATORS)
    return "\n".join(_rewritten(line) for line in str(made).split("\n"))


def _rewritten(line: str) -> str:
    for old, new in REWRITTEN.items():
        if line.startswith(old):
            return new + line[len(old) :]
    return line
