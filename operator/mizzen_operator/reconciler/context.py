"""What a look at one service has found so far, what has kept it from its work, and what it ends with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from mizzen_operator.api.gpu_memory_check import Fit
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway.reconcile import Entrance
from mizzen_operator.gateway_client.routing_table import Acknowledgements
from mizzen_operator.keys.rotation import Rotation
from mizzen_operator.kube.errors import Failure, KubeError, Refused, rejection
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import ObservedState
from mizzen_operator.rollout.state import RolloutState
from mizzen_operator.status.missing_refs import RequiredRef

REPORT_SECONDS = 0.5
"""A look that has not ended by then tells what is there, and again after each such time."""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """What a look ended with.

    Attributes:
        waits: something is under way that no watch will tell of, such as a gateway's acknowledgement.
        settled: everything that is there runs; otherwise it may lack something that no watch tells of.
        failure: what kept the operator from its work; it tries again, ever more slowly.
        others: services for which this look has changed something: they share its gateway.
        again: seconds until another look is due whatever happens; None when none is.
    """

    requeue_backoff: bool = False
    settled: bool = True
    failure: Failure | None = None
    also_enqueue: tuple[ServiceKey, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousResult:
    """What the last look at a service has found, as far as the next one may need it before it is through."""

    newest: str = ""
    entrance: Entrance | None = None
    failure: Failure | None = None
    download: Download | None = None


@dataclass(slots=True)
class Look:
    """A look under way.

    Attributes:
        newest: the revision of the spec.
        groups: the service's groups, with the readiness gates as they are now.
        entrance: the service's gateway; None until the look knows it, or where it cannot be made.
        failure: what kept the operator from its work, in words for the status.
        absent: what the spec names and is not there, where a pod waits for it.
        learned: the memory counts what the groups show; until then a status keeps the groups that it has, for
            restarts that it tells of are taken for counted.
        error: what may succeed at the next look; the rest of this one was done, and it ends with this.
        writing: held by who writes the status, so that none writes what another has overtaken.
    """

    service: InferenceService
    observed: ObservedState
    newest: str
    now: datetime
    memory: RolloutState
    groups: Sequence[Group]
    fits: Fit | None = None
    download: Download | None = None
    acknowledged: Acknowledgements = field(default_factory=Acknowledgements)
    entrance: Entrance | None = None
    rotation: Rotation | None = None
    cold_start: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    absent: Sequence[RequiredRef] = ()
    learned: bool = False
    error: KubeError | None = None
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def deployment(self) -> Mapping[str, Any]:
        """The gateway's Deployment as it is now; empty when there is none."""
        return self.observed.deployment or {} if self.entrance is None else self.entrance.deployment

    @property
    def downloading(self) -> bool:
        """Whether the model is on its way."""
        return self.download is not None and not self.download.cached_time

    @property
    def known(self) -> PreviousResult:
        """What the next look may need of this one; the Deployment is read anew, and large."""
        entrance = replace(self.entrance, deployment={}) if self.entrance is not None else None
        return PreviousResult(self.newest, entrance, self.failure, self.download)

    def by(self, known: PreviousResult) -> Look:
        """This look, with what the last one knew in place of what this one has not come to know yet."""
        entrance, failure, download = self.entrance, self.failure, self.download
        last = known.entrance
        if entrance is None and last is not None and (last.shared is not None) == self.service.shared:
            entrance = replace(last, deployment=self.observed.deployment or {})
        if known.newest == self.newest:
            failure, download = failure or known.failure, download or known.download
        return replace(self, entrance=entrance, failure=failure, download=download)

    async def attempt(self, work: Awaitable[None]) -> None:
        """Do a part of the look; what goes wrong is noted, and no other part is left undone for it."""
        try:
            await work
        except (Refused, KubeError) as error:
            rejected = rejection(error)
            if rejected is not None:
                self.failure = self.failure or rejected
            elif isinstance(error, KubeError):
                self.error = self.error or error


async def telling(work: Coroutine[Any, Any, None], tell: Callable[[], Awaitable[None]]) -> None:
    """Do something, and tell of what is there while that takes long: the API server may hang in a write."""
    doing = asyncio.create_task(work)
    try:
        while not (await asyncio.wait({doing}, timeout=REPORT_SECONDS))[0]:
            await tell()
        await doing
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)
