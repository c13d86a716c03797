# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures of the operator's tests: a control plane, its client, simulated pods, and operators."""

from __future__ import annotations

import copy
import importlib.util
import ssl
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from live_service import Service
from mizzen_local.controlplane import ControlPlane, start_control_plane
from mizzen_operator.api.parse import parse_service
from mizzen_operator.api.types import InferenceService
from mizzen_operator.kube.refs import ObjectRef
from pod_security import RESTRICTED

ROOT = Path(__file__).parents[2]
CONTROLLERS = (
    "deployment-controller",
    "disruption-controller",
    "garbage-collector-controller",
    "job-controller",
    "namespace-controller",
    "persistentvolumeclaim-protection-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "serviceaccount-controller",
)


class Refused(Exception):
    """The API server refused a request; `code` is the HTTP status of its response."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Api:
    """Client of the API server with administrator rights."""

    def __init__(self, plane: ControlPlane) -> None:
        context = ssl.create_default_context(cafile=str(plane.authority))
        pki = plane.folder / "pki"
        context.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        self._http = httpx.Client(base_url=plane.server, verify=context, timeout=30, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def text(self, path: str) -> str:
        return self._http.get(path).text

    def request(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        headers = {"Content-Type": options.pop("content_type", "application/json")}
        answer = self._http.request(method, path, json=body, headers=headers, **options)
        if answer.status_code >= 400:
            raise Refused(answer.status_code, answer.json().get("message", answer.text))
        return answer.json()

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return self.request("GET", ObjectRef(kind, namespace, name).path())

    def find(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        try:
            return self.get(kind, namespace, name)
        except Refused as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str = "", selector: str = "") -> list[dict[str, Any]]:
        params = {"labelSelector": selector} if selector else {}
        return self.request("GET", ObjectRef(kind, namespace).path(), params=params)["items"]

    def create(self, body: dict[str, Any], **params: str) -> dict[str, Any]:
        path = ObjectRef(body["kind"], body["metadata"]["namespace"]).path()
        return self.request("POST", path, body, params=params)

    def patch(
        self, kind: str, namespace: str, name: str, body: Any, subresource: str = "", **options: Any
    ) -> dict[str, Any]:
        options.setdefault("content_type", "application/merge-patch+json")
        return self.request("PATCH", ObjectRef(kind, namespace, name, subresource).path(), body, **options)

    def delete(self, kind: str, namespace: str, name: str, **options: Any) -> None:
        try:
            self.request("DELETE", ObjectRef(kind, namespace, name).path(), options or None)
        except Refused as error:
            if error.code != 404:
                raise

    def apply_any(self, body: dict[str, Any], path: str) -> None:
        self.request(
            "PATCH",
            f"{path}/{body['metadata']['name']}",
            body,
            params={"fieldManager": "tests", "force": "true"},
            content_type="application/apply-patch+yaml",
        )


def eventually(check: Callable[[], Any], seconds: float = 60.0, expectation: str = "") -> Any:
    """Wait until `check()` returns something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {expectation or check}"
        time.sleep(0.05)
    return result


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[..., Any]:
    return eventually


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("control-plane")
    plane = start_control_plane(folder, controllers=CONTROLLERS, scheduler=False)
    yield plane
    plane.stop()


def crd_accepts_objects(client: Api) -> bool:
    """Return whether the API server accepts objects of the CRD yet.

    It accepts them only some time after the CRD has become `Established`.
    """
    example = yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())
    example["metadata"]["namespace"] = "default"
    try:
        client.create(example, dryRun="All")
    except Refused as error:
        if error.code in (404, 429):
            return False
        raise
    return True


def install_crd(client: Api) -> None:
    """Create the CRD, and wait until the API server accepts its objects."""
    crd = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    client.apply_any(crd, path)

    def established() -> bool:
        status = client.request("GET", f"{path}/{crd['metadata']['name']}").get("status", {})
        return any(
            c["type"] == "Established" and c["status"] == "True" for c in status.get("conditions") or []
        )

    eventually(established)
    eventually(lambda: crd_accepts_objects(client), expectation="the API server accepts objects of the CRD")


