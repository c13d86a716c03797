# SPDX-License-Identifier: Apache-2.0
"""The `minAvailable` of PodDisruptionBudgets."""

from __future__ import annotations

import pytest

from mizzen_operator.resources.pod_disruption_budget import engine_disruption_budget, min_available
from service_kit import rolling


@pytest.mark.parametrize(
    ("pods", "unavailable", "left"), [(0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 1), (5, 0, 4), (5, 2, 3)]
)
def test_an_eviction_leaves_the_minimum_of_available_pods(pods: int, unavailable: int, left: int) -> None:
    assert min_available(pods, unavailable) == left


def test_the_budget_of_a_suspended_service_protects_no_pod() -> None:
    assert engine_disruption_budget(rolling(replicas=3))["spec"]["minAvailable"] == 2
    assert engine_disruption_budget(rolling(replicas=3, suspend=True))["spec"]["minAvailable"] == 0
