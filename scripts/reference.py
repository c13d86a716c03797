"""Write the reference pages of the documentation from what they describe.

    python scripts/reference.py

`docs/api.md` comes from the CRD, `docs/options.md` from the configuration dataclasses, `docs/metrics.md` from
the programs' registries, the tables of `docs/openai.md` from the gateway's schemas. A test compares them with
what this script would write.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from prometheus_client import CollectorRegistry

from mizzen.commands.options import Setting, settings
from mizzen.core.options import flag
from mizzen.fetch.config import FetchConfig
from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.metrics import LABELS as GATEWAY_LABELS
from mizzen.gateway.metrics import Metrics as GatewayMetrics
from mizzen.gateway.openai.describe import REQUESTS
from mizzen.server.catalogue import FIELDS
from mizzen.server.config import EngineConfig
from mizzen.server.metrics import EngineView
from mizzen.server.metrics import registry as engine_registry
from mizzen.server.names import LABELS as ENGINE_LABELS
from mizzen.server.status import Snapshot
from mizzen_operator.metrics import Metrics as OperatorMetrics

ROOT = Path(__file__).resolve().parents[1]
CRD = ROOT / "crds/inferenceservices.yaml"
API_HEAD = """\
# InferenceService

`apiVersion: mizzen.dev/v1alpha1`, `kind: InferenceService`, short name `infsvc`. This page is made from the
CRD by `scripts/reference.py`; `kubectl explain infsvc.spec` shows the same.

Only `spec.model.source` is required. Everything else has a default, which the API server writes into the
object, or is derived from other fields, and then the status shows the value in force. A manifest that breaks
a rule is rejected by `kubectl apply` with a message that names the field and the way out.
"""
API_TAIL = """\
## What is not there

What similar APIs have and this one does not, or calls otherwise, and what to use in its place:

- LoRA `adapters`: not served; merge them into the weights.
- Pipeline, data and expert parallelism; prefill and decode apart: not served; `spec.replicas` and
  `spec.parallelism.tensor`.
- An image as cache, `prefetch`: `oci://` into a claim or onto nodes; a model is always whole before groups
  are made of it.
- `gatewayRef`, no gateway at all: `Dedicated`, or one `Shared` gateway a namespace; engines speak to our
  gateways alone.
- An `HTTPRoute` in the spec: your own, to the Service of `status.url`: `examples/gateway-api.yaml`.
- A routing policy, a session header: one policy that weighs prefix, session and load, and the header
  `x-mizzen-session`: [routing](routing.md).
- `auth`, `limits`, priorities: `spec.gateway.apiKeys`: each key has its models, limits, priority and weight
  ([tenants](tenants.md)). Tokens of Kubernetes are not reviewed.
- Node selectors, tolerations, a priority class of gateway pods: those of `spec.podTemplate` are the engines'.
  Gateways need no GPU and run where any pod may.
- Scaling of gateway pods: `spec.gateway.replicas` and `processes`; the operator puts the Deployment's
  replicas back, so no autoscaler may have it as its target.
