"""The servers in the cluster that services fetch their models from, and what to show there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sources_pod as pod
from product import MODEL_CLAIM, PYTHON, SIZE, TENANT, Product

from cluster import apply, kubectl
from model_servers import Bucket
from oci_registry import Registry

NAME, SECRET = "sources", "credentials"
HOST = f"{NAME}.{TENANT}.svc"
FILES = {
    "sources_pod.py": "tests/e2e/sources_pod.py",
    "model_servers.py": "tests/shared/model_servers.py",
    "oci_registry.py": "tests/shared/oci_registry.py",
}


@dataclass(frozen=True)
class Place:
    """Somewhere that has the model: `spec.model.source`, the port, and what to show there."""

    source: str
    port: int
    credentials: str

    def model(self, key: str) -> dict[str, Any]:
        """`spec.model` of a service, with the credentials under a key of the Secret."""
        return {
            "source": self.source,
            "endpoint": f"http://{HOST}:{self.port}",
            "credentialsSecretRef": {"name": SECRET, "key": key},
            "cache": {
                "mode": "PersistentVolumeClaim",
                "claimName": MODEL_CLAIM,
                "size": SIZE["storage"],
                "accessMode": "ReadWriteOnce",
            },
        }


_REGISTRY = f"{HOST}:{pod.REGISTRY}"
PLACES = {
    "hub": Place(f"hf://{pod.REPOSITORY}@main", pod.HUB, pod.TOKEN),
    "bucket": Place(f"s3://{Bucket.NAME}/{pod.PREFIX}", pod.BUCKET, Bucket.PROFILE),
    "registry": Place(
        f"oci://{_REGISTRY}/{pod.REPOSITORY}:{pod.TAG}", pod.REGISTRY, Registry.login(_REGISTRY)
    ),
}


class Sources:
    """The servers, as the tests see them."""

    def __init__(self, product: Product) -> None:
        """Start them, with the Secret of what to show and, where the cluster makes none, the volume."""
        self._product = product
        metadata = {"name": NAME, "namespace": TENANT}
        shown = {key: place.credentials for key, place in PLACES.items()}
        ports = [{"name": f"port-{port}", "port": port} for port in range(pod.HUB, pod.CONTROL + 1)]
        service = {"selector": {"app": NAME}, "ports": ports}
        [script, servers] = product.script_pod(
            NAME, "engine-cpu", FILES, [PYTHON, f"/{NAME}/sources_pod.py", HOST]
        )
        servers["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": pod.CONTROL}}
        secret = {**metadata, "name": SECRET}
        apply(
            *product.model_volume(),
            {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "stringData": shown},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
            script,
            servers,
        )
        kubectl("wait", "-n", TENANT, f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s")

    def open(self) -> None:
        """Let the servers send the rest of all files."""
        self._control("open")

    def counts(self) -> dict[str, Any]:
        """What the servers were asked for so far."""
        return self._control("counts")

    def remove(self) -> None:
        """Take away what was made, with all services, which use the claim that the operator made."""
        kubectl("delete", "infsvc", "--all", "-n", TENANT, "--wait=true", "--timeout=60s")
        for kind, name in (("pod", NAME), ("service", NAME), ("secret", SECRET), ("pvc", MODEL_CLAIM)):
            kubectl("delete", kind, name, "-n", TENANT, "--timeout=60s")
        if self._product.model_folder:
            kubectl("delete", "pv", MODEL_CLAIM, "--timeout=60s")

    def _control(self, what: str) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{TENANT}/pods/{NAME}:{pod.CONTROL}/proxy/{what}"
        return self._product.reader.get(path)
