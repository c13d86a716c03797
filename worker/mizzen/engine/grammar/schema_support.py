# SPDX-License-Identifier: Apache-2.0
"""Checks that xgrammar (the compiler) enforces everything in a JSON Schema (draft 2020-12).

The compiler ignores unknown keywords, and some known keywords in combination with others. Output would then
silently not conform to the schema, so each schema is checked before compilation, and the error names the
keyword. The tests cover every combination that is allowed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from mizzen.common.json_schema import (
    BOUNDS,
    CHOICES,
    EXTRA_MEMBERS,
    LENGTHS,
    NOT_ENFORCED,
    NUMBER,
    STRUCTURE,
    TYPES,
    Schema,
    resolve_pointer,
)
from mizzen.common.schema_check import find_keyword_fault
from mizzen.engine.grammar.errors import GrammarError
from mizzen.engine.grammar.regex_rules import check_pattern

EXCLUSIVE_KEYWORDS = (*CHOICES, "enum", "const")
"""Keywords that must be a schema's only constraint; `enum` and `const` may also stand beside `type`."""
CONSTRAINTS = ("type", *EXCLUSIVE_KEYWORDS, *STRUCTURE)
"""All keywords that constrain values."""
MAX_BOUND = 2**63
"""Bounds of numbers must be smaller than this."""


def read_json(text: str, nesting: int) -> Any:
    """Parse JSON whose depth is at most `nesting` levels.

    Raises:
        GrammarError: The text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_constant=reject_constant)
    except RecursionError:
        raise GrammarError(f"the JSON nests deeper than {nesting} levels") from None
    except ValueError as error:
        raise GrammarError(f"the text is not JSON: {error}") from None
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > nesting:
            raise GrammarError(f"the JSON nests deeper than {nesting} levels")
        level = [child for parent in level for child in _children(parent)]
    return value


def reject_constant(name: str) -> Any:
    """Raise a ValueError for one of the constants that Python's parser accepts besides JSON."""
    raise ValueError(f"{name} is not JSON")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [child for child in value.values() if isinstance(child, dict | list)]
    return [child for child in value if isinstance(child, dict | list)] if isinstance(value, list) else []


def check_schema(schema: Any) -> None:
    """Reject a schema that the compiler would not enforce completely.

    Raises:
        GrammarError: The schema is rejected; the message names the place (a JSON pointer), the keyword, and a
            remedy.
    """
    SchemaChecker(schema).check_all()