@pytest.fixture
def operators_without_crd(tmp_path: Path) -> Iterator[tuple[Any, Callable[[], Api]]]:
    """Operators of a control plane without the CRD, and a function that creates the CRD and returns a client.

    No operator has been started.
    """
    plane = start_control_plane(tmp_path, controllers=(), scheduler=False)
    client = Api(plane)
    folder = tmp_path / "operators"
    folder.mkdir()
    processes = _helper("operator_processes").Operators(client, plane, folder)

    def create_crd() -> Api:
        install_crd(client)
        return client

    try:
        processes.install()
        yield processes, create_crd
        processes.stop(eventually)
    finally:
        client.close()
        plane.stop()


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Iterator[Api]:
    client = Api(control_plane)
    install_crd(client)
    restricted = {"metadata": {"labels": RESTRICTED}}
    content_type = "application/merge-patch+json"
    client.request("PATCH", "/api/v1/namespaces/default", restricted, content_type=content_type)
    yield client
    client.close()


@contextmanager
def temporary_namespace(api: Api, labels: Mapping[str, str]) -> Iterator[str]:
    """Create a namespace with a generated name, and delete it after the block."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    metadata = {"name": name, "labels": dict(labels)}
    api.request("POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
    yield name
    try:
        api.request("DELETE", f"/api/v1/namespaces/{name}")
    except Refused as error:
        if error.code != 404:  # the test has deleted it
            raise


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """A namespace that admits only restricted pods, so that tests fail if the operator creates others."""
    with temporary_namespace(api, RESTRICTED) as name:
        yield name


@pytest.fixture
def lax_namespace(api: Api) -> Iterator[str]:
    """A namespace that admits all pods."""
    with temporary_namespace(api, {}) as name:
        yield name


@pytest.fixture
def example() -> dict[str, Any]:
    """The InferenceService of examples/inferenceservice.yaml."""
    return yaml.safe_load((ROOT / "examples/inferenceservice.yaml").read_text())


@pytest.fixture
def minimal() -> Callable[..., dict[str, Any]]:
    """Return a function that makes the smallest service; keyword arguments are merged into its spec."""

    def make(name: str = "demo", **spec: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "apiVersion": "mizzen.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"model": {"source": "file:///opt/mizzen/models/demo"}},
        }
        body["spec"] = overlay(body["spec"], spec)
        return body

    return make


@pytest.fixture
def service(api: Any, minimal: Callable[..., dict[str, Any]]) -> Callable[..., InferenceService]:
    """Return a function that makes a parsed service with the API server's defaults, without storing it."""

    def make(**spec: Any) -> InferenceService:
        body = minimal(**spec)
        body["metadata"]["namespace"] = "default"
        return parse_service(api.create(body, dryRun="All"))

    return make


def overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(below)
    for key, value in above.items():
        if isinstance(merged.get(key), dict) and isinstance(value, dict):
            merged[key] = overlay(merged[key], value)
        else:
            merged[key] = value
    return merged


def _helper(name: str) -> Any:
    """Return a helper module of this folder; it is loaded only once, so that other helpers can import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def node(api: Api, control_plane: ControlPlane) -> Iterator[Any]:
    """The simulated node, which runs until the end of the session."""
    client = Api(control_plane)
    _helper("simulated_gateways")
    simulated = _helper("simulation").SimulatedNode(client, control_plane)
    simulated.start()
    yield simulated
    simulated.stop()
    client.close()
    assert not simulated.errors


@pytest.fixture(scope="session")
def operators(
    api: Api, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Operator processes; the first one has become the leader."""
    processes = _helper("operator_processes").Operators(
        api, control_plane, tmp_path_factory.mktemp("operators")
    )
    processes.install()
    processes.start()
    eventually(processes.leads, expectation="an operator leads")
    yield processes
    processes.stop(eventually)


@pytest.fixture
def live_service(
    api: Api, node: Any, operators: Any, namespace: str, minimal: Callable[..., Any]
) -> Iterator[Callable[..., Service]]:
    """Return a function that creates the service `demo` with one gateway; an operator reconciles it."""

    def make(**spec: Any) -> Service:
        body = minimal(**{"engine": {"device": "CPU"}, "gateway": {"replicas": 1}, **spec})
        body["metadata"]["namespace"] = namespace
        api.create(body)
        return Service(api, node, namespace, eventually)

    yield make
    node.behaviour = type(node.behaviour)()
    api.delete("InferenceService", namespace, "demo")
