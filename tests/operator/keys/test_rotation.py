# SPDX-License-Identifier: Apache-2.0
"""Keys are rotated without an outage: on a real API server, and with a crash between any two steps."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marks import in_cluster
from mizzen.wire import curve_keys as wire
from mizzen_operator.api.types import CommonMetadata
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.keys.rotation import KeyRotator, is_rotation_due, rotation_progress
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.group import Group
from mizzen_operator.resources.key_secrets import connection_key_name

ENGINES = "mizzen.dev/component=engine"
NOTE = "mizzen.dev/rotate-keys"


# ── the operator's process ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class Port:
    """Services of one namespace, their keys, and their Events."""

    api: Any
    node: Any
    namespace: str
    eventually: Callable[..., Any]

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        status = self.api.get("InferenceService", self.namespace, name).get("status", {})
        absent = {"status": "Absent", "reason": ""}
        return next((c for c in status.get("conditions", []) if c["type"] == kind), absent)

    def settle(self, *names: str) -> None:
        for name in names:
            self.eventually(lambda name=name: self.condition(name, "Ready")["status"] == "True", 90, name)

    def secret(self, name: str) -> dict[str, str]:
        data = self.api.get("Secret", self.namespace, name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def request_rotation(self, name: str, value: str) -> None:
        patch = {"metadata": {"annotations": {NOTE: value}}}
        self.api.patch("InferenceService", self.namespace, name, patch)

    def rotated(self, name: str, generation: int) -> bool:
        condition = self.condition(name, "KeysRotating")
        return condition["reason"] == "KeysRotated" and f"generation {generation} " in condition["message"]

    def events(self) -> list[str]:
        return [event["reason"] for event in self.api.list("Event", self.namespace)]


@pytest.fixture
def port(api: Any, node: Any, operators: Any, namespace: str, eventually: Any) -> Any:
    node.behaviour.mounts[namespace] = 0.4
    yield Port(api, node, namespace, eventually)
    node.behaviour = type(node.behaviour)()
    for body in api.list("InferenceService", namespace):
        api.delete("InferenceService", namespace, body["metadata"]["name"])


@in_cluster
def test_the_annotation_rotates_the_keys_of_a_service_without_an_outage(
    port: Port, operators: Any, minimal: Callable[..., Any]
) -> None:
    body = minimal(engine={"device": "CPU"}, gateway={"replicas": 2}, replicas=2)
    body["metadata"]["namespace"] = port.namespace
    port.api.create(body)
    port.settle("demo")
    pods = sorted(pod["metadata"]["uid"] for pod in port.api.list("Pod", port.namespace))
    before = [port.secret(f"demo-{kind}") for kind in ("keys", "engine-keys", "gateway-keys")]
    port.node.keyless_engines.clear()
    port.node.reset_lowest(port.namespace)
    for turn in (1, 2):
        port.request_rotation("demo", f"turn {turn}")
        port.eventually(lambda: port.condition("demo", "KeysRotating")["status"] == "True", 60)
        if turn == 2:  # another operator takes over during the rotation
            leader = operators.leader()
            operators.kill(leader, signal.SIGTERM)
            operators.start()
        port.eventually(lambda turn=turn: port.rotated("demo", turn), 120)
    after = [port.secret(f"demo-{kind}") for kind in ("keys", "engine-keys", "gateway-keys")]
    root, engine, gateway = after
    assert not set(after[0].values()) & set(before[0].values())
    assert not [name for secret in after for name in secret if name.startswith("next.")]
    assert {secret["generation"] for secret in after} == {"2"}
    assert engine["engine.secret"] == root["engine.secret"]
    assert gateway["gateway.secret"] == root["gateway.secret"]
    assert gateway["admin.token"] == root["admin.token"]
    assert engine["gateway.public"] == gateway["gateway.public"]
    assert pods == sorted(pod["metadata"]["uid"] for pod in port.api.list("Pod", port.namespace))
    assert port.node.lowest[port.namespace] == 2
    assert port.node.keyless_engines == []
    reasons = ("KeysRotating", "KeysRotated")  # an Event is written after the status
    port.eventually(lambda: all(port.events().count(reason) >= 2 for reason in reasons), 60)
    assert [port.events().count(reason) for reason in reasons] == [2, 2]
    meta = port.api.get("Secret", port.namespace, "demo-keys")["metadata"]
    assert meta["annotations"][NOTE] == "turn 2"
    assert meta["annotations"]["mizzen.dev/keys-made"] >= meta["creationTimestamp"]
    port.settle("demo")


@in_cluster
def test_the_keys_of_a_shared_gateway_are_rotated_with_those_of_the_oldest_service(
    port: Port, minimal: Callable[..., Any]
) -> None:
    for name in ("first", "second"):
        body = minimal(name, engine={"device": "CPU"}, gateway={"mode": "Shared", "replicas": 1}, replicas=1)
        body["metadata"]["namespace"] = port.namespace
        port.api.create(body)
        port.settle(name)
    names = ("mizzen-shared", "first-engine-keys", "second-engine-keys")
    before = {name: port.secret(name) for name in names}
    port.node.keyless_engines.clear()
    port.request_rotation("first", "now")

    def done() -> bool:
        after = {name: port.secret(name) for name in names}
        shared = after["mizzen-shared"]
        return (
            shared["gateway.secret"] != before["mizzen-shared"]["gateway.secret"]
            and shared["admin.token"] != before["mizzen-shared"]["admin.token"]
            and after["first-engine-keys"]["engine.secret"] != before["first-engine-keys"]["engine.secret"]
            and after["second-engine-keys"]["engine.secret"] == before["second-engine-keys"]["engine.secret"]
            and all(keys["gateway.public"] == shared["gateway.public"] for keys in after.values())
            and not [name for keys in after.values() for name in keys if name.startswith("next.")]
        )

    port.eventually(done, 120)
    port.eventually(lambda: port.rotated("first", 1), 60)
    assert port.node.keyless_engines == []
    port.settle("first", "second")


# ── each step may fail, before or after it took effect ──────────────────────────────────────────────────────


class Store:
    """Fake API server for Secrets, with faults.

    `outcomes` lists the outcomes of the next writes: `done`, `lost` (nothing is written, and the write
    fails), or `unanswered` (done, but the response is lost). The Secret `demo-keys`, from which the other
    Secrets are derived, is deleted at the next read if `reads_until_loss` is 1, at the second read if it is
    2, and so on; 0 means never.
    """

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        self.outcomes: list[str] = []
        self.reads_until_loss = 0
        self._version = 0

    async def get(self, ref: ObjectRef, *, live: bool = False) -> dict[str, Any] | None:
        secret = self.secrets.get(ref.name)
        if self.reads_until_loss:
            self.reads_until_loss -= 1
            if not self.reads_until_loss:
                self.secrets.pop("demo-keys", None)
        return secret

    async def create(self, manifest: dict[str, Any]) -> bool:
        name = manifest["metadata"]["name"]
        if name in self.secrets:
            return False
        self._write(name, manifest)
        return True

    async def patch(self, ref: ObjectRef, patch: Mapping[str, Any], content_type: str = "") -> None:
        if (live := self.secrets.get(ref.name)) is None:
            raise KubeError(404, "NotFound", "the Secret does not exist")
        if patch["metadata"].get("resourceVersion") != live["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the Secret has changed")
        merged = {**live, "data": _merged(live["data"], patch["data"])}
        notes = _merged(live["metadata"].get("annotations", {}), patch["metadata"]["annotations"])
        self._write(ref.name, {**merged, "metadata": {**live["metadata"], "annotations": notes}})

    def _write(self, name: str, body: dict[str, Any]) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes else "done"
        if outcome != "lost":
            self._version += 1
            self.secrets[name] = {
                **body,
                "metadata": {**body["metadata"], "resourceVersion": str(self._version)},
            }
        if outcome != "done":
            raise KubeError(0, "Unreachable", "no answer")

    def mounted(self, name: str) -> dict[str, str]:
        return {k: base64.b64decode(v).decode() for k, v in self.secrets[name]["data"].items()}


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**old, **new}.items() if value is not None}


@dataclass
class SimulatedPods:
    """Two gateways and two engines of one service; each sees new keys when it is refreshed."""

    keeper: KeyRotator
    store: Store
    service: Any
    gateways: list[dict[str, str]] = field(default_factory=list)
    engines: list[dict[str, str]] = field(default_factory=list)

    def start(self) -> None:
        self.gateways = [self.store.mounted("demo-gateway-keys")] * 2
        self.engines = [self.store.mounted("demo-engine-keys")] * 2

    def refresh(self, which: int) -> None:
        if which < 2:
            self.gateways[which] = self.store.mounted("demo-gateway-keys")
        else:
            self.engines[which - 2] = self.store.mounted("demo-engine-keys")

    def routing_state(self) -> RoutingState:
        gateway_keys = [self._names(gateway) for gateway in self.gateways]
        used: dict[str, set[str]] = {}
        for gateway in gateway_keys:
            for index, engine in enumerate(self.engines):
                common = [name for name in gateway if name in self._names(engine)]
                assert common, "a gateway and an engine have no key in common"
                used.setdefault(f"e{index}", set()).add(common[0])
        return RoutingState(
            ready_gateways=2,
            reporting_gateways=2,
            key_names=frozenset.intersection(*(frozenset(names) for names in gateway_keys)),
            engine_key_names={uid: frozenset(names) for uid, names in used.items()},
        )

    @staticmethod
    def _names(held: dict[str, str]) -> list[str]:
        sides = [
            [held[f"{prefix}{side}.public"] for prefix in ("next.", "") if f"{prefix}{side}.public" in held]
            for side in ("engine", "gateway")
        ]
        return [connection_key_name(engine, gateway) for engine in sides[0] for gateway in sides[1]]

    async def reconcile(self) -> bool:
        """Reconcile once as a new operator; return whether it succeeded and no rotation is in progress."""
        try:
            keys = await self.keeper.sync(self.service)
            for gateway in self.gateways:
                tokens = {gateway.get("admin.token"), gateway.get("next.admin.token")}
                assert keys.token in tokens, "a gateway rejects the operator's token"
            groups = [
                Group(f"e{i}", f"e{i}", i, "r", 0, containers_ready=True) for i in range(len(self.engines))
            ]
            if keys.rotating and not rotation_progress(keys, groups, self.routing_state()).waiting_for:
                await self.keeper.drop_previous(self.service)
            return not keys.rotating
        except KubeError:
            return False


STEP = st.one_of(
    st.integers(0, 3),
    st.sampled_from(["reconcile", "reconcile", "lose keys", "lose keys in 1", "lose keys in 3"]),
)


@settings(max_examples=150)
@example(steps=["lose keys in 1", "reconcile"], outcomes=[], generations=1)
@given(
    steps=st.lists(STEP, max_size=40),
    outcomes=st.lists(st.sampled_from(["done", "done", "lost", "unanswered"]), max_size=25),
    generations=st.integers(1, 3),
)
def test_after_a_crash_between_any_two_steps_gateways_and_engines_have_a_common_key(
    steps: list[Any], outcomes: list[str], generations: int
) -> None:
    asyncio.run(_crashes(steps, outcomes, generations))


async def _crashes(steps: list[Any], outcomes: list[str], generations: int) -> None:
    store = Store()
    kube: Any = store
    keeper = KeyRotator(kube, OperatorConfig(), Metrics(), lambda key, made: None)
    pods = SimulatedPods(keeper, store, _service(""))
    assert await pods.reconcile()
    pods.start()
    first = dict(store.mounted("demo-keys"))
    for number in range(generations):
        store.outcomes = list(outcomes)
        pods.service = _service(f"turn {number}")
        for step in steps:
            if step == "reconcile":
                await pods.reconcile()
            elif step == "lose keys":
                store.secrets.pop("demo-keys", None)
            elif isinstance(step, str):
                store.reads_until_loss = int(step.rpartition(" ")[2])
            else:
                pods.refresh(step)
            pods.routing_state()
        store.outcomes, store.reads_until_loss = [], 0
        for _ in range(60):
            settled = await pods.reconcile()
            for which in range(4):
                pods.refresh(which)
            if settled:
                break
        else:
            raise AssertionError("the rotation never ends")
    last = store.mounted("demo-keys")
    assert not {name for name in last if name.startswith("next.")}
    assert first["engine.secret"] != last["engine.secret"]
    assert int(last["generation"]) >= generations
    assert pods.routing_state().key_names == frozenset(
        [connection_key_name(pods.engines[0]["engine.public"], pods.engines[0]["gateway.public"])]
    )


def _service(requested: str) -> Any:
    @dataclass(frozen=True)
    class Owner:
        name: str = "demo"
        namespace: str = "llm"
        uid: str = "u"
        shares_gateway: bool = False
        status: Mapping[str, Any] = field(default_factory=lambda: {"replicas": 0})
        rotate_keys: str = requested
        common: CommonMetadata = field(default_factory=CommonMetadata)

    return Owner()


def test_a_rotation_is_due_by_request_or_by_age() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    old = (now - timedelta(days=91)).strftime("%Y-%m-%dT%H:%M:%SZ")
    young = (now - timedelta(days=89)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert is_rotation_due("", "", old, 90, now)
    assert not is_rotation_due("", "", young, 90, now)
    assert not is_rotation_due("", "", old, 0, now)
    assert is_rotation_due("again", "once", young, 0, now)
    assert not is_rotation_due("once", "once", young, 0, now)
    assert not is_rotation_due("", "once", "", 90, now)


def test_operator_and_gateway_name_a_pair_of_keys_alike() -> None:
    engine, gateway = "a" * 40, "b" * 40
    assert connection_key_name(engine, gateway) == wire.key_pair_name(engine.encode(), gateway.encode())
