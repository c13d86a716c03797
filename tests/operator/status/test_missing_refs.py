# SPDX-License-Identifier: Apache-2.0
"""Objects that pods need; if an object is missing, the message names the spec's field that refers to it."""

from __future__ import annotations

import pytest

from mizzen_operator.status.missing_refs import (
    CLAIM,
    CONFIG_MAP,
    SECRET,
    RequiredRef,
    engine_refs,
    explain_missing_ref,
    fetch_refs,
    gateway_refs,
)
from service_kit import SPEC, service

VOLUMES = [
    {"name": "a", "secret": {"secretName": "authority"}},
    {"name": "b", "configMap": {"name": "settings"}},
    {"name": "c", "persistentVolumeClaim": {"claimName": "scratch"}},
    {"name": "d", "projected": {"sources": [{"secret": {"name": "one"}}, {"configMap": {"name": "two"}}]}},
    {"name": "e", "secret": {"secretName": "perhaps", "optional": True}},
    {"name": "f", "emptyDir": {}},
]
ENV = [
    {"name": "PLAIN", "value": "x"},
    {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    {"name": "MODE", "valueFrom": {"configMapKeyRef": {"name": "modes", "key": "mode", "optional": True}}},
]
DEMO = service(
    model={**SPEC["model"], "source": "pvc://models/demo"},
    engine={**SPEC["engine"], "env": ENV},
    podTemplate={"volumes": VOLUMES},
)


def test_every_field_that_names_an_object_is_known() -> None:
    volumes = "spec.podTemplate.volumes"
    assert engine_refs(DEMO) == [
        RequiredRef(CLAIM, "models", "spec.model.source"),
        RequiredRef(SECRET, "hub", "spec.engine.env[1].valueFrom.secretKeyRef.name"),
        RequiredRef(SECRET, "authority", f"{volumes}[0].secret.secretName"),
        RequiredRef(CONFIG_MAP, "settings", f"{volumes}[1].configMap.name"),
        RequiredRef(CLAIM, "scratch", f"{volumes}[2].persistentVolumeClaim.claimName"),
        RequiredRef(SECRET, "one", f"{volumes}[3].projected.sources[0].secret.name"),
        RequiredRef(CONFIG_MAP, "two", f"{volumes}[3].projected.sources[1].configMap.name"),
    ]
    keys = {"secretNames": ["x", "y"], "fromLabel": False}
    gateway = service(gateway={**SPEC["gateway"], "apiKeys": keys, "tls": {"secretName": "cert"}}).gateway
    assert [(ref.name, ref.field) for ref in gateway_refs(gateway)] == [
        ("x", "spec.gateway.apiKeys.secretNames[0]"),
        ("y", "spec.gateway.apiKeys.secretNames[1]"),
        ("cert", "spec.gateway.tls.secretName"),
    ]


def test_a_fetched_model_needs_its_credentials_and_a_claim_without_a_size() -> None:
    reference = {"name": "hub", "key": "token"}
    cache = {"mode": "PersistentVolumeClaim", "claimName": "cache"}
    model = {**SPEC["model"], "source": "hf://a/b", "credentialsSecretRef": reference, "cache": cache}
    claim = RequiredRef(CLAIM, "cache", "spec.model.cache.claimName")
    token = RequiredRef(SECRET, "hub", "spec.model.credentialsSecretRef.name")
    assert engine_refs(service(model=model)) == [claim]
    assert fetch_refs(service(model=model)) == [token, claim]
    fetched = {**model, "cache": {**cache, "size": "1Gi"}}
    assert engine_refs(service(model=fetched)) == []
    node = {**model, "cache": {"mode": "HostPath", "path": "/models"}}
    assert engine_refs(service(model=node)) == [token]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ('secret "hub" not found', "spec.engine.env[1].valueFrom.secretKeyRef.name"),
        ('configmap "settings" not found', "spec.podTemplate.volumes[1].configMap.name"),
        (
            'demo-a-0-0: 0/3 nodes: persistentvolumeclaim "scratch" not found. preemption: none',
            "spec.podTemplate.volumes[2].persistentVolumeClaim.claimName",
        ),
        ("couldn't find key token in Secret llm/hub", "spec.engine.env[1].valueFrom.secretKeyRef.name"),
        ('secret "another" not found', ""),
        ("out of memory", ""),
        ("", ""),
    ],
)
def test_kubernetes_message_about_a_missing_object_gets_the_field(message: str, field: str) -> None:
    explained = explain_missing_ref(message, engine_refs(DEMO))
    assert explained.startswith(message)
    assert explained[len(message) :].startswith(f"; {field} names it: " if field else "")
    assert bool(field) is (explained != message)
