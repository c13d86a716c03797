# SPDX-License-Identifier: Apache-2.0
"""Generate the reference pages of the documentation from their sources.

    python scripts/reference.py

`docs/api.md` comes from the CRD, `docs/options.md` from the configuration dataclasses, `docs/metrics.md` from
the programs' registries, and the tables of `docs/openai.md` from the gateway's schemas. A test checks that
the pages are up to date.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import yaml
from generated_pages import ROOT, read_page, replace_part, write_pages
from prometheus_client import CollectorRegistry, Metric

from mizzen.commands.options import Setting, settings
from mizzen.common.options import flag
from mizzen.fetch.config import FetchConfig
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.openai.openapi_document import REQUEST_PARTS, REQUESTS
from mizzen.gateway.telemetry.metrics import LABELS as GATEWAY_LABELS
from mizzen.gateway.telemetry.metrics import Metrics as GatewayMetrics
from mizzen.server.config import EngineConfig
from mizzen.server.metric_catalogue import FIELDS
from mizzen.server.metric_names import LABELS as ENGINE_LABELS
from mizzen.server.metrics import EngineView, build_registry
from mizzen.server.status_block import Snapshot
from mizzen_operator.autoscaling.scaling_metrics import ScalingMetrics
from mizzen_operator.metrics import Metrics as OperatorMetrics
from mizzen_operator.status.service_metrics import ServiceMetrics

CRD = ROOT / "crds/inferenceservices.yaml"
API_HEAD = """\
# InferenceService

`apiVersion: mizzen.dev/v1alpha1`, `kind: InferenceService`, short name `infsvc`. `scripts/reference.py`
generates this page from the CRD; `kubectl explain infsvc.spec` shows the same text.

Only `spec.model.source` is required. If another field is not set, the API server writes its default into the
object. Some fields have no default, but are derived from others; the status shows the value in force.
`kubectl apply` rejects a manifest that violates a rule, with a message that names the field and the fix.
"""
API_TAIL = """\
## Not supported

These features of similar APIs do not exist in this API, or have another name in it. The list names the
alternative:

- **LoRA `adapters`** are not supported. Merge them into the weights.
- **Pipeline, data and expert parallelism, and disaggregated prefill** are not supported. Use `spec.replicas`
  and `spec.parallelism.tensor`.
- **An image as model cache, and `prefetch`.** Use `oci://` and a cache in a claim or in a folder on the
  nodes. The operator always fetches a model completely before it creates groups.
- **`gatewayRef`, or no gateway at all.** Use a `Dedicated` gateway, or one `Shared` gateway per namespace.
  Engines accept requests only from Mizzen's gateways.
- **An `HTTPRoute` in the spec.** Create your own `HTTPRoute` to the Service of `status.url`;
  `examples/gateway-api.yaml` is an example.
- **A routing policy or a configurable session header.** The only [policy](routing.md) weighs cached prefix,
  session and load. The session headers are always `x-mizzen-session` and
  `x-session-affinity`.
- **`auth`, `limits` and priorities.** Use `spec.gateway.apiKeys`. Each key has its own models, limits,
  priority and weight ([tenants](tenants.md)). Kubernetes tokens are not accepted, because there is no
  TokenReview.
- **Autoscaling of gateway pods.** Use `spec.gateway.replicas` and `processes`. The operator reverts changes
  of the Deployment's replicas, so no autoscaler may target it.
