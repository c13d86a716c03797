"""Secrets with API keys found by their label: which ones, and the operator against a real API server."""

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
def test_the_oldest_are_taken_in_whatever_order_they_are_listed(seconds: list[int], draw: Any) -> None:
    secrets = [secret(f"s{index:03d}", second) for index, second in enumerate(seconds)]
    names = select_secrets(secrets)
    assert list(names) == sorted(names)
    assert len(names) == min(MAX_SECRETS, len(secrets))
    age = {one["metadata"]["name"]: one["metadata"]["creationTimestamp"] for one in secrets}
    left_out = set(age) - set(names)
    assert all(age[new] >= age[old] for new in left_out for old in names)
    draw.shuffle(secrets)
    assert select_secrets(secrets) == names


def test_a_secret_that_is_being_deleted_is_not_taken() -> None:
    assert select_secrets([secret("a"), secret("b", deletionTimestamp="2026-01-02T00:00:00Z")]) == ("a",)


@pytest.mark.parametrize("service", ["demo", "shared", "mizzen", "a-gateway"])
def test_a_gateways_name_says_whose_it_is(service: str) -> None:
    name = child_names.gateway_name(service)
    assert child_names.service_of_gateway(name) == service
    assert name != child_names.SHARED_GATEWAY


def test_an_empty_folder_of_keys_lets_nobody_in(tmp_path: Path) -> None:
    tenants = TenantRegistry([str(tmp_path)])
    assert not tenants.keyless
    for headers in ([], [(b"authorization", b"Bearer "), (b"authorization", b"Bearer sk-guessed")]):
        with pytest.raises(ApiError) as refused:
            tenants.authenticate({"type": "http", "headers": headers})
        assert refused.value.status == 401


class Port:
    """Services and Secrets of one namespace."""

    def __init__(self, api: Any, namespace: str, minimal: Callable[..., Any], eventually: Any) -> None:
        self.api, self.namespace, self._minimal, self.eventually = api, namespace, minimal, eventually

    def create(self, name: str, mode: str = "Dedicated", **api_keys: Any) -> None:
        gateway = {"mode": mode, "replicas": 1, "apiKeys": {"fromLabel": True, **api_keys}}
        body = self._minimal(name, engine={"device": "CPU"}, gateway=gateway)
        body["metadata"]["namespace"] = self.namespace
        self.api.create(body)
        self.eventually(lambda: self.condition(name, "Ready")["status"] == "True", 90, what=name)

    def label(self, name: str, gateway: str) -> None:
        meta = {"name": name, "namespace": self.namespace, "labels": {LABEL: gateway}}
        self.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        status = self.api.get("InferenceService", self.namespace, name).get("status", {})
        found = [one for one in status.get("conditions", []) if one["type"] == kind]
        return found[0] if found else {"status": "Absent", "reason": "", "message": ""}

    def deployment(self, gateway: str) -> dict[str, Any]:
        return self.api.get("Deployment", self.namespace, gateway)

    def mounted(self, gateway: str) -> set[str]:
        """Secrets that a gateway's pods mount where it reads API keys."""
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
        self.eventually(lambda: self.mounted(gateway) == set(names), 90, what=f"{gateway} mounts {names}")


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
    """Secrets come and go, and nobody touches the service."""

    pytestmark = CONTROL_PLANE

    def test_secrets_are_mounted_and_left(self, port: Port, mode: str, gateway: str) -> None:
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
        assert "--api-keys-file" in arguments  # closed, not open
        found = port.api.get("InferenceService", port.namespace, "demo")["metadata"]["generation"]
        assert found == generation

    def test_a_new_secret_leaves_no_gap(self, port: Port, mode: str, gateway: str) -> None:
        port.create("demo", mode)
        before = port.deployment(gateway)["metadata"]["generation"]
        lowest = [port.deployment(gateway)["status"]["availableReplicas"]]
        port.label("team", gateway)

        def rolled_out() -> bool:
            found = port.deployment(gateway)
            status = found["status"]
            lowest.append(status.get("availableReplicas", 0))
            current = status["observedGeneration"] == found["metadata"]["generation"] > before
            return current and status.get("updatedReplicas") == status.get("replicas") == 1

        port.eventually(rolled_out, 90)
        assert min(lowest) >= 1

    def test_nothing_is_written_once_all_is_well(self, port: Port, mode: str, gateway: str) -> None:
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
def test_a_gateway_that_does_not_ask_takes_no_labelled_secret(port: Port) -> None:
    port.label("team", "demo-gateway")
    port.create("demo", fromLabel=False)
    assert port.mounted("demo-gateway") == set()
    arguments = port.deployment("demo-gateway")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--api-keys-file" not in arguments


def front(namespace: str, *, asks: bool = True) -> GatewaySpec:
    """A gateway of that namespace."""
    admission = Admission(1, 0, 1, 1)
    return GatewaySpec(
        name="demo-gateway",
        namespace=namespace,
        selector={},
        owners=(),
        keys_secret="",
        arguments=(),
        gateway=Gateway(1, "ClusterIP", 8000, {}, (), "", (), admission, keys_from_label=asks),
        drain_timeout=1,
        image_pull_secrets=(),
    )


async def client(kubeconfig: Path) -> KubeClient:
    configuration = Configuration()
    await load_kube_config(str(kubeconfig), client_configuration=configuration)
    return KubeClient(configuration, Metrics())


@in_cluster
async def test_news_is_what_differs_from_the_last_look_and_no_value_is_read(
    control_plane: ControlPlane, api: Any, namespace: str
) -> None:
    meta = {"name": "team", "namespace": namespace, "labels": {LABEL: "demo-gateway"}}
    api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"k": "sk-hidden"}})
    kube = await client(control_plane.kubeconfig)
    try:
        [listed] = await kube.list_metadata(ObjectRef("Secret", namespace), LABEL)
        assert set(listed) <= {"kind", "apiVersion", "metadata"}
        secrets = ApiKeySecrets(kube, "")
        assert await secrets.find(front(namespace)) == ("team",)
        assert await _news(secrets, []) == []
        meta["name"] = "other"
        api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})
        assert await _news(secrets, where := [GatewayKey(namespace, "demo-gateway")]) == where
        assert await secrets.find(front(namespace)) == ("other", "team")
        assert await _news(secrets, []) == []
        assert await secrets.find(front(namespace, asks=False)) == ()
        api.delete("Secret", namespace, "other")
        assert await secrets.changed_gateways() == []  # nobody asks
    finally:
        await kube.close()


async def _news(secrets: ApiKeySecrets, wanted: list[GatewayKey]) -> list[GatewayKey]:
    """News once the API server's memory has caught up with what is wanted, or what they are after 30 s."""
    news = await secrets.changed_gateways()
    deadline = time.monotonic() + 30
    while news != wanted and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        news = await secrets.changed_gateways()
    return news


@in_cluster
async def test_without_the_right_the_failure_says_which(
    control_plane: ControlPlane, api: Any, namespace: str, tmp_path: Path
) -> None:
    meta = {"name": "nobody", "namespace": namespace}
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    path = f"/api/v1/namespaces/{namespace}/serviceaccounts/nobody/token"
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
            await ApiKeySecrets(kube, "").find(front(namespace))
        assert refused.value.reason == "SecretsForbidden"
        assert await ApiKeySecrets(kube, "").find(front(namespace, asks=False)) == ()
    finally:
        await kube.close()