class SchemaChecker:
    """Checks a schema and all of its subschemas."""

    def __init__(self, schema: Any) -> None:
        self.root = schema
        self.references: set[str] = set()
        """References whose targets were checked or wait to be checked."""
        self.waiting: list[tuple[str, Any]] = []
        """JSON pointers and schemas that are still to be checked."""

    def check_all(self) -> None:
        """Check the schema and all of its subschemas, at any depth."""
        self.waiting.append(("", self.root))
        while self.waiting:
            path, schema = self.waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                raise GrammarError(f"schema at {path or '/'} must be an object or a boolean")
            self.check_one(path, schema)
            self.waiting += subschemas(path, schema)

    def check_one(self, path: str, schema: Schema) -> None:
        """Check the keywords of one schema, without its subschemas; `path` is its JSON pointer.

        The other checks rely on the first one: values that are neither schemas nor lists of schemas have the
        right type.
        """
        for name, value in schema.items():
            fault = find_keyword_fault(name, value)
            if fault is not None and (name != "type" or value == []):  # `schema_types` checks the names
                raise keyword_error(path, name, fault)
        for name in NOT_ENFORCED:
            if name in schema:
                raise keyword_error(path, name, "is not enforced: leave it out")
        if schema.get("uniqueItems"):
            raise keyword_error(path, "uniqueItems", "is not enforced: leave it out")
        exclusive = next((name for name in EXCLUSIVE_KEYWORDS if name in schema), None)
        if exclusive is not None:
            self.check_exclusive(path, schema, exclusive)
            return
        types = self.schema_types(path, schema)
        if types is None or "string" in types:
            self.check_string(path, schema)
        if types is None or types & {"number", "integer"}:
            self.check_number(path, schema, types)
        if types is None or "object" in types:
            self.check_object(path, schema)

    def schema_types(self, path: str, schema: Schema) -> set[str] | None:
        """Return the types that a schema allows; None if it allows any type."""
        if "type" in schema:
            declared = schema["type"]
            names = declared if isinstance(declared, list) else [declared]
            for name in names:
                if not isinstance(name, str) or name not in TYPES:
                    raise keyword_error(path, "type", f"must be one of {', '.join(TYPES)}, not {name!r}")
            return set(names)
        if "properties" in schema:
            return {"object"}
        if "items" in schema or "prefixItems" in schema:
            return {"array"}
        for name in STRUCTURE:
            if name in schema:
                raise keyword_error(path, name, 'is only enforced together with "type": add it')
        return None

    def check_exclusive(self, path: str, schema: Schema, keyword: str) -> None:
        """Check a schema that has `keyword`, one of EXCLUSIVE_KEYWORDS."""
        allowed = ("type",) if keyword in ("enum", "const") else ()
        for name in CONSTRAINTS:
            if name in schema and name != keyword and name not in allowed:
                raise keyword_error(
                    path, name, f'is not enforced beside "{keyword}": move it into the schemas there'
                )
        value = schema[keyword]
        if keyword == "$ref":
            self.check_reference(path, value)
        if keyword == "allOf" and (not isinstance(value, list) or len(value) != 1):
            raise keyword_error(path, keyword, "is only enforced with a single schema: merge them")
        if keyword == "oneOf" and isinstance(value, list):
            self.check_disjoint(path, value)
        if keyword in ("enum", "const"):
            self.check_finite(path, keyword, value)
        if keyword in ("enum", "const") and "type" in schema:
            types = self.schema_types(path, schema) or set()
            for entry in value if keyword == "enum" else [value]:
                if not any(TYPES[name](entry) for name in types):
                    raise keyword_error(path, keyword, f"holds {entry!r}, which is not of the type beside it")

    def check_finite(self, path: str, keyword: str, value: Any) -> None:
        """Check that JSON can write a constant."""
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise keyword_error(path, keyword, "holds a number that is too large") from None

    def check_reference(self, path: str, reference: str) -> None:
        """Check that a reference points to a schema within the root schema."""
        if reference != "#" and not reference.startswith("#/"):
            text = (
                "must point into the schema itself with a JSON pointer (#/...), not with an $anchor or a URL"
            )
            raise keyword_error(path, "$ref", text)
        target = resolve_pointer(self.root, reference)
        if not isinstance(target, dict | bool):
            raise keyword_error(path, "$ref", f"points to {reference}, where there is no schema")
        if isinstance(target, dict) and reference not in self.references:
            self.references.add(reference)
            self.waiting.append((reference[1:], target))

    def check_disjoint(self, path: str, schemas: list[Any]) -> None:
        """Check that no value can conform to two of the schemas: the compiler treats `oneOf` as `anyOf`.

        Schemas whose keywords have values of the wrong type are left out: their own check, which comes later,
        names the keyword.
        """
        resolved = [self.resolve_ref(schema) for schema in schemas]
        for first, second in combinations([schema for schema in resolved if not has_faults(schema)], 2):
            if not are_disjoint(first, second):
                text = "is only enforced if its schemas differ in type or in a required constant: use anyOf"
                raise keyword_error(path, "oneOf", text)

    def resolve_ref(self, schema: Any) -> Any:
        """Return the schema that a reference points to, or the schema itself if it is not a reference."""
        for _ in range(16):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            schema = resolve_pointer(self.root, schema["$ref"])
        return schema

    def check_string(self, path: str, schema: Schema) -> None:
        """Check the keywords that apply to strings."""
        lengths = [name for name in LENGTHS if name in schema]
        for other in ("pattern", "format"):
            if other in schema and lengths:
                raise keyword_error(
                    path, lengths[0], f'is not enforced beside "{other}": say it in a pattern'
                )
        if "pattern" in schema:
            try:
                check_pattern(schema["pattern"], quoted=True)
            except GrammarError as error:
                raise keyword_error(path, "pattern", str(error)) from None

    def check_number(self, path: str, schema: Schema, types: set[str] | None) -> None:
        """Check the keywords that apply to numbers."""
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(schema.get(name), bool):
                raise keyword_error(path, name, "must be a number (draft 2020-12)")
        for name in NUMBER:
            if name in schema and not abs(schema[name]) < MAX_BOUND:
                raise keyword_error(path, name, "is only enforced below 2^63: leave it out")
        if "multipleOf" not in schema:
            return
        step = schema["multipleOf"]
        if types is None or "number" in types or not isinstance(step, int) or step < 1:
            raise keyword_error(path, "multipleOf", "is only enforced for whole numbers of type integer")
        bounds = {name for name in BOUNDS if name in schema}
        if bounds and bounds != {"minimum", "maximum"}:
            text = 'is only enforced on its own or with both "minimum" and "maximum"'
            raise keyword_error(path, "multipleOf", text)

    def check_object(self, path: str, schema: Schema) -> None:
        """Check the keywords that apply to objects."""
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        more = [name for name in EXTRA_MEMBERS if schema.get(name, False) is not False]
        for name in schema.get("required", []):
            if name not in properties:
                raise keyword_error(path, "required", f'names {name!r}: describe it in "properties"')
        if "propertyNames" in schema and (properties or patterns):
            raise keyword_error(path, "propertyNames", "is not enforced beside described properties")
        if len(patterns) > 1 or (patterns and more):
            raise keyword_error(
                path, "patternProperties", "is enforced with one pattern and no further properties"
            )
        for pattern in patterns:
            try:
                check_pattern(pattern, quoted=True)
                clash = next((name for name in properties if re.search(pattern, name)), None)
            except re.error as error:
                raise keyword_error(
                    path, "patternProperties", f"is not a regular expression: {error}"
                ) from None
            except GrammarError as error:
                raise keyword_error(path, "patternProperties", str(error)) from None
            if clash is not None:
                raise keyword_error(path, "patternProperties", f"covers the property {clash!r}, too")
        if (patterns or more or "propertyNames" in schema) and schema.get("minProperties", 0) > 1:
            raise keyword_error(path, "minProperties", "above 1 is only enforced for described properties")


