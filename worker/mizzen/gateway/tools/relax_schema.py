# SPDX-License-Identifier: Apache-2.0
"""Relax a JSON schema to the constraints that an engine can enforce.

An engine rejects a schema that its grammars cannot enforce completely. That is right for `strict` schemas.
For other schemas, unsupported constraints are dropped and the rest is enforced. If an object schema loses a
constraint that may describe properties, it allows any additional properties.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from mizzen.common.json_schema import (
    BOUNDS,
    CHOICES,
    CONDITIONS,
    EXTRA_MEMBERS,
    LENGTHS,
    NOT_ENFORCED,
    OBJECT,
    STRUCTURE,
    TYPES,
    Schema,
)
from mizzen.common.regex_support import pattern_fault
from mizzen.gateway.tools.schema_references import SchemaReferences
from mizzen.gateway.tools.schema_values import is_number, normalize_counts, relax_bounds

_ESCAPE_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_LITERAL_BRACE = re.compile(r"(?:^\^?|[(|^:])\{|\{(?!\d+(?:,\d*)?\})")
PROPERTY_COUNTS = {"minProperties", "maxProperties"}
PROPERTY_KEYWORDS = {"properties", "patternProperties", "propertyNames", *EXTRA_MEMBERS}
"""Keywords that describe an object's properties."""
MAX_SUBSCHEMAS = 50_000
"""Number of subschemas after which references are dropped; targets that contain each other repeat them."""


def relax_schema(schema: Any) -> Any:
    """Return a copy of a schema without the constraints that an engine would reject.

    `is_too_deep` must be false for the schema.
    """
    return _SchemaRelaxer(schema).relax_root()


class _SchemaRelaxer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = SchemaReferences(root)
        self._count = 0

    def relax_root(self) -> Any:
        """Return a relaxed copy of the root schema, with definitions for all targets of its references."""
        relaxed = self.relax(self._root)
        targets: dict[str, Any] = {}
        for name, target in self._references.targets:  # relaxing a target may add more of them
            targets[name] = self.relax(target) or {}
        if targets:
            relaxed["$defs"] = {**relaxed.get("$defs", {}), **targets}
        return relaxed

    def relax(self, schema: Any) -> Any:
        """Return a relaxed copy of a schema, including its subschemas."""
        self._count += 1
        if not isinstance(schema, dict) or not schema:
            return schema
        kept = normalize_counts({name: value for name, value in schema.items() if name not in NOT_ENFORCED})
        if kept.get("uniqueItems"):
            del kept["uniqueItems"]
        if isinstance(kept.get("items"), list):  # as in drafts before 2020
            kept["prefixItems"] = kept.pop("items")
        if any(name in schema for name in CONDITIONS):
            allow_other_properties(kept)
        if "enum" in kept or "const" in kept:
            keep_listed_values(kept)
        elif not self._relax_choice(kept):
            relax_by_type(kept)
        return self._relax_children(kept)

    def _relax_choice(self, kept: Schema) -> bool:
        """Keep a choice keyword (`$ref`, `anyOf`, …) if the engine enforces it; return whether one was kept.

        The engine enforces it only if the schema has no other choice keyword, and no keyword that applies
        to a single type (such as `minLength` to strings).
        """
        choices = [name for name in CHOICES if name in kept]
        if not choices:
            return False
        beside = [name for name in STRUCTURE if name in kept]
        first = kept[choices[0]]
        stands_alone = len(choices) == 1 and not beside
        if not stands_alone or (choices == ["allOf"] and not (isinstance(first, list) and len(first) == 1)):
            drop_keys(kept, choices)
            allow_other_properties(kept)
            return False
        if choices == ["$ref"]:
            reference = self._references.rename(first) if self._count < MAX_SUBSCHEMAS else None
            if reference is None:
                drop_keys(kept, choices)
                return False
            kept["$ref"] = reference
        elif isinstance(first, list) and any(schema is False for schema in first):
            drop_keys(kept, choices)
            possible = [alternative for alternative in first if alternative is not False]
            if not possible or choices == ["allOf"]:  # nothing matches: the engine has no such schema
                return False
            first = kept[choices[0]] = possible
        kind = kept.pop("type", None)
        if isinstance(first, list):
            name = "anyOf" if choices[0] == "oneOf" else choices[0]  # oneOf is enforced as anyOf
            del kept[choices[0]]
            kept[name] = first if kind is None else [inherit_type(alternative, kind) for alternative in first]
        return True

    def _relax_children(self, kept: Schema) -> Schema:
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(kept.get(name), dict):
                kept[name] = {key: self.relax(schema) for key, schema in kept[name].items()}
        for name in ("$defs", "definitions"):
            if isinstance(kept.get(name), dict):
                kept[name] = {key: {} if part is False else part for key, part in kept[name].items()}
        for name in ("prefixItems", "anyOf", "allOf"):
            if isinstance(kept.get(name), list):
                kept[name] = [self.relax(schema) for schema in kept[name]]
        # the only place where the compiler does not accept booleans
        if isinstance(kept.get("prefixItems"), list):
            kept["prefixItems"] = [
                {} if isinstance(schema, bool) else schema for schema in kept["prefixItems"]
            ]
        drop_impossible(kept)
        for name in ("items", *EXTRA_MEMBERS, "unevaluatedItems"):
            if name in kept:
                kept[name] = self.relax(kept[name])
        if isinstance(kept.get("propertyNames"), dict):
            names_schema = kept["propertyNames"]
            relaxed = self.relax({"type": "string", **names_schema})
            kept["propertyNames"] = relaxed if "type" in names_schema else without_keys(relaxed, ("type",))
        return kept


