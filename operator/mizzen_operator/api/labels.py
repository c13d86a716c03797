"""Names that the operator, the gateways and the users' tools agree on."""

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
"""How many pods a group has; absent where it has one."""

GATEWAY_LABEL = "mizzen.dev/gateway"
API_KEYS = "mizzen.dev/api-keys"
"""On Secrets of the user's: the name of the gateway that takes the API keys in them."""

ENGINE, GATEWAY, FETCH = "engine", "gateway", "fetch"
SHARED = "shared"
"""Value of the label mizzen.dev/gateway on what belongs to services that share a gateway."""
SERVICES_FILE = "services.json"
"""Key of the ConfigMap that lists the services of a shared gateway."""
ROUTABLE = "mizzen.dev/routable"
"""The readiness gate of engine pods: the gateways have acknowledged the group."""
VERIFIED = "mizzen.dev/verified"
"""A further gate, of groups that must answer golden prompts right: gateways hold such a pod back."""
APPLIED_HASH = "mizzen.dev/applied"
"""Annotation of a child: hash of the manifest that was applied last."""

SERVICE_ACCOUNT_UID = "mizzen.dev/service-account-uid"
"""Annotation of gateway pods: the very ServiceAccount that their tokens are bound to."""

ROTATE_KEYS = "mizzen.dev/rotate-keys"
"""Annotation of a service: another value asks for new keys. Of its Secrets: the value obeyed last."""
KEYS_MADE, NEXT_KEYS_MADE = "mizzen.dev/keys-made", "mizzen.dev/next-keys-made"
"""Annotations of Secrets: when the keys of the present and of the next generation were made."""

DEVICE_LOST_CODE = 3
"""Exit code of an engine whose device is gone or broken: its pod has no other one."""

FIELD_MANAGER = "mizzen-operator"
KEYS_FOLDER = "/var/run/mizzen/keys"
API_KEYS_FOLDER = "/var/run/mizzen/api-keys"
NO_API_KEYS_FOLDER = "/var/run/mizzen/no-api-keys"
"""Is empty, so that a gateway that finds its keys by their label is closed while there are none."""
TLS_FOLDER = "/var/run/mizzen/tls"
JOB_NAME = "batch.kubernetes.io/job-name"
"""Given by Kubernetes to the pods of a Job."""
MAX_DIGITS = 9
"""Of a number in a label or a Secret: so it fits into the 32 bits that `status.groups[].group` has."""
TERMINATION_MESSAGE = "/dev/termination-log"
ADMIN_TOKEN = "admin.token"
HTTP_PORT, ADMIN_PORT, WIRE_PORT, ENGINE_HTTP_PORT, FETCH_PORT = 8000, 8001, 5557, 8081, 8082
ODD_WIRE_PORT = WIRE_PORT + 1
"""Where engines use keys of odd generations: the key of a socket cannot change."""
RANKS_PORT = 5560
"""Of a group's leading pod, for its other pods; they use the two ports after it, too."""


def is_valid_number(text: str) -> bool:
    """Whether a text is a number as the operator writes it; somebody may have edited it."""
    return text.isdecimal() and len(text) <= MAX_DIGITS
