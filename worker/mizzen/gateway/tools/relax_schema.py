"""Widens a JSON schema to what an engine can hold an answer to.

An engine refuses a schema that asks for more than its grammars enforce. That is right where `strict` is asked
for. Elsewhere the constraints at fault are left out, and the rest is enforced: an object in which something
was left out that could have described properties may have any others.
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

COUNTS = {"minProperties", "maxProperties"}
DESCRIPTIONS = {"properties", "patternProperties", "propertyNames", *MORE}
"""Of an object's properties."""
REFERRED = ("$defs", "definitions", "properties")


def widened(schema: Any) -> Any:
    """Return a schema, not nested too deeply, without the constraints that an engine would refuse."""
    return _Widening(schema).of(schema)


class _Widening:
    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, given: Any) -> Any:
        """Return one schema widened, and all in it."""
        if not isinstance(given, dict) or not given:
            return given
        kept = {name: value for name, value in given.items() if name not in NOT_ENFORCED}
        if kept.get("uniqueItems"):
            del kept["uniqueItems"]
        if isinstance(kept.get("items"), list):  # as drafts before 2020 have it
            kept["prefixItems"] = kept.pop("items")
        if any(name in given for name in CONDITIONS):
            open_(kept)
        if "enum" in kept or "const" in kept:
            listed(kept)
        elif not self._chosen(kept):
            plain(kept)
        return self._inner(kept)

    def _chosen(self, kept: Schema) -> bool:
        """Keep the one choice of a schema, if it stands alone; tell whether there is one."""
        choices = [name for name in CHOICES if name in kept]
        if not choices:
            return False
        beside = [name for name in STRUCTURE if name in kept]
        first = kept[choices[0]]
        alone = len(choices) == 1 and not beside
        if not alone or (choices == ["allOf"] and not (isinstance(first, list) and len(first) == 1)):
            drop(kept, choices)
            open_(kept)
            return False
        if choices == ["$ref"] and not self._leads_somewhere(first):
            drop(kept, choices)
            return False
        kind = kept.pop("type", None)
        if isinstance(first, list):
            name = "anyOf" if choices[0] == "oneOf" else choices[0]  # which is how it is enforced
            del kept[choices[0]]
            kept[name] = first if kind is None else [typed(one, kind) for one in first]
        return True

    def _leads_somewhere(self, reference: Any) -> bool:
        if reference == "#":
            return True
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return False
        steps = [step.replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]
        target = self._root if steps[0] in REFERRED else None
        for step in steps:
            target = target.get(step) if isinstance(target, dict) and step not in NOT_ENFORCED else None
        return isinstance(target, dict | bool)

    def _inner(self, kept: Schema) -> Schema:
        for name in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(kept.get(name), dict):
                kept[name] = {key: self.of(schema) for key, schema in kept[name].items()}
        for name in ("prefixItems", "anyOf", "allOf"):
            if isinstance(kept.get(name), list):
                kept[name] = [self.of(schema) for schema in kept[name]]
        if isinstance(kept.get("prefixItems"), list):  # the one place in which the compiler takes no `true`
            kept["prefixItems"] = [{} if schema is True else schema for schema in kept["prefixItems"]]
        for name in ("items", *MORE, "unevaluatedItems"):
            if name in kept:
                kept[name] = self.of(kept[name])
        if isinstance(kept.get("propertyNames"), dict):
            given = kept["propertyNames"]
            found = self.of({"type": "string", **given})
            kept["propertyNames"] = found if "type" in given else without(found, ("type",))
        return kept


def drop(kept: Schema, names: Iterable[str]) -> None:
    """Take keywords away."""
    for name in names:
        kept.pop(name, None)


def without(schema: Schema, names: Collection[str]) -> Schema:
    """Return a schema without some keywords."""
    return {name: value for name, value in schema.items() if name not in names}


def open_(kept: Schema) -> None:
    """Let an object have other properties than are described, unless its own schema says that it has none."""
    if "properties" in kept or "object" in types(kept):
        kept.setdefault("additionalProperties", True)


def typed(schema: Any, kind: Any) -> Any:
    """Return a schema with the type of the one that it stands in, where it says nothing of types itself."""
    if not isinstance(schema, dict) or any(name in schema for name in ("type", "enum", "const", *CHOICES)):
        return schema
    return {"type": kind, **schema}


