"""One look at one service: observe, plan, execute, status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator import labels, rollout
from mizzen_operator.actions import DeleteGroup, strays, without_new
from mizzen_operator.api import InferenceService
from mizzen_operator.apply import Refused
from mizzen_operator.autoscale.run import Autoscaler
from mizzen_operator.config import OperatorConfig
from mizzen_operator.download import Download, allowed, begun, clocked, finished, held, pinned
from mizzen_operator.entrance import Entrance, Entrances, token_refused
from mizzen_operator.execute import Executor
from mizzen_operator.facts import Facts
from mizzen_operator.failure import Failure, rejection
from mizzen_operator.fit import fit
from mizzen_operator.gates import Gates
from mizzen_operator.gateways import Acknowledgements
from mizzen_operator.groups import Group
from mizzen_operator.keys import Rotation
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.labelled import LabelledSecrets, Where
from mizzen_operator.listen import GatewayListener
from mizzen_operator.memory import recall
from mizzen_operator.metrics import Metrics
from mizzen_operator.models import LOOK_SECONDS, Models
from mizzen_operator.observe import Observed, observe
from mizzen_operator.parse import ApiError, parse
from mizzen_operator.plan import plan
from mizzen_operator.queue import Key
from mizzen_operator.render.engine import engine_image, revision
from mizzen_operator.revisions import Revisions
from mizzen_operator.session import brief
from mizzen_operator.starts import cold_start
from mizzen_operator.unread import Bystander, unread
from mizzen_operator.verify import Verifier
from mizzen_operator.writer import StatusWriter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a look ended with.

    Attributes:
        waits: something is under way that no watch will tell of, such as a gateway's acknowledgement.
        settled: everything that is there runs; otherwise it may lack something that no watch tells of.
        failure: what kept the operator from its work; it tries again, ever more slowly.
        others: services for which this look has changed something: they share its gateway.
        again: seconds until another look is due whatever happens; None when none is.
    """

    waits: bool = False
    settled: bool = True
    failure: Failure | None = None
    others: tuple[Key, ...] = ()
    again: float | None = None


