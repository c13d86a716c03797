# SPDX-License-Identifier: Apache-2.0
"""Export the status block as `/metrics`, under Mizzen's, SGLang's and vLLM's names.

The supervisor registers the collector. All metrics have the label `model_name`; some also have `reason`,
`code`, `phase`, `format` or `layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from mizzen import __version__
from mizzen.core.request import FinishReason
from mizzen.engine.info import WEIGHT_FORMATS
from mizzen.server.metric_catalogue import (
    EXPERT_LAYERS,
    HISTOGRAMS,
    IMAGE_REJECTIONS,
    METRICS,
    STARTUP_PHASES,
    Histogram,
    Metric,
)
from mizzen.server.metric_names import ABORTED, CACHE_CONFIG, SUCCESS, TOKENS, USAGE, VLLM
from mizzen.server.status_block import Snapshot
from mizzen.wire.messages import RefusalCode

PREFIX = "mizzen_engine_"
SGLANG = "sglang:"

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class EngineView:
    """Values that `/metrics` exports: rank 0's status snapshot and the supervisor's state."""

    snapshot: Snapshot
    state: str
    """State of the engine: starting, serving, draining or failed."""
    failure_kind: str
    """`ExitReason.kind` of the engine's failure; empty if the engine has not failed."""
    uptime_seconds: float
    dropped_spans: int = 0
    """Number of spans that the supervisor could not export."""


STATES = ("starting", "serving", "draining", "failed")


