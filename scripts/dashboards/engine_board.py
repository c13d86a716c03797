"""What engines do: batches, KV cache, steps, and the phases of their starts."""

from __future__ import annotations

from panels import Dashboard, Panel, Query, Row, Variable, quantiles, rate

OF = 'namespace=~"$namespace",service=~"$service",pod=~"$pod"'


def each(metric: str, legend: str = "{{pod}}") -> Query:
    """Return a gauge of each engine."""
    return Query(f"mizzen_engine_{metric}{{{OF}}}", legend)


def grown(metric: str, by: str = "pod") -> str:
    """Return a counter's growth a second."""
    return rate(f"mizzen_engine_{metric}", by, OF)


BATCH = Row(
    "Batch and queue",
    (
        Panel(
            "Running requests",
            "Requests that hold a slot of the batch, by engine; `spec.engine.maxRunningRequests` bounds them.",
            "short", (each("running_requests"),),
        ),
        Panel(
            "Waiting requests",
            "Requests in the engine's own queue. More than 0 for long: the batch or the KV cache is full.",
            "short", (each("waiting_requests"),), yellow=8, red=64,
        ),
        Panel(
            "Waiting prompt tokens",
            "Prompt tokens of the requests in the queue: how much prefill is owed.",
            "short", (each("waiting_tokens"),),
        ),
        Panel(
            "Oldest request without a token",
            "How long the request waits that waits longest for its first token.",
            "s", (each("oldest_wait_seconds"),), yellow=5, red=15,
        ),
        Panel(
            "Tokens a step",
            "Tokens that a step gives on average: the batch that decodes.",
            "short", (Query(f"{grown('output_tokens_total')} / {grown('steps_total')}", "{{pod}}"),),
        ),
        Panel(
            "Ends of requests",
            "Requests that ended, a second: with a stop, at their length, aborted by their client, or in error.",
            "reqps", (Query(grown("finished_requests_total", "reason"), "{{reason}}"),), stacked=True,
        ),
    ),
)  # fmt: skip
SPEED = Row(
    "Steps and speed",
    (
        Panel(
            "Step time",
            "Between the outputs of two steps, which is what a running request waits for each token.",
            "s", quantiles("mizzen_engine_step_seconds", OF), yellow=0.1, red=0.5,
        ),
        Panel(
            "Steps by their time",
            "How many steps a second took how long. Two bands are usual: steps that only decode, and steps that "
            "prefill a part of a prompt too.",
            "s",
            (Query(rate("mizzen_engine_step_seconds_bucket", "le", OF), "{{le}}"),),
            "heatmap",
        ),
        Panel(
            "Steps a second",
            "Forward passes a second, by engine.",
            "ops", (Query(grown("steps_total"), "{{pod}}"),),
        ),
        Panel(
            "Tokens generated",
            "Tokens a second, by engine.",
            "short", (Query(grown("output_tokens_total"), "{{pod}}"),), stacked=True,
        ),
        Panel(
            "Tokens generated, by the engine itself",
            "The engine's own figure for the last second, which endpoint pickers read as `sglang:gen_throughput`.",
            "short", (Query(f"sglang:gen_throughput{{{OF}}}", "{{pod}}"),),
        ),
        Panel(
            "Time to the first token, in the engine",
            "From a request's arrival in the engine to its first token. What the gateway adds is not in it.",
            "s", quantiles("mizzen_engine_time_to_first_token_seconds", OF), yellow=1, red=2,
        ),
        Panel(
            "Between tokens, in the engine",
            "Time between two steps with tokens of a request.",
            "s", quantiles("mizzen_engine_inter_token_seconds", OF), yellow=0.1, red=0.2,
        ),
    ),
)  # fmt: skip
CACHE = Row(
    "KV cache",
    (
        Panel(
            "Pages",
            "Pages that running requests hold, pages that only the prefix cache holds (free on demand), and pages "
            "with nothing in them.",
            "short",
            (
                Query(f"sum(mizzen_engine_kv_pages_used{{{OF}}})", "running requests"),
                Query(f"sum(mizzen_engine_kv_pages_cached{{{OF}}})", "prefix cache alone"),
                Query(
                    f"sum(mizzen_engine_kv_pages{{{OF}}} - mizzen_engine_kv_pages_used{{{OF}}} "
                    f"- mizzen_engine_kv_pages_cached{{{OF}}})",
                    "empty",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "In use",
            "Share of the pages that running requests hold, by engine.",
            "percentunit",
            (Query(f"sglang:token_usage{{{OF}}}", "{{pod}}"),),
            yellow=0.9, red=0.95, most=1,
        ),
        Panel(
            "Prefix cache hits",
            "Share of prompt tokens whose KV the prefix cache had, by engine. Low where prompts share nothing, or "
            "where requests with one prefix go to many engines.",
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
            "Grammars compiled, found compiled, and refused, a second.",
            "ops",
            (
                Query(grown("grammars_compiled_total", ""), "compiled"),
                Query(grown("grammar_cache_hits_total", ""), "found compiled"),
                Query(grown("grammars_refused_total", ""), "refused"),
            ),
        ),
        Panel(
            "Time to compile a grammar",
            "Mean time that a grammar took; requests that wait for one hold up no other.",
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
            "Time for a mask",
            "Mean time that a step spent on the mask of allowed tokens of one request.",
            "s",
            (Query(f"{grown('grammar_mask_seconds_total', '')} / {grown('grammar_masks_total', '')}", "mean"),),
            yellow=0.001, red=0.005,
        ),
    ),
)  # fmt: skip
LIFE = Row(
    "Life and faults",
    (
        Panel(
            "Engines by state",
            "How many engines start, serve, drain or have failed.",
            "short",
            (Query(f"sum by (state) (mizzen_engine_state{{{OF}}})", "{{state}}"),), stacked=True,
        ),
        Panel(
            "Phases of the start",
            "How long each phase of the last start took, as the slowest engine says: imports, configuration, "
            "weights, KV cache, warm-up.",
            "s",
            (Query(f"max by (phase) (mizzen_engine_startup_seconds{{{OF}}})", "{{phase}}"),),
            "bargauge", yellow=60, red=300,
        ),
        Panel(
            "Up for",
            "Time since the start of each engine's supervisor; it drops to 0 at a restart.",
            "s", (each("uptime_seconds"),),
        ),
        Panel(
            "Refused",
            "Requests and frames that engines did not take, a second, by reason. `draining` and `queue_full` are "
            "tried elsewhere by the gateway.",
            "reqps", (Query(grown("refused_total", "code"), "{{code}}"),),
        ),
        Panel(
            "Gateways connected",
            "Gateways that each engine hears. Fewer than there are gateway pods: look at the network policy and "
            "the keys.",
            "short", (each("gateways"),), falling=True, red=1,
        ),
        Panel(
            "Gateways lost",
            "Gateways that vanished, or that did not take their frames in time.",
            "short", (Query(f"sum by (pod) (increase(mizzen_engine_lost_gateways_total{{{OF}}}[5m]))", "{{pod}}"),),
            yellow=1, red=5,
        ),
        Panel(
            "Malformed frames",
            "Frames that were no message of the protocol: another version, or somebody else on the port.",
            "short", (Query(f"sum by (pod) (increase(mizzen_engine_malformed_frames_total{{{OF}}}[5m]))", "{{pod}}"),),
            yellow=1, red=10,
        ),
        Panel(
            "Integrity violations",
            "Failed checks of pages, slots and the prefix tree. Always 0; anything else is a fault of Mizzen, and "
            "worth a report.",
            "short",
            (Query(f"sum by (pod) (mizzen_engine_integrity_violations_total{{{OF}}})", "{{pod}}"),),
            red=1,
        ),
    ),
)  # fmt: skip

ENGINE = Dashboard(
    "mizzen-engine",
    "Mizzen / Engine",
    "Batch, KV cache, steps and starts of the engines.",
    (
        Variable("namespace", "mizzen_engine_state", "Namespace"),
        Variable("service", "mizzen_engine_state", "Service"),
        Variable("pod", "mizzen_engine_state", "Engine"),
    ),
    (BATCH, SPEED, CACHE, GRAMMARS, LIFE),
)