- Scaling by time to first token: saturation, waiting tokens or requests in work, or KEDA with any metric:
  [scaling by others](operations.md#scaling-by-others).
- Weights of a canary: `spec.rollout.partition` and `paused`: requests go to old and new groups by load.
- Golden prompts from a ConfigMap: in the spec, so that a change of them is a change of the service.
- `podMonitor` in the spec: the chart's, for all services: `monitoring.*`.
- Network policies from the start: `spec.networkPolicy: Enabled`; off by default, for a Prometheus without the
  usual label would be cut off.
- A state of loading, a capacity in the status: `status.coldStart` afterwards; `mizzen_engine_startup_seconds`
  and `sglang:max_total_num_tokens` from the engine.
- A probe request behind `Ready`: each ready gateway's word that it routes to the group over a connection that
  answers, and its pulse each second; `spec.rollout.verification` has requests answered first.
"""
OPTIONS_HEAD = """\
# Options of the processes

One option a field of the configuration objects; this page is made from them by `scripts/reference.py`. On
Kubernetes the operator sets most of them from the InferenceService; `spec.engine.extraArgs` takes the rest of
the engine's. `mizzen serve` takes those of engine and gateway but what it sets itself: the wire, the keys
and the names.
"""
METRICS_HEAD = """\
# Metrics

Every program serves `/metrics` in Prometheus' text format. This page is made from the programs' registries by
`scripts/reference.py`.

A metric has one series for each combination of its labels' values; the column `series` says how many there
are at most, of each process. Values that clients choose become labels only where they name something that
exists (a model that is served, a path of the API); all others are `other`. A histogram has a line for each
of its bounds, and three more.

Dashboards and alerts expect what the chart's monitors add at the scrape: `namespace`, `pod`, and on engines
and gateways `service`, the pod's label `mizzen.dev/service` (`mizzen-shared` for a shared gateway). The
operator's series of services have `namespace` and `service` themselves, so it is scraped with `honorLabels`.

The engine exports what other tools look for under SGLang's and vLLM's names too, always: endpoint pickers of
llm-d and of the Gateway API inference extension, AIBrix, and KEDA or HPA recipes work on it as they are.
Scrape the engine for those, not the gateway.

A gateway of several processes (`--processes`) has each sample with the label `process`, the process's number.
"""


OPENAI_MARK = "<!-- The rest is made from the gateway's schemas by scripts/reference.py. -->"


def fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields of a schema with their paths; parents first."""
    for name, value in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        yield here, value
        yield from fields(value, here)
        if "items" in value:
            yield from fields(value["items"], f"{here}[]")


def kind(schema: dict[str, Any]) -> str:
    """Return a field's type for a reader."""
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


def api_page() -> str:
    """Return the page of the InferenceService's fields."""
    crd = yaml.safe_load(CRD.read_text())
    top = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    lines = [API_HEAD]
    for part in ("spec", "status"):
        lines += [f"## {part}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        for path, schema in fields(top[part], part):
            default = schema.get("default")
            shown = "" if default in (None, {}, []) else f"`{json.dumps(default)}`"
            meaning = " ".join(schema.get("description", "").split()).replace("|", "\\|")
            lines.append(f"| `{path}` | {kind(schema)} | {shown} | {meaning} |")
        lines.append("")
    return "\n".join([*lines, API_TAIL])


def option_line(setting: Setting) -> str:
    """Return a row of the options' tables."""
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
    """Return the page of the processes' options."""
    lines = [OPTIONS_HEAD]
    for name, config in (("engine", EngineConfig), ("gateway", GatewayConfig), ("fetch", FetchConfig)):
        lines += [f"## mizzen {name}", "", "| option | values | default | meaning |", "|---|---|---|---|"]
        lines += [option_line(setting) for setting in settings(config)]
        lines.append("")
    return "\n".join(lines)


UNITS = ("seconds", "tokens", "bytes", "requests", "engines", "pages", "blocks")
OPERATOR_LABELS = {
    "action": ("actions", "kinds of changes in the source", "what was changed"),
    "cause": ("13", "kinds of ends, `configuration`, `out_of_memory`, `other`", "why engines ended"),
    "code": ("16", "status codes, and `0` without an answer", "how the API server answered"),
    "condition": ("10", "types of the service's conditions", "the condition"),
    "kind": ("12", "kinds of objects that the operator handles", "kind of the object"),
    "namespace": ("namespaces", "namespaces with services", "namespace of the service"),
    "reason": ("reasons", "words in the source", "why"),
    "result": ("6", "words in the source", "how it ended"),
    "service": ("services", "services that are there", "name of the InferenceService"),
    "state": ("5", "`wanted`, `present`, `ready`, `updated`, `available`", "which groups are counted"),
    "verb": ("5", "verbs of HTTP, 5", "what was asked"),
    "version": ("1", "one", "version of the program"),
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
"""Units of metrics whose names do not tell them."""


def unit(name: str) -> str:
    """Return a metric's unit, where it has one: counts of anything else have none."""
    bare = re.sub(r"^(sglang:|vllm:|mizzen_[a-z]+?_)", "", name)
    words = name.removesuffix("_total").replace(":", "_").split("_")
    return UNITS_BY_NAME.get(bare) or next((one for one in UNITS if one in words[-2:]), "")


def label_names(family: Any, made: dict[str, Any]) -> tuple[str, ...]:
    """Return the labels of a metric: of a family that is made at the scrape, or of the library's object."""
    source = family if hasattr(family, "_labelnames") else made[family.name]
    return tuple(source._labelnames)


def series(labels: tuple[str, ...], bounds: dict[str, tuple[str, str, str]]) -> str:
    """Return how many combinations of labels' values there are at most; a service has one namespace."""
    counts = [bounds[label][0] for label in labels if not (label == "namespace" and "service" in labels)]
    return " × ".join(count for count in counts if count != "1") or "1"


def metric_tables(registry: CollectorRegistry, bounds: dict[str, tuple[str, str, str]]) -> list[str]:
    """Return a program's tables: its metrics, and the labels that they have.

    Raises:
        KeyError: a metric has a label whose values nobody has bounded.
    """
    collectors: list[Any] = list(registry._collector_to_names)
    made = {one._name: one for one in collectors if hasattr(one, "_labelnames")}
    rows = ["| metric | type | labels | unit | series | meaning |", "|---|---|---|---|---|---|"]
    used: set[str] = set()
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = label_names(family, made)
        used.update(labels)
        shown = ", ".join(f"`{label}`" for label in labels)
        cells = (f"`{name}`", family.type, shown, unit(name), series(labels, bounds), family.documentation)
        rows.append(f"| {' | '.join(cells)} |")
    rows += ["", "| label | at most | values | meaning |", "|---|---|---|---|"]
    rows += [f"| `{label}` | {' | '.join(bounds[label])} |" for label in sorted(used)]
    return rows


def metrics_page() -> str:
    """Return the page of all metrics."""
    zero = Snapshot(array("d", bytes(8 * len(FIELDS))), "")
    view = EngineView(zero, "starting", "watchdog", 0.0)
    gateway, operator = GatewayMetrics(), OperatorMetrics()
    engine = engine_registry("demo", lambda: view, 16)
    programs = (
        ("Engine", "port 8081 (`http`)", metric_tables(engine, ENGINE_LABELS)),
        ("Gateway", "port 8001 (`admin`)", metric_tables(gateway.registry, GATEWAY_LABELS)),
        ("Operator", "the operator's own port", metric_tables(operator.registry, OPERATOR_LABELS)),
    )
    lines = [METRICS_HEAD]
    for name, where, tables in programs:
        lines += [f"## {name}", "", f"`/metrics` on {where}.", "", *tables, ""]
    return "\n".join(lines)


def body_type(schema: dict[str, Any]) -> str:
    """Return the type of a body's field for a reader."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    options = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(body_type(one) for one in options))
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
    """Return the rows of a body's table, one a field."""
    rows = []
    for name, field in schema.get("properties", {}).items():
        needed = "required" if name in schema.get("required", ()) else ""
        meaning = field.get("description", "").replace("|", "\\|")
        rows.append(f"| `{name}` | {body_type(field)} | {needed} | {meaning} |")
    return rows


def openai_page() -> str:
    """Return the page of the OpenAI API: what is written there by hand, and the tables of its bodies."""
    written = (ROOT / "docs/openai.md").read_text(encoding="utf-8").partition(OPENAI_MARK)[0]
    lines = [written + OPENAI_MARK, "", "## Fields of requests", ""]
    _, parts = msgspec.json.schema_components(REQUESTS, ref_template="#/{name}")
    first = [kind.__name__ for kind in REQUESTS]
    for name in [*first, *sorted(set(parts) - set(first))]:
        text = parts[name].get("description", "").replace("\n", " ")
        lines += [f"### {name}", "", text, "", "| field | type | | meaning |", "|---|---|---|---|"]
        lines += [*body_rows(parts[name]), ""]
    return "\n".join(lines)


PAGES = {
    "docs/api.md": api_page,
    "docs/options.md": options_page,
    "docs/metrics.md": metrics_page,
    "docs/openai.md": openai_page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / name).write_text(page(), encoding="utf-8")
