# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of an InferenceService. The CRD sets defaults; methods derive values from several fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """`spec.model`; `context_length` is in tokens, or None for the model's own context length.

    Attributes:
        implementation: code that computes the model: `Auto`, `Native` or `Transformers`.
    """

    source: str
    served_name: str
    aliases: tuple[str, ...]
    dtype: str
    context_length: int | None
    implementation: str = "Auto"


@dataclass(frozen=True, slots=True)
class ModelCache:
    """`spec.model.cache`; `claim` and `path` are empty unless the mode uses them.

    Attributes:
        size: size of the claim that the operator creates; empty if the user creates the claim.
        when_deleted: what happens to the operator's claim when the service is deleted: `Retain` or `Delete`.
    """

    mode: str = "None"
    claim: str = ""
    path: str = ""
    size: str = ""
    storage_class: str = ""
    access_mode: str = "ReadWriteMany"
    when_deleted: str = "Retain"


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """Fields of `spec.model` that say how the weights are obtained; `Model` says which weights to obtain.

    Attributes:
        credentials: name of the Secret with the credentials, and the key in it; None if the spec names no
            Secret.
        endpoint: base URL to use instead of the source's default one; empty to use the default.
    """

    cache: ModelCache = ModelCache()
    credentials: tuple[str, str] | None = None
    endpoint: str = ""

    @property
    def cached(self) -> bool:
        """Whether the model is fetched into a cache."""
        return self.cache.mode != "None"


@dataclass(frozen=True, slots=True)
class Engine:
    """`spec.engine`; `image` is empty if the spec does not name one."""

    image: str
    device: str
    max_running_requests: int
    memory_fraction: str
    prefill_chunk_tokens: int
    max_step_milliseconds: int
    page_size: int
    prefix_cache: str
    attention_prefill: str
    attention_decode: str
    extra_args: tuple[str, ...]
    env: tuple[Mapping[str, Any], ...]
    kv_cache_dtype: str
    overlap_scheduling: str
    cuda_graph: str
    cuda_graph_max_batch: int
    quantization: str = "Auto"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`spec.accelerator`; `per_pod` is the number of GPUs per pod, and 0 on the CPU."""

    resource_name: str
    per_pod: int
    node_selector: Mapping[str, str]
    claim_template: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """`spec.gateway.admission`; `queue_timeout` is in seconds."""

    max_in_flight: int
    max_tokens_in_flight: int
    queue_size: int
    queue_timeout: int


@dataclass(frozen=True, slots=True)
class Retries:
    """`spec.gateway.retries`; `max_resumes` is 0 if streams are not resumed; times are in seconds."""

    max_attempts: int = 3
    max_resumes: int = 3
    resume_timeout: int = 60
    resume_wait: int = 1


@dataclass(frozen=True, slots=True)
class Images:
    """`spec.gateway.images`: limits of images in requests, and the hosts that they may come from.

    Attributes:
        max_images: maximum number of images in a request.
        max_bytes: maximum size of an image file.
        max_pixels: maximum number of pixels of an image before it is resized.
        hosts: hosts from which the gateway fetches images; empty if it fetches none.
    """

    max_images: int
    max_bytes: int
    max_pixels: int
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Gateway:
    """`spec.gateway`, without its mode; `warmup_timeout` is in seconds."""

    replicas: int
    service_type: str
    port: int
    annotations: Mapping[str, str]
    api_keys: tuple[str, ...]
    """Names of the Secrets with API keys."""
    tls_secret: str
    """Name of the Secret with the TLS certificate; empty if TLS is off."""
    cors_origins: tuple[str, ...]
    admission: Admission
    processes: int = 1
    resources: Mapping[str, Any] = field(default_factory=dict[str, Any])
    load_factor_percent: int = 150
    warmup_tokens: int = 16384
    warmup_timeout: int = 10
    retries: Retries = Retries()
    tool_parser: str = "Auto"
    reasoning_parser: str = "Auto"
    access_log: str = "Enabled"
    moderation_categories: Mapping[str, str] = field(default_factory=dict[str, str])
    """Categories of /v1/moderations, by the label of a classifier or guard model."""
    playground: bool = False
    grpc: bool = False
    images: Images | None = None
    """None in revisions of releases that did not know the field; the gateway's defaults apply then."""
    extra_args: tuple[str, ...] = ()
    pod_template: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`spec.gateway.podTemplate`, which is merged into the gateway's pods."""
    keys_from_label: bool = False
    """Whether the gateway reads API keys from Secrets with the label `mizzen.dev/api-keys`.

    If it does, every request needs an API key.
    """


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """`spec.lifecycle`; times are in seconds.

    Attributes:
        max_group_restarts: failures that a group may have within an hour; if it has more, it is not started
            again. 0 means no limit.
    """

    startup_timeout: int
    drain_timeout: int
    max_group_restarts: int = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """An entry of `spec.rollout.verification.prompts`; any continuation passes if `expected` is empty."""

    prompt: str
    expected: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Verification:
    """`spec.rollout.verification`; `timeout` is in seconds."""

    prompts: tuple[Prompt, ...]
    on_failure: str
    timeout: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """`spec.rollout`; `max_surge` and `max_unavailable` are numbers of groups, or percentages such as `25%`.

    `progress_deadline` is in seconds.
    """

    max_surge: int | str = 1
    max_unavailable: int | str = 0
    partition: int = 0
    paused: bool = False
    progress_deadline: int = 3600
    verification: Verification | None = None

    def surge_groups(self, groups: int) -> int:
        """Return the number of extra groups that a rollout of `groups` groups may create."""
        return _resolve_percent(self.max_surge, groups, up=True)

    def unavailable_groups(self, groups: int) -> int:
        """Return how many of `groups` groups may be missing during a rollout.

        The result is at least 1 if the rollout may create no extra groups.
        """
        rounded = min(groups, _resolve_percent(self.max_unavailable, groups, up=False))
        return rounded or (1 if self.surge_groups(groups) == 0 else 0)


