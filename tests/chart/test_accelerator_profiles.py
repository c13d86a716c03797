# SPDX-License-Identifier: Apache-2.0
"""The schema of the chart's values and the operator accept the same accelerator profiles."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chart_manifests import CHART
from mizzen_operator.api.accelerator_profiles import parse_profiles

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(
    {"$ref": "#/properties/acceleratorProfiles", **{key: SCHEMA[key] for key in ("properties", "$defs")}}
)


def is_accepted_by_operator(profiles: dict[str, Any]) -> bool:
    try:
        parse_profiles(json.dumps(profiles))
    except ValueError:
        return False
    return True


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


names = st.sampled_from(["", "a", "a.b/c", "a b", "-a", "A_b", "a" * 64])
tolerations = optional(
    key=names,
    operator=st.sampled_from(["Exists", "Equal", "Gt", "In"]),
    value=names,
    effect=st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute", "Never"]),
    tolerationSeconds=st.sampled_from([0, 300]),
)
profiles = optional(
    resourceName=st.sampled_from(["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "gpu", "a/b/c", ""]),
    nodeSelector=st.dictionaries(names, names, max_size=2),
    tolerations=st.lists(tolerations, max_size=2),
    memory=st.sampled_from(["80Gi", "9856Mi", "80", "80GB", "0Gi", ""]),
    runtimeClassName=st.sampled_from(["nvidia", "", "N V", "$(HOSTNAME)"]),
)


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(["h100", "h100-mig.3g", "H100", "-a", "a" * 64]), profiles, max_size=1)
)
def test_schema_and_operator_agree(given_profiles: dict[str, Any]) -> None:
    assert VALIDATOR.is_valid(given_profiles) == is_accepted_by_operator(given_profiles)


@pytest.mark.parametrize("name", ["N V", "$(HOSTNAME)", "nvidia-", "a" * 254])
def test_a_runtime_class_that_no_cluster_can_have_is_refused(name: str) -> None:
    refused = {"h100": {"runtimeClassName": name}}
    assert not VALIDATOR.is_valid(refused) and not is_accepted_by_operator(refused)


@pytest.mark.parametrize(
    "toleration",
    [
        {"operator": "Exists"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "pool", "value": "inference"},
        {"key": "a", "operator": "Equal", "effect": "NoExecute", "tolerationSeconds": 60},
    ],
)
def test_usual_tolerations_are_accepted(toleration: dict[str, Any]) -> None:
    accepted = {"h100": {"tolerations": [toleration]}}
    assert VALIDATOR.is_valid(accepted) and is_accepted_by_operator(accepted)
