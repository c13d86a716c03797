# SPDX-License-Identifier: Apache-2.0
"""Inputs of a status. The reconciler fills them in; `builder.py` and `conditions.py` read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api.gateway_sharing import GatewaySharing
from mizzen_operator.api.gpu_memory_check import MemoryCheck
from mizzen_operator.api.types import Gateway, InferenceService
from mizzen_operator.gateway_client.routing_table import ApiKeys
from mizzen_operator.keys.rotation import RotationProgress, ServiceKeys
from mizzen_operator.kube.errors import BlockingReason
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod
from mizzen_operator.rollout.avoided_nodes import find_avoided_nodes
from mizzen_operator.rollout.stable_revision import count_old_to_keep
from mizzen_operator.rollout.state import RolloutState
from mizzen_operator.status.missing_refs import RequiredRef


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusInputs:
    """All data from which the status of a service with a valid spec is built.

    Attributes:
        service: the service, with the status that was written last.
        revision: revision of the spec.
        engine_image: engine image of that revision.
        groups: the service's groups, with the current values of their readiness gates.
        gateways: pods of the service's gateway.
        deployment: the gateway's Deployment; empty if it does not exist.
        failure: error that prevents the operator from applying the spec; None without such an error.
        sharing: services that share the gateway; None if it is dedicated or has not been reconciled yet.
        rollout: state of the rollout.
        overdue: the rollout has exceeded its progress deadline.
        scale_history: changes of `spec.replicas` by this process's autoscaler, the latest last.
        competing_hpa: name of a HorizontalPodAutoscaler that scales the service too; empty if no HPA does.
        keys: the service's keys; None if they have not been read yet.
        rotation: progress of a key rotation; None if no rotation is in progress.
        memory_fit: result of the GPU memory check; None if the spec does not declare the sizes of both
            the model and the GPU, or if the engine runs on the CPU.
        download: progress of the model's download; None if the model is not fetched.
        cold_start: `status.coldStart` of a group that has just begun to serve; empty if no group has.
        api_keys: a gateway's report on its API keys; None if no gateway reports, or if no keys are required.
        missing_refs: objects that the spec names and that a pod is waiting for, because they do not exist.
        volume_wait: why a pod waits for its volumes; empty if none does.
        quantization: description of the quantized weights of the spec's revision; empty for others, and if it
            is unknown.
        task: task of the model of the spec's revision; empty if it is unknown.
        expert_groups: number of the groups of ranks with different experts, if the model has any; 0 if not,
            and if it is unknown.
        images: whether the model of the spec's revision accepts images; false if it is unknown.
    """

    service: InferenceService
    revision: str
    engine_image: str
    groups: Sequence[Group]
    gateways: Sequence[GatewayPod]
    deployment: Mapping[str, Any]
    failure: BlockingReason | None = None
    sharing: GatewaySharing | None = None
    rollout: RolloutState = field(default_factory=RolloutState)
    overdue: bool = False
    scale_history: Sequence[Mapping[str, Any]] = ()
    competing_hpa: str = ""
    keys: ServiceKeys | None = None
    rotation: RotationProgress | None = None
    memory_fit: MemoryCheck | None = None
    download: Download | None = None
    cold_start: Mapping[str, Any] = field(default_factory=dict)
    api_keys: ApiKeys | None = None
    missing_refs: Sequence[RequiredRef] = ()
    volume_wait: str = ""
    quantization: str = ""
    task: str = ""
    expert_groups: int = 0
    images: bool = False

    @property
    def avoided_nodes(self) -> tuple[str, ...]:
        """Nodes that new groups avoid, because engines lost their device there."""
        return find_avoided_nodes(self.rollout.failures)

    @property
    def gateway(self) -> Gateway:
        """Gateway settings in force; for a shared gateway, those of the oldest service."""
        return self.sharing.oldest.gateway if self.sharing is not None else self.service.gateway

    @property
    def taken_names(self) -> Mapping[str, str]:
        """This service's model names that already belong to an older service, with that service's name."""
        return self.sharing.conflicting_names.get(self.service.name, {}) if self.sharing is not None else {}

    @property
    def live(self) -> list[Group]:
        """Live groups of all revisions."""
        return [group for group in self.groups if group.live]

    @property
    def keep_old(self) -> int:
        """Number of groups of older revisions to keep, according to `spec.rollout.partition`."""
        return count_old_to_keep(self.service, self.rollout.stable_revision, self.revision)

    @property
    def updated(self) -> list[Group]:
        """Live groups of the spec's revision."""
        return [group for group in self.live if group.revision == self.revision]

    @property
    def routed(self) -> list[Group]:
        """Live groups to which gateways send requests at present."""
        return [group for group in self.groups if group.routed]
