# SPDX-License-Identifier: Apache-2.0
"""Labels, annotations, ports and paths that the operator, the gateways and users' tools agree on."""

from __future__ import annotations

GROUP, VERSION, PLURAL, KIND = "mizzen.dev", "v1alpha1", "inferenceservices", "InferenceService"
API_VERSION = f"{GROUP}/{VERSION}"

SERVICE = "mizzen.dev/service"
COMPONENT = "mizzen.dev/component"
GROUP_INDEX = "mizzen.dev/group"
RANK = "mizzen.dev/rank"
REVISION = "mizzen.dev/revision"
INCARNATION = "mizzen.dev/incarnation"
PODS = "mizzen.dev/pods"
"""Label of engine pods: number of pods per group; absent if it is 1."""

GATEWAY_LABEL = "mizzen.dev/gateway"
API_KEYS = "mizzen.dev/api-keys"
"""Label of users' Secrets: name of the gateway that accepts the API keys in the Secret."""

ENGINE, GATEWAY, FETCH = "engine", "gateway", "fetch"
SHARED = "shared"
"""Value of the label mizzen.dev/gateway on objects of services that share a gateway."""
SERVICES_FILE = "services.json"
"""Key of the ConfigMap entry that lists the services of a shared gateway."""
ROUTABLE = "mizzen.dev/routable"
"""Readiness gate of engine pods: true once every gateway routes requests to the group."""
VERIFIED = "mizzen.dev/verified"
"""Readiness gate of engine pods: true once the group has answered its golden prompts and may serve.

Pods have this gate only if the spec has golden prompts.
"""
APPLIED_HASH = "mizzen.dev/applied"
"""Annotation of child objects: hash of the manifest that was applied last."""

SERVICE_ACCOUNT_UID = "mizzen.dev/service-account-uid"
"""Annotation of gateway pods: uid of the ServiceAccount to which the pods' tokens are bound."""

ROTATE_KEYS = "mizzen.dev/rotate-keys"
"""Annotation of services and Secrets; changing its value on a service requests new keys.

On the service's Secrets, the annotation holds the value that was handled last.
"""
KEYS_MADE, NEXT_KEYS_MADE = "mizzen.dev/keys-made", "mizzen.dev/next-keys-made"
"""Annotations of Secrets: creation times of the present and of the next generation of keys."""

AVOIDED_NODES = "mizzen.dev/avoided-nodes"
"""Annotation of engine pods: names of the nodes that the pod avoids, separated by commas.

Engines of the service have lost their device on these nodes.
"""

DEVICE_LOST_CODE = 3
"""Exit code of an engine whose device is gone or broken. A restart in the same pod cannot help."""

CONFIGURATION_CODE = 2
"""Exit code of an engine whose configuration cannot work. A restart cannot help."""

FIELD_MANAGER = "mizzen-operator"
KEYS_FOLDER = "/var/run/mizzen/keys"
API_KEYS_FOLDER = "/var/run/mizzen/api-keys"
NO_API_KEYS_FOLDER = "/var/run/mizzen/no-api-keys"
"""Empty folder of API keys for gateways that find API keys by label.

With it, such a gateway rejects every request while no Secret has the label, instead of requiring no key.
"""
TLS_FOLDER = "/var/run/mizzen/tls"
JOB_NAME = "batch.kubernetes.io/job-name"
"""Label that Kubernetes puts on the pods of a Job."""
MAX_DIGITS = 9
"""Maximum number of digits of a number in a label or Secret.

The number then fits into `status.groups[].group`, an int32.
"""
TERMINATION_MESSAGE = "/dev/termination-log"
ADMIN_TOKEN = "admin.token"
HTTP_PORT, ADMIN_PORT, WIRE_PORT, ENGINE_HTTP_PORT, FETCH_PORT = 8000, 8001, 5557, 8081, 8082
GRPC_PORT = 9000
ODD_WIRE_PORT = WIRE_PORT + 1
"""Wire port of engines whose keys have an odd generation number.

New keys need another port, because the key of a bound socket cannot change.
"""
RANKS_PORT = 5560
"""First of three consecutive ports on which a group's leader pod listens for the group's other pods."""


def is_valid_number(text: str) -> bool:
    """Return whether a label's value is a number of at most MAX_DIGITS digits; users may have edited it."""
    return text.isdecimal() and len(text) <= MAX_DIGITS
