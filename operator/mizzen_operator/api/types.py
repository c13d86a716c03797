"""Typed view of an InferenceService. Defaults live in the CRD; what spans fields is derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Model:
    """`spec.model`."""

    source: str
    served_name: str
    aliases: tuple[str, ...]
    dtype: str
    context_length: int | None


@dataclass(frozen=True, slots=True)
class ModelCache:
    """`spec.model.cache`; `claim` and `path` are empty unless the mode is theirs.

    Attributes:
        size: of the claim that is made where it is missing; empty when the user makes it.
        when_deleted: what becomes of a claim that was made when the service goes: `Retain` or `Delete`.
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
    """What of `spec.model` says how weights come to a node, and not which.

    Attributes:
        credentials: name of a Secret and key in it; None without.
        endpoint: base URL in place of the source's own; empty without.
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
    """`spec.engine`; `image` is empty when the spec names none."""

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


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`spec.accelerator`; `per_pod` is GPUs in force, 0 on CPU; `claim_template` is empty without."""

    resource_name: str
    per_pod: int
    node_selector: Mapping[str, str]
    claim_template: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """`spec.gateway.admission`."""

    max_in_flight: int
    max_tokens_in_flight: int
    queue_size: int
    queue_timeout: int


@dataclass(frozen=True, slots=True)
class Retries:
    """`spec.gateway.retries`; `max_resumes` is 0 when streams are not resumed; times in seconds."""

    max_attempts: int = 3
    max_resumes: int = 3
    resume_timeout: int = 60
    resume_wait: int = 1


@dataclass(frozen=True, slots=True)
class Gateway:
    """`spec.gateway`, without its mode."""

    replicas: int
    service_type: str
    port: int
    annotations: Mapping[str, str]
    api_keys: tuple[str, ...]
    """Names of Secrets with API keys."""
    tls_secret: str
    """Name of the Secret with the certificate; empty without TLS."""
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
    extra_args: tuple[str, ...] = ()
    keys_from_label: bool = False
    """Whether API keys are also in Secrets with the label `mizzen.dev/api-keys`; nobody is served without."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """`spec.lifecycle`; times in seconds.

    Attributes:
        max_group_restarts: failures of a group within an hour that are forgiven; 0 forgives all.
    """

    startup_timeout: int
    drain_timeout: int
    max_group_restarts: int = 10


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of `spec.rollout.verification.prompts`; any continuation is right when `expected` is empty."""

    prompt: str
    expected: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Verification:
    """`spec.rollout.verification`; `timeout` in seconds."""

    prompts: tuple[Prompt, ...]
    on_failure: str
    timeout: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """`spec.rollout`; surge and unavailable are numbers of groups or shares such as `25%`."""

    max_surge: int | str = 1
    max_unavailable: int | str = 0
    partition: int = 0
    paused: bool = False
    progress_deadline: int = 3600
    verification: Verification | None = None

    def surge_groups(self, groups: int) -> int:
        """Groups beyond `groups` that may be there while groups are replaced."""
        return _resolve_percent(self.max_surge, groups, up=True)

    def unavailable_groups(self, groups: int) -> int:
        """Groups that may be missing while groups are replaced; 1 where nothing could be replaced else."""
        rounded = min(groups, _resolve_percent(self.max_unavailable, groups, up=False))
        return rounded or (1 if self.surge_groups(groups) == 0 else 0)


def _resolve_percent(value: int | str, groups: int, *, up: bool) -> int:
    if isinstance(value, int):
        return value
    exact = int(value.removesuffix("%")) * groups
    return -(-exact // 100) if up else exact // 100


@dataclass(frozen=True, slots=True)
class Availability:
    """`spec.availability`; `spread_key` is empty when groups are not spread."""

    disruption_budgets: bool = True
    spread_key: str = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True)
class Tracing:
    """`spec.observability.tracing`; nothing is traced while `endpoint` is empty."""

    endpoint: str = ""
    sampling_percent: int = 5


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """`spec.autoscaling`; times in seconds.

    Attributes:
        metric: `Saturation`, `QueueTokens` or `ActiveRequests`.
        target: percent for `Saturation`, else the number for each group.
        idle_to_zero: None when the service is never scaled to zero.
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
class InferenceService:
    """One InferenceService as the API server holds it.

    Attributes:
        pod_template: `spec.podTemplate`, the overlay of the engine's pods.
        status: the status that was written last; empty before the first.
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
    shared: bool = False
    """Whether it shares its namespace's gateway."""
    created: str = ""
    rollout: Rollout = Rollout()
    availability: Availability = Availability()
    tracing: Tracing = Tracing()
    history_limit: int = 5
    access: ModelAccess = ModelAccess()
    autoscaling: Autoscaling | None = None
    network_policy: bool = False
    parameters: str = ""
    """`spec.model.parameters`; empty when nobody says."""
    gpu_memory: str = ""
    """`spec.accelerator.memory`; empty when nobody says."""
    rotate_keys: str = ""
    """Its annotation mizzen.dev/rotate-keys."""
    pods: int = 1
    """Pods of a group."""
    topology_key: str = ""
    """Label of nodes that is the same for all pods of a group; empty when it need not be."""
    spec: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """As the API server holds it."""

    @property
    def groups(self) -> int:
        """Number of groups that should run."""
        return 0 if self.suspend else self.replicas


MAX_SCALE_HISTORY = 8
"""Changes of spec.replicas by the operator that are told."""