- **Autoscaling by time to first token.** Use one of the metrics of `spec.autoscaling.metric.type`, or
  [KEDA](operations.md#scaling-by-others) with any metric.
- **Canary weights.** Use `spec.rollout.partition` and `paused`. The share of requests of the new revision
  then follows from its number of groups, because requests are routed by load.
- **Golden prompts from a ConfigMap.** Write them into `spec.rollout.verification.prompts`, so that changing a
  prompt is a change of the service.
- **`podMonitor` in the spec.** The chart's PodMonitors cover all services (`monitoring.*`).
- **NetworkPolicies by default.** Set `spec.networkPolicy: Enabled`. It is off by default, because it would
  block a Prometheus whose namespace lacks the usual label.
- **Loading progress or capacity in the status.** After a start, see `status.coldStart` and the engine's
  metrics `mizzen_engine_startup_seconds` and `sglang:max_total_num_tokens`.
- **A probe request before `Ready`.** Use `spec.rollout.verification`: a group must answer golden prompts
  correctly before it gets requests. Without it, a group is `Ready` once every ready gateway routes to it. The
  gateways do so over a connection on which the group sends a heartbeat every second.
"""
OPTIONS_HEAD = """\
# Options

This page lists the options of `mizzen engine`, `mizzen gateway` and `mizzen fetch`. `scripts/reference.py`
generates it from the configuration classes. On Kubernetes the operator sets most options from the
InferenceService. To set other options, use `spec.engine.extraArgs` and `spec.gateway.extraArgs`.

`mizzen serve` accepts the options of `mizzen engine` and `mizzen gateway`. It sets the options for
connections, keys and names itself and does not accept them. Its `--device` has another value, `auto`,
which is the default: cuda if there is a GPU, and otherwise cpu.
"""
METRICS_HEAD = """\
# Metrics

Every program serves `/metrics` in the Prometheus text format. `scripts/reference.py` generates this page from
the programs' registries.

A metric has one series for each combination of label values. The column *series* gives the maximum number of
series per process. A value from a request becomes a label value only if it names a served model or a path of
the API; all other values become `other`. In the output, a series of a histogram has one line for each bucket
bound, and three more (`+Inf`, `_sum` and `_count`).

Dashboards and alerts expect the labels that the chart's monitors add at scrape time. All metrics get
`namespace` and `pod`. Metrics of engines and gateways also get `service`, which is the value of the pod's
label `mizzen.dev/service` (`mizzen-shared` for a shared gateway). The operator's metrics per service already
have the labels `namespace` and `service`, so the operator is scraped with `honorLabels`.

The engine also exports its main metrics under the names that SGLang and vLLM use, so that other tools work
unchanged. Such tools are the endpoint pickers of llm-d and of the Gateway API inference extension, AIBrix,
and recipes for KEDA or the HPA. Point them at the engine, not at the gateway.

If a gateway runs several processes (`--processes`), each of its samples has the label `process` with the
number of the process.
"""


OPENAI_MARK = "<!-- scripts/reference.py generates the rest of this page from the gateway's schemas. -->"


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, schema) for each field below `path`, parents before children."""
    for name, value in schema.get("properties", {}).items():
        field_path = f"{path}.{name}"
        yield field_path, value
        yield from fields(value, field_path)
        if "items" in value:
            yield from fields(value["items"], f"{field_path}[]")


def kind(schema: dict[str, Any]) -> str:
    """Return the type of a CRD field, as Markdown for the table."""
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if schema.get("type") == "array":
        return f"list of {schema['items'].get('type', 'any')}s"
    if schema.get("type") == "object" and "additionalProperties" in schema:
        return "map"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low}..{high}" if low is not None and high is not None else ""
    return schema.get("type", "any") + (bounds or (f" ≥ {low}" if low is not None else ""))


def crd_fields(part: str) -> dict[str, dict[str, Any]]:
    """Return the schemas of all fields of `spec` or `status` in the CRD, by path, parents before children."""
    crd = yaml.safe_load(CRD.read_text())
    top = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return dict(fields(top[part], part))


