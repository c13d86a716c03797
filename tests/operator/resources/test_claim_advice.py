"""Claims that cannot be bound or mounted: the message names the fields to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mizzen_operator.resources.claim_advice import explain_unbound_claim
from mizzen_operator.rollout.state import RolloutState
from mizzen_operator.status.conditions import build_conditions
from service_kit import GOOD, SERVING, service

UNBOUND = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."


def cached(replicas: int = 1, **cache: Any) -> Any:
    claim = {"mode": "PersistentVolumeClaim", "claimName": "models", **cache}
    model = {"source": "hf://a/b", "aliases": [], "dtype": "Auto", "cache": claim}
    return service(model=model, replicas=replicas)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (
            {"size": "9Gi", "accessMode": "ReadWriteMany"},
            "claim models (ReadWriteMany, 9Gi, storage class the cluster's default) is not bound: change "
            "spec.model.cache.accessMode to ReadWriteOnce, or storageClassName",
        ),
        (
            {"size": "9Gi", "accessMode": "ReadWriteOnce", "storageClassName": "fast"},
            "claim models (ReadWriteOnce, 9Gi, storage class fast) is not bound: change "
            "spec.model.cache.storageClassName or size",
        ),
        ({}, "spec.model.cache.claimName names claim models, which is not bound"),
    ],
)
def test_an_unbound_claim_names_the_fields(cache: dict[str, Any], words: str) -> None:
    assert words in explain_unbound_claim(cached(**cache), UNBOUND)
    assert explain_unbound_claim(cached(**cache), "0/1 nodes") == "0/1 nodes"


def test_a_claim_of_one_node_is_named_while_pods_wait_for_their_volumes() -> None:
    waiting = replace(SERVING, routable=False, containers_ready=False, creating_containers=True)
    for replicas, mode, named in (
        (2, "ReadWriteOnce", True),
        (1, "ReadWriteOnce", False),
        (2, "ReadWriteMany", False),
    ):
        demo = cached(replicas, size="9Gi", accessMode=mode)
        inputs = replace(GOOD, service=demo, groups=[waiting], rollout=RolloutState(), download=None)
        found = {condition.type: condition.message for condition in build_conditions(inputs)}
        assert ("claim models is ReadWriteOnce" in found["Progressing"]) is named
