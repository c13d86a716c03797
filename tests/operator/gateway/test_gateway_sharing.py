# SPDX-License-Identifier: Apache-2.0
"""Model names and settings of services that share a gateway: the oldest service takes precedence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen_operator.api.gateway_sharing import resolve_sharing
from mizzen_operator.api.types import Admission, Gateway, InferenceService, Lifecycle, Model

GATEWAY = Gateway(1, "ClusterIP", 8000, {}, (), "", (), Admission(1, 0, 1, 1))


def service(name: str, created: str = "2026-01-01T00:00:00Z", **fields: Any) -> InferenceService:
    model = Model("file:///m", fields.pop("served", name), tuple(fields.pop("aliases", ())), "Auto", None)
    unused: Any = None
    return InferenceService(
        **{
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "generation": 1,
            "deleting": False,
            "model": model,
            "replicas": 1,
            "tensor": 1,
            "accelerator": unused,
            "engine": unused,
            "pod_template": {},
            "gateway": GATEWAY,
            "lifecycle": Lifecycle(60, 60),
            "suspend": False,
            "status": {},
            "shares_gateway": True,
            "created": created,
            **fields,
        }
    )


def test_without_services_in_shared_mode_there_is_no_sharing() -> None:
    assert resolve_sharing([]) is None
    assert resolve_sharing([service("a", shares_gateway=False), service("b", deleting=True)]) is None


def test_a_contested_name_belongs_to_the_older_service() -> None:
    new = service("a", "2026-01-02T00:00:00Z", served="chat", aliases=["mine"])
    old = service("b", "2026-01-01T00:00:00Z", served="qwen", aliases=["chat"])
    sharing = resolve_sharing([new, old])
    assert sharing is not None
    assert [service.name for service in sharing.services] == ["b", "a"]
    assert sharing.model_names == {"b": ("qwen", "chat"), "a": ("mine",)}
    assert sharing.conflicting_names == {"b": {}, "a": {"chat": "b"}}
    left = resolve_sharing([new, replace(old, deleting=True)])
    assert left is not None
    assert left.model_names == {"a": ("chat", "mine")}


def test_the_settings_of_the_oldest_service_apply() -> None:
    first = service("a", gateway=replace(GATEWAY, replicas=3, tls_secret="cert"))
    second = service("b", lifecycle=Lifecycle(60, 300))
    sharing = resolve_sharing([second, first])
    assert sharing is not None
    assert sharing.oldest is first
    assert sharing.drain_timeout == 300
    assert sharing.overridden_fields(first) == []
    assert sharing.overridden_fields(second) == ["replicas", "tls"]


NAMES = st.sampled_from("abcdef")
SERVICES = st.dictionaries(
    st.sampled_from("uvwxyz"), st.tuples(st.integers(1, 3), NAMES, st.sets(NAMES, max_size=3)), min_size=1
)


@given(SERVICES, st.randoms())
def test_every_name_has_one_owner_whatever_the_order_of_the_list(
    specs: dict[str, tuple[int, str, set[str]]], draw: Any
) -> None:
    services = [
        service(name, f"2026-01-0{day}T00:00:00Z", served=served, aliases=sorted(aliases - {served}))
        for name, (day, served, aliases) in specs.items()
    ]
    sharing = resolve_sharing(services)
    assert sharing is not None
    owned = [name for names in sharing.model_names.values() for name in names]
    claimed = {name for s in services for name in (s.model.served_name, *s.model.aliases)}
    assert len(owned) == len(set(owned))
    assert set(owned) == claimed
    for loser in services:
        for name, other in sharing.conflicting_names[loser.name].items():
            assert name in sharing.model_names[other]
    draw.shuffle(services)
    assert resolve_sharing(services) == sharing


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("port", 80, "service.port"),
        ("cors_origins", ("*",), "cors"),
        ("api_keys", ("k",), "apiKeys"),
        ("keys_from_label", True, "apiKeys"),
    ],
)
def test_an_overridden_setting_is_reported_by_its_field_in_the_spec(
    field: str, value: object, shown: str
) -> None:
    sharing = resolve_sharing([service("a"), service("b", gateway=replace(GATEWAY, **{field: value}))])
    assert sharing is not None
    assert sharing.overridden_fields(sharing.services[1]) == [shown]


def test_two_overridden_settings_of_one_field_are_reported_once() -> None:
    other = replace(GATEWAY, api_keys=("k",), keys_from_label=True)
    sharing = resolve_sharing([service("a"), service("b", gateway=other)])
    assert sharing is not None
    assert sharing.overridden_fields(sharing.services[1]) == ["apiKeys"]
