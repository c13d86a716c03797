# SPDX-License-Identifier: Apache-2.0
"""The chart on a real API server: install, upgrade, rollback, `helm test`, uninstall, and install again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mizzen_local.cluster import Cluster
from mizzen_local.kubectl import Kubectl
from mizzen_local.urls import service_url

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("chart")]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/mizzen"
PREVIOUS = Path(__file__).parent / "mizzen-0.1.0"
CRD = "inferenceservices.mizzen.dev"
ROLE = "clusterrole.rbac.authorization.k8s.io/mizzen-gateway"
WAIT = ("--wait", "--timeout", "3m")
RENDERED: dict[str, dict[str, Any]] = {
    "defaults": {},
    "namespace": {"rbac": {"scope": "namespace"}, "crds": {"enabled": False}},
    "everything": {
        "commonLabels": {"team": "llm"},
        "commonAnnotations": {"owner": "me"},
        "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "extra"}}],
        "images": {"pullSecrets": [{"name": "regcred"}]},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "networkPolicy": {
            "from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
            "extraIngress": [{"from": [{"podSelector": {}}]}],
            "extraEgress": [{"ports": [{"port": 9999, "protocol": "TCP"}]}],
        },
        "podDisruptionBudget": {"maxUnavailable": "50%"},
        "operator": {
            "extraEnv": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "extraEnvFrom": [{"configMapRef": {"name": "c", "optional": True}}],
            "extraVolumes": [{"name": "v", "secret": {"secretName": "s"}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v", "readOnly": True}],
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "topologySpreadConstraints": [],
            "priorityClassName": "system-cluster-critical",
        },
    },
}


def uid(kubectl: Kubectl, *resource: str) -> str:
    return kubectl("get", *resource, "-o", "jsonpath={.metadata.uid}")


@pytest.fixture(scope="module")
def harbour(kubectl: Kubectl) -> None:
    """Create the namespace of the rendered manifests, and the service account that admission looks up."""
    kubectl("create", "namespace", "harbour")
    kubectl("create", "serviceaccount", "sail-operator-test", "--namespace", "harbour")


@pytest.mark.usefixtures("harbour", "stand_ins")
@pytest.mark.parametrize("case", RENDERED)
def test_the_api_server_accepts_every_rendered_object(
    helm: Any, case: str, dry_run: Callable[..., list[str]]
) -> None:
    manifests = helm.template(RENDERED[case])
    accepted = dry_run("\n---\n".join(json.dumps(manifest) for manifest in manifests))
    assert len(accepted) == len(manifests)
    assert not [line for line in accepted if "(server dry run)" not in line]


def test_with_namespace_scope_no_kind_is_cluster_scoped_in_the_api(helm: Any, kubectl: Kubectl) -> None:
    listed = kubectl("api-resources", "--namespaced=false", "--no-headers").splitlines()
    unscoped = {line.split()[-1] for line in listed}
    assert {"ClusterRole", "CustomResourceDefinition", "Namespace"} <= unscoped
    assert not unscoped & {manifest["kind"] for manifest in helm.template(RENDERED["namespace"])}


@pytest.mark.usefixtures("no_crd")
def test_a_service_survives_upgrade_rollback_uninstall_and_a_new_release(
    helm: Any, kubectl: Kubectl, make_namespace: Callable[[str], str]
) -> None:
    """Install the previous version; upgrade, test, roll back and uninstall it; install a second release."""
    home = make_namespace("mizzen-system")
    here = ("--namespace", home)
    helm("install", "mizzen", PREVIOUS, *here, *WAIT, "--set", "operator.replicas=1")
    kept = {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "kept", "namespace": "default"},
        "spec": {
            "model": {"source": "file:///opt/mizzen/models/demo"},
            "engine": {"device": "CPU"},
            "replicas": 0,
        },
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(kept))
    uids = uid(kubectl, "infsvc", "kept"), uid(kubectl, "crd", CRD)

    # In the previous version, Helm did not own the CRD; docs/install.md says so.
    with pytest.raises(Exception, match="invalid ownership metadata"):
        helm("upgrade", "mizzen", CHART, *here)
    kubectl("label", "crd", CRD, "app.kubernetes.io/managed-by=Helm")
    owner = f"meta.helm.sh/release-name=mizzen meta.helm.sh/release-namespace={home}".split()
    kubectl("annotate", "crd", CRD, "helm.sh/resource-policy=keep", *owner)
    helm("upgrade", "mizzen", CHART, *here, *WAIT, "--set", "operator.replicas=2")
    served = json.loads(kubectl("get", "crd", CRD, "-o", "json"))["spec"]["versions"][0]
    shipped = yaml.safe_load((ROOT / "crds/inferenceservices.yaml").read_text())["spec"]["versions"][0]
    assert fields(served["schema"]) == fields(shipped["schema"])

    kubectl("wait", "--for=create", "rolebinding/kept-gateway", "--timeout=60s")
    assert "Phase:          Succeeded" in helm("test", "mizzen", *here)
    pods = kubectl("get", "pods", *here, "-l", "app.kubernetes.io/component=operator", "-o", "name")
    assert len(pods.splitlines()) == 2

    helm("rollback", "mizzen", "1", *here, *WAIT)
    assert (uid(kubectl, "infsvc", "kept"), uid(kubectl, "crd", CRD)) == uids
    helm("rollback", "mizzen", "2", *here)
    helm("uninstall", "mizzen", *here, *WAIT)
    assert (uid(kubectl, "infsvc", "kept"), uid(kubectl, "crd", CRD)) == uids
    wait_until_left({"ConfigMap/kube-root-ca.crt", "ServiceAccount/default", ROLE}, kubectl, home)
    role = uid(kubectl, ROLE)
    assert gateway_may_list_pods(kubectl), "the gateway can still discover its engines"

    helm("install", "mizzen", CHART, *here)
    helm("uninstall", "mizzen", *here)
    assert uid(kubectl, ROLE) == role, "the new release adopts the role, and keeps it again"
    other = ("second", CHART, *here, "--set", "operator.replicas=1")
    with pytest.raises(Exception, match="invalid ownership metadata"):
        helm("install", *other)
    helm("upgrade", "--install", *other, *WAIT, "--take-ownership", "--force-conflicts")
    assert "Phase:          Succeeded" in helm("test", "second", *here)
    wait_until_bound("ClusterRole/second-gateway", kubectl, "default", "kept-gateway")
    kubectl("delete", ROLE)  # as docs/install.md describes
    assert gateway_may_list_pods(kubectl), "the role of the second release allows this"
    helm("uninstall", "second", *here, *WAIT)
    assert (uid(kubectl, "infsvc", "kept"), uid(kubectl, "crd", CRD)) == uids
    kubectl("delete", "infsvc", "kept")
    kubectl("delete", "clusterrole", "second-gateway")


def gateway_may_list_pods(kubectl: Kubectl) -> bool:
    """Return whether the gateway of the service `kept` may list pods, which it needs to discover engines."""
    gateway = "system:serviceaccount:default:kept-gateway"
    return kubectl("auth", "can-i", "list", "pods", "--as", gateway).strip() == "yes"


def wait_until_bound(role: str, kubectl: Kubectl, namespace: str, binding: str) -> None:
    """Wait until the operator has replaced a RoleBinding by one that refers to `role` ("kind/name")."""
    reference = "-o=jsonpath={.roleRef.kind}/{.roleRef.name}"
    command = ("get", "rolebinding", binding, "--namespace", namespace, "--ignore-not-found", reference)
    deadline = time.monotonic() + 90
    while (bound := kubectl(*command)) != role:
        assert time.monotonic() < deadline, f"{binding} is bound to {bound}"
        time.sleep(0.5)


def fields(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema's nested field names without values, because the API server adds default values."""
    return {key: fields(value) for key, value in schema.items() if isinstance(value, dict)}


