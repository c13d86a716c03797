# SPDX-License-Identifier: Apache-2.0
"""Aliases of the engine's metrics under vLLM's and SGLang's names, and the values of all labels.

Endpoint pickers, autoscalers and dashboards query engines by these names: llm-d, the Gateway API inference
extension and AIBrix support both sets of names; KEDA recipes mostly use vLLM's. The aliases are always
exported; they cost only a few lines per scrape.
"""

from __future__ import annotations

from mizzen.engine.info import WEIGHT_FORMATS
from mizzen.server.metric_catalogue import EXPERT_LAYERS, STARTUP_PHASES

VLLM: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prefix_cache_queries_total"),
    "cached_tokens": ("vllm:prefix_cache_hits_total",),
    "output_tokens": ("vllm:generation_tokens_total",),
    "first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "between_tokens_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "request_seconds": ("vllm:e2e_request_latency_seconds",),
}
"""vLLM's names for each metric, by the metric's field in the status block."""

USAGE = ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Names of the gauge for the used share of the KV cache, 0 to 1; the last one is vLLM's former name."""

TOKENS: dict[str, str] = {
    "sglang:num_used_tokens": "pages_used",
    "sglang:max_total_num_tokens": "pages_total",
}
"""Metrics that count the KV cache in tokens, with the status field that holds the same number in pages."""

SUCCESS = "vllm:request_success_total"
ABORTED = "sglang:num_aborted_requests_total"

CACHE_CONFIG: dict[str, tuple[str, str]] = {
    "sglang:cache_config_info": ("page_size", "num_pages"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
"""Info metrics, with their labels for the page size in tokens and for the number of pages."""

LABELS: dict[str, tuple[str, str, str]] = {
    "model_name": ("1", "the served name", "name under which the engine serves the model"),
    "reason": (
        "11",
        "5 reasons of requests, 11 reasons of engines, 9 reasons of images",
        "why a request or the engine ended, or an image was rejected",
    ),
    "finished_reason": ("2", "`stop`, `length`", "how a successful request ended"),
    "version": ("1", "the running version", "version of the program"),
    "code": ("6", "refusal codes of the wire protocol", "why a request or frame was refused"),
    "phase": (
        str(len(STARTUP_PHASES)),
        ", ".join(f"`{phase.name.lower()}`" for phase in STARTUP_PHASES),
        "phase of the startup",
    ),
    "format": (
        str(len(WEIGHT_FORMATS)),
        ", ".join(f"`{name}`" for name in WEIGHT_FORMATS),
        "format of weights in memory",
    ),
    "layer": (
        str(EXPERT_LAYERS),
        "layers of the model that have experts, from 0 on",
        "index of a layer in the model",
    ),
    "state": ("4", "`starting`, `serving`, `draining`, `failed`", "state of the engine"),
    "page_size": ("1", "the engine's `--page-size`", "number of tokens in a page"),
    "num_pages": ("1", "a number", "number of pages in the KV cache"),
    "block_size": ("1", "the engine's `--page-size`", "number of tokens in a page"),
    "num_gpu_blocks": ("1", "a number", "number of pages in the KV cache"),
}
"""For each label: the maximum number of its values, the values, and its meaning, as in docs/metrics.md."""
