# SPDX-License-Identifier: Apache-2.0
"""Creates the spans of a request with OpenTelemetry's SDK. This module is only imported if tracing is on.

engine.request    child of the gateway's span `engine`
  queue           until the first prefill chunk is launched
  prefill         until the first token
    preemption    from the retraction until the next token
  decode          until the last token
    preemption
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from mizzen import __version__
from mizzen.common.otlp import HeadersFile
from mizzen.common.request_timeline import PreemptionTimes
from mizzen.common.span_export import SpanExport
from mizzen.server.tracing.request_trace import RequestTrace

NANO = 1_000_000_000
Attributes = Mapping[str, AttributeValue]


class EngineSpans:
    """Creates and exports the spans of one engine's requests."""

    def __init__(
        self,
        url: str,
        headers: HeadersFile,
        *,
        model: str,
        engine: str,
        revision: str,
        on_drop: Callable[[int], None],
    ) -> None:
        """Start the export.

        Args:
            url: URL to which spans are posted.
            headers: headers of the requests.
            model: name under which the model is served.
            engine: name of the engine.
            revision: revision of the engine; may be empty.
            on_drop: called with numbers of spans that could not be exported, from any thread.
        """
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._export = SpanExport(
            url,
            headers,
            program="mizzen-engine",
            version=__version__,
            instance=engine,
            resource={"mizzen.revision": revision},
            on_drop=on_drop,
            sampler=ALWAYS_ON,  # the gateway has decided: it sends the context of sampled traces only
        )

    def create(self, trace: RequestTrace, clock: float) -> None:
        """Create the spans of a finished request.

        Args:
            trace: times and counts of the request.
            clock: Unix time minus monotonic time, in seconds.
        """
        builder = _SpanBuilder(self._export, clock)
        times = trace.timeline
        root = builder.start(
            "engine.request",
            self._propagator.extract({"traceparent": times.traceparent}, Context()),
            times.arrival,
            request_attributes(trace, self._model),
            SpanKind.SERVER,
        )
        inside = set_span_in_context(root, Context())
        queue = builder.start("queue", inside, times.arrival)
        if times.grammar_ready:
            builder.add_event(queue, "grammar compiled", times.grammar_ready)
        builder.end(queue, times.scheduled or trace.ended)
        if times.scheduled:
            self._create_prefill(builder, trace, inside)
        if trace.decodes:
            decode = builder.start("decode", inside, times.first_token, decode_attributes(trace))
            _create_preemptions(builder, trace, decode, trace.ended, decoding=True)
            builder.end(decode, trace.ended)
        if trace.error:
            root.set_status(Status(StatusCode.ERROR, trace.error))
        builder.end(root, trace.ended)

    def close(self) -> None:
        """Export the remaining spans, for a few seconds at most."""
        self._export.close()

    def _create_prefill(self, builder: _SpanBuilder, trace: RequestTrace, inside: Context) -> None:
        times = trace.timeline
        attributes = {
            "mizzen.prefill.chunks": times.chunk_count,
            "mizzen.prefill.tokens": times.chunk_tokens,
            "mizzen.usage.cached_tokens": times.cached,
        }
        prefill = builder.start("prefill", inside, times.scheduled, attributes)
        for chunk in times.chunks:
            details = {"mizzen.chunk.start": chunk.start, "mizzen.chunk.tokens": chunk.tokens}
            builder.add_event(prefill, "chunk launched", chunk.time, details)
        ended = times.first_token or trace.ended
        _create_preemptions(builder, trace, prefill, ended, decoding=False)
        builder.end(prefill, ended)


class _SpanBuilder:
    """Creates spans whose times are seconds of the monotonic clock."""

    def __init__(self, export: SpanExport, clock: float) -> None:
        self._tracer, self._clock = export.tracer, clock

    def start(
        self,
        name: str,
        parent: Context,
        began: float,
        attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        """Start a span at a time."""
        return self._tracer.start_span(name, parent, kind, attributes, start_time=self._unix(began))

    def add_event(self, span: Span, name: str, moment: float, attributes: Attributes | None = None) -> None:
        """Add an event to a span."""
        span.add_event(name, attributes, timestamp=self._unix(moment))

    def end(self, span: Span, ended: float) -> None:
        """End a span at a time."""
        span.end(self._unix(ended))

    def _unix(self, moment: float) -> int:
        """Convert a time to Unix nanoseconds."""
        return int((moment + self._clock) * NANO)


def _create_preemptions(
    builder: _SpanBuilder, trace: RequestTrace, phase: Span, ended: float, *, decoding: bool
) -> None:
    """Create the spans of the preemptions during the prefill or the decode, which ended at `ended`."""
    inside = set_span_in_context(phase, Context())
    preemptions = trace.preemptions(decoding=decoding)
    for preemption, following in zip_longest(preemptions, preemptions[1:]):
        limit = ended if following is None else following.began
        span = builder.start("preemption", inside, preemption.began, preemption_attributes(preemption))
        if preemption.resumed:
            builder.add_event(span, "resumed", preemption.resumed)
        builder.end(span, preemption.ended or limit)


def request_attributes(trace: RequestTrace, model: str) -> Attributes:
    """Return the attributes of the span `engine.request`."""
    times = trace.timeline
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "embeddings" if trace.embeds else "text_completion",
        "gen_ai.request.model": model[:256],
        "gen_ai.response.finish_reasons": [trace.finish_reason],
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.output_tokens,
        "mizzen.usage.cached_tokens": trace.cached_tokens,
        "mizzen.preemptions": times.preemption_count,
    }
    if times.first_token:
        attributes["gen_ai.server.time_to_first_token"] = times.first_token - times.arrival
    if trace.resumed_tokens:
        attributes["mizzen.usage.resumed_tokens"] = trace.resumed_tokens
    if trace.error:
        attributes["error.type"] = trace.error
    return attributes


def decode_attributes(trace: RequestTrace) -> Attributes:
    """Return the attributes of the span `decode`."""
    attributes: dict[str, AttributeValue] = {}
    tokens = trace.output_tokens - 1  # the prefill generates the first one
    if tokens > 0:
        seconds = trace.ended - trace.timeline.first_token
        attributes["mizzen.decode.tokens"] = tokens
        attributes["gen_ai.server.time_per_output_token"] = seconds / tokens
    if trace.mean_batch:
        attributes["mizzen.decode.mean_batch_size"] = trace.mean_batch
    return attributes


def preemption_attributes(preemption: PreemptionTimes) -> Attributes:
    """Return the attributes of a span `preemption`."""
    attributes: dict[str, AttributeValue] = {"mizzen.preemption.reason": preemption.reason}
    if preemption.resumed:
        attributes |= {
            "mizzen.preemption.wait_seconds": preemption.resumed - preemption.began,
            "mizzen.preemption.recomputed_tokens": max(0, preemption.computed - preemption.cached),
            "mizzen.prefill.chunks": preemption.chunks,
            "mizzen.usage.cached_tokens": preemption.cached,
        }
    return attributes
