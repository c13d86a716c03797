# SPDX-License-Identifier: Apache-2.0
"""Generate charts/mizzen-models/values.schema.json, which contains the spec of an InferenceService.

    python scripts/catalog_schema.py

The schema of the spec comes from the CRD, so that Helm rejects unknown fields and wrong types of an override
before anything is sent to the API server. Rules that need the whole spec are left to the API server. A test
checks that the schema is up to date.
"""

from __future__ import annotations

import json
from typing import Any

import yaml
from generated_pages import ROOT, write_pages

SCHEMA = "charts/mizzen-models/values.schema.json"
KEPT = (
    "type",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
)
"""Keywords that mean the same in a CRD and in JSON Schema, apart from the two with "exclusive"."""
NAME = "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$"
"""Names of entries: those of InferenceServices, without dots, which `--set` would take for separators."""
ACCELERATOR = ("resourceName", "nodeSelector", "memory", "profile")
"""Fields of `spec.accelerator` that a kind of GPU may set."""
POD = ("tolerations", "runtimeClassName")
"""Fields of `spec.podTemplate` that a kind of GPU may set."""
MAP_OF_TEXT = {"type": "object", "additionalProperties": {"type": "string"}}


def convert(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a CRD's schema as JSON Schema, in which objects accept no unknown fields.

    Required fields are left out, because an override has only some fields.
    """
    result = {key: part[key] for key in KEPT if key in part}
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if result.pop(exclusive, False):
            result[exclusive] = result.pop(bound)
    if "anyOf" in part:
        result["anyOf"] = [convert(choice) for choice in part["anyOf"]]
    if "items" in part:
        result["items"] = convert(part["items"])
    if "properties" in part:
        result["properties"] = {name: convert(field) for name, field in part["properties"].items()}
    if isinstance(part.get("additionalProperties"), dict):
        result["additionalProperties"] = convert(part["additionalProperties"])
    elif part.get("type") == "object" and not part.get("x-kubernetes-preserve-unknown-fields"):
        result["additionalProperties"] = False
    return result


def make_object(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has no other fields than these."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def make_schema(crd: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of the values of the catalog's chart."""
    [version] = crd["spec"]["versions"]
    spec = convert(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    accelerator, pod = spec["properties"]["accelerator"], spec["properties"]["podTemplate"]
    gpu = {name: accelerator["properties"][name] for name in ACCELERATOR}
    gpu |= {name: pod["properties"][name] for name in POD}
    entry = {
        "enabled": {"type": "boolean"},
        "accelerator": {"type": "string"},
        "disk": spec["properties"]["model"]["properties"]["cache"]["properties"]["size"],
        "token": {"type": "boolean"},
        "spec": {"$ref": "#/$defs/spec"},
    }
    text = {"type": "string", "minLength": 1, "maxLength": 253}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Values of the mizzen-models chart",
        **make_object(
            {
                "global": {"type": "object", "description": "Set by Helm in subcharts; not used."},
                "commonLabels": MAP_OF_TEXT,
                "commonAnnotations": MAP_OF_TEXT,
                "hubToken": {**make_object({"name": text, "key": text}), "required": ["name", "key"]},
                "accelerators": {"type": "object", "additionalProperties": make_object(gpu)},
                "defaults": {"$ref": "#/$defs/spec"},
                "catalog": {
                    "type": "object",
                    "propertyNames": {"pattern": NAME},
                    "additionalProperties": make_object(entry),
                },
            }
        ),
        "required": ["accelerators", "catalog", "defaults", "hubToken"],
        "$defs": {"spec": spec},
    }


def schema_text() -> str:
    """Return the text of values.schema.json."""
    crd = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text(encoding="utf-8"))
    return json.dumps(make_schema(crd), indent=1) + "\n"


PAGES = {SCHEMA: schema_text}

if __name__ == "__main__":
    write_pages(PAGES)
