# SPDX-License-Identifier: Apache-2.0
"""A gateway selects Secrets with API keys by label: the selection, and the operator on a real API server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import load_kube_config

from marks import CONTROL_PLANE, in_cluster
from mizzen.gateway.auth.authentication import TenantRegistry
from mizzen.gateway.errors import ApiError
from mizzen_local.controlplane import ControlPlane
from mizzen_local.pki import write_token_kubeconfig
from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import Admission, Gateway
from mizzen_operator.gateway.api_key_secrets import MAX_SECRETS, ApiKeySecrets, GatewayKey, select_secrets
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import Refused
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.metrics import Metrics
from mizzen_operator.resources.gateway_spec import GatewaySpec

LABEL = "mizzen.dev/api-keys"


def secret(name: str, second: int = 0, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:{second:02d}Z", **more}}


@given(st.lists(st.integers(0, 59), max_size=2 * MAX_SECRETS), st.randoms())
def test_the_oldest_secrets_are_selected_in_whatever_order_they_are_listed(
    seconds: list[int], draw: Any
) -> None:
    secrets = [secret(f"s{index:03d}", second) for index, second in enumerate(seconds)]
    names = select_secrets(secrets)
    assert list(names) == sorted(names)
    assert len(names) == min(MAX_SECRETS, len(secrets))
    created = {secret["metadata"]["name"]: secret["metadata"]["creationTimestamp"] for secret in secrets}
    left_out = set(created) - set(names)
    assert all(created[new] >= created[old] for new in left_out for old in names)
    draw.shuffle(secrets)
    assert select_secrets(secrets) == names


def test_a_secret_that_is_being_deleted_is_not_selected() -> None:
    assert select_secrets([secret("a"), secret("b", deletionTimestamp="2026-01-02T00:00:00Z")]) == ("a",)


@pytest.mark.parametrize("service", ["demo", "shared", "mizzen", "a-gateway", "mizzen.shared"])
def test_no_dedicated_gateway_has_the_name_of_the_shared_one(service: str) -> None:
    assert child_names.gateway_name(service) != child_names.SHARED_GATEWAY


def test_with_an_empty_folder_of_keys_every_request_is_rejected(tmp_path: Path) -> None:
    tenants = TenantRegistry([str(tmp_path)])
    assert not tenants.keyless
    for headers in ([], [(b"authorization", b"Bearer "), (b"authorization", b"Bearer sk-guessed")]):
        with pytest.raises(ApiError) as refused:
            tenants.authenticate({"type": "http", "headers": headers})
        assert refused.value.status == 401


class Port:
    """Services, Secrets and gateways of one namespace."""

    def __init__(self, api: Any, namespace: str, minimal: Callable[..., Any], eventually: Any) -> None:
        self.api, self.namespace, self._minimal, self.eventually = api, namespace, minimal, eventually

    def create(self, name: str, mode: str = "Dedicated", **api_keys: Any) -> None:
        gateway = {"mode": mode, "replicas": 1, "apiKeys": {"fromLabel": True, **api_keys}}
        body = self._minimal(name, engine={"device": "CPU"}, gateway=gateway)
        body["metadata"]["namespace"] = self.namespace
        self.api.create(body)
        self.eventually(lambda: self.condition(name, "Ready")["status"] == "True", 90, expectation=name)

    def label(self, name: str, gateway: str) -> None:
        meta = {"name": name, "namespace": self.namespace, "labels": {LABEL: gateway}}
        self.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        status = self.api.get("InferenceService", self.namespace, name).get("status", {})
        absent = {"status": "Absent", "reason": "", "message": ""}
        return next((c for c in status.get("conditions", []) if c["type"] == kind), absent)

    def deployment(self, gateway: str) -> dict[str, Any]:
        return self.api.get("Deployment", self.namespace, gateway)

    def mounted(self, gateway: str) -> set[str]:
        """Return the Secrets that a gateway's pods mount in the folder of API keys."""
        spec = self.deployment(gateway)["spec"]["template"]["spec"]
        [container] = spec["containers"]
        folders = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        return {
            volume["secret"]["secretName"]
            for volume in spec["volumes"]
            if folders[volume["name"]].startswith(f"{labels.API_KEYS_FOLDER}/")
            and folders[volume["name"]] in container["args"]
        }

    def mounts(self, gateway: str, *names: str) -> None:
        self.eventually(
            lambda: self.mounted(gateway) == set(names), 90, expectation=f"{gateway} mounts {names}"
        )


@pytest.fixture
def port(
    api: Any, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any], eventually: Any
) -> Iterator[Port]:
    yield Port(api, namespace, minimal, eventually)
    for body in api.list("InferenceService", namespace):
        api.delete("InferenceService", namespace, body["metadata"]["name"])


