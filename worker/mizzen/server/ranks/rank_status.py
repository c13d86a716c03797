# SPDX-License-Identifier: Apache-2.0
"""Publish rank 0's counters, gauges and phases in its status block; used by the serving loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mizzen.core.outputs import ExpertUse, GrammarCounts, Load
from mizzen.core.request import Finished, FinishReason
from mizzen.engine.images.statistics import ImageStatistics
from mizzen.server.engine_api import EngineInfoProtocol
from mizzen.server.metric_catalogue import (
    BETWEEN_TOKENS_SECONDS,
    EXPERT_LAYERS,
    FIRST_TOKEN_SECONDS,
    INDEX,
    MEMORY,
    REQUEST_SECONDS,
    STEP_SECONDS,
    Phase,
)
from mizzen.server.ranks.phases import PhaseStatus
from mizzen.server.status_block import StatusWriter
from mizzen.wire.messages import RefusalCode
from mizzen.wire.server.outbox import Outbox
from mizzen.wire.server.peers import WireCounters

_STEPS = INDEX["steps"]
_OUTPUT_TOKENS = INDEX["output_tokens"]
_PROMPT_TOKENS = INDEX["prompt_tokens"]
_CACHED_TOKENS = INDEX["cached_tokens"]
_STEP_BUCKETS, _STEP_SUM = INDEX["step_seconds_0"], INDEX["step_seconds_sum"]
_FIRST_BUCKETS, _FIRST_SUM = INDEX["first_token_seconds_0"], INDEX["first_token_seconds_sum"]
_GAP_BUCKETS, _GAP_SUM = INDEX["between_tokens_seconds_0"], INDEX["between_tokens_seconds_sum"]
_REQUEST_BUCKETS, _REQUEST_SUM = INDEX["request_seconds_0"], INDEX["request_seconds_sum"]
_REASONS = {int(reason): INDEX[f"finished_{reason.name}"] for reason in FinishReason}


THROUGHPUT_SECONDS = 1.0
"""Minimum period over which the throughput in tokens per second is averaged."""


class RankStatus(PhaseStatus):
    """Counters of rank 0; `publish` copies all of them to the status block at once."""

    def __init__(self, writer: StatusWriter) -> None:
        super().__init__(writer)
        self._rate_at, self._rate_tokens = 0.0, 0.0

    def enter_serving(self, endpoint: str) -> None:
        """Enter the phase SERVING and publish the endpoint that gateways connect to."""
        self._writer.set_text(endpoint)
        self.enter_phase(Phase.SERVING)

    def set_memory(self, info: EngineInfoProtocol) -> None:
        """Record the memory sizes of the loaded engine."""
        for name in MEMORY:
            self._values[INDEX[name]] = getattr(info, name)
        for name, size in info.format_bytes.items():
            self._values[INDEX[f"weights_bytes_{name}"]] = size

    def set_expert_use(self, use: ExpertUse | None) -> None:
        """Record how tokens use the experts of a mixture; None if they are not counted."""
        if use is None:
            return
        self._set("experts_counted", 1)
        self._set("expert_dropped", use.dropped)
        for layer, ratio in use.ratios.items():
            if layer < EXPERT_LAYERS:
                self._set(f"expert_load_{layer}", ratio)

    def count_step(self, seconds: float, tokens: int) -> None:
        """Count a step that took `seconds` and generated `tokens` tokens."""
        values = self._values
        values[_STEPS] += 1
        values[_OUTPUT_TOKENS] += tokens
        values[_STEP_BUCKETS + bisect_left(STEP_SECONDS, seconds)] += 1
        values[_STEP_SUM] += seconds

    def count_first_tokens(self, waits: NDArray[np.float64]) -> None:
        """Count the first tokens of requests; `waits` contains, for each of these requests, the seconds from
        its arrival to its first token."""
        values = self._values
        for seconds in waits.tolist():
            values[_FIRST_BUCKETS + bisect_left(FIRST_TOKEN_SECONDS, seconds)] += 1
            values[_FIRST_SUM] += seconds

    def count_later_tokens(self, seconds: float, requests: int) -> None:
        """Count one more token for each of `requests` requests, `seconds` after its previous token."""
        values = self._values
        values[_GAP_BUCKETS + bisect_left(BETWEEN_TOKENS_SECONDS, seconds)] += requests
        values[_GAP_SUM] += seconds * requests

    def count_finished(self, ends: Sequence[Finished], seconds: Sequence[float]) -> None:
        """Count finished requests; `seconds` are the times from each request's arrival to its end."""
        values = self._values
        for end, duration in zip(ends, seconds, strict=True):
            values[_REQUEST_BUCKETS + bisect_left(REQUEST_SECONDS, duration)] += 1
            values[_REQUEST_SUM] += duration
            values[_REASONS[int(end.reason)]] += 1
            values[_PROMPT_TOKENS] += end.prompt_tokens
            values[_CACHED_TOKENS] += end.cached_tokens

    def count_dropped_spans(self, spans: int) -> None:
        """Count spans that are lost because the supervisor did not read their records in time."""
        self._values[INDEX["dropped_spans"]] += spans

    def set_images(self, counters: WireCounters, images: ImageStatistics) -> None:
        """Record the counters of images that arrived, and were decoded, encoded or found in caches."""
        decoding, use = images.decoding, images.use
        for name, value in (
            ("images_requested", counters.images_requested),
            ("images_received", counters.images_received),
            ("image_bytes", counters.image_bytes),
            ("images_decoded", decoding.decoded),
            ("image_seconds", decoding.seconds),
            ("images", use.admitted),
            ("image_prefix_hits", use.prefix_hits),
            ("image_embedding_hits", use.embedding_hits),
            ("images_encoded", use.encoded),
            ("image_encode_seconds", images.encoding_seconds),
            ("image_processes_started", images.confined is not None),
            ("image_processes_confined", images.confined is True),
        ):
            self._set(name, value)
        for reason, count in counters.images_rejected.items():
            self._set(f"images_rejected_{reason}", count)
        for failure, count in decoding.failed.items():
            self._set(f"images_rejected_{failure.value}", count)

    def publish(self, load: Load, out: Outbox, integrity: int, grammars: GrammarCounts, now: float) -> None:
        """Publish all counters and gauges.

        Args:
            load: Current load of the engine.
            out: Outbox with the counters of the wire.
            integrity: Number of inconsistencies found so far.
            grammars: Counters of structured output.
            now: Time of this iteration of the serving loop; it is published as the heartbeat.
        """
        counters = out.counters
        if now - self._rate_at >= THROUGHPUT_SECONDS:
            tokens = self._values[_OUTPUT_TOKENS]
            self._set("throughput", (tokens - self._rate_tokens) / (now - self._rate_at))
            self._rate_at, self._rate_tokens = now, tokens
        for name, value in (
            ("heartbeat", now),
            ("live", len(out.table)),
            ("accepted", counters.accepted),
            ("malformed", counters.malformed),
            ("other_protocol", counters.other_protocol),
            ("lost_peers", counters.lost_peers),
            ("peers", len(out.peers)),
            ("integrity", integrity),
            ("running", load.running),
            ("waiting", load.waiting),
            ("oldest_wait", out.table.oldest_wait(now)),
            ("waiting_tokens", load.waiting_tokens),
            ("pages_total", load.pages_total),
            ("pages_used", load.pages_used),
            ("pages_cached", load.pages_cached),
            ("grammars_compiled", grammars.compiled),
            ("grammars_refused", grammars.refused),
            ("grammar_hits", grammars.hits),
            ("grammar_seconds", grammars.compile_seconds),
            ("grammar_masks", grammars.masks),
            ("mask_seconds", grammars.mask_seconds),
        ):
            self._set(name, value)
        for code in RefusalCode:
            self._set(f"refused_{code.name}", counters.refused[code])
        self._writer.publish()

    def _set(self, name: str, value: float) -> None:
        self._values[INDEX[name]] = value

    def _get(self, name: str) -> float:
        return self._values[INDEX[name]]
