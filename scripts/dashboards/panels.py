# SPDX-License-Identifier: Apache-2.0
"""Render dashboards, which the `*_board.py` modules describe as data, in Grafana's classic JSON schema.

Fields that equal Grafana's defaults are omitted, because the dashboards count towards the size of a Helm
release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "heatmap", "bargauge", "table"]

SCHEMA_VERSION = 39
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GREEN, YELLOW, RED = "green", "yellow", "red"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query of a panel. `legend` may contain label names in double braces."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard.

    Attributes:
        unit: Grafana's identifier of the unit.
        yellow: value from which the panel is yellow; None for no threshold.
        red: value from which the panel is red; None for no threshold.
        falling: whether the thresholds are reversed, so that values below `red` are red.
        width: width in columns; a dashboard has 24 columns.
        most: upper end of the axis; None lets Grafana choose it.
        links_to_service: whether each row or series links to the dashboard of its service. The series have
            the labels `namespace` and `service`.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    yellow: float | None = None
    red: float | None = None
    falling: bool = False
    width: int = 8
    height: int = 7
    stacked: bool = False
    most: float | None = None
    links_to_service: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of panels with a title; panels that do not fit into one line continue in the next line."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A drop-down variable of a dashboard, whose choices are the values of `label` in `metric`."""

    label: str
    metric: str
    title: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard.

    Attributes:
        uid: identifies the dashboard in URLs.
        title: its name in Grafana.
        rollouts: label matchers of the services whose rollouts are annotations.
    """

    uid: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    rollouts: str


def rate(metric: str, by: str = "", labels: str = "") -> str:
    """Return the per-second rate of a counter as PromQL, summed by labels.

    Args:
        metric: name of the counter.
        by: names of the labels to sum by, separated by commas.
        labels: label matchers that select series.
    """
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "", labels: str = "") -> str:
    """Return a quantile of a histogram as PromQL.

    Args:
        share: the quantile, from 0 to 1.
        metric: name of the histogram.
        by: names of the labels to group by, separated by commas.
        labels: label matchers that select series.
    """
    keys = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', keys, labels)})"


def quantiles(metric: str, labels: str = "", shares: Sequence[float] = (0.5, 0.99)) -> list[Query]:
    """Return one query for each quantile of a histogram, over all series that `labels` selects."""
    return [Query(quantile(share, metric, "", labels), f"p{round(share * 100)}") for share in shares]


def mean(metric: str, by: str = "", labels: str = "") -> str:
    """Return the mean of a histogram as PromQL: one mean for each combination of the labels `by`.

    Args:
        metric: name of the histogram.
        by: names of the labels to group by, separated by commas.
        labels: label matchers that select series.
    """
    return f"{rate(f'{metric}_sum', by, labels)} / {rate(f'{metric}_count', by, labels)}"


def render(dashboard: Dashboard) -> Json:
    """Return a dashboard in Grafana's JSON schema."""
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["mizzen"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_link()],
        "annotations": {"list": [_rollouts(dashboard.rollouts)]},
        "templating": {"list": [_datasource(), *map(_variable, dashboard.variables)]},
        "panels": _panels(dashboard.rows),
    }


def _link() -> Json:
    """Return a drop-down menu of Mizzen's dashboards; its links keep the time range and the variables."""
    return {
        "asDropdown": True,
        "icon": "external link",
        "includeVars": True,
        "keepTime": True,
        "tags": ["mizzen"],
        "targetBlank": False,
        "title": "Mizzen",
        "tooltip": "",
        "type": "dashboards",
        "url": "",
    }


def _rollouts(matchers: str) -> Json:
    """Return the annotations that mark the time of each rollout in all panels."""
    return {
        "name": "Rollouts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": f"max by (namespace, service) (mizzen_operator_rollout_age_seconds{{{matchers}}}) > 0",
        "step": "30s",
        "titleFormat": "Rollout",
        "textFormat": "{{namespace}}/{{service}}",
    }


def _service_link(kind: Kind) -> Json:
    """Return a link to the dashboard of the service of a table's row, or of a series."""
    where = "__data.fields" if kind == "table" else "__field.labels"
    variables = "".join(f"var-{name}=${{{where}.{name}}}&" for name in ("namespace", "service"))
    return {"title": "Open the service", "url": f"/d/mizzen-service?{variables}${{__url_time_range}}"}


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.label,
        "label": variable.title,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": variable.label},
        "current": {"text": ["All"], "value": ["$__all"]},
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "sort": 1,
        "options": [],
    }


def _panels(rows: Sequence[Row]) -> list[Json]:
    panels: list[Json] = []
    top = 0
    for row in rows:
        panels.append({
            "id": len(panels) + 1,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            "panels": [],
        })  # fmt: skip
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top}
            panels.append(_panel(panel, len(panels) + 1, place))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return panels


def _panel(panel: Panel, number: int, place: Json) -> Json:
    defaults: Json = {"unit": panel.unit}
    if panel.kind != "timeseries" or panel.yellow is not None or panel.red is not None:
        defaults["thresholds"] = _thresholds(panel)
    if panel.most is not None:
        defaults |= {"min": 0, "max": panel.most}
    if panel.links_to_service:
        defaults["links"] = [_service_link(panel.kind)]
    custom = _custom(panel)
    if custom:
        defaults["custom"] = custom
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        **({"options": _options(panel)} if panel.kind != "timeseries" else {}),
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        **({"transformations": _columns()} if panel.kind == "table" else {}),
    }


def _target(panel: Panel, index: int, query: Query) -> Json:
    target: Json = {"refId": chr(ord("A") + index), "expr": query.expr}
    if query.legend:
        target["legendFormat"] = query.legend
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    if panel.kind in ("table", "bargauge"):
        target |= {"instant": True, "range": False}
    if panel.kind == "table":
        target["format"] = "table"
    return target


def _thresholds(panel: Panel) -> Json:
    steps: list[Json] = [{"color": RED if panel.falling else GREEN, "value": None}]
    after = (
        ((panel.red, YELLOW), (panel.yellow, GREEN))
        if panel.falling
        else ((panel.yellow, YELLOW), (panel.red, RED))
    )
    steps += [{"color": color, "value": value} for value, color in after if value is not None]
    if panel.falling and panel.yellow is None:
        steps[-1]["color"] = GREEN
    return {"mode": "absolute", "steps": steps}


def _custom(panel: Panel) -> Json:
    if panel.kind != "timeseries":
        return {}
    custom: Json = {}
    if panel.stacked:
        custom |= {"fillOpacity": 25, "stacking": {"mode": "normal", "group": "A"}}
    if panel.red is not None or panel.yellow is not None:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    return custom


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            return {}
        case "stat":
            calculated = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": calculated, "colorMode": "value", "graphMode": "area"}
        case "bargauge":
            calculated = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": calculated, "orientation": "horizontal", "displayMode": "basic"}
        case "heatmap":
            return {"calculate": False, "yAxis": {"unit": panel.unit}}
        case "table":
            return {"showHeader": True}


def _columns() -> list[Json]:
    """Return the transformations that merge the queries of a table panel and hide two columns."""
    hidden = {"Time": True, "__name__": True}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": hidden}},
    ]
