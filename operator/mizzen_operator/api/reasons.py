# SPDX-License-Identifier: Apache-2.0
"""Condition types, and the reasons given by conditions, groups, readiness gates, scale changes and errors.

Every package uses the constants of this module; docs/conditions.md explains each value. The values are a
public contract that users alert on, so they never change. Each constant is named after its value.
"""

from __future__ import annotations

MAX_MESSAGE = 1024
"""Maximum number of characters of a message in a status or an Event; the CRD has the same limit."""

# --- Types of conditions ---
READY = "Ready"
AVAILABLE = "Available"
PROGRESSING = "Progressing"
SCHEDULED = "Scheduled"
GATEWAY_READY = "GatewayReady"
FAILED = "Failed"
MODEL_CACHED = "ModelCached"
CONFLICT = "Conflict"
SCALING_ACTIVE = "ScalingActive"
KEYS_ROTATING = "KeysRotating"
"""Condition type, and also the reason of the Event that reports the start of a rotation."""
API_KEYS_IN_FORCE = "ApiKeysInForce"

CONDITION_TYPES = frozenset(
    {
        READY,
        AVAILABLE,
        PROGRESSING,
        SCHEDULED,
        GATEWAY_READY,
        FAILED,
        MODEL_CACHED,
        CONFLICT,
        SCALING_ACTIVE,
        KEYS_ROTATING,
        API_KEYS_IN_FORCE,
    }
)
"""Types of the conditions that the operator writes; conditions of other types belong to other writers."""

# --- Reasons of Ready ---
ALL_GROUPS_SERVING = "AllGroupsServing"
SCALED_TO_ZERO = "ScaledToZero"
SUSPENDED = "Suspended"

# --- Reasons of Available ---
SERVING = "Serving"
NO_GROUP_SERVES = "NoGroupServes"
NO_GATEWAY_READY = "NoGatewayReady"
NO_GATEWAY_ANSWERS = "NoGatewayAnswers"
NAME_CONFLICT = "NameConflict"

# --- Reasons of Progressing ---
SETTLED = "Settled"
STARTING_GROUPS = "StartingGroups"
REPLACING_GROUPS = "ReplacingGroups"
REMOVING_GROUPS = "RemovingGroups"
STARTING_GATEWAY = "StartingGateway"
DOWNLOADING = "Downloading"
PAUSED = "Paused"
PARTITION_REACHED = "PartitionReached"
PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"

# --- Reasons of Scheduled ---
ALL_GROUPS_HAVE_NODES = "AllGroupsHaveNodes"
NO_GROUPS_WANTED = "NoGroupsWanted"
NOT_MADE = "NotMade"
PENDING = "Pending"
UNSCHEDULABLE = "Unschedulable"
WILL_NOT_FIT = "WillNotFit"

# --- Reasons of GatewayReady ---
ALL_REPLICAS_READY = "AllReplicasReady"
GATEWAY_MISSING = "GatewayMissing"
GATEWAY_ROLLING_OUT = "GatewayRollingOut"
GATEWAY_NOT_READY = "GatewayNotReady"
GATEWAY_FAILING = "GatewayFailing"
GATEWAY_REJECTED = "GatewayRejected"
GATEWAY_HANGS = "GatewayHangs"

# --- Reasons of ModelCached ---
REVISION_PINNED = "RevisionPinned"
DOWNLOAD_FAILED = "DownloadFailed"

# --- Reasons of Conflict ---
NO_CONFLICT = "NoConflict"
GATEWAY_SETTINGS_DIFFER = "GatewaySettingsDiffer"

# --- Reasons of ScalingActive ---
AUTOSCALING = "Autoscaling"
ANOTHER_AUTOSCALER = "AnotherAutoscaler"

# --- Reasons of KeysRotating ---
KEYS_ROTATED = "KeysRotated"
NEXT_KEYS_PUBLISHED = "NextKeysPublished"
DROPPING_FORMER_KEYS = "DroppingFormerKeys"
SECRET_IMMUTABLE = "SecretImmutable"

# --- Reasons of ApiKeysInForce ---
KEYS_READ = "KeysRead"
API_KEYS_UNUSABLE = "ApiKeysUnusable"
NO_API_KEYS = "NoApiKeys"

