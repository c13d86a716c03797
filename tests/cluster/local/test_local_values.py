# SPDX-License-Identifier: Apache-2.0
"""Values of the operator's chart that `mizzen-local` gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mizzen_local.cli import app
from mizzen_local.cluster import ClusterError, render_operator


def operator_container(values: dict[str, Any]) -> dict[str, Any]:
    [found] = [item for item in render_operator(values) if item["kind"] == "Deployment"]
    return found["spec"]["template"]["spec"]["containers"][0]


def test_values_replace_those_of_the_chart_but_keep_the_local_ones() -> None:
    image = operator_container({})["image"]
    given = {"operator": {"watchNamespace": "llm"}, "acceleratorProfiles": {"h100": {"memory": "79Gi"}}}
    container = operator_container(given)
    assert container["image"] == image
    assert '{"h100":{"memory":"79Gi"}}' in container["args"]
    [deployment] = [item for item in render_operator(given) if item["kind"] == "Deployment"]
    assert deployment["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"profiles": {}}, "the chart has no such value"),
        ({"acceleratorProfiles": {"h100": {"memory": "80G"}}}, "profile 'h100'"),
        ({"acceleratorProfiles": ["h100"]}, "must be a JSON object of profiles by name"),
        ({"operator": 3}, "the values of the chart: "),
        ({"rbac": {"scope": "namespace"}}, "only Helm can render a scope other than cluster"),
    ],
)
def test_an_invalid_value_is_refused_before_anything_starts(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match="the values of the chart: ") as error:
        render_operator(values)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (None, (), "No such file"),
        ("a: [", (), "values.yaml: while parsing"),
        ("- h100", (), "must contain values by name, such as acceleratorProfiles"),
        ("acceleratorProfiles: {h100: {gpu: 1}}", (), "Object contains unknown field `gpu`"),
        ("{}", ("--bare",), "--values has no effect with --bare"),
    ],
)
def test_an_unusable_file_is_refused_by_its_name(
    text: str | None,
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MIZZEN_LOCAL_DIR", str(tmp_path / "cluster"))
    file = tmp_path / "values.yaml"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(app, ["up", "--values", str(file), *options])
    assert result.exit_code == 1
    assert words in result.stderr
    assert not (tmp_path / "cluster").exists()
