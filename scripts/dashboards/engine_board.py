# SPDX-License-Identifier: Apache-2.0
"""The engine dashboard: batches, KV cache, steps and startup phases."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantiles, rate

OF = 'namespace=~"$namespace",service=~"$service",pod=~"$pod"'

ENGINES = f"max by (namespace, pod) (mizzen_engine_uptime_seconds{{{OF}}})"
"""One series for each selected engine pod."""


def gpu(metric: str) -> str:
    """Return a metric of the DCGM exporter as PromQL, for the GPUs of the selected engines.

    Prometheus renames the exporter's labels `pod` and `namespace` to `exported_pod` and `exported_namespace`
    unless it honors them; both are accepted.
    """
    series = metric
    for label in ("pod", "namespace"):
        series = f'label_replace({series}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f"max by (namespace, pod, gpu) ({series}) and on (namespace, pod) {ENGINES}"


def each(metric: str, legend: str = "{{pod}}") -> Query:
    """Return a query for a gauge of the selected engines, with one series per engine."""
    return Query(f"mizzen_engine_{metric}{{{OF}}}", legend)


def grown(metric: str, by: str = "pod") -> str:
    """Return the per-second rate of a counter of the selected engines as PromQL, summed by a label."""
    return rate(f"mizzen_engine_{metric}", by, OF)


BATCH = Row(
    "Batch and queue",
    (
        Panel(
            "Running requests",
            "Requests that hold a slot of the batch, by engine; at most `spec.engine.maxRunningRequests`.",
            "short", (each("running_requests"),),
        ),
        Panel(
            "Waiting requests",
            "Requests in the engine's own queue. If it stays above 0, the batch or the KV cache is full.",
            "short", (each("waiting_requests"),), yellow=8, red=64,
        ),
        Panel(
            "Waiting prompt tokens",
            "Prompt tokens of the requests in the engine's queue: the prefill work that is still to be done.",
            "short", (each("waiting_tokens"),),
        ),
        Panel(
            "Oldest wait for a first token",
            "Time that the oldest request without a first token has been waiting, by engine.",
            "s", (each("oldest_wait_seconds"),), yellow=5, red=15,
        ),
        Panel(
            "Tokens per step",
            "Average number of tokens that a step generates: the size of the decode batch.",
            "short", (Query(f"{grown('output_tokens_total')} / {grown('steps_total')}", "{{pod}}"),),
        ),
        Panel(
            "Finished requests",
            "Requests per second that finished, by reason: a stop token, their maximum length, an abort by "
            "the client, or an error.",
            "reqps", (Query(grown("finished_requests_total", "reason"), "{{reason}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
SPEED = Row(
    "Steps and speed",
    (
        Panel(
            "Step time",
            "Time between the outputs of two consecutive steps: the time that a running request waits for "
            "each token.",
            "s", quantiles("mizzen_engine_step_seconds", OF), yellow=0.1, red=0.5,
        ),
        Panel(
            "Step time distribution",
            "Number of steps per second in each duration bucket. Two bands are normal: decode-only steps, "
            "and steps that also prefill a chunk of a prompt.",
            "s",
            (Query(rate("mizzen_engine_step_seconds_bucket", "le", OF), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Steps per second",
            "Forward passes per second, by engine.",
            "ops", (Query(grown("steps_total"), "{{pod}}"),),
        ),
        Panel(
            "Tokens generated",
            "Generated tokens per second, by engine.",
            "short", (Query(grown("output_tokens_total"), "{{pod}}"),), stacked=True,
        ),
        Panel(
            "Tokens generated, reported by the engine",
            "Tokens per second as the engine measured them over the last second; endpoint pickers read this "
            "as `sglang:gen_throughput`.",
            "short", (Query(f"sglang:gen_throughput{{{OF}}}", "{{pod}}"),),
        ),
        Panel(
            "Time to first token (TTFT) in the engine",
            "Time from a request's arrival at the engine to its first token, without the time in the gateway.",
            "s", quantiles("mizzen_engine_time_to_first_token_seconds", OF), yellow=1, red=2,
        ),
        Panel(
            "Inter-token latency (ITL) in the engine",
            "Time between two consecutive steps that generate tokens of the same request.",
            "s", quantiles("mizzen_engine_inter_token_seconds", OF), yellow=0.1, red=0.2,
        ),
        Panel(
            "Load of experts",
            "Tokens of the busiest expert over the mean, in the most unequal layer of a mixture, and tokens "
            "without an expert (always 0). Empty unless the engine counts them (`--expert-load on`).",
            "short", (
                Query(f"max by (pod) (mizzen_engine_expert_load_ratio{{{OF}}})", "{{pod}}"),
                Query(f"mizzen_engine_expert_dropped_tokens_total{{{OF}}}", "{{pod}} dropped"),
            ),
        ),
    ),
)  # fmt: skip
CACHE = Row(
    "KV cache",
    (
        Panel(
            "KV cache pages",
            "Pages that running requests hold, pages that only the prefix cache holds (reclaimed on "
            "demand), and free pages.",
            "short",
            (
                Query(f"sum(mizzen_engine_kv_pages_used{{{OF}}})", "running requests"),
                Query(f"sum(mizzen_engine_kv_pages_cached{{{OF}}})", "prefix cache only"),
                Query(
                    f"sum(mizzen_engine_kv_pages{{{OF}}} - mizzen_engine_kv_pages_used{{{OF}}} "
                    f"- mizzen_engine_kv_pages_cached{{{OF}}})",
                    "free",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "KV cache usage",
            "Share of the KV cache pages that running requests hold, by engine.",
            "percentunit",
            (Query(f"sglang:token_usage{{{OF}}}", "{{pod}}"),),
            yellow=0.9, red=0.95, most=1,
        ),
        Panel(
            "Prefix cache hit rate",
            "Share of prompt tokens whose KV was in the prefix cache, by engine. It is low if prompts share "
            "no prefixes, or if requests with the same prefix are spread over many engines.",
            "percentunit",
            (
                Query(
                    f"{grown('cached_prompt_tokens_total')} / {grown('prompt_tokens_total')}",
                    "{{pod}}",
                ),
            ),
            most=1,
        ),
    ),
)  # fmt: skip
GRAMMARS = Row(
    "Structured output",
    (
        Panel(
            "Grammars",
            "Grammars per second that were compiled, found in the cache, or rejected.",
            "ops",
            (
                Query(grown("grammars_compiled_total", ""), "compiled"),
                Query(grown("grammar_cache_hits_total", ""), "cache hits"),
                Query(grown("grammars_refused_total", ""), "rejected"),
            ),
        ),
        Panel(
            "Grammar compile time",
            "Mean time to compile a grammar. Requests that wait for their grammar do not delay other "
            "requests.",
            "s",
            (
                Query(
                    f"{grown('grammar_compile_seconds_total', '')} / {grown('grammars_compiled_total', '')}",
                    "mean",
                ),
            ),
            yellow=1, red=5,
        ),
        Panel(
            "Token mask time",
            "Mean time that a step spends on the mask of allowed tokens for one request.",
            "s",
            (Query(f"{grown('grammar_mask_seconds_total', '')} / {grown('grammar_masks_total', '')}", "mean"),),
            yellow=0.001, red=0.005,
        ),
    ),
)  # fmt: skip
IMAGES = Row(
    "Images",
    (
        Panel(
            "Images",
            "Images per second of admitted requests, found in caches, received, encoded, and rejected by reason.",
            "ops",
            (
                Query(grown("images_total", ""), "admitted"),
                Query(grown("image_prefix_hits_total", ""), "in prefix cache"),
                Query(grown("image_embedding_hits_total", ""), "embeddings stored"),
                Query(grown("images_received_total", ""), "received"),
                Query(grown("images_encoded_total", ""), "encoded"),
                Query(grown("images_rejected_total", "reason"), "rejected: {{reason}}"),
            ),
        ),
        Panel(
            "Time per image",
            "Mean time to decode and resize an image, and that of the vision encoder.",
            "s",
            tuple(
                Query(f"{grown(f'image_{step}_seconds_total', '')} / {grown(f'images_{step}d_total', '')}", step)
                for step in ("decode", "encode")
            ),
            yellow=1, red=5,
        ),
    ),
)  # fmt: skip
LIFE = Row(
    "Lifecycle and faults",
    (
        Panel(
            "Engines by state",
            "Number of engines that are starting, serving, draining or failed.",
            "short",
            (Query(f"sum by (state) (mizzen_engine_state{{{OF}}})", "{{state}}"),), stacked=True,
        ),
        Panel(
            "Startup phases",
            "Duration of each phase of the last startup, for the slowest engine: imports, configuration, "
            "weights, KV cache, warm-up.",
            "s",
            (Query(f"max by (phase) (mizzen_engine_startup_seconds{{{OF}}})", "{{phase}}"),),
            "bargauge", yellow=60, red=300,
        ),
        Panel(
            "Uptime",
            "Time since each engine's supervisor started; drops to 0 on a restart.",
            "s", (each("uptime_seconds"),),
        ),
        Panel(
            "Rejected requests and frames",
            "Requests and frames per second that engines rejected, by reason. The gateway retries "
            "`draining` and `queue_full` on another engine.",
            "reqps", (Query(grown("refused_total", "code"), "{{code}}"),),
        ),
        Panel(
            "Connected gateways",
            "Number of gateways connected to each engine. If it is below the number of gateway pods, check "
            "the NetworkPolicy and the keys.",
            "short", (each("gateways"),), falling=True, red=1,
        ),
        Panel(
            "Lost gateways",
            "Number of gateways that disappeared or did not read their frames in time, over the last 5 "
            "minutes.",
            "short", (Query(f"sum by (pod) (increase(mizzen_engine_lost_gateways_total{{{OF}}}[5m]))", "{{pod}}"),),
            yellow=1, red=5,
        ),
        Panel(
            "Malformed frames",
            "Number of frames over the last 5 minutes that were not valid messages: the sender spoke another "
            "version of the protocol, or was not a gateway.",
            "short", (Query(f"sum by (pod) (increase(mizzen_engine_malformed_frames_total{{{OF}}}[5m]))", "{{pod}}"),),
            yellow=1, red=10,
        ),
        Panel(
            "Integrity violations",
            "Number of failed consistency checks of pages, slots and the prefix tree. Any value other than 0 "
            "is a bug in Mizzen; please report it.",
            "short",
            (Query(f"sum by (pod) (mizzen_engine_integrity_violations_total{{{OF}}})", "{{pod}}"),),
            red=1,
        ),
    ),
)  # fmt: skip
GPUS = Row(
    "GPUs (from the DCGM exporter, if the cluster has it)",
    (
        Panel(
            "GPU utilization",
            "Share of time in which a kernel ran on each GPU. It is near 100 % while requests run, however few.",
            "percent", (Query(gpu("DCGM_FI_DEV_GPU_UTIL"), "{{pod}} GPU {{gpu}}"),), most=100,
        ),
        Panel(
            "GPU memory used",
            "Memory used on each GPU. Engines reserve their share (`spec.engine.memoryFraction`) at the start.",
            "decmbytes", (Query(gpu("DCGM_FI_DEV_FB_USED"), "{{pod}} GPU {{gpu}}"),),
        ),
        Panel(
            "GPU power",
            "Power draw of each GPU.",
            "watt", (Query(gpu("DCGM_FI_DEV_POWER_USAGE"), "{{pod}} GPU {{gpu}}"),),
        ),
        Panel(
            "GPU temperature",
            "Temperature of each GPU; GPUs reduce their clock when they are too hot.",
            "celsius", (Query(gpu("DCGM_FI_DEV_GPU_TEMP"), "{{pod}} GPU {{gpu}}"),), yellow=80, red=90,
        ),
        Panel(
            "GPU errors (Xid)",
            "Number of the last Xid error of each GPU, from its driver; 0 without an error.",
            "short", (Query(gpu("DCGM_FI_DEV_XID_ERRORS"), "{{pod}} GPU {{gpu}}"),), red=1,
        ),
    ),
)  # fmt: skip

ENGINE = Dashboard(
    "mizzen-engine",
    "Mizzen / Engine",
    "Batch, KV cache, steps and startup of the engines.",
    (
        Variable("namespace", "mizzen_engine_state", "Namespace"),
        Variable("service", "mizzen_engine_state", "Service"),
        Variable("pod", "mizzen_engine_state", "Engine"),
    ),
    (BATCH, SPEED, CACHE, GRAMMARS, IMAGES, LIFE, GPUS),
    'namespace=~"$namespace",service=~"$service"',
)
