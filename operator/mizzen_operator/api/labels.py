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
"""Number of pods per group; absent if it is 1."""

GATEWAY_LABEL = "mizzen.dev/gateway"
API_KEYS = "mizzen.dev/api-keys"
"""On users' Secrets: name of the gateway that accepts the API keys in the Secret."""

ENGINE, GATEWAY, FETCH = "engine", "gateway", "fetch"
SHARED = "shared"
"""Value of the label mizzen.dev/gateway on objects of services that share a gateway."""
SERVICES_FILE = "services.json"
"""Key of the ConfigMap entry that lists the services of a shared gateway."""
ROUTABLE = "mizzen.dev/routable"
"""Readiness gate of engine pods: every gateway routes requests to the group."""
VERIFIED = "mizzen.dev/verified"
"""Readiness gate of groups that must answer golden prompts first; gateways route nothing to them before."""
APPLIED_HASH = "mizzen.dev/applied"
"""Annotation of child objects: hash of the manifest that was applied last."""

SERVICE_ACCOUNT_UID = "mizzen.dev/service-account-uid"
"""Annotation of gateway pods: uid of the ServiceAccount to which their tokens are bound."""

ROTATE_KEYS = "mizzen.dev/rotate-keys"
"""Annotation of a service: a changed value requests new keys. Of its Secrets: the value handled last."""
KEYS_MADE, NEXT_KEYS_MADE = "mizzen.dev/keys-made", "mizzen.dev/next-keys-made"
"""Annotations of Secrets: creation times of the present and of the next generation of keys."""

DEVICE_LOST_CODE = 3
"""Exit code of an engine whose device is gone or broken. A restart in the same pod cannot help."""

FIELD_MANAGER = "mizzen-operator"
KEYS_FOLDER = "/var/run/mizzen/keys"
API_KEYS_FOLDER = "/var/run/mizzen/api-keys"
NO_API_KEYS_FOLDER = "/var/run/mizzen/no-api-keys"
"""Empty folder read by a gateway with labelled API keys: it rejects everyone while there are no keys."""
TLS_FOLDER = "/var/run/mizzen/tls"
JOB_NAME = "batch.kubernetes.io/job-name"
"""Label that Kubernetes puts on the pods of a Job."""
MAX_DIGITS = 9
"""Maximum digits of a number in a label or Secret, so that it fits the int32 of `status.groups[].group`."""
TERMINATION_MESSAGE = "/dev/termination-log"
ADMIN_TOKEN = "admin.token"
HTTP_PORT, ADMIN_PORT, WIRE_PORT, ENGINE_HTTP_PORT, FETCH_PORT = 8000, 8001, 5557, 8081, 8082
ODD_WIRE_PORT = WIRE_PORT + 1
"""Wire port of engines while their keys are of an odd generation: the key of a bound socket cannot change."""
RANKS_PORT = 5560
"""Port of a group's leader pod for its other pods; the next two ports are used too."""


def is_valid_number(text: str) -> bool:
    """Return whether a text is a number as the operator writes it; users may have edited the label."""
    return text.isdecimal() and len(text) <= MAX_DIGITS