def wait_until_left(kept: set[str], kubectl: Kubectl, namespace: str) -> None:
    """Wait until an installation has no objects but `kept`; garbage collection takes a moment."""
    deadline = time.monotonic() + 120
    while (remaining := remaining_objects(kubectl, namespace)) != kept:
        assert time.monotonic() < deadline, f"left over: {remaining - kept}"
        time.sleep(0.5)


def remaining_objects(kubectl: Kubectl, namespace: str) -> set[str]:
    """Return the chart's ClusterRoles and their bindings, and all objects in a namespace except Events."""
    listed = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    kinds = ",".join(kind for kind in listed if not kind.startswith("events"))
    items = json.loads(kubectl("get", kinds, "--namespace", namespace, "-o", "json"))["items"]
    cluster_scoped = kubectl(
        "get", "clusterroles,clusterrolebindings", "-l", "app.kubernetes.io/name=mizzen", "-o", "name"
    )
    return {f"{item['kind']}/{item['metadata']['name']}" for item in items} | set(cluster_scoped.splitlines())


@pytest.mark.usefixtures("crd")
def test_an_operator_of_one_namespace_serves_it_without_a_cluster_role(
    helm: Any, kubectl: Kubectl, make_namespace: Callable[[str], str]
) -> None:
    home, elsewhere = make_namespace("solo"), make_namespace("elsewhere")
    values = "rbac.scope=namespace,crds.enabled=false,operator.replicas=1"
    helm("install", "solo", CHART, "--namespace", home, *WAIT, "--set", values)
    example = str(ROOT / "examples/shared-gateway.yaml")
    kubectl("apply", "--namespace", elsewhere, "-f", example)
    kubectl("apply", "--namespace", home, "-f", example)
    ready = ("--for=condition=Ready", "--timeout=240s")
    kubectl("wait", "--namespace", home, "infsvc/demo", "infsvc/ship", *ready, timeout=260)
    binding = json.loads(kubectl("get", "rolebinding", "mizzen-shared", "--namespace", home, "-o", "json"))
    assert binding["roleRef"]["kind"] == "Role"
    ignored = json.loads(kubectl("get", "infsvc", "demo", "--namespace", elsewhere, "-o", "json"))
    assert "status" not in ignored
    url = f"{service_url(kubectl, 'ship', home)}/chat/completions"
    body = {"model": "ship", "messages": [{"role": "user", "content": "What is Mizzen?"}], "max_tokens": 4}
    assert httpx.post(url, json=body, timeout=60, trust_env=False).status_code == 401
    keyed = {"Authorization": "Bearer sk-change-me-batch"}
    answer = httpx.post(url, json=body, headers=keyed, timeout=60, trust_env=False)
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert "Phase:          Succeeded" in helm("test", "solo", "--namespace", home)
    wide = f"rbac.scope=cluster,operator.watchNamespace={home},crds.enabled=false,operator.replicas=1"
    helm("upgrade", "solo", CHART, "--namespace", home, *WAIT, "--set", wide)
    wait_until_bound("ClusterRole/solo-gateway", kubectl, home, "mizzen-shared")
    assert httpx.post(url, json=body, headers=keyed, timeout=60, trust_env=False).status_code == 200
    kubectl("delete", "infsvc", "--all", "--namespace", home, "--cascade=foreground", timeout=200)
    helm("uninstall", "solo", "--namespace", home, *WAIT)
    kubectl("delete", "clusterrole", "solo-gateway")  # Helm keeps the role


