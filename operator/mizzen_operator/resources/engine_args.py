# SPDX-License-Identifier: Apache-2.0
"""Builds the command line of an engine's container, and reads a pod's rank from it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import InferenceService
from mizzen_operator.resources.fetch_job import model_path
from mizzen_operator.resources.group_member import GroupMember

COMMAND = "engine"
"""Subcommand of `mizzen` that an engine's container runs."""


def engine_arguments(service: InferenceService, name: str, member: GroupMember) -> list[str]:
    """Return the arguments of `mizzen` for an engine; options and values are separate items.

    Args:
        service: the service.
        name: name of the revision.
        member: the pod that the container belongs to.
    """
    engine, model = service.engine, service.model
    options = {
        "model": model_path(service),
        "served-name": model.served_name,
        "device": engine.device.lower(),
        "dtype": model.dtype.lower(),
        "context-length": model.context_length,
        "model-implementation": "" if model.implementation == "Auto" else model.implementation.lower(),
        "tensor": service.tensor,
        "expert": service.expert,
        "max-running-requests": engine.max_running_requests,
        "memory-fraction": engine.memory_fraction,
        "prefill-chunk-tokens": engine.prefill_chunk_tokens,
        "max-step-milliseconds": engine.max_step_milliseconds,
        "page-size": engine.page_size,
        "prefix-cache": engine.prefix_cache.lower(),
        "attention-prefill": _attention(engine.attention_prefill),
        "attention-decode": _attention(engine.attention_decode),
        "quantization": "" if engine.quantization == "Auto" else engine.quantization.lower(),
        "kv-cache-dtype": engine.kv_cache_dtype.lower(),
        "steps-in-flight": 2 if engine.overlap_scheduling == "Enabled" else 1,
        "cuda-graph": "auto" if engine.cuda_graph == "Auto" else "off",
        "cuda-graph-max-batch": engine.cuda_graph_max_batch,
        "revision": name,
        "engine-id": "$(POD_NAME)",
        "wire-bind": f"tcp://$(POD_IP):{labels.WIRE_PORT}",
        "keys": labels.KEYS_FOLDER,
        "http-host": "$(POD_IP)",
        "http-port": labels.ENGINE_HTTP_PORT,
        "termination-message": labels.TERMINATION_MESSAGE,
        "startup-timeout-seconds": service.lifecycle.startup_timeout,
        "drain-timeout-seconds": service.lifecycle.drain_timeout,
        **_node_options(service, member),
    }
    pairs = [(f"--{option}", str(value)) for option, value in options.items() if value not in (None, "")]
    return [COMMAND, *(item for pair in pairs for item in pair), *engine.extra_args]


def _node_options(service: InferenceService, member: GroupMember) -> dict[str, Any]:
    """Return the options with which the pods of a multi-pod group find one another."""
    if service.pods == 1:
        return {}
    leader = child_names.leader_dns_name(service.name, service.namespace, member.leader)
    return {
        "nodes": service.pods,
        "node-rank": member.rank,
        "leader-address": leader if member.rank else "",
        "ranks-address": "$(POD_IP)",
        "ranks-port": labels.RANKS_PORT,
    }


def rank_from_arguments(pod: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return an engine pod's rank and its group's number of pods, from its arguments, which cannot be edited.

    Returns None if an admission webhook has replaced the arguments.
    """
    containers = [entry for entry in pod["spec"]["containers"] if entry["name"] == labels.ENGINE]
    candidates = [container.get("args", ()) for container in containers]
    arguments = next((arguments for arguments in candidates if arguments[:1] == [COMMAND]), None)
    if arguments is None:
        return None
    options = dict(pairwise(arguments))
    return int(options.get("--node-rank", "0")), int(options.get("--nodes", "1"))


def _attention(backend: str) -> str:
    return "flashinfer-fa3" if backend == "FlashInferFA3" else backend.lower()