@pytest.mark.parametrize(("mode", "gateway"), [("Dedicated", "demo-gateway"), ("Shared", "mizzen-shared")])
@pytest.mark.usefixtures("port")
class TestLive:
    """Secrets are added and removed while the service stays unchanged."""

    pytestmark = CONTROL_PLANE

    def test_labelled_secrets_are_mounted_until_they_lose_the_label(
        self, port: Port, mode: str, gateway: str
    ) -> None:
        port.label("before", gateway)
        port.label("others", "other-gateway")
        port.create("demo", mode)
        port.mounts(gateway, "before")
        generation = port.api.get("InferenceService", port.namespace, "demo")["metadata"]["generation"]
        port.label("after", gateway)
        port.mounts(gateway, "before", "after")
        port.api.patch("Secret", port.namespace, "others", {"metadata": {"labels": {LABEL: gateway}}})
        port.mounts(gateway, "before", "after", "others")
        port.api.patch("Secret", port.namespace, "before", {"metadata": {"labels": {LABEL: None}}})
        port.api.delete("Secret", port.namespace, "others")
        port.mounts(gateway, "after")
        port.api.delete("Secret", port.namespace, "after")
        port.mounts(gateway)
        words = f"every request gets 401 because no Secret has the label {LABEL}={gateway}"
        port.eventually(lambda: words in port.condition("demo", "GatewayReady")["message"], 90)
        arguments = port.deployment(gateway)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--api-keys-file" in arguments  # requests without a key are rejected
        assert (
            port.api.get("InferenceService", port.namespace, "demo")["metadata"]["generation"] == generation
        )

    def test_a_new_secret_is_rolled_out_without_an_outage(self, port: Port, mode: str, gateway: str) -> None:
        port.create("demo", mode)
        before = port.deployment(gateway)["metadata"]["generation"]
        lowest = [port.deployment(gateway)["status"]["availableReplicas"]]
        port.label("team", gateway)

        def rolled_out() -> bool:
            deployment = port.deployment(gateway)
            status = deployment["status"]
            lowest.append(status.get("availableReplicas", 0))
            current = status["observedGeneration"] == deployment["metadata"]["generation"] > before
            return current and status.get("updatedReplicas") == status.get("replicas") == 1

        port.eventually(rolled_out, 90)
        assert min(lowest) >= 1

    def test_no_object_is_written_once_the_service_has_settled(
        self, port: Port, mode: str, gateway: str
    ) -> None:
        port.label("one", gateway)
        port.label("two", gateway)
        port.create("demo", mode, secretNames=["two"])
        port.mounts(gateway, "one", "two")

        def versions() -> list[str]:
            bodies = [port.deployment(gateway), *port.api.list("InferenceService", port.namespace)]
            bodies += port.api.list("Secret", port.namespace)
            return [body["metadata"]["resourceVersion"] for body in bodies]

        def idle() -> bool:
            before = versions()
            time.sleep(8)  # Secrets are listed every 5 s
            return versions() == before

        port.eventually(idle, 90)


@in_cluster
def test_without_from_label_no_labelled_secret_is_mounted(port: Port) -> None:
    port.label("team", "demo-gateway")
    port.create("demo", fromLabel=False)
    assert port.mounted("demo-gateway") == set()
    arguments = port.deployment("demo-gateway")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--api-keys-file" not in arguments


def gateway_spec(namespace: str, *, from_label: bool = True) -> GatewaySpec:
    """Return the spec of a dedicated gateway; with `from_label`, the gateway selects API keys by label."""
    admission = Admission(1, 0, 1, 1)
    return GatewaySpec(
        name="demo-gateway",
        namespace=namespace,
        selector={},
        owners=(),
        keys_secret="",
        arguments=(),
        gateway=Gateway(1, "ClusterIP", 8000, {}, (), "", (), admission, keys_from_label=from_label),
        drain_timeout=1,
        image_pull_secrets=(),
    )


async def client(kubeconfig: Path) -> KubeClient:
    configuration = Configuration()
    await load_kube_config(str(kubeconfig), client_configuration=configuration)
    return KubeClient(configuration, Metrics())


@in_cluster
async def test_changed_gateways_differ_from_the_last_list_and_no_secret_value_is_read(
    control_plane: ControlPlane, api: Any, namespace: str
) -> None:
    meta = {"name": "team", "namespace": namespace, "labels": {LABEL: "demo-gateway"}}
    api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"k": "sk-hidden"}})
    kube = await client(control_plane.kubeconfig)
    try:
        [listed] = await kube.list_metadata(ObjectRef("Secret", namespace), LABEL)
        assert set(listed) <= {"kind", "apiVersion", "metadata"}
        secrets = ApiKeySecrets(kube, "")
        assert await secrets.find(gateway_spec(namespace)) == ("team",)
        assert await wait_for_changes(secrets, []) == []
        meta["name"] = "other"
        api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})
        gateways = [GatewayKey(namespace, "demo-gateway")]
        assert await wait_for_changes(secrets, gateways) == gateways
        assert await secrets.find(gateway_spec(namespace)) == ("other", "team")
        assert await wait_for_changes(secrets, []) == []
        assert await secrets.find(gateway_spec(namespace, from_label=False)) == ()
        api.delete("Secret", namespace, "other")
        assert await secrets.changed_gateways() == []  # no gateway uses the label any more
    finally:
        await kube.close()


async def wait_for_changes(secrets: ApiKeySecrets, wanted: list[GatewayKey]) -> list[GatewayKey]:
    """Poll until the changed gateways equal `wanted`, and return them; lists may lag behind writes.

    After 30 s, return the changed gateways of the last poll.
    """
    changed = await secrets.changed_gateways()
    deadline = time.monotonic() + 30
    while changed != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        changed = await secrets.changed_gateways()
    return changed


@in_cluster
async def test_the_error_names_the_missing_right_to_list_secrets(
    control_plane: ControlPlane, api: Any, namespace: str, tmp_path: Path
) -> None:
    meta = {"name": "unprivileged", "namespace": namespace}
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/unprivileged/token"
    token = tmp_path / "token"
    token.write_text(api.request("POST", path, request)["status"]["token"])
    kubeconfig = write_token_kubeconfig(
        tmp_path / "kubeconfig",
        server=control_plane.server,
        authority=control_plane.authority,
        namespace=namespace,
        token_file=token,
    )
    kube = await client(kubeconfig)
    try:
        with pytest.raises(Refused, match="needs an operator that may list Secrets") as refused:
            await ApiKeySecrets(kube, "").find(gateway_spec(namespace))
        assert refused.value.reason == "SecretsForbidden"
        assert await ApiKeySecrets(kube, "").find(gateway_spec(namespace, from_label=False)) == ()
    finally:
        await kube.close()
