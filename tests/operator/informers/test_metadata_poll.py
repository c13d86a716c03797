# SPDX-License-Identifier: Apache-2.0
"""Intervals at which the operator reads unwatched children again to compare them with the spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from mizzen_operator.api.types import InferenceService
from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube import apply_cache
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.metrics import Metrics
from mizzen_operator.pods.observe import ObservedState
from mizzen_operator.rollout.pod_policies import PodPolicies
from one_object import OneObject
from service_kit import group, rolling

RECHECK, RESYNC = 30.0, 600.0


@dataclass
class Bench:
    """Reconciles of one service at times that the test chooses."""

    applied: ApplyCache
    policies: PodPolicies
    server: OneObject
    service: InferenceService
    clock: list[float]

    async def reads(self, seconds: float, gateways: int, ready: bool = False) -> int:
        """Reconcile the service once, and return the number of objects that this reconcile reads.

        Args:
            seconds: time since the previous reconcile, in seconds.
            gateways: number of ready gateways; the service has two.
            ready: whether the gateways route to the group.
        """
        self.clock[0] += seconds
        self.server.requests.clear()
        observed_group = replace(group(), routable=ready)
        deployment = {"spec": {"replicas": 2}, "status": {"readyReplicas": gateways}}
        observed = ObservedState((observed_group,), frozenset(), (), deployment, None)
        self.applied.expire(self.service, observed.progress_marker, settled=observed.settled)
        await self.policies.apply_disruption_budget(self.service)
        self.service = replace(self.service, status={"conditions": []})
        return self.server.requests.count("get")


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    clock, server, metrics = [1000.0], OneObject(), Metrics()
    monkeypatch.setattr(apply_cache, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    kube: Any = server
    config = OperatorConfig(recheck_seconds=RECHECK, resync_seconds=RESYNC)
    applied = ApplyCache(config)
    policies = PodPolicies(config, Applier(kube, metrics, UnwatchedChildren()), applied)
    bench = Bench(applied, policies, server, replace(rolling(), status={}), clock)
    await bench.reads(0, 0)
    return bench


async def test_a_service_that_is_stuck_is_compared_again_soon(bench: Bench) -> None:
    assert await bench.reads(RECHECK - 2, 0) == 0, "the service has made progress: its group exists"
    assert await bench.reads(1, 0) == 0
    assert await bench.reads(2, 0) == 1
    assert await bench.reads(RECHECK - 1, 0) == 0
    assert await bench.reads(2, 0) == 1


async def test_a_service_that_makes_progress_is_not_compared_however_late_the_reconcile_is(
    bench: Bench,
) -> None:
    assert await bench.reads(2 * RECHECK, 0) == 0
    assert await bench.reads(2 * RECHECK, 1) == 0
    assert await bench.reads(2 * RECHECK, 2) == 0
    assert await bench.reads(1, 2) == 1, "the service makes no progress and does not serve"


async def test_every_service_is_compared_again_after_the_resync_interval(bench: Bench) -> None:
    assert await bench.reads(RESYNC - 1, 2, ready=True) == 0
    assert await bench.reads(2, 2, ready=True) == 1
    for round_ in range(1, 12):
        assert await bench.reads(50, round_ % 2) == 0
    assert await bench.reads(51, 0) == 1
