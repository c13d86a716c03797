"""Relax a JSON schema to the constraints that an engine can enforce.

An engine rejects a schema that its grammars cannot enforce completely. That is right for `strict` schemas.
For others, unsupported constraints are dropped and the rest is enforced: an object that loses a constraint
that may describe properties allows any other properties.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from mizzen.common.json_schema import (
    BOUNDS,
    CHOICES,
    CONDITIONS,
    LENGTHS,
    MORE,
    NOT_ENFORCED,
    STRUCTURE,
    TYPES,
    Schema,
)
from mizzen.common.regex_support import pattern_fault

PROPERTY_COUNTS = {"minProperties", "maxProperties"}
PROPERTY_KEYWORDS = {"properties", "patternProperties", "propertyNames", *MORE}
"""Keywords that describe an object's properties."""
REFERENCE_ROOTS = ("$defs", "definitions", "properties")


def relax_schema(schema: Any) -> Any:
    """Return a schema without the constraints that an engine would reject.

    The schema must not be nested too deeply.
    """
    return _SchemaRelaxer(schema).relax(schema)


class _SchemaRelaxer:
    def __init__(self, root: Any) -> None:
        self._root = root

    def relax(self, schema: Any) -> Any:
        """Return one schema relaxed, and all schemas in it."""
        if not isinstance(schema, dict) or not schema:
            return schema
        kept = {name: value for name, value in schema.items() if name not in NOT_ENFORCED}
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
        """Keep a schema's single choice keyword if it stands alone; return whether it is kept."""
        choices = [name for name in CHOICES if name in kept]
        if not choices:
            return False
        beside = [name for name in STRUCTURE if name in kept]
        first = kept[choices[0]]
        is_only_pattern = len(choices) == 1 and not beside
        if not is_only_pattern or (
            choices == ["allOf"] and not (isinstance(first, list) and len(first) == 1)
        ):
            drop_keys(kept, choices)
            allow_other_properties(kept)
            return False
        if choices == ["$ref"] and not self._resolves(first):
            drop_keys(kept, choices)
            return False
        kind = kept.pop("type", None)
        if isinstance(first, list):
            name = "anyOf" if choices[0] == "oneOf" else choices[0]  # oneOf is enforced as anyOf
            del kept[choices[0]]
            kept[name] = first if kind is None else [inherit_type(alternative, kind) for alternative in first]
        return True

    def _resolves(self, reference: Any) -> bool:
        if reference == "#":
            return True
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return False
        steps = [step.replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]
        target = self._root if steps[0] in REFERENCE_ROOTS else None
        for step in steps:
            target = target.get(step) if isinstance(target, dict) and step not in NOT_ENFORCED else None
        return isinstance(target, dict | bool)

    def _relax_children(self, kept: Schema) -> Schema:
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(kept.get(name), dict):
                kept[name] = {key: self.relax(schema) for key, schema in kept[name].items()}
        for name in ("prefixItems", "anyOf", "allOf"):
            if isinstance(kept.get(name), list):
                kept[name] = [self.relax(schema) for schema in kept[name]]
        # the only place where the compiler does not accept `true`
        if isinstance(kept.get("prefixItems"), list):
            kept["prefixItems"] = [{} if schema is True else schema for schema in kept["prefixItems"]]
        for name in ("items", *MORE, "unevaluatedItems"):
            if name in kept:
                kept[name] = self.relax(kept[name])
        if isinstance(kept.get("propertyNames"), dict):
            names_schema = kept["propertyNames"]
            relaxed = self.relax({"type": "string", **names_schema})
            kept["propertyNames"] = relaxed if "type" in names_schema else without_keys(relaxed, ("type",))
        return kept


def drop_keys(kept: Schema, names: Iterable[str]) -> None:
    """Remove keywords."""
    for name in names:
        kept.pop(name, None)


def without_keys(schema: Schema, names: Collection[str]) -> Schema:
    """Return a schema without some keywords."""
    return {name: value for name, value in schema.items() if name not in names}


def allow_other_properties(kept: Schema) -> None:
    """Allow properties that are not described, unless the schema itself forbids them."""
    if "properties" in kept or "object" in type_names(kept):
        kept.setdefault("additionalProperties", True)


