# SPDX-License-Identifier: Apache-2.0
"""The fetch Job, its claim, and engine pods with models that are cached on their nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from marks import CONTROL_PLANE
from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.resources.engine_pod import engine_pods
from mizzen_operator.resources.fetch_job import cache_claim, cache_folder, fetch_job
from mizzen_operator.resources.revision_hash import revision

pytestmark = CONTROL_PLANE
CONFIG = OperatorConfig(engine_image="engine:1", gateway_image="gateway:1")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL: dict[str, Any] = {
    "source": "hf://Qwen/Qwen3-0.6B@main",
    "credentialsSecretRef": {"name": "hub", "key": "token"},
    "cache": {"mode": "PersistentVolumeClaim", "claimName": "weights", "size": "10Gi"},
}
Make = Callable[..., InferenceService]


@pytest.fixture
def service(service: Make) -> Make:
    def make(model: dict[str, Any] | None = None, **spec: Any) -> InferenceService:
        return service(model={**MODEL, **(model or {})}, **spec)

    return make


def test_the_fetch_pod_is_restricted_and_its_credentials_are_only_mounted(
    service: Make, api: Any, namespace: str
) -> None:
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    demo = service(podTemplate={"tolerations": tolerations}, accelerator={"nodeSelector": {"gpu": "h200"}})
    job = fetch_job(demo, CONFIG)
    assert api.create({**job, "metadata": {**job["metadata"], "namespace": namespace}}, dryRun="All")
    template = job["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": namespace}, **template}
    pod["metadata"] = {**template["metadata"], "name": "x", "namespace": namespace}
    api.create(pod, dryRun="All")
    spec, [container] = template["spec"], template["spec"]["containers"]
    assert spec["nodeSelector"] == {"gpu": "h200"} and spec["tolerations"] == tolerations
    assert spec["automountServiceAccountToken"] is False and container["resources"]["limits"]["memory"]
    assert [entry["name"] for entry in container["env"]] == ["POD_IP"]
    [volume] = [v for v in spec["volumes"] if v["name"] == "mizzen-credentials"]
    assert volume["secret"]["items"] == [{"key": "token", "path": "credentials"}]
    at = container["args"].index("--credentials")
    assert container["args"][at + 1] == "/var/run/mizzen/credentials/credentials"


def test_the_fetch_command_accepts_the_arguments_of_the_job(service: Make) -> None:
    from typer.testing import CliRunner

    from mizzen.cli import app

    demo = service({"endpoint": "http://127.0.0.1:1"})
    given = {"model": {"folder": cache_folder(demo), "resolvedRevision": COMMIT}}
    [container] = fetch_job(replace(demo, status=given), CONFIG)["spec"]["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--pin") + 1] == COMMIT
    ran = CliRunner().invoke(app, [*container["args"], "--help"])
    assert ran.exit_code == 0, ran.output
    known = set(ran.output.split())
    assert {argument for argument in container["args"] if argument.startswith("--")} <= known


def test_the_jobs_name_depends_on_its_source_and_not_on_the_resolved_revision(service: Make) -> None:
    demo = service()
    name = fetch_job(demo, CONFIG)["metadata"]["name"]
    pinned = replace(demo, status={"model": {"folder": cache_folder(demo), "resolvedRevision": COMMIT}})
    assert fetch_job(pinned, CONFIG)["metadata"]["name"] == name and len(name) <= 63
    others = [
        service({"source": "hf://Qwen/Qwen3-1.7B"}),
        service({"endpoint": "http://hub"}),
        service({"cache": {**MODEL["cache"], "claimName": "other"}}),
    ]
    assert len({name, *(fetch_job(other, CONFIG)["metadata"]["name"] for other in others)}) == 4
    assert len({revision(other, CONFIG) for other in (demo, *others)}) == 4


def test_a_cache_on_the_node_is_filled_by_an_init_container(
    service: Make, api: Any, lax_namespace: str
) -> None:
    demo = service({"cache": {"mode": "HostPath", "path": "/srv/models"}})
    demo = replace(demo, status={"model": {"folder": cache_folder(demo), "resolvedRevision": COMMIT}})
    [pod] = engine_pods(demo, CONFIG, revision="abcd1234", group=0, attempt=0)
    pod["metadata"]["namespace"] = lax_namespace
    api.create(pod, dryRun="All")
    [first], [engine] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert first["args"][:2] == ["fetch", MODEL["source"]] and COMMIT in first["args"]
    mounts = {mount["name"]: mount.get("readOnly", False) for mount in engine["volumeMounts"]}
    assert mounts["mizzen-model"] is True and "mizzen-credentials" not in mounts
    assert {"mizzen-model", "mizzen-credentials"} <= {mount["name"] for mount in first["volumeMounts"]}


def test_a_claim_is_deleted_with_its_service_only_if_the_spec_says_so(service: Make) -> None:
    kept = cache_claim(service())
    assert kept is not None and "ownerReferences" not in kept["metadata"]
    going = cache_claim(
        service({"cache": {**MODEL["cache"], "whenDeleted": "Delete", "accessMode": "ReadWriteOnce"}})
    )
    assert going is not None and going["metadata"]["ownerReferences"][0]["name"] == "demo"
    assert going["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert cache_claim(service({"cache": {"mode": "PersistentVolumeClaim", "claimName": "w"}})) is None
