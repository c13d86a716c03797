"""Who has what among services that share a gateway: the oldest comes first, in whatever order they come."""

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


def test_nobody_shares() -> None:
    assert resolve_sharing([]) is None
    assert resolve_sharing([service("a", shares_gateway=False), service("b", deleting=True)]) is None


def test_a_name_is_the_older_services() -> None:
    new = service("a", "2026-01-02T00:00:00Z", served="chat", aliases=["mine"])
    old = service("b", "2026-01-01T00:00:00Z", served="qwen", aliases=["chat"])
    sharing = resolve_sharing([new, old])
    assert sharing is not None
    assert [one.name for one in sharing.services] == ["b", "a"]
    assert sharing.model_names == {"b": ("qwen", "chat"), "a": ("mine",)}
    assert sharing.conflicting_names == {"b": {}, "a": {"chat": "b"}}
    left = resolve_sharing([new, replace(old, deleting=True)])
    assert left is not None
    assert left.model_names == {"a": ("chat", "mine")}


def test_settings_are_the_oldest_services() -> None:
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
def test_every_name_has_one_owner_and_the_order_of_the_list_is_nothing(
    given: dict[str, tuple[int, str, set[str]]], draw: Any
) -> None:
    services = [
        service(name, f"2026-01-0{day}T00:00:00Z", served=served, aliases=sorted(aliases - {served}))
        for name, (day, served, aliases) in given.items()
    ]
    sharing = resolve_sharing(services)
    assert sharing is not None
    owned = [name for names in sharing.model_names.values() for name in names]
    claimed = {name for one in services for name in (one.model.served_name, *one.model.aliases)}
    assert len(owned) == len(set(owned))
    assert set(owned) == claimed
    for one in services:
        for name, other in sharing.conflicting_names[one.name].items():
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
def test_differences_are_named_as_in_the_spec(field: str, value: object, shown: str) -> None:
    sharing = resolve_sharing([service("a"), service("b", gateway=replace(GATEWAY, **{field: value}))])
    assert sharing is not None
    assert sharing.overridden_fields(sharing.services[1]) == [shown]


def test_a_field_that_differs_twice_is_named_once() -> None:
    other = replace(GATEWAY, api_keys=("k",), keys_from_label=True)
    sharing = resolve_sharing([service("a"), service("b", gateway=other)])
    assert sharing is not None
    assert sharing.overridden_fields(sharing.services[1]) == ["apiKeys"]
