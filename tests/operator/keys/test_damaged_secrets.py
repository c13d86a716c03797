# SPDX-License-Identifier: Apache-2.0
"""Damaged key Secrets: the status of the service names the Secret and the remedy."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from live_service import Service
from marks import in_cluster
from mizzen_operator.resources.key_secrets import (
    begin_rotation,
    engine_keys,
    is_rotating,
    keys_created,
    read_generation,
)

WRONG = base64.b64encode(b'"' * 40).decode()


def secret(data: dict[str, str] | None, **notes: str) -> dict[str, Any]:
    meta = {"name": "demo-keys", "creationTimestamp": "2026-01-01T00:00:00Z", "annotations": notes}
    return {"metadata": meta, **({} if data is None else {"data": data})}


@pytest.mark.parametrize(
    "data",
    [None, {}, {"engine.secret": WRONG}, {"engine.secret": "AAAA"}, {"engine.secret": "!"}],
    ids=["no data", "empty data", "not z85", "too short", "not base64"],
)
def test_the_error_names_an_unusable_key(data: dict[str, str] | None) -> None:
    assert not is_rotating(secret(data))
    with pytest.raises(ValueError, match=r"Secret demo-keys has no usable engine\.secret: delete it"):
        engine_keys(secret(data))


@pytest.mark.parametrize("text", ["x", "-1", "9" * 5000, "", "1.5"])
def test_the_error_names_an_invalid_generation(text: str) -> None:
    with pytest.raises(ValueError, match="Secret demo-keys has no usable generation: delete it"):
        read_generation(secret({"generation": base64.b64encode(text.encode()).decode()}))


@pytest.mark.parametrize("time", ["2024-01-01", "2024-01-01T00:00:00", "yesterday", ""])
def test_an_invalid_creation_time_is_replaced_by_that_of_the_secret(time: str) -> None:
    assert keys_created(secret({}, **{"mizzen.dev/keys-made": time})) == "2026-01-01T00:00:00Z"


def test_a_creation_time_with_a_time_zone_is_valid() -> None:
    assert (
        keys_created(secret({}, **{"mizzen.dev/keys-made": "2025-01-01T00:00:00Z"})) == "2025-01-01T00:00:00Z"
    )


def test_an_empty_secret_can_be_rotated() -> None:
    assert begin_rotation(secret(None), {"engine.secret": "x"}, "", "now")["data"]


@in_cluster
def test_a_damaged_key_is_reported_and_the_service_recovers_once_the_secret_is_deleted(
    live_service: Callable[..., Service], node: Any, api: Any, namespace: str
) -> None:
    demo = live_service()
    demo.settle(1)
    # Secrets are not watched: they are read again soon while a group is unavailable, and rarely otherwise.
    node.behaviour.unschedulable.add(namespace)
    note = {"annotations": {"mizzen.dev/keys-made": "2024-01-01"}}
    api.patch("Secret", namespace, "demo-keys", {"metadata": note, "data": {"engine.secret": WRONG}})
    demo.patch(engine={"maxRunningRequests": 9})
    demo.eventually(lambda: demo.condition("Failed")["reason"] == "KeysUnusable", 60)
    assert "Secret demo-keys has no usable engine.secret" in demo.condition("Failed")["message"]
    node.behaviour.unschedulable.clear()
    api.delete("Secret", namespace, "demo-keys")
    demo.patch(engine={"maxRunningRequests": 10})
    demo.settle(1)