class Reconciler:
    """Brings services to what their specs say, one step at a time."""

    def __init__(
        self,
        kube: Kube,
        gateways: GatewayListener,
        config: OperatorConfig,
        metrics: Metrics,
        autoscaler: Autoscaler,
        verifier: Verifier,
    ) -> None:
        self._autoscaler = autoscaler
        self._verifier = verifier
        self._gates = Gates(kube, verifier)
        self._bystander = Bystander(kube, gateways, self._gates)
        self._kube = kube
        self._gateways = gateways
        self._config = config
        self._metrics = metrics
        self._labelled = LabelledSecrets(kube, config.namespace)
        self._revisions = Revisions(kube, config, metrics)
        self._models = Models(kube, config, metrics)
        self._executor = Executor(kube, config, metrics, self._labelled, self._revisions)
        self._entrances = Entrances(kube, config, metrics, self._executor, self._labelled)
        self._writer = StatusWriter(kube, metrics)

    def sharing(self, namespace: str) -> list[Key]:
        """Services that share the namespace's gateway, as far as they were looked at."""
        return self._entrances.sharing(namespace)

    async def other_api_keys(self) -> list[Key]:
        """Services whose gateway should mount other Secrets with API keys than it was seen to.

        Raises:
            KubeError: the API server failed.
        """
        return await self._entrances.other_api_keys()

    async def reconcile(self, key: Key) -> Outcome:
        """Look at a service and do the next step.

        Raises:
            KubeError: the API server failed; nothing is lost, the next look starts anew.
        """
        body = await self._kube.get(Ref("InferenceService", key.namespace, key.name))
        if body is None or "deletionTimestamp" in body["metadata"]:
            if body is None:
                self._forget(key)
            # Its children go with it; nothing is made any more.
            return Outcome(others=self._entrances.leave(key))
        try:
            service = parse(body)
        except ApiError:
            # It may be as the CRD before had it, for what is stored has not changed, and no watch tells.
            return await self._unreadable(key)
        try:
            return await self._step(key, service)
        except (KubeError, OSError):
            raise
        except Exception as error:
            logger.exception("%s/%s: unexpected error", *key)
            return await self._stand_by(key, body, _fault(error))

    async def _unreadable(self, key: Key) -> Outcome:
        """Look at a service that could not be read as the API server has it now."""
        body = await self._kube.reread(Ref("InferenceService", key.namespace, key.name))
        if body is None:
            return Outcome(waits=True)  # its end is about to be told
        try:
            service = parse(body)
        except ApiError as error:
            return await self._stand_by(key, body, Failure("InvalidSpec", str(error)))
        return await self._step(key, service)

    async def _stand_by(self, key: Key, body: Mapping[str, Any], failure: Failure) -> Outcome:
        """Leave a service as it is, and tell how that is: its spec cannot be acted on."""
        self._autoscaler.seen(key, None)
        service = unread(body)
        if service.shared:
            self._entrances.join(key)
        seen = await self._bystander.look(key, service, failure)
        await self._writer.unread(key, seen)
        return Outcome(settled=seen.settled, failure=failure)

    def _forget(self, key: Key) -> None:
        self._executor.forget(key)
        self._labelled.forget(Where(key.namespace, labels.gateway_name(key.name)))
        self._writer.forget(key)
        self._gateways.forget(key)
        self._verifier.keep(key, ())
        self._autoscaler.seen(key, None)
        self._models.told(key, None)

    async def _step(self, key: Key, service: InferenceService) -> Outcome:
        observed = await observe(self._kube, service)
        self._autoscaler.seen(key, service.autoscaling, service.uid)
        newest, now = revision(service, self._config), datetime.now(UTC)
        acknowledged, groups = Acknowledgements(), observed.groups
        memory = recall(service.status)
        deployment: Mapping[str, Any] = observed.deployment or {}
        failure: Failure | None = None
        entrance: Entrance | None = None
        turn: Rotation | None = None
        start: Mapping[str, Any] = {}
        fits = fit(service)
        download: Download | None = finished(service)
        self._executor.refresh(service, settled=observed.settled)
        try:
            entrance = await self._entrances.make(key, service, observed)
            deployment, failure = entrance.deployment, entrance.failure
            acknowledged = await self._ask(key, service, observed, entrance)
            if acknowledged.refused:
                failure = failure or token_refused(service)
            groups = await self._gates.routable(service, observed.groups, acknowledged)
            start = _cold_start(observed.groups, groups)
            groups = await self._gates.verified(service, newest, groups, acknowledged)
            turn = await self._entrances.rotate(service, entrance, groups, acknowledged)
            download, problem = await self._fetch(service, observed)
            failure = failure or problem
            memory = rollout.learn(service, newest, groups, acknowledged.by_all, now)
            memory = clocked(memory, download)
            used = {memory.current, *(group.revision for group in groups)}
            recorded = await self._revisions.sync(service, newest, used)
            wanted = rollout.wanted(service, newest, memory, restorable=memory.current in recorded)
            wanted = held(wanted, download)
            if fits is not None and not fits.fits:  # nothing is made of it, and nothing goes for it
                wanted = replace(wanted, paused=True)
            taken = observed.taken | self._executor.passed(service)
            actions = plan(wanted, groups, acknowledged.by_all, taken)
            if fits is not None and not fits.fits:
                actions = without_new(actions, newest)
            actions = [*strays(observed.strays), *allowed(actions, newest, download)]
            if any(isinstance(action, DeleteGroup) for action in actions):
                service = await self._writer.remember(service, memory)
            await self._executor.groups(pinned(service, download), newest, actions)
            await self._executor.budget(service)
            await self._executor.policies(service)
        except (Refused, KubeError) as error:
            rejected = rejection(error)
            if rejected is None:
                raise
            failure = failure or rejected
        downloading = download is not None and not download.cached
        facts = Facts(
            service,
            newest,
            engine_image(service, self._config),
            groups,
            [replace(pod, answers=pod.address not in acknowledged.silent) for pod in observed.gateways],
            deployment,
            failure,
            entrance.shared.sharing if entrance is not None and entrance.shared is not None else None,
            memory,
            not downloading and rollout.overdue(service, memory, now),
            self._autoscaler.scales(key),
            self._autoscaler.rival(key),
            entrance.keys if entrance is not None else None,
            turn,
            fits,
            self._models.told(key, download),
            start,
        )
        await self._writer.write(key, facts)
        waits = turn is not None or any(group.resting for group in groups)
        others = self._entrances.others(key, entrance)
        left = rollout.seconds_left(service, memory, now)
        again = left + 1 if left is not None and left > 0 else None
        if downloading and not service.suspend:
            again = LOOK_SECONDS if failure is None else None
        return Outcome(waits, observed.settled, failure, others, again)

    async def _fetch(
        self, service: InferenceService, observed: Observed
    ) -> tuple[Download | None, Failure | None]:
        """Bring the model on its way; where that is rejected, what serves is looked after all the same."""
        try:
            return await self._models.sync(service, unused=not observed.groups), None
        except (Refused, KubeError) as error:
            failure = rejection(error)
            if failure is None or not service.access.cached:
                raise
            return begun(service, failed=failure.message), failure

    async def _ask(
        self, key: Key, service: InferenceService, observed: Observed, entrance: Entrance
    ) -> Acknowledgements:
        ready = any(group.live and group.containers_ready for group in observed.groups)
        wanted = ready or entrance.rotating or not (service.autoscaling is None or service.suspend)
        if not wanted:
            self._gateways.forget(key)
            return Acknowledgements()
        answer = await self._gateways.ask(observed.gateways, entrance.token, key)
        if answer.refused:  # the token may have been made anew
            self._entrances.distrust(key)
        return answer


def _fault(error: Exception) -> Failure:
    """The operator's own fault, as far as a status can tell."""
    return Failure(
        "OperatorError",
        f"the operator fails on this service, and leaves it as it is: {brief(error)}; its log tells where. "
        "Go back to the spec before, or to the operator's release before, and report it",
    )


def _cold_start(before: Sequence[Group], after: Sequence[Group]) -> Mapping[str, Any]:
    """`status.coldStart` of the slowest of groups that gateways have just come to route to; empty of none."""
    served = {group.uid for group in before if group.was_routable}
    came = [group for group in after if group.was_routable and group.uid not in served]
    starts = [cold_start(group.name, group.start, datetime.now(UTC)) for group in came]
    return max(starts, key=lambda start: start["firstReadySeconds"], default={})
