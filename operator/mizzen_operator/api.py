"""Typed view of an InferenceService. Defaults live in the CRD; what spans fields is derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`spec.accelerator`; `per_pod` is the value in force, 0 on CPU."""

    resource_name: str
    per_pod: int
    node_selector: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Admission:
    """`spec.gateway.admission`."""

    max_in_flight: int
    max_tokens_in_flight: int
    queue_size: int
    queue_timeout: int


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
    keys_from_label: bool = False
    """Whether API keys are also in Secrets with the label `mizzen.dev/api-keys`; nobody is served without."""


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """`spec.lifecycle`, in seconds."""

    startup_timeout: int
    drain_timeout: int


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
        ),
        suspend=spec["suspend"],
        status=body.get("status") or {},
        shared=gateway["mode"] == "Shared",
        created=meta.get("creationTimestamp", ""),
    )


def _gateway(given: Mapping[str, Any]) -> Gateway:
    admission = given["admission"]
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
        keys_from_label=given["apiKeys"]["fromLabel"],
    )


def _accelerator(spec: Mapping[str, Any], tensor: int) -> Accelerator:
    given = spec["accelerator"]
    on_cpu = spec["engine"]["device"] == "CPU"
    return Accelerator(
        resource_name=given["resourceName"],
        per_pod=0 if on_cpu else given.get("perPod", tensor),
        node_selector=given["nodeSelector"],
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
    )