def inherit_type(schema: Any, kind: Any) -> Any:
    """Return a schema with the type of its parent if it does not constrain its own type."""
    if not isinstance(schema, dict) or any(name in schema for name in ("type", "enum", "const", *CHOICES)):
        return schema
    return {"type": kind, **schema}


def type_names(schema: Schema) -> set[str]:
    """Return the types that a schema names."""
    names = schema.get("type")
    return {name for name in (names if isinstance(names, list) else [names]) if isinstance(name, str)}


def keep_listed_values(kept: Schema) -> None:
    """Keep the listed values of a schema, and of its `type` only the values that match."""
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
    """Keep the enforceable constraints of a schema without choices."""
    types = type_names(kept)
    if "type" not in kept and "properties" in kept:
        types = {"object"}
    elif not {"type", "items", "prefixItems"} & set(kept):
        drop_keys(kept, STRUCTURE)
    if "string" in types:
        relax_string(kept)
    if types & {"number", "integer"}:
        relax_number(kept, types)
    if "object" in types:
        relax_object(kept)


def relax_string(kept: Schema) -> None:
    """Keep a pattern that is matched as written; keep lengths only without `pattern` and `format`."""
    if "pattern" in kept and not matched_as_written(kept["pattern"]):
        del kept["pattern"]
    if "pattern" in kept or "format" in kept:
        drop_keys(kept, LENGTHS)


def relax_number(kept: Schema, types: set[str]) -> None:
    """Keep bounds that are numbers, and integer multiples."""
    drop_keys(kept, [name for name in BOUNDS if isinstance(kept.get(name), bool)])
    step, bounds = kept.get("multipleOf"), {name for name in BOUNDS if name in kept}
    is_integer_step = "number" not in types and isinstance(step, int) and step >= 1
    if not is_integer_step or (bounds and bounds != {"minimum", "maximum"}):
        drop_keys(kept, ["multipleOf"])


def relax_object(kept: Schema) -> None:
    """Describe required properties, and keep one rule for the properties that are not described."""
    if not all(isinstance(kept.get(name, {}), dict) for name in ("properties", "patternProperties")):
        return
    required = kept.get("required")
    if isinstance(required, list):
        describe_required(kept, [name for name in required if isinstance(name, str)])
    if "patternProperties" in kept and not is_only_pattern(kept):
        del kept["patternProperties"]
        kept["additionalProperties"] = True
    patterns = kept.get("patternProperties")
    if kept.get("properties") or patterns:
        drop_keys(kept, ["propertyNames"])
    # without a description, the compiler has no properties to count
    if PROPERTY_COUNTS & set(kept) and not PROPERTY_KEYWORDS & set(kept):
        kept["additionalProperties"] = True
    min_properties = kept.get("minProperties")
    more = any(kept.get(name, False) is not False for name in MORE)
    if (
        (patterns or more or "propertyNames" in kept)
        and isinstance(min_properties, int)
        and min_properties > 1
    ):
        del kept["minProperties"]


def describe_required(kept: Schema, required: list[str]) -> None:
    """Describe required properties that have no schema: the rule for other properties applies to them."""
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


def is_only_pattern(kept: Schema) -> bool:
    """Return whether a single name pattern is all that a schema says about an object's properties."""
    patterns = list(kept["patternProperties"])
    if kept.get("properties") or any(kept.get(name, False) is not False for name in MORE):
        return not patterns
    return len(patterns) <= 1 and all(map(matched_as_written, patterns))


def matched_as_written(pattern: Any) -> bool:
    """Return whether an engine matches a pattern in JSON as written: see docs/structured-output.md."""
    if not isinstance(pattern, str):
        return True  # the engine reports the fault
    return pattern_fault(pattern, quoted=True) is None


def find_subschema(schema: Any, path: str) -> tuple[Schema, str] | None:
    """Return the schema that a path (`/properties/a`) leads to, and its path in error messages."""
    named = ""
    for step in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(schema, dict) and step in schema:
            schema, named = schema[step], f"{named}.{step}"
        elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
            schema, named = schema[int(step)], f"{named}[{step}]"
        else:
            return None
    return (schema, named) if isinstance(schema, dict) else None
