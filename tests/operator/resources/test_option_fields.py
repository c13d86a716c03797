# SPDX-License-Identifier: Apache-2.0
"""Every option that the operator sets is translated to the field from which its value comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from mizzen.engine.config import MODEL_IMPLEMENTATIONS
from mizzen_operator.api.parse import parse_service
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_args import engine_arguments
from mizzen_operator.resources.fetch_job import fetch_job
from mizzen_operator.resources.gateway_deployment import gateway_arguments
from mizzen_operator.resources.gateway_spec import dedicated_gateway_spec
from mizzen_operator.resources.group_member import GroupMember
from mizzen_operator.resources.option_fields import (
    ENGINE_FIELDS,
    FETCH_FIELDS,
    GATEWAY_FIELDS,
    translate_engine_options,
    translate_fetch_options,
    translate_gateway_options,
)
from service_kit import META, SPEC

CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1", gateway_role="role")
CRD = yaml.safe_load((Path(__file__).parents[3] / "crds/inferenceservices.yaml").read_text())
FULL: dict[str, Any] = {
    **SPEC,
    "model": {
        **SPEC["model"],
        "source": "hf://a/b",
        "servedName": "m",
        "aliases": ["n"],
        "contextLength": 4096,
        "implementation": "Native",
        "cache": {"mode": "PersistentVolumeClaim", "claimName": "models", "size": "9Gi"},
        "credentialsSecretRef": {"name": "token", "key": "token"},
        "endpoint": "https://hub.example",
    },
    "engine": {**SPEC["engine"], "quantization": "FP8"},
    "parallelism": {"tensor": 4, "expert": 2},
    "accelerator": {"resourceName": "nvidia.com/gpu", "nodeSelector": {}, "perPod": 2},
    "podTemplate": {"imagePullSecrets": [], "tolerations": []},
    "autoscaling": {
        "minReplicas": 0,
        "maxReplicas": 2,
        "metric": {"type": "Saturation", "targetPercent": 80},
        "scaleUpStabilizationSeconds": 0,
        "scaleDownStabilizationSeconds": 300,
        "idleSecondsToZero": 600,
        "wakeTimeoutSeconds": 60,
    },
    "observability": {
        "tracing": {
            "otlpEndpoint": "http://collector:4317",
            "samplingPercent": 5,
            "headersSecretRef": {"name": "otlp", "key": "headers"},
        }
    },
    "suspend": True,
}
"""A spec with which every option is set."""
FULL["gateway"] = {
    **SPEC["gateway"],
    "apiKeys": {"secretNames": ["teams"], "fromLabel": True},
    "cors": {"allowOrigins": ["https://chat.example"]},
    "tls": {"secretName": "certificate"},
    "moderation": {"categories": {"S10": "hate"}},
    "playground": "Enabled",
    "grpc": "Enabled",
    "images": {
        "urls": "Allowed",
        "allowHosts": ["cdn.example.com", "*.example.org"],
        "maxPerRequest": 4,
        "maxBytes": 65536,
        "maxPixels": 1000000,
    },
}


def engine(spec: dict[str, Any]) -> list[str]:
    demo = parse_service({"metadata": META, "spec": spec})
    return engine_arguments(demo, "a", GroupMember("a", 0, 0, "demo-a-0-0", 1))


def gateway(spec: dict[str, Any]) -> list[str]:
    return gateway_arguments(dedicated_gateway_spec(parse_service({"metadata": META, "spec": spec})))


def fetch(spec: dict[str, Any]) -> list[str]:
    job = fetch_job(parse_service({"metadata": META, "spec": spec}), CONFIG)
    return job["spec"]["template"]["spec"]["containers"][0]["args"]


class Program:
    """A program with the fields of its options, and its options that no field sets."""

    def __init__(
        self,
        arguments: Callable[[dict[str, Any]], list[str]],
        fields: dict[str, str],
        translate: Callable[[str], str],
        without_field: str,
    ) -> None:
        self.arguments = arguments
        self.fields = fields
        self.translate = translate
        self.without_field = set(without_field.split())

    def options(self, spec: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the options of the command line, with their values; '' for an option without a value."""
        words = self.arguments(spec)
        for word, value in zip(words, [*words[1:], "--"], strict=True):
            if word.startswith("--"):
                yield word[2:], "" if value.startswith("--") else value


PROGRAMS = {
    "engine": Program(
        engine,
        ENGINE_FIELDS,
        translate_engine_options,
        "engine-id http-host http-port keys leader-address node-rank ranks-address ranks-port revision "
        "termination-message wire-bind",
    ),
    "gateway": Program(
        gateway,
        GATEWAY_FIELDS,
        translate_gateway_options,
        "admin-host admin-port admin-token-file host keys namespace port service",
    ),
    "fetch": Program(
        fetch, FETCH_FIELDS, translate_fetch_options, "pin progress-host progress-port termination-message to"
    ),
}


def schema(field: str) -> dict[str, Any]:
    """Return the schema of a field.

    Raises:
        KeyError: the CRD has no such field.
    """
    found = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in field.split("."):
        found = found["properties"][name]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_option_has_a_field_or_is_set_by_the_operator_alone(name: str) -> None:
    program = PROGRAMS[name]
    rendered = {option for option, _ in program.options(FULL)}
    assert rendered - program.without_field == set(program.fields)
    assert not set(program.fields) & program.without_field
    for fields in program.fields.values():
        for field in fields.split(" / "):
            schema(field)


def test_an_option_of_several_programs_has_one_field() -> None:
    engine_options, gateway_options = set(ENGINE_FIELDS), set(GATEWAY_FIELDS)
    assert all(ENGINE_FIELDS[name] == GATEWAY_FIELDS[name] for name in engine_options & gateway_options)
    assert not (engine_options | gateway_options) & set(FETCH_FIELDS)


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_values_are_translated_to_those_of_the_field(name: str) -> None:
    program, checked = PROGRAMS[name], 0
    for option, field in program.fields.items():
        for value in schema(field).get("enum", ()) if " / " not in field else ():
            spec = deepcopy(FULL)
            *path, last = field.split(".")[1:]
            target = spec
            for part in path:
                target = target[part]
            target[last] = value
            options = dict(program.options(spec))
            if value in ("Auto", schema(field).get("default")) and option not in options:
                continue  # the operator leaves the default out
            rendered = options[option]
            if not rendered:  # a flag: messages name it without a value
                assert program.translate(f"--{option}: no") == f"{field}: no"
                continue
            assert program.translate(f"--{option} {rendered}: no") == f"{field} {value}: no"
            checked += 1
    assert checked > 8


def test_every_implementation_that_a_message_names_is_translated() -> None:
    fields = schema("spec.model.implementation")["enum"]
    translated = [
        translate_engine_options(f"use --model-implementation {choice}") for choice in MODEL_IMPLEMENTATIONS
    ]
    assert sorted(translated) == sorted(f"use spec.model.implementation {value}" for value in fields)
