# SPDX-License-Identifier: Apache-2.0
"""Public contracts of the operator: revision hashes, metrics, conditions, options, labels, child objects."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml
from golden_files import check, load
from operator_children import render_children
from operator_reasons import collect_literals, collect_reasons

from mizzen_local.cli import app
from mizzen_operator.api.parse import parse_service
from mizzen_operator.autoscaling.scaling_metrics import ScalingMetrics
from mizzen_operator.config import VERSION, OperatorConfig
from mizzen_operator.main import main
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources import revision_hash as revisions
from mizzen_operator.status.service_metrics import ServiceMetrics
from source_code import parse_source

ROOT = Path(__file__).parents[2]
CRD = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPECS: dict[str, dict[str, Any]] = load("operator_revision_specs")
"""Sample specs by name; each contains only the fields that differ from `MINIMAL`."""
MINIMAL: dict[str, Any] = {"model": {"source": "file:///models/demo"}}
IMAGES = ("engine:1", "engine:2", "registry.example/engine@sha256:" + "0" * 64)
META = {"name": "demo", "namespace": "llm", "uid": "u", "generation": 1}
MIN_SPECS = 50
LABEL = re.compile(r"mizzen\.dev/[a-z][a-z-]*")


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge the fields of `above` into `below` recursively; values that are not objects are replaced."""
    both = {
        key: overlay(below[key], value)
        if isinstance(below.get(key), dict) and isinstance(value, dict)
        else value
        for key, value in above.items()
    }
    return {**below, **both}


def apply_defaults(schema: dict[str, Any], value: Any) -> Any:
    """Fill in a schema's defaults as the API server does when an object is stored."""
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        missing = {
            key: part["default"] for key, part in properties.items() if "default" in part and key not in value
        }
        return {
            key: apply_defaults(properties.get(key, {}), item)
            for key, item in json.loads(json.dumps({**missing, **value})).items()
        }
    if isinstance(value, list):
        return [apply_defaults(schema.get("items", {}), item) for item in value]
    return value


def stored_service(spec: dict[str, Any], **meta: Any) -> dict[str, Any]:
    """Return an InferenceService as the API server stores it; `spec` is merged into `MINIMAL`."""
    return {
        "metadata": {**META, **meta},
        "spec": apply_defaults(SCHEMA["properties"]["spec"], overlay(MINIMAL, spec)),
    }


def leaf_paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of the leaves of a schema: all fields without fields of their own."""
    inner = schema.get("items", schema)
    if not inner.get("properties"):
        yield path
    for key, part in inner.get("properties", {}).items():
        yield from leaf_paths(part, f"{path}.{key}" if path else key)


def set_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all fields that an object sets, including fields with fields of their own."""
    if isinstance(value, list):
        for item in value:
            yield from set_paths(item, path)
        return
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from set_paths(item, f"{path}.{key}" if path else key)


def revision(spec: dict[str, Any], image: str = IMAGES[0]) -> str:
    return revisions.revision(parse_service(stored_service(spec)), OperatorConfig(engine_image=image))


def test_revision_hashes_are_those_of_earlier_releases() -> None:
    by_image = {image: revision({}, image) for image in IMAGES}
    check("operator_revisions", {"specs": {n: revision(s) for n, s in SPECS.items()}, "images": by_image})


def test_the_corpus_of_specs_is_valid_and_sets_every_field_of_the_crd() -> None:
    assert len(SPECS) >= MIN_SPECS
    validator = jsonschema.Draft202012Validator(SCHEMA["properties"]["spec"])
    for name, spec in SPECS.items():
        validator.validate(overlay(MINIMAL, spec))
        unknown = {p for p in set_paths(spec) if p} - set(known_paths(SCHEMA["properties"]["spec"]))
        opaque = ("podTemplate.affinity.", "podTemplate.volumes.", "podTemplate.topologySpreadConstraints.")
        maps = ("nodeSelector.", "labels.", "annotations.", "requests.", "limits.", "categories.")
        assert not {p for p in unknown if not p.startswith(opaque) and not any(m in p for m in maps)}, name
    covered = {path for spec in SPECS.values() for path in set_paths(overlay(MINIMAL, spec))}
    assert set(leaf_paths(SCHEMA["properties"]["spec"])) - covered == set()


