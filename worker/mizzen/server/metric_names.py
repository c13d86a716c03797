"""Aliases of the engine's metrics under vLLM's and SGLang's names, and the values of all labels.

Endpoint pickers, autoscalers and dashboards look for these names on the engine: llm-d, the Gateway API
inference extension and AIBrix know either family, KEDA recipes mostly vLLM's. They are always exported: a
scrape is a few lines longer, and nothing has to be enabled.
"""

from __future__ import annotations

from mizzen.server.metric_catalogue import STARTUP_PHASES

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
"""vLLM's metric names, by field of the status block."""

USAGE = ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""Names of the gauge for the used share of the KV cache, 0 to 1; the last is vLLM's former name."""

TOKENS: dict[str, str] = {
    "sglang:num_used_tokens": "pages_used",
    "sglang:max_total_num_tokens": "pages_total",
}
"""Metrics that count KV in tokens, with the status field that counts the same in pages."""

SUCCESS = "vllm:request_success_total"
ABORTED = "sglang:num_aborted_requests_total"

CACHE_CONFIG: dict[str, tuple[str, str]] = {
    "sglang:cache_config_info": ("page_size", "num_pages"),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
}
"""Info metrics with the labels that hold the page size and the number of pages."""

LABELS: dict[str, tuple[str, str, str]] = {
    "model_name": ("1", "one", "name under which the engine serves the model"),
    "reason": ("11", "5 for requests, 11 for engines", "why a request, or the engine itself, ended"),
    "finished_reason": ("2", "`stop`, `length`", "how a successful request ended"),
    "version": ("1", "one", "version of the program"),
    "code": ("6", "refusal codes of the wire protocol, 6", "why a request or frame was refused"),
    "phase": (
        str(len(STARTUP_PHASES)),
        ", ".join(f"`{phase.name.lower()}`" for phase in STARTUP_PHASES),
        "phase of the startup",
    ),
    "state": ("4", "`starting`, `serving`, `draining`, `failed`", "state of the engine"),
    "page_size": ("1", "one", "tokens in a page"),
    "num_pages": ("1", "one", "pages of the KV cache"),
    "block_size": ("1", "one", "tokens in a page"),
    "num_gpu_blocks": ("1", "one", "pages of the KV cache"),
}
"""Maximum number of values, the values, and the meaning of each label, for docs/metrics.md."""