def drop_keys(kept: Schema, names: Iterable[str]) -> None:
    """Remove keywords from a schema, if present."""
    for name in names:
        kept.pop(name, None)


def without_keys(schema: Schema, names: Collection[str]) -> Schema:
    """Return a copy of a schema without certain keywords."""
    return {name: value for name, value in schema.items() if name not in names}


def allow_other_properties(kept: Schema) -> None:
    """Make an object schema allow properties that it does not describe, unless it forbids them itself."""
    if "properties" in kept or "object" in type_names(kept):
        kept.setdefault("additionalProperties", True)


def inherit_type(schema: Any, kind: Any) -> Any:
    """Return a copy of a schema with its parent's type; a schema that fixes its own type stays unchanged."""
    if not isinstance(schema, dict) or any(name in schema for name in ("type", "enum", "const", *CHOICES)):
        return schema
    return {"type": kind, **schema}


def type_names(schema: Schema) -> set[str]:
    """Return the types that a schema's `type` names."""
    names = schema.get("type")
    return {name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)}


def keep_listed_values(kept: Schema) -> None:
    """Reduce a schema to the values that it lists (`enum` or `const`) and that match its `type`.

    If no value matches, drop the type.
    """
    name = "enum" if "enum" in kept else "const"
    drop_keys(kept, [*STRUCTURE, *CHOICES, *(["const"] if name == "enum" else [])])
    values = kept[name] if name == "enum" else [kept[name]]
    if "type" not in kept or not isinstance(values, list):
        return
    checks = [TYPES[name] for name in type_names(kept) if name in TYPES]
    fitting = [value for value in values if any(check(value) for check in checks)]
    if not fitting:
        del kept["type"]
    elif name == "enum":
        kept["enum"] = fitting


def relax_by_type(kept: Schema) -> None:
    """Drop constraints that an engine cannot enforce on the schema's types.

    The schema must not contain choice keywords.
    """
    types = type_names(kept)
    if "type" not in kept and "properties" in kept:
        types = {"object"}
    elif "type" not in kept and {"items", "prefixItems"} & set(kept):
        types = {"array"}
    elif "type" not in kept:
        drop_keys(kept, STRUCTURE)
    if "object" not in types:  # an engine would apply some of them to arrays
        drop_keys(kept, OBJECT)
    if "string" in types:
        relax_string(kept)
    if types & {"number", "integer"}:
        relax_number(kept, types)
    if "object" in types:
        relax_object(kept)
    if "array" in types:
        relax_array(kept)


def relax_string(kept: Schema) -> None:
    """Drop a `pattern` that is not `matched_as_written`; drop lengths if `pattern` or `format` remains."""
    if "pattern" in kept and not matched_as_written(kept["pattern"]):
        del kept["pattern"]
    if "pattern" in kept or "format" in kept:
        drop_keys(kept, LENGTHS)


def relax_number(kept: Schema, types: set[str]) -> None:
    """Drop bounds that are booleans, and `multipleOf` unless an engine can enforce it.

    An engine can enforce `multipleOf` if it is a positive integer, if the schema does not allow the type
    `number`, and if the schema has either no bounds or exactly the bounds `minimum` and `maximum`.
    """
    relax_bounds(kept, integer="number" not in types)
    step, bounds = kept.get("multipleOf"), {name for name in BOUNDS if name in kept}
    is_integer_step = "number" not in types and isinstance(step, int) and step >= 1
    in_range = bounds == {"minimum", "maximum"} and is_integer_step
    if in_range:
        in_range = kept["maximum"] // step * step >= kept["minimum"]  # otherwise, no multiple is in the range
    if not is_integer_step or (bounds and not in_range):
        drop_keys(kept, ["multipleOf"])


def relax_array(kept: Schema) -> None:
    """Describe items that an engine would otherwise forbid, and drop prefix items beyond `maxItems`.

    An engine takes `minItems` and `maxItems` to count only items that the schema describes.
    """
    most, least = kept.get("maxItems"), kept.get("minItems")
    prefix = kept.get("prefixItems", [])
    if is_number(most) and isinstance(prefix, list) and prefix and most < len(prefix):
        kept["prefixItems"] = prefix = prefix[: int(most)]
        if not prefix:
            del kept["prefixItems"]
    described = isinstance(prefix, list) and bool(prefix)
    too_few = is_number(least) and isinstance(prefix, list) and least > len(prefix)
    if not ("items" in kept or "unevaluatedItems" in kept):
        if too_few or (not described and most is not None):
            kept["items"] = {}
    elif too_few and False in (kept.get("items"), kept.get("unevaluatedItems")):
        del kept["minItems"]


