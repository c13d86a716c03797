# SPDX-License-Identifier: Apache-2.0
"""Translates options of `mizzen`, in messages of pods, to the fields of the service that set them."""

from __future__ import annotations

import re

from mizzen_operator.api import labels
from mizzen_operator.resources.gateway_deployment import ACCESS_LOG, REASONING_PARSERS, TOOL_PARSERS

_OPTION = re.compile(r"(?<![\w.-])--([a-z][a-z-]*[a-z])(?:[ =]([a-z0-9][a-z0-9-]*)(?![\w./-]))?")
ENGINE_FIELDS = {
    "model": "spec.model.source",
    "dtype": "spec.model.dtype",
    "context-length": "spec.model.contextLength",
    "model-implementation": "spec.model.implementation",
    "served-name": "spec.model.servedName",
    "tensor": "spec.parallelism.tensor",
    "expert": "spec.parallelism.expert",
    "nodes": "spec.parallelism.tensor / spec.accelerator.perPod",
    "device": "spec.engine.device",
    "max-running-requests": "spec.engine.maxRunningRequests",
    "memory-fraction": "spec.engine.memoryFraction",
    "prefill-chunk-tokens": "spec.engine.prefillChunkTokens",
    "max-step-milliseconds": "spec.engine.maxStepMilliseconds",
    "page-size": "spec.engine.pageSize",
    "prefix-cache": "spec.engine.prefixCache",
    "attention-prefill": "spec.engine.attention.prefill",
    "attention-decode": "spec.engine.attention.decode",
    "quantization": "spec.engine.quantization",
    "kv-cache-dtype": "spec.engine.kvCacheDtype",
    "steps-in-flight": "spec.engine.overlapScheduling",
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
    "moderation-category": "spec.gateway.moderation.categories",
    "max-images": "spec.gateway.images.maxPerRequest",
    "max-image-bytes": "spec.gateway.images.maxBytes",
    "max-image-pixels": "spec.gateway.images.maxPixels",
    "image-urls": "spec.gateway.images.urls",
    "image-hosts": "spec.gateway.images.allowHosts",
    "playground": "spec.gateway.playground",
    "grpc-port": "spec.gateway.grpc",
    "suspended": "spec.suspend",
    "wake-timeout-seconds": "spec.autoscaling.wakeTimeoutSeconds",
    "otlp-endpoint": "spec.observability.tracing.otlpEndpoint",
    "otlp-headers-file": "spec.observability.tracing.headersSecretRef",
    "drain-timeout-seconds": "spec.lifecycle.drainTimeoutSeconds",
}
"""Fields that set options of a gateway, by option."""
FETCH_FIELDS = {
    "endpoint": "spec.model.endpoint",
    "credentials": "spec.model.credentialsSecretRef",
}
"""Fields that set options of the program that fetches a model, by option."""
_FIELDS = ENGINE_FIELDS | GATEWAY_FIELDS | FETCH_FIELDS
"""Fields of all programs: a message may name an option of another program, for example as advice."""
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
    "int8": "INT8",
    "none": "None",
    "off": "Disabled",
    "radix": "Radix",
    "reference": "Reference",
    "split": "Split",
    "w4a16": "W4A16",
}
"""Values of fields, by the values of their options, unless `_VALUES_BY_OPTION` has the option."""
_VALUES_BY_OPTION = {
    "access-log": {value: name for name, value in ACCESS_LOG.items()},
    "image-urls": {"allowed": "Allowed", "refused": "Refused"},
    "grpc-port": {str(labels.GRPC_PORT): "Enabled"},
    "model-implementation": {"auto": "Auto", "native": "Native", "transformers": "Transformers"},
    "reasoning-parser": {value: name for name, value in REASONING_PARSERS.items()},
    "steps-in-flight": {"1": "Disabled", "2": "Enabled"},
    "tool-parser": {value: name for name, value in TOOL_PARSERS.items()},
}
_USAGE = re.compile(r"\A\s*Usage: mizzen .*?\nError: ", re.DOTALL)
"""Beginning of the output of `mizzen` if its arguments are wrong."""
_UNKNOWN_OPTION = "No such option: "
_OPTION_ORIGIN = "; options come from {}.extraArgs, or from an operator of another release than the image"


def translate_engine_options(message: str) -> str:
    """Return a message of an engine's pod with options replaced by the fields that set them.

    Options that only `spec.engine.extraArgs` can set stay unchanged.
    """
    return _translate(_shorten_usage(message, "spec.engine"))


def translate_gateway_options(message: str) -> str:
    """Return a gateway's message with options replaced by the fields that set them, with their values."""
    return _translate(_shorten_usage(message, "spec.gateway"))


def translate_fetch_options(message: str) -> str:
    """Return a fetch's message with options replaced by the fields that set them."""
    return _translate(message)


def _shorten_usage(message: str, field: str) -> str:
    """Return a message without the hint at the command line's help, which a pod's user cannot follow.

    Args:
        message: the message of a pod.
        field: the field whose `extraArgs` the pod's command line contains.
    """
    match = _USAGE.match(message)
    if match is None:
        return message
    error = message[match.end() :].strip()
    origin = _OPTION_ORIGIN.format(field) if error.startswith(_UNKNOWN_OPTION) else ""
    return f"wrong configuration: {error}{origin}"


def _translate(message: str) -> str:
    def replace(match: re.Match[str]) -> str:
        option, value = match.groups()
        field = _FIELDS.get(option)
        if field is None:
            return match[0]
        return f"{field} {_VALUES_BY_OPTION.get(option, _VALUES).get(value, value)}" if value else field

    return _OPTION.sub(replace, message)
