# SPDX-License-Identifier: Apache-2.0
"""Manifests of the services, Secrets and keys of the observed cluster."""

from __future__ import annotations

import datetime
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

NAME, BROKEN, FETCHING, SPACE = "demo", "broken", "fetching", "default"
KEYS = {"team-a": "sk-team-a-0001", "team-b": "sk-team-b-0001", "batch": "sk-batch-0001"}
"""API keys of the observed service, by name."""


def service(name: str, replicas: int) -> dict[str, Any]:
    return {
        "apiVersion": "mizzen.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": SPACE},
        "spec": {
            "model": {"source": "file:///opt/mizzen/models/demo"},
            "replicas": replicas,
            "autoscaling": {
                "minReplicas": 2,
                "maxReplicas": 2,
                "metric": {"type": "ActiveRequests", "targetValue": 1},
            },
            "engine": {
                "device": "CPU",
                "maxRunningRequests": 4,
                "extraArgs": ["--kv-cache-tokens=8192"],
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            },
            "gateway": {
                "replicas": 1,
                "tls": {"secretName": "demo-tls"},
                "apiKeys": {"secretNames": ["demo-api-keys"]},
                "admission": {"maxInFlight": 12, "queueSize": 3, "queueTimeoutSeconds": 20},
                "extraArgs": ["--breaker-failures=1"],
            },
            "lifecycle": {"startupTimeoutSeconds": 120, "drainTimeoutSeconds": 5},
        },
    }


def secret(name: str) -> dict[str, Any]:
    """Return a Secret with a certificate that is valid for 30 days."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": name, "namespace": SPACE},
        "stringData": {"tls.crt": certificate.public_bytes(Encoding.PEM).decode(), "tls.key": private},
    }


def key_secret() -> dict[str, Any]:
    """Return the Secret with the API keys of the observed service."""
    lines = [f"  - {{name: {name}, key: {key}}}" for name, key in KEYS.items()]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "demo-api-keys", "namespace": SPACE},
        "stringData": {"keys.yaml": "\n".join(["keys:", *lines])},
    }


def fetching_service(folder: str) -> dict[str, Any]:
    """Return a service that downloads its model into a folder, from a hub that does not answer."""
    body = service(FETCHING, 1)
    cache = {"mode": "HostPath", "path": folder}
    body["spec"]["model"] = {"source": "hf://org/tiny@main", "endpoint": "http://127.0.0.1:9", "cache": cache}
    del body["spec"]["autoscaling"]
    body["spec"]["gateway"] = {"replicas": 1}
    return body
