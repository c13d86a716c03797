"""The installation under test: its images, its namespaces, its service, and the pod that chats with it."""

from __future__ import annotations

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
    """What a run installs.

    Attributes:
        prefix: of the images' repositories, such as `localhost/mizzen`.
        tag: of the images that are installed first.
        next_tag: of those that `helm upgrade` brings.
        pull_policy: of all pods.
        engine_site: folder of the nodes with the packages that the engine's image leaves out; empty for none.
        model_folder: folder of the nodes for models; empty where the cluster makes volumes by itself.
    """

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
        """Read what `run.py` says."""
        return cls(
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
        """Reference of an image."""
        return f"{self.prefix}/{program}:{tag or self.tag}"

    def helm(self, verb: str, tag: str) -> None:
        """Install or upgrade the chart as a user does."""
        values = {
            "images": {
                "operator": {"repository": f"{self.prefix}/operator", "tag": tag},
                "gateway": {"repository": f"{self.prefix}/gateway", "tag": tag},
                "engine": {"repository": f"{self.prefix}/engine-cpu", "tag": tag},
                "operatorPullPolicy": self.pull_policy,
                "childPullPolicy": self.pull_policy,
            }
        }
        where = [RELEASE, str(ROOT / "charts/mizzen"), "--namespace", SYSTEM]
        run("helm", verb, *where, "--wait", "--timeout", "3m", "-f", "-", stdin=json.dumps(values))

    def service(self, name: str = NAME, **changed: Any) -> dict[str, Any]:
        """The InferenceService of the demo, with two groups and two gateways, unless changed."""
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
        """The volume with the engine's packages and its claim: the restricted level allows claims only."""
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
        """The volume for models, where no StorageClass makes one: a folder of a node."""
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
        """A pod that stays, from which the tests chat, and its script."""
        scripts = {"load.py": "tests/e2e/load.py", "count.py": "tests/cluster/noloss/load.py"}
        return self.script_pod(CLIENT, "gateway", scripts, ["sleep", "infinity"])

    def script_pod(
        self, name: str, image: str, scripts: Mapping[str, str], command: list[str]
    ) -> list[dict[str, Any]]:
        """A pod of one of the images that runs a command, with files of the repository in `/<name>`."""
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
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": script},
            {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod},
        ]

    def pods(self, component: str, name: str = NAME) -> list[dict[str, Any]]:
        """The pods of a service's engines, gateways or fetches."""
        selector = f"mizzen.dev/service={name},mizzen.dev/component={component}"
        return self.reader.pods(TENANT, selector)

    def operators(self) -> list[dict[str, Any]]:
        """The operator's pods."""
        return self.reader.pods(SYSTEM, "app.kubernetes.io/component=operator")

    def status(self, name: str = NAME) -> dict[str, Any]:
        """An InferenceService as it is."""
        return self.reader.get(f"/apis/mizzen.dev/v1alpha1/namespaces/{TENANT}/inferenceservices/{name}")

    def leader(self) -> str:
        """Name of the operator's pod that leads; empty for none."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{RELEASE}-operator"
        return self.reader.get(path).get("spec", {}).get("holderIdentity") or ""

    def settled(self, groups: int, name: str = NAME, pods: int = 1) -> bool:
        """Tell whether a service is Ready at its newest generation with exactly so many groups."""
        now = self.status(name)
        status = now.get("status", {})
        return (
            condition(now, "Ready") == "True"
            and status["observedGeneration"] == now["metadata"]["generation"]
            and status["availableReplicas"] == groups
            and len(self.pods("engine", name)) == groups * pods
        )


def _volume(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    kept = {"capacity": SIZE, "storageClassName": "", "persistentVolumeReclaimPolicy": "Retain"}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**kept, **spec},
    }


def namespace(name: str) -> dict[str, Any]:
    """A namespace that admits pods of the restricted level only."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}


def everything() -> set[str]:
    """Return the names of all objects of the cluster that nobody makes by himself, such as events."""
    transient = {"events", "events.events.k8s.io", "endpoints", "endpointslices.discovery.k8s.io"}
    transient.add("apiservices.apiregistration.k8s.io")  # made by the API server for each CRD
    kinds = set(kubectl("api-resources", "--verbs=list", "-o", "name").split()) - transient
    output = kubectl("get", ",".join(sorted(kinds)), "-A", "-o", "name", "--ignore-not-found")
    return set(output.split())
