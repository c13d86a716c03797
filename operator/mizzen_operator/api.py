"""Typed view of an InferenceService. Defaults live in the CRD; what spans fields is derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator import labels


class ApiError(ValueError):
    """An object lacks a field that the CRD gives every object; names the field."""


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

    def surge(self, groups: int) -> int:
        """Groups beyond `groups` that may be there while groups are replaced."""
        return _share(self.max_surge, groups, up=True)

    def unavailable(self, groups: int) -> int:
        """Groups that may be missing while groups are replaced; 1 where nothing could be replaced else."""
        rounded = min(groups, _share(self.max_unavailable, groups, up=False))
        return rounded or (1 if self.surge(groups) == 0 else 0)


def _share(value: int | str, groups: int, *, up: bool) -> int:
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


def parse(body: Mapping[str, Any]) -> InferenceService:
    """Read an object of the API server.

    Raises:
        ApiError: a field that the CRD requires or defaults is missing, so the installed CRD is not ours.
    """
    try:
        return _parse(body)
    except (KeyError, TypeError) as error:
        raise ApiError(f"the object lacks {error}: install the CRD of this release") from error


def _parse(body: Mapping[str, Any]) -> InferenceService:
    meta, spec = body["metadata"], body["spec"]
    model, engine, gateway = spec["model"], spec["engine"], spec["gateway"]
    tensor = spec["parallelism"]["tensor"]
    return InferenceService(
        name=meta["name"],
        namespace=meta["namespace"],
        uid=meta["uid"],
        generation=meta["generation"],
        deleting="deletionTimestamp" in meta,
        model=Model(
            source=model["source"],
            served_name=model.get("servedName") or meta["name"],
            aliases=tuple(model["aliases"]),
            dtype=model["dtype"],
            context_length=model.get("contextLength"),
        ),
        replicas=spec["replicas"],
        tensor=tensor,
        accelerator=_accelerator(spec, tensor),
        engine=_engine(engine),
        pod_template=spec["podTemplate"],
        gateway=_gateway(gateway),
        lifecycle=Lifecycle(
            startup_timeout=spec["lifecycle"]["startupTimeoutSeconds"],
            drain_timeout=spec["lifecycle"]["drainTimeoutSeconds"],
            max_group_restarts=spec["lifecycle"]["maxGroupRestarts"],
        ),
        suspend=spec["suspend"],
        status=body.get("status") or {},
        shared=gateway["mode"] == "Shared",
        created=meta.get("creationTimestamp", ""),
        rollout=_rollout(spec["rollout"]),
        availability=Availability(
            disruption_budgets=spec["availability"]["podDisruptionBudget"] == "Auto",
            spread_key=spec["availability"]["spreadTopologyKey"],
        ),
        tracing=Tracing(
            endpoint=spec["observability"]["tracing"]["otlpEndpoint"],
            sampling_percent=spec["observability"]["tracing"]["samplingPercent"],
        ),
        history_limit=spec["revisionHistoryLimit"],
        access=_access(model),
        autoscaling=_autoscaling(spec.get("autoscaling")),
        network_policy=spec["networkPolicy"] == "Enabled",
        parameters=model.get("parameters", ""),
        gpu_memory=spec["accelerator"].get("memory", ""),
        rotate_keys=meta.get("annotations", {}).get(labels.ROTATE_KEYS, ""),
        pods=tensor // spec["accelerator"].get("perPod", tensor),
        topology_key=spec["parallelism"].get("topologyKey", ""),
        spec=spec,
    )


def _access(given: Mapping[str, Any]) -> ModelAccess:
    cache, secret = given["cache"], given.get("credentialsSecretRef")
    return ModelAccess(
        cache=ModelCache(
            mode=cache["mode"],
            claim=cache.get("claimName", ""),
            path=cache.get("path", ""),
            size=str(cache.get("size", "")),
            storage_class=cache.get("storageClassName", ""),
            access_mode=cache.get("accessMode", "ReadWriteMany"),  # older revisions have none
            when_deleted=cache.get("whenDeleted", "Retain"),
        ),
        endpoint=given.get("endpoint", ""),
        credentials=(secret["name"], secret["key"]) if secret else None,
    )


def _autoscaling(given: Mapping[str, Any] | None) -> Autoscaling | None:
    if given is None:
        return None
    metric = given["metric"]
    return Autoscaling(
        min_replicas=given["minReplicas"],
        max_replicas=given["maxReplicas"],
        metric=metric["type"],
        target=metric["targetPercent"] if metric["type"] == "Saturation" else metric["targetValue"],
        up_stabilization=given["scaleUpStabilizationSeconds"],
        down_stabilization=given["scaleDownStabilizationSeconds"],
        idle_to_zero=given.get("idleSecondsToZero"),
        wake_timeout=given["wakeTimeoutSeconds"],
    )


def _rollout(given: Mapping[str, Any]) -> Rollout:
    verification = given.get("verification")
    return Rollout(
        max_surge=given["maxSurge"],
        max_unavailable=given["maxUnavailable"],
        partition=given["partition"],
        paused=given["paused"],
        progress_deadline=given["progressDeadlineSeconds"],
        verification=_verification(verification) if verification else None,
    )


def _verification(given: Mapping[str, Any]) -> Verification:
    return Verification(
        prompts=tuple(Prompt(one["prompt"], one["expected"], one["maxTokens"]) for one in given["prompts"]),
        on_failure=given["onFailure"],
        timeout=given["timeoutSeconds"],
    )


def _gateway(given: Mapping[str, Any]) -> Gateway:
    admission, retries = given["admission"], given["retries"]
    return Gateway(
        replicas=given["replicas"],
        service_type=given["service"]["type"],
        port=given["service"]["port"],
        annotations=given["service"]["annotations"],
        api_keys=tuple(given["apiKeys"]["secretNames"]),
        tls_secret=given.get("tls", {}).get("secretName", ""),
        cors_origins=tuple(given["cors"]["allowOrigins"]),
        admission=Admission(
            max_in_flight=admission["maxInFlight"],
            max_tokens_in_flight=admission["maxTokensInFlight"],
            queue_size=admission["queueSize"],
            queue_timeout=admission["queueTimeoutSeconds"],
        ),
        processes=given["processes"],
        resources=given["resources"],
        load_factor_percent=given["routing"]["loadFactorPercent"],
        warmup_tokens=given["routing"]["warmupTokens"],
        warmup_timeout=given["routing"]["warmupTimeoutSeconds"],
        retries=Retries(
            max_attempts=retries["maxAttempts"],
            max_resumes=retries["maxResumes"] if retries["streamResume"] == "Enabled" else 0,
            resume_timeout=retries["resumeTimeoutSeconds"],
            resume_wait=retries["resumeWaitSeconds"],
        ),
        tool_parser=given["toolParser"],
        reasoning_parser=given["reasoningParser"],
        access_log=given["accessLog"],
        extra_args=tuple(given["extraArgs"]),
        keys_from_label=given["apiKeys"]["fromLabel"],
    )


def _accelerator(spec: Mapping[str, Any], tensor: int) -> Accelerator:
    given = spec["accelerator"]
    on_cpu = spec["engine"]["device"] == "CPU"
    return Accelerator(
        resource_name=given["resourceName"],
        per_pod=0 if on_cpu else given.get("perPod", tensor),
        node_selector=given["nodeSelector"],
        claim_template=given.get("resourceClaimTemplateName", ""),
    )


def _engine(given: Mapping[str, Any]) -> Engine:
    return Engine(
        image=given.get("image", ""),
        device=given["device"],
        max_running_requests=given["maxRunningRequests"],
        memory_fraction=given["memoryFraction"],
        prefill_chunk_tokens=given["prefillChunkTokens"],
        max_step_milliseconds=given["maxStepMilliseconds"],
        page_size=given["pageSize"],
        prefix_cache=given["prefixCache"],
        attention_prefill=given["attention"]["prefill"],
        attention_decode=given["attention"]["decode"],
        extra_args=tuple(given["extraArgs"]),
        env=tuple(given["env"]),
        kv_cache_dtype=given["kvCacheDtype"],
        overlap_scheduling=given["overlapScheduling"],
        cuda_graph=given["cudaGraph"]["mode"],
        cuda_graph_max_batch=given["cudaGraph"]["maxBatchSize"],
    )
