# SPDX-License-Identifier: Apache-2.0
"""The installation under test: images, namespaces, the demo service, volumes, and the client pod."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Reader, Restarts, condition, kubectl, run

ROOT = Path(__file__).parents[2]
SYSTEM, TENANT = "mizzen-system", "mizzen-e2e"
RELEASE, NAME, CLIENT = "mizzen", "demo", "client"
SITE_CLAIM, SITE_MOUNT = "site-packages", "/mnt/site-packages"
MODEL_CLAIM, SIZE = "models", {"storage": "1Gi"}
PYTHON = "/opt/mizzen/bin/python"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@dataclass(frozen=True)
class Product:
    """The installation of a run, its manifests, and queries about it.

    Attributes:
        chart: package of the operator's chart.
        prefix: prefix of the images' repositories, such as `localhost/mizzen`.
        tag: tag of the images that are installed first.
        next_tag: tag of the images that `helm upgrade` installs.
        pull_policy: image pull policy of all pods.
        engine_site: folder on the nodes with the Python packages that the engine's image lacks; empty if the
            image has all packages.
        model_folder: folder on the nodes for models; empty if the cluster provisions volumes.
        reader: reader of the cluster's objects.
        restarts: restarts of containers in both namespaces.
    """

    chart: Path
    prefix: str
    tag: str
    next_tag: str
    pull_policy: str
    engine_site: str
    model_folder: str
    reader: Reader
    restarts: Restarts

    @classmethod
    def of(cls, environment: Mapping[str, str], reader: Reader) -> Product:
        """Return the installation that the environment variables of `run.py` describe."""
        return cls(
            chart=Path(environment["E2E_CHART"]),
            prefix=environment["E2E_PREFIX"],
            tag=environment["E2E_TAG"],
            next_tag=environment["E2E_NEXT_TAG"],
            pull_policy=environment["E2E_PULL_POLICY"],
            engine_site=environment.get("E2E_ENGINE_SITE", ""),
            model_folder=environment.get("E2E_MODEL_FOLDER", ""),
            reader=reader,
            restarts=Restarts(reader, (SYSTEM, TENANT)),
        )

    def image(self, program: str, tag: str | None = None) -> str:
        """Return the reference of a program's image; by default with the first tag."""
        return f"{self.prefix}/{program}:{tag or self.tag}"

    def helm(self, verb: str, tag: str) -> None:
        """Run `helm install` or `helm upgrade` with the images of a tag; wait until the pods are ready."""
        values = {
            "images": {
                "operator": {"repository": f"{self.prefix}/operator", "tag": tag},
                "gateway": {"repository": f"{self.prefix}/gateway", "tag": tag},
                "engine": {"repository": f"{self.prefix}/engine-cpu", "tag": tag},
                "operatorPullPolicy": self.pull_policy,
                "childPullPolicy": self.pull_policy,
            }
        }
        target = [RELEASE, str(self.chart), "--namespace", SYSTEM]
        run("helm", verb, *target, "--wait", "--timeout", "3m", "-f", "-", stdin=json.dumps(values))

    def service(self, name: str = NAME, **changed: Any) -> dict[str, Any]:
        """Return an InferenceService of the demo model, by default with two groups and two gateways.

        `changed` replaces fields of its spec.
        """
        spec: dict[str, Any] = {
            "model": {"source": "file:///opt/mizzen/models/demo"},
            "replicas": 2,
            "engine": {"device": "CPU", "maxRunningRequests": 32, "prefillChunkTokens": 512},
            "podTemplate": {
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                "sharedMemorySizeLimit": "64Mi",
            },
            "gateway": {"replicas": 2},
            "lifecycle": {"startupTimeoutSeconds": 150, "drainTimeoutSeconds": 30},
            **changed,
        }
        if self.engine_site:
            claim = {"claimName": SITE_CLAIM, "readOnly": True}
            spec["engine"]["env"] = [{"name": "PYTHONPATH", "value": SITE_MOUNT}]
            spec["podTemplate"]["volumes"] = [{"name": "site", "persistentVolumeClaim": claim}]
            spec["podTemplate"]["volumeMounts"] = [
                {"name": "site", "mountPath": SITE_MOUNT, "readOnly": True}
            ]
        metadata = {"name": name, "namespace": TENANT}
        return {
            "apiVersion": "mizzen.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": metadata,
            "spec": spec,
        }

    def volume(self) -> list[dict[str, Any]]:
        """Return a volume with the engine's packages, and a claim to it.

        The claim is needed because restricted pods cannot mount a folder of the node.
        """
        if not self.engine_site:
            return []
        volume = {
            "accessModes": ["ReadOnlyMany"],
            "claimRef": {"name": SITE_CLAIM, "namespace": TENANT},
            "hostPath": {"path": self.engine_site, "type": "Directory"},
        }
        claim = {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": SITE_CLAIM,
            "resources": {"requests": SIZE},
        }
        return [
            _volume(SITE_CLAIM, volume),
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": SITE_CLAIM, "namespace": TENANT},
                "spec": claim,
            },
        ]

    def model_volume(self) -> list[dict[str, Any]]:
        """Return a volume for models in a folder of a node, if the cluster does not provision volumes."""
        if not self.model_folder:
            return []
        linux = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
        volume = {
            "accessModes": ["ReadWriteOnce"],
            "claimRef": {"name": MODEL_CLAIM, "namespace": TENANT},
            "local": {"path": self.model_folder},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [linux]}]}},
        }
        return [_volume(MODEL_CLAIM, volume)]

    def client(self) -> list[dict[str, Any]]:
        """Return the client pod, from which the tests send requests, and the ConfigMap with its scripts."""
        scripts = {"load.py": "tests/e2e/load.py", "count.py": "tests/cluster/noloss/load.py"}
        return self.script_pod(CLIENT, "gateway", scripts, ["sleep", "infinity"])

    def script_pod(
        self,
        name: str,
        image: str,
        scripts: Mapping[str, str],
        command: list[str],
        data: Mapping[str, bytes] | None = None,
    ) -> list[dict[str, Any]]:
        """Return a pod that runs a command in an image, and a ConfigMap with files for its folder `/<name>`.

        Args:
            name: name of both objects.
            image: program whose image the pod uses.
            scripts: maps the name of each file in the folder to the file's path in the repository.
            command: command of the container.
            data: contents of further files in the folder, by name.
        """
        binary = {name: base64.b64encode(content).decode() for name, content in (data or {}).items()}
        script = {name: (ROOT / path).read_text() for name, path in scripts.items()}
        security = {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        container = {
            "name": name,
            "image": self.image(image),
            "imagePullPolicy": self.pull_policy,
            "command": command,
            "securityContext": security,
            "volumeMounts": [{"name": "script", "mountPath": f"/{name}"}],
        }
        metadata = {"name": name, "namespace": TENANT, "labels": {"app": name}}
        pod = {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": name}}],
        }
        files = {"data": script, "binaryData": binary}
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **files},
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        ]

    def pods(self, component: str, name: str = NAME) -> list[dict[str, Any]]:
        """Return the pods of one component (`engine`, `gateway` or `fetch`) of a service."""
        selector = f"mizzen.dev/service={name},mizzen.dev/component={component}"
        return self.reader.pods(TENANT, selector)

    def operators(self) -> list[dict[str, Any]]:
        """Return the operator's pods."""
        return self.reader.pods(SYSTEM, "app.kubernetes.io/component=operator")

    def status(self, name: str = NAME) -> dict[str, Any]:
        """Return the current InferenceService, with spec and status."""
        return self.reader.get(f"/apis/mizzen.dev/v1alpha1/namespaces/{TENANT}/inferenceservices/{name}")

    def leader(self) -> str:
        """Return the name of the operator's leading pod; empty if no pod leads."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{RELEASE}-operator"
        return self.reader.get(path).get("spec", {}).get("holderIdentity") or ""

    def settled(self, groups: int, name: str = NAME, pods: int = 1) -> bool:
        """Return whether a service is Ready at its newest generation with exactly `groups` groups.

        `pods` is the number of pods in a group.
        """
        now = self.status(name)
        status = now.get("status", {})
        return (
            condition(now, "Ready") == "True"
            and status["observedGeneration"] == now["metadata"]["generation"]
            and status["availableReplicas"] == groups
            and len(self.pods("engine", name)) == groups * pods
        )


def _volume(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    common = {"capacity": SIZE, "storageClassName": "", "persistentVolumeReclaimPolicy": "Retain"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**common, **spec},
    }


def namespace(name: str) -> dict[str, Any]:
    """Return a namespace that admits only restricted pods."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}


def everything() -> set[str]:
    """Return the names of the cluster's objects; kinds whose objects Kubernetes creates are left out."""
    transient = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io"}
    transient.add("apiservices.apiregistration.k8s.io")  # created by the API server for each CRD
    kinds = set(kubectl("api-resources", "--verbs=list", "-o", "name").split()) - transient
    output = kubectl("get", ",".join(sorted(kinds)), "-A", "-o", "name", "--ignore-not-found")
    return set(output.split())