def api_page() -> str:
    """Return the text of docs/api.md, the reference of the InferenceService's fields."""
    lines = [API_HEAD]
    for part in ("spec", "status"):
        lines += [f"## {part}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        for path, schema in crd_fields(part).items():
            default = schema.get("default")
            shown = "" if default in (None, {}, []) else f"`{json.dumps(default)}`"
            meaning = " ".join(schema.get("description", "").split()).replace("|", "\\|")
            lines.append(f"| `{path}` | {kind(schema)} | {shown} | {meaning} |")
        lines.append("")
    return "\n".join([*lines, API_TAIL])


def option_line(setting: Setting) -> str:
    """Return the row of a setting in an options table."""
    bounds = [
        f"{word} {value:g}"
        for word, value in (("at least", setting.low), ("at most", setting.high))
        if value is not None
    ]
    choices = [" \\| ".join(f"`{choice}`" for choice in setting.choices)] if setting.choices else []
    default = setting.default
    if default is ...:
        shown = "required"
    else:
        shown = (
            ""
            if default in (None, (), "")
            else f"`{str(default).lower() if default in (True, False) else default}`"
        )
    return f"| `{flag(setting.name)}` | {', '.join(choices + bounds)} | {shown} | {setting.help} |"


def options_page() -> str:
    """Return the text of docs/options.md, the reference of the command-line options."""
    lines = [OPTIONS_HEAD]
    for name, config in (("engine", EngineConfig), ("gateway", GatewayConfig), ("fetch", FetchConfig)):
        lines += [f"## mizzen {name}", "", "| option | values | default | meaning |", "|---|---|---|---|"]
        lines += [option_line(setting) for setting in settings(config)]
        lines.append("")
    return "\n".join(lines)


UNITS = ("seconds", "tokens", "bytes", "requests", "engines", "pages", "blocks")
OPERATOR_LABELS = {
    "action": ("actions", "kinds of changes in the source", "kind of change"),
    "cause": (
        "13",
        "10 failure reasons of the engine, `configuration`, `out_of_memory`, `other`",
        "why an engine failed",
    ),
    "code": ("16", "status codes, and `0` if there was no answer", "status code of the API server's answer"),
    "condition": ("10", "condition types of an InferenceService", "condition type"),
    "kind": ("12", "kinds of objects that the operator manages", "kind of object"),
    "namespace": ("namespaces", "namespaces with services", "namespace of the InferenceService"),
    "reason": ("reasons", "constants in the source", "reason of the failure or of the decision"),
    "result": (
        "6",
        "constants in the source",
        "result of the reconcile pass, query, verification or rollout",
    ),
    "service": ("services", "existing services", "name of the InferenceService"),
    "state": ("5", "`wanted`, `present`, `ready`, `updated`, `available`", "state of the counted groups"),
    "verb": ("5", "HTTP methods", "method of the request"),
    "version": ("1", "the running version", "version of the program"),
}


UNITS_BY_NAME = {
    "output_tokens_per_second": "tokens/s",
    "gen_throughput": "tokens/s",
    "token_usage": "share",
    "cache_hit_rate": "share",
    "kv_cache_usage_perc": "share",
    "gpu_cache_usage_perc": "share",
    "num_running_reqs": "requests",
    "num_queue_reqs": "requests",
    "prefix_cache_queries_total": "tokens",
    "prefix_cache_hits_total": "tokens",
    "workqueue_depth": "services",
    "services": "services",
    "service_groups": "groups",
}
"""Units of metrics whose names do not contain the unit."""


def unit(name: str) -> str:
    """Return the unit of a metric, or an empty string for plain counts."""
    bare = re.sub(r"^(sglang:|vllm:|mizzen_[a-z]+?_)", "", name)
    words = name.removesuffix("_total").replace(":", "_").split("_")
    return UNITS_BY_NAME.get(bare) or next((word for word in UNITS if word in words[-2:]), "")


def engine_metrics() -> CollectorRegistry:
    """Return the registry of an engine that has served no requests."""
    view = EngineView(Snapshot(array("d", bytes(8 * len(FIELDS))), ""), "starting", "watchdog", 0.0)
    return build_registry("demo", lambda: view, 16)


def metric_name(family: Metric) -> str:
    """Return the name of a metric in the text format."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def label_names(family: Any, metrics: dict[str, Any]) -> tuple[str, ...]:
    """Return the label names of a metric family.

    `metrics` are the registered metric objects, by name; families created at scrape time know their own
    labels.
    """
    source = family if hasattr(family, "_labelnames") else metrics[family.name]
    return tuple(source._labelnames)


def series(labels: tuple[str, ...], bounds: dict[str, tuple[str, str, str]]) -> str:
    """Return the maximum number of series of a metric, as a product of the numbers of label values.

    The label `namespace` does not count if the metric also has the label `service`.
    """
    counts = [bounds[label][0] for label in labels if not (label == "namespace" and "service" in labels)]
    return " × ".join(count for count in counts if count != "1") or "1"


def metric_tables(registry: CollectorRegistry, bounds: dict[str, tuple[str, str, str]]) -> list[str]:
    """Return the tables of a program's metrics and of their labels, as lines.

    Args:
        registry: registry with the program's metrics.
        bounds: for each label, the maximum number of values, the values, and their meaning.

    Raises:
        KeyError: a metric has a label that `bounds` does not contain.
    """
    collectors: list[Any] = list(registry._collector_to_names)
    metrics = {collector._name: collector for collector in collectors if hasattr(collector, "_labelnames")}
    rows = ["| metric | type | labels | unit | series | meaning |", "|---|---|---|---|---|---|"]
    used: set[str] = set()
    for family in registry.collect():
        name = metric_name(family)
        labels = label_names(family, metrics)
        used.update(labels)
        shown = ", ".join(f"`{label}`" for label in labels)
        cells = (f"`{name}`", family.type, shown, unit(name), series(labels, bounds), family.documentation)
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", "| label | maximum number of values | values | meaning |", "|---|---|---|---|"]
    rows += [f"| `{label}` | {' | '.join(bounds[label])} |" for label in sorted(used)]
    return rows


def metrics_page() -> str:
    """Return the text of docs/metrics.md, the reference of all metrics."""
    gateway, operator = GatewayMetrics(), OperatorMetrics()
    ServiceMetrics(operator.registry)
    ScalingMetrics(operator.registry)
    programs = (
        ("Engine", "port 8081 (`http`)", metric_tables(engine_metrics(), ENGINE_LABELS)),
        ("Gateway", "port 8001 (`admin`)", metric_tables(gateway.registry, GATEWAY_LABELS)),
        ("Operator", "port 8080 (`http`)", metric_tables(operator.registry, OPERATOR_LABELS)),
    )
    lines = [METRICS_HEAD]
    for name, where, tables in programs:
        lines += [f"## {name}", "", f"`/metrics` on {where}.", "", *tables, ""]
    return "\n".join(lines)


def body_type(schema: dict[str, Any]) -> str:
    """Return the type of a request body's field, as Markdown for the table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(body_type(option) for option in options))
    if "enum" in schema or "const" in schema:
        return " \\| ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {body_type(schema['items'])}" if schema.get("items") else "list"
    low, high = schema.get("minimum"), schema.get("maximum")
    above = f" above {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else ""
    upto = f" up to {high}" if high is not None else ""
    bounds = f" {low} to {high}" if low is not None and high is not None else above + upto
    if low is not None and high is None:
        bounds = f" from {low}"
    return schema.get("type", "any") + bounds


def body_rows(schema: dict[str, Any]) -> list[str]:
    """Return the rows of a request body's table, one per field."""
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in schema.get("required", ()) else ""
        meaning = field.get("description", "").replace("|", "\\|")
        if not meaning and len(field.get("enum", ())) == 1:
            meaning = f"Always `{field['enum'][0]}`."
        rows.append(f"| `{name}` | {body_type(field)} | {needed} | {meaning} |")
    return rows


def openai_page() -> str:
    """Return the text of docs/openai.md: its handwritten part, then generated tables of request bodies."""
    lines = ["## Fields of requests", ""]
    _, parts = msgspec.json.schema_components((*REQUESTS, *REQUEST_PARTS), ref_template="#/{name}")
    first = [kind.__name__ for kind in REQUESTS]
    for name in [*first, *sorted(set(parts) - set(first))]:
        text = parts[name].get("description", "").replace("\n", " ")
        lines += [f"### {name}", "", text, "", "| field | type | | meaning |", "|---|---|---|---|"]
        lines += [*body_rows(parts[name]), ""]
    return replace_part(read_page("docs/openai.md"), OPENAI_MARK, lines)


PAGES = {
    "docs/api.md": api_page,
    "docs/options.md": options_page,
    "docs/metrics.md": metrics_page,
    "docs/openai.md": openai_page,
}

if __name__ == "__main__":
    write_pages(PAGES)
