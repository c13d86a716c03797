"""Translates options of `mizzen engine` and `mizzen gateway`, in pods' messages, to fields of the service."""

from __future__ import annotations

import re

_OPTION = re.compile(r"(?<![\w.-])--([a-z][a-z-]*[a-z])(?:[ =]([a-z0-9][a-z0-9-]*)(?![\w./-]))?")
ENGINE_FIELDS = {
    "model": "spec.model.source",
    "dtype": "spec.model.dtype",
    "context-length": "spec.model.contextLength",
    "served-name": "spec.model.servedName",
    "tensor": "spec.parallelism.tensor",
    "device": "spec.engine.device",
    "max-running-requests": "spec.engine.maxRunningRequests",
    "memory-fraction": "spec.engine.memoryFraction",
    "prefill-chunk-tokens": "spec.engine.prefillChunkTokens",
    "max-step-milliseconds": "spec.engine.maxStepMilliseconds",
    "page-size": "spec.engine.pageSize",
    "prefix-cache": "spec.engine.prefixCache",
    "attention-prefill": "spec.engine.attention.prefill",
    "attention-decode": "spec.engine.attention.decode",
    "kv-cache-dtype": "spec.engine.kvCacheDtype",
    "cuda-graph": "spec.engine.cudaGraph.mode",
    "cuda-graph-max-batch": "spec.engine.cudaGraph.maxBatchSize",
    "startup-timeout-seconds": "spec.lifecycle.startupTimeoutSeconds",
    "drain-timeout-seconds": "spec.lifecycle.drainTimeoutSeconds",
}
"""Fields that set options of an engine, by option."""
GATEWAY_FIELDS = {
    "served-name": "spec.model.servedName",
    "alias": "spec.model.aliases",
    "cors-origin": "spec.gateway.cors.allowOrigins",
    "api-keys-file": "spec.gateway.apiKeys",
    "tls-cert": "spec.gateway.tls.secretName",
    "tls-key": "spec.gateway.tls.secretName",
    "tool-parser": "spec.gateway.toolParser",
    "reasoning-parser": "spec.gateway.reasoningParser",
    "max-in-flight": "spec.gateway.admission.maxInFlight",
    "max-tokens-in-flight": "spec.gateway.admission.maxTokensInFlight",
    "queue-size": "spec.gateway.admission.queueSize",
    "queue-timeout-seconds": "spec.gateway.admission.queueTimeoutSeconds",
    "max-attempts": "spec.gateway.retries.maxAttempts",
    "max-resumes": "spec.gateway.retries.maxResumes",
    "resume-timeout-seconds": "spec.gateway.retries.resumeTimeoutSeconds",
    "resume-wait-seconds": "spec.gateway.retries.resumeWaitSeconds",
    "load-factor-percent": "spec.gateway.routing.loadFactorPercent",
    "warm-tokens": "spec.gateway.routing.warmupTokens",
    "warm-seconds": "spec.gateway.routing.warmupTimeoutSeconds",
    "processes": "spec.gateway.processes",
    "access-log": "spec.gateway.accessLog",
    "wake-timeout-seconds": "spec.autoscaling.wakeTimeoutSeconds",
    "otlp-endpoint": "spec.observability.tracing.otlpEndpoint",
    "drain-timeout-seconds": "spec.lifecycle.drainTimeoutSeconds",
}
"""Fields that set options of a gateway, by option."""
_VALUES = {
    "auto": "Auto",
    "bfloat16": "BFloat16",
    "cpu": "CPU",
    "cuda": "CUDA",
    "fa3": "FA3",
    "flashinfer": "FlashInfer",
    "flashinfer-fa3": "FlashInferFA3",
    "float16": "Float16",
    "float32": "Float32",
    "fp8": "FP8",
    "none": "None",
    "off": "Disabled",
    "radix": "Radix",
    "reference": "Reference",
    "split": "Split",
}
"""Values of fields, by the values of their options."""


def translate_engine_options(message: str) -> str:
    """Return an engine's message with options replaced by the fields that set them, with their values.

    Options that only `spec.engine.extraArgs` can set stay unchanged.
    """
    return _translate(message, ENGINE_FIELDS)


def translate_gateway_options(message: str) -> str:
    """Return a gateway's message with options replaced by the fields that set them, with their values."""
    return _translate(message, GATEWAY_FIELDS)


def _translate(message: str, fields: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        field, value = fields.get(match[1]), match[2]
        if field is None:
            return match[0]
        return f"{field} {_VALUES.get(value, value)}" if value else field

    return _OPTION.sub(replace, message)