class EngineCollector:
    """Prometheus collector that reads the engine's state at every scrape."""

    def __init__(self, model: str, view: Callable[[], EngineView], page_size: int) -> None:
        self._model = model
        self._view = view
        self._page_size = page_size

    def collect(self) -> Iterator[Family]:
        """Yield all metric families with their current values."""
        view = self._view()
        snapshot = view.snapshot
        for metric in METRICS:
            for name in _names(metric):
                yield self._scalar_metric(metric, name, snapshot[metric.field])
        for histogram in HISTOGRAMS:
            for name in _names(histogram):
                yield self._histogram(histogram, name, snapshot)
        yield from self._labelled_metrics(snapshot)
        yield from self._ratio_metrics(snapshot)
        yield from self._compatibility_metrics(snapshot)
        yield from self._cache_config(snapshot)
        yield self._image_decoding(snapshot)
        yield from self._engine_metrics(view)

    def _scalar_metric(self, metric: Metric, name: str, value: float) -> Family:
        kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
        family = kind(name, metric.help, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _histogram(self, histogram: Histogram, name: str, snapshot: Snapshot) -> Family:
        total, buckets = 0.0, []
        bounds = [*map(str, histogram.buckets), "+Inf"]
        for index, bound in enumerate(bounds):
            total += snapshot[f"{histogram.field}_{index}"]
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, histogram.help, labels=("model_name",))
        family.add_metric((self._model,), buckets, snapshot[f"{histogram.field}_sum"])
        return family

    def _labelled_metrics(self, snapshot: Snapshot) -> Iterator[Family]:
        finished = CounterMetricFamily(
            f"{PREFIX}finished_requests_total", "Finished requests by reason", labels=("model_name", "reason")
        )
        for reason in FinishReason:
            finished.add_metric((self._model, reason.name.lower()), snapshot[f"finished_{reason.name}"])
        refused = CounterMetricFamily(
            f"{PREFIX}refused_total", "Refused requests and frames by code", labels=("model_name", "code")
        )
        for code in RefusalCode:
            refused.add_metric((self._model, code.name.lower()), snapshot[f"refused_{code.name}"])
        rejected = CounterMetricFamily(
            f"{PREFIX}images_rejected_total",
            "Images that were not accepted or not decoded, by reason",
            labels=("model_name", "reason"),
        )
        for reason in IMAGE_REJECTIONS:
            rejected.add_metric((self._model, reason), snapshot[f"images_rejected_{reason}"])
        phases = GaugeMetricFamily(
            f"{PREFIX}startup_seconds", "Duration of a startup phase", labels=("model_name", "phase")
        )
        for phase in STARTUP_PHASES:
            phases.add_metric((self._model, phase.name.lower()), snapshot[f"phase_seconds_{phase.name}"])
        weights = GaugeMetricFamily(
            f"{PREFIX}weights_format_bytes",
            "Memory used by weights by the format in which they are held; scales count with their weights",
            labels=("model_name", "format"),
        )
        for name in WEIGHT_FORMATS:
            weights.add_metric((self._model, name), snapshot[f"weights_bytes_{name}"])
        busiest = GaugeMetricFamily(
            f"{PREFIX}expert_load_ratio",
            "Tokens of a layer's busiest expert over the mean of its experts, in the last period of 10 s or "
            "more; 1 means equal loads",
            labels=("model_name", "layer"),
        )
        for layer in range(EXPERT_LAYERS):
            if ratio := snapshot[f"expert_load_{layer}"]:
                busiest.add_metric((self._model, str(layer)), ratio)
        dropped = CounterMetricFamily(
            f"{PREFIX}expert_dropped_tokens_total",
            "Tokens that a layer left without one of their experts, summed over layers; always 0, as "
            "experts have no capacity limit",
            labels=("model_name",),
        )
        if snapshot["experts_counted"]:
            dropped.add_metric((self._model,), snapshot["expert_dropped"])
        yield from (finished, refused, rejected, phases, weights, busiest, dropped)

    def _ratio_metrics(self, snapshot: Snapshot) -> Iterator[Family]:
        pages = snapshot["pages_total"]
        usage = snapshot["pages_used"] / pages if pages else 0.0
        prompt = snapshot["prompt_tokens"]
        hits = snapshot["cached_tokens"] / prompt if prompt else 0.0
        for name in USAGE:
            text = "Share of the KV cache held by running requests, 0 to 1"
            yield self._gauge(name, text, usage)
        text = "Share of prompt tokens whose KV came from the prefix cache, 0 to 1"
        yield self._gauge(f"{SGLANG}cache_hit_rate", text, hits)

    def _compatibility_metrics(self, snapshot: Snapshot) -> Iterator[Family]:
        """Yield metrics that only vLLM or SGLang define: KV cache in tokens, aborted and successful
        requests."""
        for name, field in TOKENS.items():
            text = (
                "Tokens held by running requests" if field == "pages_used" else "KV cache capacity in tokens"
            )
            yield self._gauge(name, text, snapshot[field] * self._page_size)
        aborted = CounterMetricFamily(ABORTED, "Requests aborted by the client", labels=("model_name",))
        aborted.add_metric((self._model,), snapshot[f"finished_{FinishReason.ABORT.name}"])
        good = CounterMetricFamily(
            SUCCESS, "Requests that finished successfully", labels=("model_name", "finished_reason")
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            good.add_metric((self._model, reason.name.lower()), snapshot[f"finished_{reason.name}"])
        yield from (aborted, good)

    def _gauge(self, name: str, text: str, value: float) -> Family:
        family = GaugeMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _cache_config(self, snapshot: Snapshot) -> Iterator[Family]:
        for name, labels in CACHE_CONFIG.items():
            text = "Always 1; labels hold the KV page size in tokens and the number of pages"
            family = GaugeMetricFamily(name, text, labels=("model_name", *labels))
            pages = int(snapshot["pages_total"])
            if pages:
                family.add_metric((self._model, str(self._page_size), str(pages)), 1.0)
            yield family

    def _image_decoding(self, snapshot: Snapshot) -> Family:
        family = GaugeMetricFamily(
            f"{PREFIX}image_decoding_confined",
            "1 if the kernel restricts the system calls of the processes that decode images, else 0; no "
            "value before the first image",
            labels=("model_name",),
        )
        if snapshot["image_processes_started"]:
            family.add_metric((self._model,), snapshot["image_processes_confined"])
        return family

    def _engine_metrics(self, view: EngineView) -> Iterator[Family]:
        uptime = GaugeMetricFamily(
            f"{PREFIX}uptime_seconds", "Time since the supervisor started", labels=("model_name",)
        )
        uptime.add_metric((self._model,), view.uptime_seconds)
        state = GaugeMetricFamily(
            f"{PREFIX}state", "1 for the current state of the engine", labels=("model_name", "state")
        )
        for name in STATES:
            state.add_metric((self._model, name), float(name == view.state))
        end = GaugeMetricFamily(
            f"{PREFIX}failed_end",
            "1 for the reason of the failure, once the engine has failed",
            labels=("model_name", "reason"),
        )
        if view.failure_kind:
            end.add_metric((self._model, view.failure_kind), 1.0)
        build = GaugeMetricFamily(
            f"{PREFIX}build_info", "Always 1; the label holds the version", labels=("model_name", "version")
        )
        build.add_metric((self._model, __version__), 1.0)
        spans = CounterMetricFamily(
            f"{PREFIX}dropped_spans_total",
            "Spans of traces that were dropped: queue full, or not accepted by the collector",
            labels=("model_name",),
        )
        spans.add_metric((self._model,), view.snapshot["dropped_spans"] + view.dropped_spans)
        yield from (uptime, state, end, build, spans)


def _names(metric: Metric | Histogram) -> tuple[str, ...]:
    sglang = (SGLANG + metric.sglang,) if metric.sglang else ()
    return (PREFIX + metric.name, *sglang, *VLLM.get(metric.field, ()))


def build_registry(model: str, view: Callable[[], EngineView], page_size: int) -> CollectorRegistry:
    """Return a registry that contains only the engine's metrics.

    Args:
        model: Value of the label `model_name`.
        view: Returns the values to export; called at every scrape.
        page_size: Tokens per KV page.
    """
    metrics = CollectorRegistry(auto_describe=False)
    metrics.register(EngineCollector(model, view, page_size))  # pyright: ignore[reportArgumentType]
    return metrics
