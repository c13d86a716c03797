"""Everything that a status says, before it is put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api.gateway_sharing import Sharing
from mizzen_operator.api.gpu_memory_check import Fit
from mizzen_operator.api.types import Gateway, InferenceService
from mizzen_operator.gateway_client.routing_table import ApiKeys
from mizzen_operator.keys.rotation import Keys, Rotation
from mizzen_operator.kube.errors import Failure
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import GatewayPod
from mizzen_operator.rollout import progress
from mizzen_operator.rollout.state import Memory
from mizzen_operator.status.missing_refs import Need


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a status says.

    Attributes:
        revision: what the groups should run.
        groups: the service's pods, with the readiness gates as they are now.
        deployment: the gateway's Deployment as it is now; empty when there is none.
        failure: what kept the operator from its work, if anything did.
        sharing: who shares the service's gateway with it; None when it has its own, or nobody knows yet.
        memory: what the status remembers of the rollout.
        overdue: the rollout has got nowhere for too long.
        scales: what the operator's autoscaler did since this process began, the latest last.
        rival: the HorizontalPodAutoscaler that scales it too.
        keys: the service's keys; None when nobody knows yet.
        rotation: how far a rotation of keys is; None while there is none.
        fit: whether the model may fit into the GPUs; None when nobody says how large they are.
        download: how far the model is; None where it is not fetched.
        api_keys: what the gateway says of its API keys; None when it says nothing, or nobody needs one.
        absent: what the spec names and is not there, where a pod waits for it.
        cold_start: `status.coldStart` of a group that has just come to serve; empty when none has.
    """

    service: InferenceService
    revision: str
    engine_image: str
    groups: Sequence[Group]
    gateways: Sequence[GatewayPod]
    deployment: Mapping[str, Any]
    failure: Failure | None = None
    sharing: Sharing | None = None
    memory: Memory = field(default_factory=Memory)
    overdue: bool = False
    scales: Sequence[Mapping[str, Any]] = ()
    rival: str = ""
    keys: Keys | None = None
    rotation: Rotation | None = None
    fit: Fit | None = None
    download: Download | None = None
    cold_start: Mapping[str, Any] = field(default_factory=dict)
    api_keys: ApiKeys | None = None
    absent: Sequence[Need] = ()

    @property
    def gateway(self) -> Gateway:
        """The settings of its gateway that are in force."""
        return self.sharing.first.gateway if self.sharing is not None else self.service.gateway

    @property
    def taken(self) -> Mapping[str, str]:
        """Names of its model that belong to other services: name to the other's name."""
        return self.sharing.taken.get(self.service.name, {}) if self.sharing is not None else {}

    @property
    def live(self) -> list[Group]:
        """Groups that are there to stay."""
        return [group for group in self.groups if group.live]

    @property
    def stay(self) -> int:
        """Groups that shall stay at the old revision."""
        return progress.stay(self.service, self.memory.current, self.revision)

    @property
    def current(self) -> list[Group]:
        """Live groups of the wanted revision."""
        return [group for group in self.live if group.revision == self.revision]

    @property
    def routable(self) -> list[Group]:
        """Live groups that get requests now."""
        return [group for group in self.groups if group.routed]
