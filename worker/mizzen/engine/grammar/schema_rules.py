# SPDX-License-Identifier: Apache-2.0
"""Converts a JSON schema to EBNF rules.

xgrammar converts the schema, except for patterns, lengths and constants. These are replaced by placeholders
before the conversion, and put into the rules afterwards: xgrammar's own rules match texts that do not match a
pattern, allow control characters in strings of limited length, round numbers, and confuse characters with
bytes in the names of properties that the schema does not describe. References are replaced by
plain names in `$defs`, because xgrammar does not read every JSON pointer.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import xgrammar

from mizzen.common.json_schema import CHOICES, EXTRA_MEMBERS, LENGTHS, NUMBER, Schema, resolve_pointer
from mizzen.common.regex_support import any_json_character
from mizzen.common.regex_tree import Node, Repeat
from mizzen.engine.grammar.long_repetitions import RuleNames
from mizzen.engine.grammar.regex_rules import RegexRules, check_pattern, literal_text, other_names

SEPARATORS = (",", ":")
MAX_LENGTH = 2**40
"""Upper limits on string lengths from here on are left out, because no answer is that long."""
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties")
_PLAIN = r"[^\0-\x1f\"\\\r\n]"
_PLAIN_UTF8 = r"[^\0-\x1f\"\\\ud800-\udfff]"
REWRITTEN_PREFIXES = {
    # A rule that recurses for each character begins again with each character, which changes the mask key.
    rf'basic_string_sub ::= (("\"") | ({_PLAIN} basic_string_sub) | ("\\" basic_escape basic_string_sub))': (
        rf'basic_string_sub ::= (({_PLAIN_UTF8}* "\"") | ({_PLAIN_UTF8}* "\\" basic_escape basic_string_sub))'
    ),
    # The compiler ignores the requested separators for content that no schema describes.
    'basic_array_items ::= ((", " basic_any))': 'basic_array_items ::= (("," basic_any))',
    'basic_object_properties ::= ((", " basic_string': 'basic_object_properties ::= (("," basic_string',
}
"""Maps the beginnings of some rules that the compiler generates to the texts that replace them."""


def json_schema_to_ebnf(schema: Any, whitespace: int | None = 0) -> str:
    """Return EBNF rules for JSON that conforms to a schema.

    Args:
        schema: The schema; `check_schema` accepts it.
        whitespace: Highest number of whitespace characters between two JSON tokens; None for no limit.

    Raises:
        RuntimeError: xgrammar cannot convert the schema.
        GrammarError: A grammar cannot enforce a pattern.
    """
    placeholders = _Placeholders(schema)
    options: dict[str, Any] = {"any_whitespace": False, "separators": SEPARATORS}
    if whitespace != 0:
        options = {"any_whitespace": True, "max_whitespace_cnt": whitespace}
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(placeholders.prepared_root()), **options)
    lines = [_rewritten(line, compact=whitespace == 0) for line in str(grammar).split("\n")]
    return placeholders.filled("\n".join(lines))


def _rewritten(line: str, *, compact: bool) -> str:
    for old, new in REWRITTEN_PREFIXES.items() if compact else ():
        if line.startswith(old):
            line = new + line[len(old) :]
    return line.replace(_PLAIN.removesuffix("]"), _PLAIN_UTF8.removesuffix("]"))


class _Placeholders:
    """A schema with placeholders, and the EBNF expressions that replace these in the rules."""

    def __init__(self, root: Any) -> None:
        self._root = root
        text, self._name = json.dumps(root), "zq"
        while self._name in text:
            self._name += "zq"
        self._rules = RegexRules(f"{self._name}_r")
        self._names = RuleNames(f"{self._name}_n")
        self._patterns: dict[str, str] = {}
        """Placeholders of patterns by their EBNF expressions."""
        self._values: dict[str, str] = {}
        """Placeholders of constants by the JSON text of the constants."""
        self._references: dict[str, str] = {}
        """Names in `$defs` of the prepared schema, by reference."""

    def prepared_root(self) -> Any:
        """Return the schema with placeholders."""
        prepared = self.prepare(self._root)
        definitions: dict[str, Any] = {}
        while len(definitions) < len(self._references):  # the target of a reference may have more of them
            reference, name = list(self._references.items())[len(definitions)]
            definitions[name] = self.prepare(resolve_pointer(self._root, reference))
        return {**prepared, "$defs": definitions} if definitions else prepared

    def filled(self, rules: str) -> str:
        """Return rules with the placeholders replaced."""
        expressions = {
            **{f'Regex("{name}", json_string=true)': text for text, name in self._patterns.items()},
            **{rf'"\"{name}\""': literal_text(text) for text, name in self._values.items()},
        }
        if expressions:
            found = re.compile("|".join(map(re.escape, expressions)))
            rules = found.sub(lambda match: expressions[match[0]], rules)
        return "\n".join([rules, *self._rules.lines(), *self._names.lines()])

    def prepare(self, schema: Any) -> Any:
        """Return a schema with placeholders."""
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return {"$ref": self._reference(schema["$ref"])}
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return {"enum": [self._value(value) for value in values]}
        kept = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        self._prepare_string(kept)
        self._prepare_numbers(kept)
        return self._prepare_children(kept)

    def _reference(self, reference: str) -> str:
        if reference == "#":
            return reference
        name = self._references.setdefault(reference, f"r{len(self._references)}")
        return f"#/$defs/{name}"

    def _value(self, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False, separators=SEPARATORS)
        text = re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
        return self._values.setdefault(text, f"{self._name}v{len(self._values)}v")

    def _pattern(self, node: Node) -> str:
        return self._expression(self._rules.expression(node))

    def _expression(self, expression: str) -> str:
        return self._patterns.setdefault(expression, f"{self._name}p{len(self._patterns)}p")

    def _prepare_string(self, kept: Schema) -> None:
        """Replace the pattern or the lengths of a string schema."""
        if "pattern" in kept:
            kept["pattern"] = self._pattern(check_pattern(kept["pattern"], quoted=True))
        elif any(name in kept for name in LENGTHS):
            high = kept.pop("maxLength", None)
            low = int(kept.pop("minLength", 0))
            if low or high is not None:
                most = None if high is None or high >= MAX_LENGTH else int(high)
                kept["pattern"] = self._pattern(Repeat(any_json_character(), low, most))

    def _prepare_numbers(self, kept: Schema) -> None:
        """Write whole numbers without a fraction, and bounds of integers as whole numbers."""
        for name in (*_COUNTS, *NUMBER):
            if isinstance(kept.get(name), float) and kept[name].is_integer():
                kept[name] = int(kept[name])
        if kept.get("type") != "integer":
            return
        for name, inclusive, rounded in (
            ("minimum", "minimum", math.ceil),
            ("maximum", "maximum", math.floor),
            ("exclusiveMinimum", "minimum", math.ceil),
            ("exclusiveMaximum", "maximum", math.floor),
        ):
            if isinstance(kept.get(name), float):
                bound = rounded(kept.pop(name))
                best = max if inclusive == "minimum" else min
                kept[inclusive] = best(bound, kept[inclusive]) if inclusive in kept else bound

    def _prepare_children(self, kept: Schema) -> Schema:
        if "oneOf" in kept:  # no value conforms to two of its schemas, which `check_schema` has made sure of
            kept["anyOf"] = kept.pop("oneOf")
        for name in CHOICES:
            if isinstance(kept.get(name), list):
                kept[name] = [self.prepare(part) for part in kept[name]]
        if isinstance(kept.get("prefixItems"), list):  # the only place where xgrammar does not accept `true`
            parts = [self.prepare(part) for part in kept["prefixItems"]]
            kept["prefixItems"] = [{} if part is True else part for part in parts]
        for name in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
            if name in kept:
                kept[name] = self.prepare(kept[name])
        if isinstance(kept.get("properties"), dict):
            kept["properties"] = {key: self.prepare(part) for key, part in kept["properties"].items()}
        if isinstance(kept.get("patternProperties"), dict):
            kept["patternProperties"] = {
                self._pattern(check_pattern(pattern, quoted=True)): self.prepare(part)
                for pattern, part in kept["patternProperties"].items()
            }
        elif kept.get("properties"):
            self._prepare_other_properties(kept)
        if isinstance(kept.get("propertyNames"), dict):
            names = kept["propertyNames"]
            string = {} if any(key in names for key in (*CHOICES, "enum", "const")) else {"type": "string"}
            kept["propertyNames"] = self.prepare({**string, **names})
        return kept

    def _prepare_other_properties(self, kept: Schema) -> None:
        """Replace the schema of properties that are not described by one for all other names.

        xgrammar's own rules for these names confuse characters with bytes.
        """
        for keyword in EXTRA_MEMBERS:
            if kept.get(keyword, False) is not False:
                names = other_names(self._names, kept["properties"])
                kept["patternProperties"] = {self._expression(names): kept[keyword]}
                kept[keyword] = False
                return
