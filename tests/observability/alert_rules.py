# SPDX-License-Identifier: Apache-2.0
"""Renders the chart's rule files as Helm does, for Prometheus and promtool."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = sorted((ROOT / "charts/mizzen/alerts").glob("*.yaml"))
_PLACE = re.compile(r"\$\{(\w+)\.(\w+)\}")


def render_rule_text(text: str, **changed: dict[str, float]) -> str:
    """Return the text of a rule file with the values of `monitoring.rules` inserted.

    Args:
        text: the text, in which `${section.name}` stands for a value.
        changed: values by section that replace the chart's defaults.

    Raises:
        KeyError: the chart has no such value.
    """
    values: dict[str, Any] = yaml.safe_load((ROOT / "charts/mizzen/values.yaml").read_text())
    rules = values["monitoring"]["rules"]
    return _PLACE.sub(lambda found: str({**rules[found[1]], **changed.get(found[1], {})}[found[2]]), text)


def render_rules(folder: Path) -> list[Path]:
    """Write all rule files with the chart's default values into a folder, and return their paths."""
    paths = [folder / path.name for path in RULES]
    for path, source in zip(paths, RULES, strict=True):
        path.write_text(render_rule_text(source.read_text()))
    return paths
