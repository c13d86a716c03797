# SPDX-License-Identifier: Apache-2.0
"""State of one reconcile: values computed so far, errors, and the result.

`reconcile_service.py` fills in the context step by step. If the status has to be written before all steps are
done, the missing values come from the previous reconcile.
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
"""Time after which an unfinished reconcile first writes the status, and interval between later writes."""


@dataclass(frozen=True, slots=True)
class ReconcileResult:
    """Result of a reconcile; it tells the controller which services to reconcile again, and when.

    Attributes:
        requeue_backoff: the reconcile waits for an event that no watch reports, such as an acknowledgement by
            a gateway: reconcile again with exponential back-off.
        settled: the gateway and all existing groups run as they should. Otherwise, reconcile again after a
            while, because an object may be missing whose creation no watch reports.
        failure: error that prevents the operator from applying the spec: retry with exponential back-off.
        also_enqueue: other services to reconcile, because they share the gateway that has changed.
        requeue_after: seconds until the next reconcile, even without an event; None if no time is set.
    """

    requeue_backoff: bool = False
    settled: bool = True
    failure: BlockingReason | None = None
    also_enqueue: tuple[ServiceKey, ...] = ()
    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class PreviousResult:
    """Values of the previous reconcile, for a status written before this reconcile has computed them.

    Attributes:
        revision: revision of the spec.
        gateway: the service's gateway, without its Deployment; None if it was unknown.
        failure: error that prevented the operator from applying the spec; None without such an error.
        download: progress of the model's download; None if the model is not fetched.
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
        memory_fit: result of the GPU memory check; None if the spec does not declare the sizes of both
            the model and the GPU, or if the engine runs on the CPU.
        download: progress of the model's download; None if the model is not fetched.
        routing: routing state of the gateways.
        gateway: the service's gateway; None before it has been reconciled, or if it cannot be created.
        rotation: progress of a key rotation; None if no rotation is in progress.
        cold_start: `status.coldStart` of a group that has just begun to serve; empty if no group has.
        failure: first error that prevents the operator from applying the spec; None without such an error.
        missing_refs: objects that the spec names and that a pod is waiting for, because they do not exist.
        volume_wait: why a pod waits for its volumes; empty if none does.
        restarts_counted: `rollout` includes the restarts of `groups`. Until it does, `status.groups` is left
            unchanged, because restarts recorded there are treated as already counted.
        error: first error that a retry may fix; it is raised after all other steps have been tried.
        status_lock: held while the status is written, so that no writer starts from a stale status.
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
    volume_wait: str = ""
    restarts_counted: bool = False
    error: KubeError | None = None
    status_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def deployment(self) -> Mapping[str, Any]:
        """Current Deployment of the gateway; empty if it does not exist."""
        return self.observed.deployment or {} if self.gateway is None else self.gateway.deployment

    @property
    def downloading(self) -> bool:
        """Whether the model is still downloading."""
        return self.download is not None and not self.download.cached_time

    def to_previous_result(self) -> PreviousResult:
        """Return the values to keep for the next reconcile, without the (large) Deployment."""
        gateway = replace(self.gateway, deployment={}) if self.gateway is not None else None
        return PreviousResult(self.revision, gateway, self.failure, self.download)

    def with_previous(self, previous: PreviousResult) -> ReconcileContext:
        """Return a copy of this context in which values of the previous reconcile replace missing ones."""
        gateway, failure, download = self.gateway, self.failure, self.download
        last = previous.gateway
        if gateway is None and last is not None and (last.shared is not None) == self.service.shares_gateway:
            gateway = replace(last, deployment=self.observed.deployment or {})
        if previous.revision == self.revision:
            failure, download = failure or previous.failure, download or previous.download
        return replace(self, gateway=gateway, failure=failure, download=download)

    def record_failure(self, failure: BlockingReason | None) -> None:
        """Record an error that prevents the operator from applying the spec; only the first is kept."""
        self.failure = self.failure or failure

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Return a context manager whose block may fail: the error is recorded, and other steps still run."""
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
    """Call `report` every `REPORT_SECONDS` while the body runs, because requests in the body may hang."""
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
    await reporter  # a report in progress must end before the caller writes the final status