def relax_object(kept: Schema) -> None:
    """Give required properties a schema, and drop constraints that an engine cannot enforce in combination.

    Examples are `propertyNames` with `properties`, and `minProperties` above 1 with additional properties.
    """
    if not all(isinstance(kept.get(name, {}), dict) for name in ("properties", "patternProperties")):
        return
    required = kept.get("required")
    if isinstance(required, list):
        describe_required(kept, [name for name in required if isinstance(name, str)])
    if "patternProperties" in kept and not patterns_are_enforceable(kept):
        del kept["patternProperties"]
        kept["additionalProperties"] = True
    patterns = kept.get("patternProperties")
    if kept.get("properties") or patterns or isinstance(kept.get("propertyNames"), bool):
        drop_keys(kept, ["propertyNames"])
    # without a description, the compiler has no properties to count
    if PROPERTY_COUNTS & set(kept) and not PROPERTY_KEYWORDS & set(kept):
        kept["additionalProperties"] = True
    min_properties = kept.get("minProperties")
    more = any(kept.get(name, False) is not False for name in EXTRA_MEMBERS)
    if (
        (patterns or more or "propertyNames" in kept)
        and isinstance(min_properties, int)
        and min_properties > 1
    ):
        del kept["minProperties"]
    relax_property_counts(kept, closed=not (patterns or more or "propertyNames" in kept))


def relax_property_counts(kept: Schema, *, closed: bool) -> None:
    """Drop counts of properties that contradict the described ones; `closed`: there are no others."""
    most, least, required = (kept.get(name) for name in ("maxProperties", "minProperties", "required"))
    if is_number(most) and isinstance(required, list) and most < len(required):
        del kept["maxProperties"]
    if is_number(least) and closed and least > len(kept.get("properties", {})):
        del kept["minProperties"]


def describe_required(kept: Schema, required: list[str]) -> None:
    """Give required properties without a schema the schema of `additionalProperties`.

    If additional properties are forbidden, required properties without a schema are no longer required.
    """
    described = kept.get("properties", {})
    missing = [name for name in required if name not in described]
    if not missing:
        return
    if "properties" not in kept:
        kept.setdefault("additionalProperties", True)
    other = kept.get("additionalProperties", True)
    if other is False:
        kept["required"] = [name for name in required if name in described]
        return
    kept["properties"] = {**described, **dict.fromkeys(missing, other)}


def patterns_are_enforceable(kept: Schema) -> bool:
    """Return whether an engine enforces `patternProperties`.

    It enforces at most one pattern, which it must match as written and which must not match one of
    `properties`, and only if the schema does not allow additional properties.
    """
    patterns = list(kept["patternProperties"])
    if any(kept.get(name, False) is not False for name in EXTRA_MEMBERS):
        return not patterns
    properties = kept.get("properties", {})
    return len(patterns) <= 1 and all(
        matched_as_written(pattern) and not any(matches(pattern, name) for name in properties)
        for pattern in patterns
    )


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a part of a property's name, or is not a regular expression."""
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return True


def drop_impossible(kept: Schema) -> None:
    """Drop subschemas that are `false`, which an engine cannot express in these places.

    A property that must not occur is simply not described.
    """
    properties = kept.get("properties")
    if isinstance(properties, dict) and any(schema is False for schema in properties.values()):
        required = kept.get("required")
        names = required if isinstance(required, list) else []
        kept["properties"] = {
            key: schema is False or schema
            for key, schema in properties.items()
            if schema is not False or key in names
        }


def matched_as_written(pattern: Any) -> bool:
    """Return whether an engine can enforce a pattern exactly as the schema states it.

    Engines match patterns against the JSON text of a string; see docs/structured-output.md.
    """
    if not isinstance(pattern, str):
        return True  # the engine reports the fault
    return pattern_fault(pattern, quoted=True) is None and is_regular_expression(pattern)


def is_regular_expression(pattern: str) -> bool:
    """Return whether a pattern is a regular expression in which each `{` begins a repetition."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return not _LITERAL_BRACE.search(_ESCAPE_OR_CLASS.sub("x", pattern))


def find_subschema(schema: Any, path: str) -> tuple[Schema, str] | None:
    """Return the subschema at a path such as `/properties/a`; None if the path does not lead to a schema.

    The second value is the path as error messages show it: `.properties.a`.
    """
    shown_path = ""
    for step in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(schema, dict) and step in schema:
            schema, shown_path = schema[step], f"{shown_path}.{step}"
        elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
            schema, shown_path = schema[int(step)], f"{shown_path}[{step}]"
        else:
            return None
    return (schema, shown_path) if isinstance(schema, dict) else None