def has_faults(schema: Any) -> bool:
    """Return whether a keyword that `are_disjoint` reads has a value of the wrong type."""
    if not isinstance(schema, dict):
        return False
    read = (name for name in ("type", "properties", "required", "enum") if name in schema)
    return any(find_keyword_fault(name, schema[name]) for name in read)


def are_disjoint(schema_a: Any, schema_b: Any) -> bool:
    """Return whether it is certain that no value conforms to both schemas."""
    if not isinstance(schema_a, dict) or not isinstance(schema_b, dict):
        return False
    values = [_values(schema) for schema in (schema_a, schema_b)]
    if values[0] is not None and values[1] is not None:
        return not set(values[0]) & set(values[1])
    types = [_types(schema) for schema in (schema_a, schema_b)]
    if types[0] and types[1] and not types[0] & types[1]:
        return True
    if types[0] != {"object"} or types[1] != {"object"}:
        return False
    shared = set(schema_a.get("required") or ()) & set(schema_b.get("required") or ())
    for name in shared:
        first, second = (_values(schema.get("properties", {}).get(name)) for schema in (schema_a, schema_b))
        if first is not None and second is not None and not set(first) & set(second):
            return True
    return False


def _types(schema: Schema) -> set[str]:
    declared = schema.get("type") or ("object" if "properties" in schema else [])
    names = set(declared if isinstance(declared, list) else [declared])
    return names | {"integer"} if "number" in names else names


def _values(schema: Any) -> list[str] | None:
    """Return the values of `const` or `enum` as JSON; None if the schema has neither."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [json.dumps(schema["const"], sort_keys=True)]
    if isinstance(schema.get("enum"), list):
        return [json.dumps(value, sort_keys=True) for value in schema["enum"]]
    return None


def subschemas(path: str, schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yield the direct subschemas of a schema, each with its JSON pointer."""
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        parts = schema.get(name)
        if isinstance(parts, dict):
            yield from ((f"{path}/{name}/{key}", part) for key, part in parts.items())
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if isinstance(parts, list):
            yield from ((f"{path}/{name}/{index}", part) for index, part in enumerate(parts))
    for name in ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"):
        if name in schema:
            yield f"{path}/{name}", schema[name]
    if isinstance(schema.get("propertyNames"), dict):
        yield f"{path}/propertyNames", {"type": "string", **schema["propertyNames"]}


def keyword_error(path: str, keyword: str, text: str) -> GrammarError:
    """Return an error whose message begins with a keyword and its place in the schema."""
    return GrammarError(f'"{keyword}" at {path or "/"} {text}')