def known_paths(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all fields of a schema."""
    yield path
    for key, part in schema.get("items", schema).get("properties", {}).items():
        yield from known_paths(part, f"{path}.{key}" if path else key)


def test_metrics_keep_their_names_types_labels_and_buckets() -> None:
    families: dict[str, Any] = {}
    metrics = Metrics()
    ServiceMetrics(metrics.registry)
    ScalingMetrics(metrics.registry)
    for collector in metrics.registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            families[collector._name] = {
                "type": collector._type,
                "labels": list(collector._labelnames),
                "buckets": [str(bound) for bound in getattr(collector, "_upper_bounds", _bounds(collector))],
            }
            continue
        for family in collector.collect():
            labels = getattr(family, "_labelnames", ())
            families[family.name] = {"type": family.type, "labels": list(labels), "buckets": []}
    check("operator_metrics", families)


def _bounds(collector: Any) -> list[float]:
    return getattr(collector, "_kwargs", {}).get("buckets", [])


def test_conditions_events_and_actions_keep_their_types_and_reasons() -> None:
    check("operator_reasons", collect_reasons())


def test_words_visible_in_the_cluster_are_unchanged() -> None:
    check("operator_literals", collect_literals())


class _ParserCaptured(Exception):
    """Raised instead of parsing the command line."""


def capture_parser(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> argparse.ArgumentParser:
    """Return the parser that `mizzen-operator` builds for its command line."""
    captured: list[argparse.ArgumentParser] = []

    def stop(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        captured.append(self)
        raise _ParserCaptured

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", ["mizzen-operator", *arguments])
    with pytest.raises(_ParserCaptured):
        main()
    return captured[0]


def describe_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    return {
        " ".join(action.option_strings) or action.dest: {
            "default": str(action.default).replace(VERSION, "<version>"),
            "metavar": action.metavar,
            "type": getattr(action.type, "__name__", None),
            "choices": action.choices,
            "required": action.required,
            "nargs": action.nargs,
        }
        for action in parser._actions
    }


def test_options_of_mizzen_operator_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MIZZEN_OPERATOR_")]:
        monkeypatch.delenv(variable)
    pinned = {"mizzen-operator": describe_options(capture_parser(monkeypatch))}
    pinned["mizzen-operator check"] = describe_options(capture_parser(monkeypatch, "check"))
    for name, option in pinned["mizzen-operator"].items():
        variable = "MIZZEN_OPERATOR_" + name.removeprefix("--").upper().replace("-", "_")
        monkeypatch.setenv(variable, "7")
        changed = (
            describe_options(capture_parser(monkeypatch)).get(name, {}).get("default") != option["default"]
        )
        option["variable"] = variable if changed else None
        monkeypatch.delenv(variable)
    check("operator_options", pinned)


def test_limits_of_options_are_unchanged() -> None:
    fields = dataclasses.fields(OperatorConfig)
    check(
        "operator_option_limits",
        {option.name: {k: option.metadata[k] for k in ("choices", "low")} for option in fields},
    )


def walk_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, inner in getattr(command, "commands", {}).items():
        yield from walk_commands(inner, f"{name} {child}")


def test_commands_and_options_of_mizzen_local_are_unchanged() -> None:
    pinned: dict[str, Any] = {}
    names = (
        "opts",
        "secondary_opts",
        "default",
        "metavar",
        "required",
        "nargs",
        "multiple",
        "hidden",
        "envvar",
    )
    names = (*names, "is_flag", "min", "max")
    for name, command in walk_commands(typer.main.get_command(app), "mizzen-local"):
        pinned[name] = {
            "hidden": command.hidden,
            "settings": command.context_settings,
            "parameters": {
                parameter.name: {"type": str(parameter.type_descriptor.annotation)}
                | {key: getattr(parameter, key, None) for key in names}
                for parameter in command.params
                if not parameter.name.endswith("_completion")  # Typer's own
            },
        }
    check("local_commands", json.loads(json.dumps(pinned)))


def test_names_of_labels_and_annotations_are_unchanged() -> None:
    files = [path for folder in ("operator", "worker") for path in (ROOT / folder).rglob("*.py")]
    names = {
        label
        for path in files
        for node in ast.walk(parse_source(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for label in LABEL.findall(node.value)
    }
    check("labels", sorted(names - {f"{CRD['spec']['group']}/v"}))


def test_child_objects_of_sample_services_are_unchanged() -> None:
    manifests = render_children(lambda spec, meta: parse_service(stored_service(spec, **meta)))
    check("operator_children", json.loads(json.dumps(manifests)))