@pytest.mark.usefixtures("no_crd")
def test_the_helm_test_reports_why_the_operator_is_not_ready(
    bare: Cluster, kubectl: Kubectl, make_namespace: Callable[[str], str]
) -> None:
    home = make_namespace("empty")
    assert "mizzen.dev/v1alpha1 is not served: install the CRD" in check(bare, home)
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds/inferenceservices.yaml"))
    kubectl("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=60s")
    assert f"no replica holds Lease {home}/x" in check(bare, home)
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "x", "namespace": home},
        "spec": {"holderIdentity": "x-0"},
    }
    kubectl("apply", "-f", "-", stdin=json.dumps(lease))
    assert f"there is no Service {home}/x" in check(bare, home)
    kubectl("create", "service", "clusterip", "x", "--tcp=8080", "--namespace", home)
    assert "/readyz: " in check(bare, home)


def check(bare: Cluster, namespace: str) -> str:
    """Run the command of `helm test` with a timeout of 0 s, which must fail; return its standard error."""
    command = [sys.executable, "-m", "mizzen_operator.main", "check", "--name", "x", "--namespace", namespace]
    environment = {**os.environ, "KUBECONFIG": str(bare.state.kubeconfig)}
    run = subprocess.run(
        [*command, "--timeout-seconds", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1, run
    return run.stderr