def types(schema: Schema) -> set[str]:
    """Return the types that a schema names."""
    given = schema.get("type")
    return {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}


def listed(kept: Schema) -> None:
    """Keep the values that a schema lists, and of its type only what they are."""
    name = "enum" if "enum" in kept else "const"
    drop(kept, [*STRUCTURE, *CHOICES, *(["const"] if name == "enum" else [])])
    values = kept[name] if name == "enum" else [kept[name]]
    if "type" not in kept or not isinstance(values, list):
        return
    checks = [TYPES[one] for one in types(kept) if one in TYPES]
    fitting = [value for value in values if any(check(value) for check in checks)]
    if not fitting:
        del kept["type"]
    elif name == "enum":
        kept["enum"] = fitting


def plain(kept: Schema) -> None:
    """Keep of a schema without choices what is enforced."""
    known = types(kept)
    if "type" not in kept and "properties" in kept:
        known = {"object"}
    elif not {"type", "items", "prefixItems"} & set(kept):
        drop(kept, STRUCTURE)
    if "string" in known:
        of_strings(kept)
    if known & {"number", "integer"}:
        of_numbers(kept, known)
    if "object" in known:
        of_objects(kept)


def of_strings(kept: Schema) -> None:
    """Keep a pattern that is matched as written, and lengths where nothing else says how a text looks."""
    if "pattern" in kept and not matched_as_written(kept["pattern"]):
        del kept["pattern"]
    if "pattern" in kept or "format" in kept:
        drop(kept, LENGTHS)


def of_numbers(kept: Schema, known: set[str]) -> None:
    """Keep bounds that are numbers, and multiples of whole ones."""
    drop(kept, [name for name in BOUNDS if isinstance(kept.get(name), bool)])
    step, bounds = kept.get("multipleOf"), {name for name in BOUNDS if name in kept}
    whole = "number" not in known and isinstance(step, int) and step >= 1
    if not whole or (bounds and bounds != {"minimum", "maximum"}):
        drop(kept, ["multipleOf"])


def of_objects(kept: Schema) -> None:
    """Describe what is required, and keep one rule for properties that are not described."""
    if not all(isinstance(kept.get(name, {}), dict) for name in ("properties", "patternProperties")):
        return
    required = kept.get("required")
    if isinstance(required, list):
        describe(kept, [name for name in required if isinstance(name, str)])
    if "patternProperties" in kept and not alone(kept):
        del kept["patternProperties"]
        kept["additionalProperties"] = True
    patterns = kept.get("patternProperties")
    if kept.get("properties") or patterns:
        drop(kept, ["propertyNames"])
    if COUNTS & set(kept) and not DESCRIPTIONS & set(kept):  # the compiler knows none to count
        kept["additionalProperties"] = True
    least = kept.get("minProperties")
    more = any(kept.get(name, False) is not False for name in MORE)
    if (patterns or more or "propertyNames" in kept) and isinstance(least, int) and least > 1:
        del kept["minProperties"]


def describe(kept: Schema, required: list[str]) -> None:
    """Let properties that are required be described: by what holds for those that are not."""
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


def alone(kept: Schema) -> bool:
    """Tell whether one pattern of names is all that an object's schema says of its properties."""
    patterns = list(kept["patternProperties"])
    if kept.get("properties") or any(kept.get(name, False) is not False for name in MORE):
        return not patterns
    return len(patterns) <= 1 and all(map(matched_as_written, patterns))


def matched_as_written(pattern: Any) -> bool:
    """Tell whether an engine reads a pattern within JSON as a person does: see docs/structured-output.md."""
    if not isinstance(pattern, str):
        return True  # the engine says what is wrong
    return pattern_fault(pattern, quoted=True) is None


def place(schema: Any, path: str) -> tuple[Schema, str] | None:
    """Return the schema that a path leads to (`/properties/a`), and its place as errors name it."""
    named = ""
    for step in path.strip("/").split("/") if path.strip("/") else ():
        if isinstance(schema, dict) and step in schema:
            schema, named = schema[step], f"{named}.{step}"
        elif isinstance(schema, list) and step.isdecimal() and int(step) < len(schema):
            schema, named = schema[int(step)], f"{named}[{step}]"
        else:
            return None
    return (schema, named) if isinstance(schema, dict) else None