# --- Reasons of Failed; Ready and Progressing repeat them ---
AS_EXPECTED = "AsExpected"
DELETING = "Deleting"
NAMESPACE_TERMINATING = "NamespaceTerminating"
INVALID_SPEC = "InvalidSpec"
OPERATOR_ERROR = "OperatorError"
NEIGHBOUR_INVALID = "NeighbourInvalid"
RESTART_BUDGET_EXCEEDED = "RestartBudgetExceeded"
VERIFICATION_FAILED = "VerificationFailed"
POD_REJECTED = "PodRejected"
PROFILE_MISSING = "ProfileMissing"
FETCH_REJECTED = "FetchRejected"
REJECTED = "Rejected"
"""A reason, and also the suffix of `JobRejected` and `PersistentVolumeClaimRejected`."""
WEBHOOK_FAILED = "WebhookFailed"
NAME_TAKEN = "NameTaken"
KEYS_UNUSABLE = "KeysUnusable"
TOKEN_REFUSED = "TokenRefused"
SECRETS_FORBIDDEN = "SecretsForbidden"
REFERENCE_MISSING = "ReferenceMissing"
REVISION_LOST = "RevisionLost"
REVISION_UNREADABLE = "RevisionUnreadable"
DEVICE_LOST = "DeviceLost"
NODE_LOST = "NodeLost"
NODE_AVOIDED, NODE_ALLOWED = "NodeAvoided", "NodeAllowed"
"""Reasons of Events only: new groups avoid a node, or may use it again."""
ENDED = "Ended"
INVALID_CONFIGURATION = "InvalidConfiguration"

# --- Reasons of Events that are no reasons of conditions ---
CREATED = "Created"
DOWNLOADED = "Downloaded"
SCALED = "Scaled"
WOKE = "Woke"
ROLLOUT_STARTED = "RolloutStarted"
ROLLOUT_FINISHED = "RolloutFinished"

# --- Reasons of readiness gates of engine pods ---
GATEWAYS_ROUTE = "GatewaysRoute"
NO_GATEWAY_ROUTES = "NoGatewayRoutes"
ENGINE_NOT_READY = "EngineNotReady"
PASSED = "Passed"
REFUSED = "Refused"
VERIFICATION_REMOVED = "NotAsked"

# --- Reasons of scale changes by the autoscaler ---
ABOVE_MAXIMUM = "AboveMaximum"
BELOW_MINIMUM = "BelowMinimum"
REQUESTS_WAIT = "RequestsWait"
IDLE = "Idle"
ABOVE_TARGET = "AboveTarget"
"""Suffix of a reason that begins with the metric, such as `SaturationAboveTarget`."""
BELOW_TARGET = "BelowTarget"
"""Suffix of a reason that begins with the metric, such as `SaturationBelowTarget`."""

# --- Reasons of errors that end a reconcile, which is then retried; a label of a metric ---
UNREACHABLE = "Unreachable"
VANISHED = "Vanished"
NOT_SEEN_YET = "NotSeenYet"
NAME_PASSED = "NamePassed"
TIMEOUT = "Timeout"
UNEXPECTED = "Unexpected"

# --- Reasons given by Kubernetes; the operator compares them or passes them on ---
CRASH_LOOP_BACK_OFF = "CrashLoopBackOff"
CREATE_CONTAINER_CONFIG_ERROR = "CreateContainerConfigError"
CREATE_CONTAINER_ERROR = "CreateContainerError"
ERR_IMAGE_NEVER_PULL = "ErrImageNeverPull"
ERR_IMAGE_PULL = "ErrImagePull"
IMAGE_PULL_BACK_OFF = "ImagePullBackOff"
INVALID_IMAGE_NAME = "InvalidImageName"
RUN_CONTAINER_ERROR = "RunContainerError"
CONTAINER_CREATING = "ContainerCreating"
POD_INITIALIZING = "PodInitializing"
SCHEDULING_GATED = "SchedulingGated"
DELETION_BY_TAINT_MANAGER = "DeletionByTaintManager"
DELETION_BY_POD_GC = "DeletionByPodGC"
ERROR = "Error"
COMPLETED = "Completed"
OOM_KILLED = "OOMKilled"
DISRUPTED = "Disrupted"
"""Reason that the operator reports for a disrupted pod if Kubernetes gives no reason."""
