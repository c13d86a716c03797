# SPDX-License-Identifier: Apache-2.0
"""Parses an InferenceService from the API server's JSON into the dataclasses of `types.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.api.field_errors import describe_field_error
from mizzen_operator.api.types import (
    Accelerator,
    Admission,
    Autoscaling,
    Availability,
    CommonMetadata,
    Engine,
    Gateway,
    Images,
    InferenceService,
    Lifecycle,
    Model,
    ModelAccess,
    ModelCache,
    Prompt,
    Retries,
    Rollout,
    Tracing,
    Verification,
)

PROMPT_TOKENS = 16
"""Default of a prompt's `maxTokens`.

The schema has no defaults within list items, because tools that compare whole lists, such as `kubectl apply`,
would find a difference in every list that omits the field.
"""


class InvalidServiceError(ValueError):
    """An object does not match this release's CRD; the message names the field and the remedy."""


def parse_service(body: Mapping[str, Any]) -> InferenceService:
    """Parse an InferenceService as the API server returns it.

    Raises:
        InvalidServiceError: a field that the CRD requires or defaults is missing, or has a value that the CRD
            rejects, because the object was stored under the CRD of another release.
    """
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidServiceError(f"{describe_field_error(_parse, body)}; {_REMEDY}") from error


_REMEDY = (
    "the CRD of the cluster is older or newer than the operator: upgrade both together (helm upgrade, or "
    "kubectl apply --server-side --force-conflicts -f crds/inferenceservices.yaml), and apply the service "
    "again if that does not help"
)


def _parse(body: Mapping[str, Any]) -> InferenceService:
    meta, spec = body["metadata"], body["spec"]
    model, engine, gateway = spec["model"], spec["engine"], spec["gateway"]
    tensor, common = spec["parallelism"]["tensor"], spec.get("commonMetadata", {})
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
            implementation=model.get("implementation", "Auto"),
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
        shares_gateway=gateway["mode"] == "Shared",
        created=meta.get("creationTimestamp", ""),
        rollout=_rollout(spec["rollout"]),
        availability=Availability(
            disruption_budgets=spec["availability"]["podDisruptionBudget"] == "Auto",
            spread_key=spec["availability"]["spreadTopologyKey"],
        ),
        tracing=_tracing(spec["observability"]["tracing"]),
        history_limit=spec["revisionHistoryLimit"],
        access=_access(model),
        autoscaling=_autoscaling(spec.get("autoscaling")),
        network_policy=spec["networkPolicy"] == "Enabled",
        parameters=model.get("parameters", ""),
        gpu_memory=spec["accelerator"].get("memory", ""),
        profile="" if engine["device"] == "CPU" else spec["accelerator"].get("profile", ""),
        rotate_keys=meta.get("annotations", {}).get(labels.ROTATE_KEYS, ""),
        pods=tensor // spec["accelerator"].get("perPod", tensor),
        topology_key=spec["parallelism"].get("topologyKey", ""),
        expert=spec["parallelism"].get("expert"),
        common=CommonMetadata(common.get("labels", {}), common.get("annotations", {})),
        spec=spec,
    )


def _tracing(given: Mapping[str, Any]) -> Tracing:
    secret = given.get("headersSecretRef")
    return Tracing(
        endpoint=given["otlpEndpoint"],
        sampling_percent=given["samplingPercent"],
        headers_secret=(secret["name"], secret["key"]) if secret else None,
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
            access_mode=cache.get("accessMode", "ReadWriteMany"),  # absent in revisions of older releases
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
        max_surge=_int_or_percent(given["maxSurge"]),
        max_unavailable=_int_or_percent(given["maxUnavailable"]),
        partition=given["partition"],
        paused=given["paused"],
        progress_deadline=given["progressDeadlineSeconds"],
        verification=_verification(verification) if verification else None,
    )


def _int_or_percent(given: int | str) -> int | str:
    if isinstance(given, str) and not (given.endswith("%") and given[:-1].isdecimal()):
        raise ValueError(f"{given[:64]!r} is not a percentage such as '25%'")
    return given


def _verification(given: Mapping[str, Any]) -> Verification:
    return Verification(
        prompts=tuple(
            Prompt(entry["prompt"], entry.get("expected", ""), entry.get("maxTokens", PROMPT_TOKENS))
            for entry in given["prompts"]
        ),
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
        moderation_categories=given.get("moderation", {}).get("categories", {}),
        playground=given.get("playground") == "Enabled",  # absent in revisions of older releases
        grpc=given.get("grpc") == "Enabled",  # absent in revisions of older releases
        images=_images(given.get("images")),
        extra_args=tuple(given["extraArgs"]),
        keys_from_label=given["apiKeys"]["fromLabel"],
        pod_template=given.get("podTemplate", {}),  # absent in revisions of older releases
    )


def _images(given: Mapping[str, Any] | None) -> Images | None:
    if given is None:
        return None
    return Images(
        max_images=given["maxPerRequest"],
        max_bytes=given["maxBytes"],
        max_pixels=given["maxPixels"],
        hosts=tuple(given["allowHosts"]) if given["urls"] == "Allowed" else (),
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


def _decimal(given: str | float) -> str:
    """Return a decimal as a string; the manifest may have a number or a string.

    Raises:
        TypeError: it has a value of another type, which the CRD does not exclude.
    """
    if isinstance(given, bool) or not isinstance(given, str | float | int):
        raise TypeError("neither a number nor a string")
    return str(given)


def _engine(given: Mapping[str, Any]) -> Engine:
    return Engine(
        image=given.get("image", ""),
        device=given["device"],
        max_running_requests=given["maxRunningRequests"],
        memory_fraction=_decimal(given["memoryFraction"]),
        prefill_chunk_tokens=given["prefillChunkTokens"],
        max_step_milliseconds=given["maxStepMilliseconds"],
        page_size=given["pageSize"],
        prefix_cache=given["prefixCache"],
        attention_prefill=given["attention"]["prefill"],
        attention_decode=given["attention"]["decode"],
        extra_args=tuple(given["extraArgs"]),
        env=tuple(given["env"]),
        kv_cache_dtype=given["kvCacheDtype"],
        quantization=given.get("quantization", "Auto"),
        overlap_scheduling=given["overlapScheduling"],
        cuda_graph=given["cudaGraph"]["mode"],
        cuda_graph_max_batch=given["cudaGraph"]["maxBatchSize"],
    )
