# SPDX-License-Identifier: Apache-2.0
"""The model servers in the cluster from which services fetch their models; `sources_pod.py` runs there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sources_pod as pod
from chat import Chat
from product import MODEL_CLAIM, PYTHON, SIZE, TENANT, Product

from cluster import apply, kubectl
from demo_model import QUESTION
from image_noise import data_url, encode_noise
from mixture_chat_model import TOKENS, save_mixture_chat_model
from model_servers import Bucket
from oci_registry import Registry
from vision_chat_model import answer_question, save_vision_chat_model

NAME, SECRET = "sources", "credentials"
HOST = f"{NAME}.{TENANT}.svc"
FILES = {
    "sources_pod.py": "tests/e2e/sources_pod.py",
    "model_servers.py": "tests/shared/servers/model_servers.py",
    "oci_registry.py": "tests/shared/servers/oci_registry.py",
}


@dataclass(frozen=True)
class ModelSource:
    """A model on one of the servers: `spec.model.source`, the server's port, and the required credentials."""

    source: str
    port: int
    credentials: str

    def model(self, key: str) -> dict[str, Any]:
        """Return `spec.model` of a service; `key` is the key of the credentials in the Secret."""
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
MODEL_SOURCES = {
    "hub": ModelSource(f"hf://{pod.REPOSITORY}@main", pod.HUB, pod.TOKEN),
    "bucket": ModelSource(f"s3://{Bucket.NAME}/{pod.PREFIX}", pod.BUCKET, Bucket.PROFILE),
    "registry": ModelSource(
        f"oci://{_REGISTRY}/{pod.REPOSITORY}:{pod.TAG}", pod.REGISTRY, Registry.login(_REGISTRY)
    ),
}
MIXTURE, VISION = (
    ModelSource(f"hf://{pod.REPOSITORY}@{branch}", pod.HUB, pod.TOKEN) for branch in (pod.MIXTURE, pod.VISION)
)
"""Models on other branches of the hub; their credentials are those of `hub`."""


class Sources:
    """The pod with all model servers, controlled through the API server's proxy."""

    def __init__(self, product: Product) -> None:
        """Start the pod, and create the Secret with all credentials and, if needed, the volume for models."""
        self._product = product
        metadata = {"name": NAME, "namespace": TENANT}
        credentials = {key: source.credentials for key, source in MODEL_SOURCES.items()}
        ports = [{"name": f"port-{port}", "port": port} for port in range(pod.HUB, pod.CONTROL + 1)]
        service = {"selector": {"app": NAME}, "ports": ports}
        self.mixture_chat, mixture = _make_model(pod.MIXTURE, _save_mixture)
        self.vision_chat, vision = _make_model(pod.VISION, _save_vision)
        [script, servers] = product.script_pod(
            NAME, "engine-cpu", FILES, [PYTHON, f"/{NAME}/sources_pod.py", HOST], mixture | vision
        )
        servers["spec"]["containers"][0]["readinessProbe"] = {"tcpSocket": {"port": pod.CONTROL}}
        secret = {**metadata, "name": SECRET}
        apply(
            *product.model_volume(),
            {"apiVersion": "v1", "kind": "Secret", "metadata": secret, "stringData": credentials},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        )
        # `kubectl apply` would write the models into an annotation too, where they do not fit.
        kubectl("create", "-f", "-", stdin=json.dumps(script))
        apply(servers)
        kubectl("wait", "-n", TENANT, f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s")

    def open(self) -> None:
        """Let the servers send the withheld rest of all files."""
        self._control("open")

    def counts(self) -> dict[str, Any]:
        """Return the counts of requests so far; see `sources_pod.py`."""
        return self._control("counts")

    def remove(self) -> None:
        """Delete all services, then the servers and volumes.

        Services must be deleted first, because they use the operator's claim for models.
        """
        kubectl("delete", "infsvc", "--all", "-n", TENANT, "--wait=true", "--timeout=60s")
        for kind, name in (("pod", NAME), ("service", NAME), ("secret", SECRET), ("pvc", MODEL_CLAIM)):
            kubectl("delete", kind, name, "-n", TENANT, "--timeout=60s")
        if self._product.model_folder:
            kubectl("delete", "pv", MODEL_CLAIM, "--timeout=60s")

    def _control(self, command: str) -> dict[str, Any]:
        path = f"/api/v1/namespaces/{TENANT}/pods/{NAME}:{pod.CONTROL}/proxy/{command}"
        return self._product.reader.get(path)


def _make_model(branch: str, save: Callable[[Path], Chat]) -> tuple[Chat, dict[str, bytes]]:
    """Return a question to a tiny model with its answer, and the model's files as the pod names them."""
    with tempfile.TemporaryDirectory() as folder:
        chat = save(Path(folder))
        prefix = pod.file_prefix(branch)
        return chat, {f"{prefix}{path.name}": path.read_bytes() for path in Path(folder).iterdir()}


def _save_mixture(folder: Path) -> Chat:
    """Save a mixture of experts; return a question with the answer of Transformers."""
    return Chat(QUESTION, save_mixture_chat_model(folder), TOKENS)


def _save_vision(folder: Path) -> Chat:
    """Save a model that reads images; return a question on an image with the answer of Transformers."""
    save_vision_chat_model(folder)
    image = encode_noise(1, 40, 30)
    return Chat(QUESTION, answer_question(folder, image, QUESTION, TOKENS), TOKENS, data_url(image))