def _resolve_percent(value: int | str, groups: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    exact = int(value.removesuffix("%")) * groups
    return -(-exact // 100) if up else exact // 100


@dataclass(frozen=True, slots=True)
class Availability:
    """`spec.availability`; `spread_key` is empty if groups are not spread."""

    disruption_budgets: bool = True
    spread_key: str = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class Tracing:
    """`spec.observability.tracing`; while `endpoint` is empty, the operator's options apply.

    Attributes:
        headers_secret: name and key of the Secret with headers of requests to the collector; None if the
            collector requires none.
    """

    endpoint: str = ""
    sampling_percent: int = 5
    headers_secret: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """`spec.autoscaling`; times are in seconds.

    Attributes:
        metric: `Saturation`, `QueueTokens` or `ActiveRequests`.
        target: target of the metric: percent for `Saturation`, else tokens or requests per group.
        idle_to_zero: idle time before the service is scaled to zero; None if it never is.
    """

    min_replicas: int
    max_replicas: int
    metric: str
    target: int
    up_stabilization: int
    down_stabilization: int
    idle_to_zero: int | None
    wake_timeout: int


@dataclass(frozen=True, slots=True)
class CommonMetadata:
    """`spec.commonMetadata`."""

    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class InferenceService:
    """An InferenceService as the API server holds it.

    Attributes:
        pod_template: `spec.podTemplate`, which is merged into the engine pods.
        status: status that was written last; empty if none was written yet.
    """

    name: str
    namespace: str
    uid: str
    generation: int
    deleting: bool
    model: Model
    replicas: int
    tensor: int
    accelerator: Accelerator
    engine: Engine
    pod_template: Mapping[str, Any]
    gateway: Gateway
    lifecycle: Lifecycle
    suspend: bool
    status: Mapping[str, Any]
    shares_gateway: bool = False
    """Whether the service uses the shared gateway of its namespace."""
    created: str = ""
    rollout: Rollout = Rollout()
    availability: Availability = Availability()
    tracing: Tracing = Tracing()
    history_limit: int = 5
    access: ModelAccess = ModelAccess()
    autoscaling: Autoscaling | None = None
    expert: int | None = None
    """Number of groups of ranks that hold different experts; None if the engine derives it."""
    network_policy: bool = False
    parameters: str = ""
    """`spec.model.parameters`; empty if it is not declared."""
    gpu_memory: str = ""
    """Memory of one GPU, such as `80Gi`; empty if it is not declared."""
    gpu_memory_field: str = "spec.accelerator.memory"
    """Field of the spec, or value of the operator's chart, that declares the memory of a GPU."""
    profile: str = ""
    """`spec.accelerator.profile`; empty if the spec does not name one, or if the engine runs on the CPU."""
    rotate_keys: str = ""
    """Value of the service's annotation mizzen.dev/rotate-keys; empty if it is not set."""
    pods: int = 1
    """Number of pods per group."""
    topology_key: str = ""
    """Node label that must be equal for all pods of a group; empty if there is no such constraint."""
    common: CommonMetadata = CommonMetadata()
    """Labels and annotations of all of the service's objects."""
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Spec as the API server holds it."""

    @property
    def groups(self) -> int:
        """Number of groups that should run."""
        return 0 if self.suspend else self.replicas


MAX_SCALE_HISTORY = 8
"""Maximum length of `status.scaleHistory`, the list of changes that the operator made to spec.replicas."""
