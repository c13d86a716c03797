"""State of one reconcile: what it has found so far, what went wrong, and its result.

`reconcile_service.py` fills in the context step by step. Reports to the status that are made meanwhile take
what is not known yet from the previous reconcile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from mizzen_operator.api.gpu_memory_check import MemoryCheck
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.gateway.reconcile import ReconciledGateway
from mizzen_operator.gateway_client.routing_table import RoutingState
from mizzen_operator.keys.rotation import RotationProgress
from mizzen_operator.kube.errors import BlockingReason, KubeError, Refused, rejection
from mizzen_operator.model_cache.progress import Download
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import ObservedState
from mizzen_operator.rollout.state import RolloutState
from mizzen_operator.status.missing_refs import RequiredRef

REPORT_SECONDS = 0.5
"""Time after which an unfinished reconcile reports to the status, and time between two such reports."""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """Result of a reconcile; the controller enqueues the service accordingly.

    Attributes:
        requeue_backoff: something is pending that no watch reports, such as an acknowledgement by a gateway:
            reconcile again with exponential back-off.
        settled: everything that exists runs as it should; otherwise something may be missing that no watch
            reports.
        failure: error that kept the operator from applying the spec: retry with exponential back-off.
        also_enqueue: services that share the gateway that this reconcile has changed.
        requeue_after: seconds until the next reconcile, whatever happens; None if none is due.
    """

    requeue_backoff: bool = False
    settled: bool = True
    failure: BlockingReason | None = None
    also_enqueue: tuple[ServiceKey, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousResult:
    """Values of the previous reconcile that the next one may report before it has its own.

    Attributes:
        revision: revision of the spec.
        gateway: the service's gateway, without its Deployment.
        failure: error that kept the operator from applying the spec.
        download: progress of the model's download.
    """

    revision: str = ""
    gateway: ReconciledGateway | None = None
    failure: BlockingReason | None = None
    download: Download | None = None


@dataclass(slots=True)
class ReconcileContext:
    """State of one reconcile.

    Attributes:
        service: the service, with the status that was written last.
        observed: the observed objects.
        revision: revision of the spec.
        now: time of the reconcile, in UTC.
        rollout: state of the rollout.
        groups: the service's groups, with the current values of their readiness gates.
        memory_fit: result of the GPU memory check; None if the spec does not declare the sizes.
        download: progress of the model's download; None if the model is not fetched.
        routing: routing state of the gateways.
        gateway: the service's gateway; None until it is known, or if it cannot be created.
        rotation: progress of a key rotation; None if absent.
        cold_start: `status.coldStart` of a group that has just begun to serve; empty if none has.
        failure: first error that keeps the operator from applying the spec; None if absent.
        missing_refs: objects that the spec names, that do not exist, and that a pod is waiting for.
        restarts_counted: the rollout state counts the restarts of the groups. Until it does, a status keeps
            its old `groups`, because restarts recorded there are treated as already counted.
        error: error that may not occur again; the remaining steps are still done, and then it is raised.
        status_lock: held while the status is written, so that no writer works on a stale status.
    """

    service: InferenceService
    observed: ObservedState
    revision: str
    now: datetime
    rollout: RolloutState
    groups: Sequence[Group]
    memory_fit: MemoryCheck | None = None
    download: Download | None = None
    routing: RoutingState = field(default_factory=RoutingState)
    gateway: ReconciledGateway | None = None
    rotation: RotationProgress | None = None
    cold_start: Mapping[str, Any] = field(default_factory=dict)
    failure: BlockingReason | None = None
    missing_refs: Sequence[RequiredRef] = ()
    restarts_counted: bool = False
    error: KubeError | None = None
    status_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def deployment(self) -> Mapping[str, Any]:
        """The gateway's current Deployment; empty if absent."""
        return self.observed.deployment or {} if self.gateway is None else self.gateway.deployment

    @property
    def downloading(self) -> bool:
        """Whether the model is still downloading."""
        return self.download is not None and not self.download.cached_time

    def to_previous_result(self) -> PreviousResult:
        """Return the values for the next reconcile, which reads the (large) Deployment again."""
        gateway = replace(self.gateway, deployment={}) if self.gateway is not None else None
        return PreviousResult(self.revision, gateway, self.failure, self.download)

    def with_previous(self, previous: PreviousResult) -> ReconcileContext:
        """Return this context, with the previous reconcile's values in place of missing ones."""
        gateway, failure, download = self.gateway, self.failure, self.download
        last = previous.gateway
        if gateway is None and last is not None and (last.shared is not None) == self.service.shares_gateway:
            gateway = replace(last, deployment=self.observed.deployment or {})
        if previous.revision == self.revision:
            failure, download = failure or previous.failure, download or previous.download
        return replace(self, gateway=gateway, failure=failure, download=download)

    def record_failure(self, failure: BlockingReason | None) -> None:
        """Record an error that keeps the operator from applying the spec; the first one is reported."""
        self.failure = self.failure or failure

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Run a step: record its error, so that the remaining steps are done all the same."""
        try:
            yield
        except (Refused, KubeError) as error:
            failure = rejection(error)
            if failure is not None:
                self.record_failure(failure)
            elif isinstance(error, KubeError):
                self.error = self.error or error


@asynccontextmanager
async def report_meanwhile(report: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `report` every `REPORT_SECONDS` while the body runs: the API server may hang in a write."""
    finished = asyncio.Event()

    async def run() -> None:
        while True:
            try:
                async with asyncio.timeout(REPORT_SECONDS):
                    await finished.wait()
                return
            except TimeoutError:
                await report()

    reporter = asyncio.create_task(run(), name="report")
    try:
        yield
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            reporter.cancel()
        finished.set()
        await asyncio.gather(reporter, return_exceptions=True)
        raise
    finished.set()
    await reporter  # a report that has begun ends before the caller writes the final status
