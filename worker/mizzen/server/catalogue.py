"""The catalogue of the engine's metrics: names, units and meaning, and their places in the status block."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mizzen.core.request import FinishReason
from mizzen.wire.messages import RefusalCode


class Phase(enum.IntEnum):
    """What a rank is doing. Start-up phases come first, in order."""

    SPAWN = 0
    IMPORT = 1
    CONFIG = 2
    WEIGHTS = 3
    KV = 4
    GRAPHS = 5
    WARMUP = 6
    SERVING = 7
    DRAINING = 8
    ENDED = 9
    FAILED = 10


STARTUP_PHASES = (Phase.IMPORT, Phase.CONFIG, Phase.WEIGHTS, Phase.KV, Phase.GRAPHS, Phase.WARMUP)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
BETWEEN_TOKENS_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FIRST_TOKEN_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of the status block that is a metric by itself."""

    field: str
    name: str
    """Without the prefix; counters end in _total."""
    help: str
    sglang: str = ""
    """Its name for tools that know SGLang's, without the prefix."""

    @property
    def counter(self) -> bool:
        """Tell a counter from a gauge."""
        return self.name.endswith("_total")


METRICS = (
    Metric("steps", "steps_total", "Forward passes"),
    Metric("accepted", "requests_total", "Requests taken from gateways", "num_requests_total"),
    Metric(
        "prompt_tokens", "prompt_tokens_total", "Prompt tokens of finished requests", "prompt_tokens_total"
    ),
    Metric(
        "cached_tokens",
        "cached_prompt_tokens_total",
        "Prompt tokens of finished requests whose KV came from the prefix cache",
        "cached_tokens_total",
    ),
    Metric("output_tokens", "output_tokens_total", "Tokens generated", "generation_tokens_total"),
    Metric("running", "running_requests", "Requests that hold a slot", "num_running_reqs"),
    Metric("waiting", "waiting_requests", "Requests in the engine's queue", "num_queue_reqs"),
    Metric(
        "oldest_wait",
        "oldest_wait_seconds",
        "How long the request waits that waits longest for its first token",
    ),
    Metric(
        "throughput",
        "output_tokens_per_second",
        "Tokens generated a second, in the last second",
        "gen_throughput",
    ),
    Metric("waiting_tokens", "waiting_tokens", "Prompt tokens of requests in the engine's queue"),
    Metric("pages_total", "kv_pages", "Pages of the KV cache"),
    Metric("pages_used", "kv_pages_used", "Pages that running requests hold"),
    Metric("pages_cached", "kv_pages_cached", "Pages that the prefix cache alone holds; free on demand"),
    Metric("weights_bytes", "weights_bytes", "Memory of weights"),
    Metric("kv_bytes", "kv_bytes", "Memory of the KV cache"),
    Metric("graph_bytes", "graph_bytes", "Memory that captured graphs took, with kernels loaded for them"),
    Metric(
        "other_bytes",
        "other_bytes",
        "Memory in use beside weights, KV and graphs once the engine was loaded: CUDA's, steps', others'",
    ),
    Metric(
        "step_bytes",
        "step_bytes",
        "Memory that sizing the KV cache left for slots, steps and graphs: measured, but for graphs",
    ),
    Metric(
        "device_bytes", "device_bytes", "Memory of the device in all: weights, KV, graphs, other and free"
    ),
    Metric(
        "free_bytes", "device_free_bytes", "Memory of the device that was free once the engine was loaded"
    ),
    Metric("malformed", "malformed_frames_total", "Frames that were no message of the protocol"),
    Metric(
        "other_protocol",
        "refused_protocols_total",
        "Times that a gateway was refused, for it speaks another protocol; it tries again every few seconds",
    ),
    Metric("lost_peers", "lost_gateways_total", "Gateways that vanished or did not take their frames"),
    Metric("peers", "gateways", "Gateways that are connected"),
    Metric("grammars_compiled", "grammars_compiled_total", "Grammars of structured output compiled"),
    Metric("grammars_refused", "grammars_refused_total", "Grammars refused: wrong, or too much work"),
    Metric("grammar_hits", "grammar_cache_hits_total", "Requests whose grammar was compiled already"),
    Metric("grammar_seconds", "grammar_compile_seconds_total", "Time that grammars took to be compiled"),
    Metric("grammar_masks", "grammar_masks_total", "Masks of allowed tokens, one a constrained row and step"),
    Metric("mask_seconds", "grammar_mask_seconds_total", "Time that steps spent on filling masks"),
    Metric("integrity", "integrity_violations_total", "Failed checks of pages, slots and prefix tree"),
)


MEMORY = (
    "weights_bytes",
    "kv_bytes",
    "graph_bytes",
    "other_bytes",
    "step_bytes",
    "device_bytes",
    "free_bytes",
)
"""Fields of what is told of memory once an engine is loaded; the first four are all that is in use."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram: `buckets` + 1 counts (not cumulative), then the sum."""

    field: str
    name: str
    help: str
    buckets: tuple[float, ...]
    sglang: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Its places in the status block."""
        return (*(f"{self.field}_{i}" for i in range(len(self.buckets) + 1)), f"{self.field}_sum")


HISTOGRAMS = (
    Histogram(
        "step_seconds",
        "step_seconds",
        "Between two steps' outputs, or from idle to the first",
        STEP_SECONDS,
    ),
    Histogram(
        "first_token_seconds",
        "time_to_first_token_seconds",
        "From a request's arrival in the engine to its first token",
        FIRST_TOKEN_SECONDS,
        "time_to_first_token_seconds",
    ),
    Histogram(
        "between_tokens_seconds",
        "inter_token_seconds",
        "Between two steps with tokens of a request, by request",
        BETWEEN_TOKENS_SECONDS,
        "inter_token_latency_seconds",
    ),
    Histogram(
        "request_seconds",
        "request_seconds",
        "From a request's arrival in the engine to its end",
        REQUEST_SECONDS,
        "e2e_request_latency_seconds",
    ),
)

STATE = ("phase", "phase_since", "phase_done", "phase_total", "heartbeat", "live")
"""The rank's phase, when it began, and how much of it is done (bytes or pieces; 0 of 0 where nobody counts);
its loop's last turn (it and the beginning in monotonic seconds), and its requests."""

FIELDS: tuple[str, ...] = (
    *STATE,
    *(metric.field for metric in METRICS),
    *(name for histogram in HISTOGRAMS for name in histogram.fields),
    *(f"phase_seconds_{phase.name}" for phase in STARTUP_PHASES),
    *(f"finished_{reason.name}" for reason in FinishReason),
    *(f"refused_{code.name}" for code in RefusalCode),
)
INDEX: dict[str, int] = {name: index for index, name in enumerate(FIELDS)}
