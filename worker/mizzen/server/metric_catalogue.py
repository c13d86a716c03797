# SPDX-License-Identifier: Apache-2.0
"""Catalogue of the engine's metrics: their names, their help texts and their fields in the status block.

Ranks write the status block (`server/status_block.py`); `server/metrics.py` exports it as `/metrics`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mizzen.core.request import FinishReason
from mizzen.engine.images.tasks import DecodeFailure
from mizzen.engine.info import WEIGHT_FORMATS
from mizzen.wire.messages import RefusalCode
from mizzen.wire.server.peers import TRANSFER_REJECTIONS


class Phase(enum.IntEnum):
    """Phase of a rank's life; a rank passes through the startup phases in the order of their numbers."""

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
    """A counter or gauge, whose value is a field of the status block."""

    field: str
    name: str
    """Name of the metric without the prefix; counters end in `_total`."""
    help: str
    sglang: str = ""
    """SGLang's name for the metric, without the prefix; empty if SGLang has no such metric."""

    @property
    def counter(self) -> bool:
        """Whether the metric is a counter; otherwise it is a gauge."""
        return self.name.endswith("_total")


METRICS = (
    Metric("steps", "steps_total", "Number of steps (forward passes)"),
    Metric("accepted", "requests_total", "Requests accepted from gateways", "num_requests_total"),
    Metric(
        "prompt_tokens", "prompt_tokens_total", "Prompt tokens of finished requests", "prompt_tokens_total"
    ),
    Metric(
        "cached_tokens",
        "cached_prompt_tokens_total",
        "Prompt tokens found in the prefix cache, summed over finished requests",
        "cached_tokens_total",
    ),
    Metric("output_tokens", "output_tokens_total", "Generated tokens", "generation_tokens_total"),
    Metric("running", "running_requests", "Running requests (one slot each)", "num_running_reqs"),
    Metric("waiting", "waiting_requests", "Requests waiting in the engine's queue", "num_queue_reqs"),
    Metric(
        "oldest_wait",
        "oldest_wait_seconds",
        "Longest time that a current request has waited for its first token",
    ),
    Metric(
        "throughput",
        "output_tokens_per_second",
        "Tokens generated per second, over the last second",
        "gen_throughput",
    ),
    Metric("waiting_tokens", "waiting_tokens", "Prompt tokens of requests waiting in the engine's queue"),
    Metric("pages_total", "kv_pages", "Total number of KV cache pages"),
    Metric("pages_used", "kv_pages_used", "Pages held by running requests"),
    Metric(
        "pages_cached", "kv_pages_cached", "Pages held only by the prefix cache, which are freed on demand"
    ),
    Metric("weights_bytes", "weights_bytes", "Memory used by weights"),
    Metric("kv_bytes", "kv_bytes", "Memory used by the KV cache"),
    Metric("graph_bytes", "graph_bytes", "Memory used by CUDA graphs, including the kernels loaded for them"),
    Metric(
        "other_bytes",
        "other_bytes",
        "Memory in use after loading, besides weights, KV cache and graphs: by CUDA, "
        "steps and other processes",
    ),
    Metric(
        "step_bytes",
        "step_bytes",
        "Memory reserved for slots, steps and graphs when the KV cache was sized; "
        "measured, except for graphs",
    ),
    Metric(
        "device_bytes",
        "device_bytes",
        "Total memory of the device: weights, KV cache, graphs, other and free",
    ),
    Metric("free_bytes", "device_free_bytes", "Free memory of the device after loading"),
    Metric("malformed", "malformed_frames_total", "Frames that were not messages of the protocol"),
    Metric(
        "other_protocol",
        "refused_protocols_total",
        "Rejected connections of gateways with another protocol version, which retry every few seconds",
    ),
    Metric("lost_peers", "lost_gateways_total", "Gateways that disappeared or did not read their frames"),
    Metric("peers", "gateways", "Connected gateways"),
    Metric("grammars_compiled", "grammars_compiled_total", "Compiled structured output grammars"),
    Metric("grammars_refused", "grammars_refused_total", "Refused grammars: invalid or too expensive"),
    Metric("grammar_hits", "grammar_cache_hits_total", "Requests whose grammar was already compiled"),
    Metric("grammar_seconds", "grammar_compile_seconds_total", "Time spent compiling grammars"),
    Metric(
        "grammar_masks", "grammar_masks_total", "Masks of allowed tokens, one per constrained row and step"
    ),
    Metric("mask_seconds", "grammar_mask_seconds_total", "Time that steps spent computing masks"),
    Metric(
        "images",
        "images_total",
        "Images of admitted requests; images found neither in the prefix cache nor in the store are encoded",
    ),
    Metric(
        "image_prefix_hits",
        "image_prefix_hits_total",
        "Images of admitted requests whose KV was in the prefix cache",
    ),
    Metric(
        "image_embedding_hits",
        "image_embedding_hits_total",
        "Images of admitted requests whose embeddings were needed and in the store",
    ),
    Metric("images_encoded", "images_encoded_total", "Images that the vision encoder has encoded"),
    Metric(
        "image_encode_seconds",
        "image_encode_seconds_total",
        "Time that the vision encoder spent on images",
    ),
    Metric("images_requested", "images_requested_total", "Images whose files were requested from gateways"),
    Metric("images_received", "images_received_total", "Images whose files have arrived from gateways"),
    Metric("image_bytes", "image_bytes_total", "Bytes of images that have arrived from gateways"),
    Metric("images_decoded", "images_decoded_total", "Images decoded into pixels"),
    Metric("image_seconds", "image_decode_seconds_total", "Time that processes spent decoding images"),
    Metric(
        "integrity", "integrity_violations_total", "Failed consistency checks of pages, slots and prefix tree"
    ),
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
"""Status fields about memory, set once the engine is loaded; the first four add up to the memory in use."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """A histogram, whose values are several fields of the status block."""

    field: str
    name: str
    help: str
    buckets: tuple[float, ...]
    sglang: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the histogram's fields in the status block: a non-cumulative count for each bucket and for
        +Inf, then the sum."""
        return (*(f"{self.field}_{i}" for i in range(len(self.buckets) + 1)), f"{self.field}_sum")


HISTOGRAMS = (
    Histogram(
        "step_seconds",
        "step_seconds",
        "Time between the outputs of two steps, or from idle to the first output",
        STEP_SECONDS,
    ),
    Histogram(
        "first_token_seconds",
        "time_to_first_token_seconds",
        "Time from a request's arrival in the engine to its first token",
        FIRST_TOKEN_SECONDS,
        "time_to_first_token_seconds",
    ),
    Histogram(
        "between_tokens_seconds",
        "inter_token_seconds",
        "Time between two steps that generate tokens of the same request",
        BETWEEN_TOKENS_SECONDS,
        "inter_token_latency_seconds",
    ),
    Histogram(
        "request_seconds",
        "request_seconds",
        "Time from a request's arrival in the engine to its end",
        REQUEST_SECONDS,
        "e2e_request_latency_seconds",
    ),
)

IMAGE_REJECTIONS = (*TRANSFER_REJECTIONS, *(failure.value for failure in DecodeFailure))
"""Reasons why images are rejected: those of the wire, then those of the decoder."""
IMAGE_PROCESSES = ("image_processes_started", "image_processes_confined")
"""Status fields about the processes that decode images: 1 if one was started, and 1 if the kernel restricts
the system calls of the last one."""
EXPERT_LAYERS = 128
"""Number of layers whose experts' load can be exported; more than known models with experts have."""
EXPERT_CHOICES = ("experts_counted", "expert_dropped")
"""Status fields about experts: 1 if their tokens are counted, and the number of choices of no expert."""
STATE = ("phase", "phase_since", "phase_done", "phase_total", "heartbeat", "live", "dropped_spans")
"""Status fields about the rank's state: number of the phase, start time of the phase, finished and total
amount of work in the phase (bytes or items; both 0 if not counted), time of the last iteration of the rank's
loop, number of live requests, and number of spans that rank 0 dropped. Times are in monotonic seconds."""

FIELDS: tuple[str, ...] = (
    *STATE,
    *(metric.field for metric in METRICS),
    *IMAGE_PROCESSES,
    *EXPERT_CHOICES,
    *(name for histogram in HISTOGRAMS for name in histogram.fields),
    *(f"weights_bytes_{name}" for name in WEIGHT_FORMATS),
    *(f"expert_load_{layer}" for layer in range(EXPERT_LAYERS)),
    *(f"phase_seconds_{phase.name}" for phase in STARTUP_PHASES),
    *(f"finished_{reason.name}" for reason in FinishReason),
    *(f"refused_{code.name}" for code in RefusalCode),
    *(f"images_rejected_{reason}" for reason in IMAGE_REJECTIONS),
)
INDEX: dict[str, int] = {name: index for index, name in enumerate(FIELDS)}
