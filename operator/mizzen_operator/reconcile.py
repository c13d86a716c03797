"""One look at one service: observe, plan, execute, status."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from mizzen_operator import labels, rollout
from mizzen_operator.api import InferenceService
from mizzen_operator.apply import Refused
from mizzen_operator.autoscale.run import Autoscaler
from mizzen_operator.config import OperatorConfig
from mizzen_operator.download import Download, allowed, clocked, finished, held, pinned
from mizzen_operator.execute import Executor
from mizzen_operator.facts import Facts, Failure
from mizzen_operator.fit import fit
from mizzen_operator.front import SharedGateway, SharedGateways
from mizzen_operator.gates import Gates
from mizzen_operator.gateways import Acknowledgements
from mizzen_operator.groups import Group
from mizzen_operator.keys import Keys, Rotation, rotation
from mizzen_operator.kube import Kube, KubeError, Ref
from mizzen_operator.labelled import LabelledSecrets, Where
from mizzen_operator.listen import GatewayListener
from mizzen_operator.memory import recall
from mizzen_operator.metrics import Metrics
from mizzen_operator.models import LOOK_SECONDS, Models
from mizzen_operator.observe import Observed, observe
from mizzen_operator.parse import ApiError, parse
from mizzen_operator.plan import Action, CreateGroup, DeleteGroup, plan
from mizzen_operator.queue import Key
from mizzen_operator.render.engine import engine_image, revision
from mizzen_operator.revisions import Revisions
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


@dataclass(frozen=True, slots=True)
class _Gateway:
    """A service's gateway as a look has left it."""

    token: str
    deployment: Mapping[str, Any]
    keys: Keys
    shared: SharedGateway | None = None

    @property
    def rotating(self) -> bool:
        """Whether keys of the service, or of the gateway that it shares, have a next generation."""
        return self.keys.rotating or (self.shared is not None and len(self.shared.public) > 1)


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
        self._kube = kube
        self._gateways = gateways
        self._config = config
        self._metrics = metrics
        self._labelled = LabelledSecrets(kube, config.namespace)
        self._revisions = Revisions(kube, config, metrics)
        self._models = Models(kube, config, metrics)
        self._executor = Executor(kube, config, metrics, self._labelled, self._revisions)
        self._fronts = SharedGateways(kube, config, metrics, self._labelled)
        self._writer = StatusWriter(kube, metrics)
        self._sharing: set[Key] = set()

    def sharing(self, namespace: str) -> list[Key]:
        """Services that share the namespace's gateway, as far as they were looked at."""
        return [key for key in self._sharing if key.namespace == namespace]

    async def other_api_keys(self) -> list[Key]:
        """Services whose gateway should mount other Secrets with API keys than it was seen to.

        Raises:
            KubeError: the API server failed.
        """
        found: list[Key] = []
        for namespace, gateway in await self._labelled.news():
            if gateway == labels.SHARED_NAME:
                found += self.sharing(namespace)
            else:
                found.append(Key(namespace, labels.served_by(gateway)))
        return found

    async def reconcile(self, key: Key) -> Outcome:
        """Look at a service and do the next step.

        Raises:
            KubeError: the API server failed; nothing is lost, the next look starts anew.
        """
        body = await self._kube.get(Ref("InferenceService", key.namespace, key.name))
        if body is None or "deletionTimestamp" in body["metadata"]:
            if body is None:
                self._forget(key)
            return await self._leave_shared(key)  # its children go with it; nothing is made any more
        try:
            service = parse(body)
        except ApiError as error:
            logger.error("%s/%s: %s", key.namespace, key.name, error)
            return Outcome(failure=Failure("WrongCRD", str(error)))
        return await self._step(key, service)

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
        gateway: _Gateway | None = None
        turn: Rotation | None = None
        fits = fit(service)
        download: Download | None = finished(service)
        self._executor.refresh(service, settled=observed.settled)
        try:
            gateway = await self._gateway(key, service, observed)
            deployment = gateway.deployment
            acknowledged = await self._ask(key, service, observed, gateway)
            if acknowledged.refused:
                failure = _refused(service)
            groups = await self._gates.routable(service, observed.groups, acknowledged)
            groups = await self._gates.verified(service, newest, groups, acknowledged)
            turn = await self._rotate(service, gateway, groups, acknowledged)
            download = await self._models.sync(service)
            memory = rollout.learn(service, newest, groups, acknowledged.by_all, now)
            memory = clocked(memory, download)
            used = {memory.current, *(group.revision for group in groups)}
            recorded = await self._revisions.sync(service, newest, used)
            wanted = rollout.wanted(service, newest, memory, restorable=memory.current in recorded)
            wanted = held(wanted, download)
            if fits is not None and not fits.fits:  # nothing is made of it, and nothing goes for it
                wanted = replace(wanted, paused=True)
            actions = plan(wanted, groups, acknowledged.by_all, observed.taken)
            if fits is not None and not fits.fits:
                actions = [one for one in actions if not _creates(one, newest)]
            actions = allowed(actions, newest, download)
            if any(isinstance(action, DeleteGroup) for action in actions):
                service = await self._writer.remember(service, memory)
            await self._executor.groups(pinned(service, download), newest, actions)
            await self._executor.budget(service)
            await self._executor.policies(service)
        except Refused as error:
            failure = Failure(error.reason, str(error))
        except KubeError as error:
            if error.code not in (400, 403, 422):
                raise
            failure = Failure("Rejected", f"the API server rejects a change: {error}")
        downloading = download is not None and not download.cached
        facts = Facts(
            service,
            newest,
            engine_image(service, self._config),
            groups,
            [replace(pod, answers=pod.address not in acknowledged.silent) for pod in observed.gateways],
            deployment,
            failure,
            gateway.shared.sharing if gateway is not None and gateway.shared is not None else None,
            memory,
            not downloading and rollout.overdue(service, memory, now),
            self._autoscaler.scales(key),
            self._autoscaler.rival(key),
            gateway.keys if gateway is not None else None,
            turn,
            fits,
            self._models.told(key, download),
        )
        await self._writer.write(key, facts)
        waits = turn is not None or any(group.resting for group in groups)
        changed = gateway is not None and gateway.shared is not None and gateway.shared.changed
        others = tuple(other for other in self.sharing(key.namespace) if other != key) if changed else ()
        left = rollout.seconds_left(service, memory, now)
        again = left + 1 if left is not None and left > 0 else None
        again = LOOK_SECONDS if downloading and not service.suspend else again
        return Outcome(waits, observed.settled, failure, others, again)

    async def _gateway(self, key: Key, service: InferenceService, observed: Observed) -> _Gateway:
        """Make what the service's gateway needs, and the gateway itself."""
        if not service.shared:
            keys = await self._executor.keys(service)
            return _Gateway(keys.token, await self._executor.gateway(service, observed), keys)
        self._sharing.add(key)
        self._fronts.refresh(service.namespace, settled=observed.settled)
        front = await self._fronts.sync(service.namespace, observed.deployment, observed.endpoint)
        if front is None:
            raise KubeError(0, "Vanished", f"{service.name} is no longer among the services of its namespace")
        keys = await self._executor.keys(service, front.public)
        if self._fronts.learn(service, keys.engine):
            again = await self._fronts.sync(service.namespace, front.deployment, observed.endpoint)
            front = replace(again, changed=True) if again is not None else front
        return _Gateway(front.token, front.deployment, keys, front)

    async def _rotate(
        self, service: InferenceService, gateway: _Gateway, groups: Sequence[Group], heard: Acknowledgements
    ) -> Rotation | None:
        """Drop the former keys once nobody uses them; says how far that is, None while nothing rotates."""
        if not gateway.rotating:
            return None
        there = rotation(gateway.keys, groups, heard)
        if not there.waits:
            if gateway.keys.rotating:
                await self._executor.drop_keys(service)
            if gateway.shared is not None and self._fronts.confirm(service, gateway.shared.public[-1]):
                self._fronts.forget(service.namespace)
        return there

    async def _leave_shared(self, key: Key) -> Outcome:
        """Have the gateway that a service has shared serve the others alone."""
        if key not in self._sharing:
            return Outcome()
        self._sharing.discard(key)
        others = self.sharing(key.namespace)
        if not others:
            self._labelled.forget(Where(key.namespace, labels.SHARED_NAME))
        return Outcome(others=tuple(others))

    async def _ask(
        self, key: Key, service: InferenceService, observed: Observed, gateway: _Gateway
    ) -> Acknowledgements:
        ready = any(group.live and group.containers_ready for group in observed.groups)
        wanted = ready or gateway.rotating or not (service.autoscaling is None or service.suspend)
        if not wanted:
            self._gateways.forget(key)
            return Acknowledgements()
        answer = await self._gateways.ask(observed.gateways, gateway.token, key)
        if answer.refused:  # the token may have been made anew
            self._executor.forget(key)
            self._fronts.forget(key.namespace)
        return answer


def _creates(action: Action, revision: str) -> bool:
    return isinstance(action, CreateGroup) and action.revision == revision


def _refused(service: InferenceService) -> Failure:
    secret = labels.SHARED_NAME if service.shared else labels.root_keys(service.name)
    whose = f"{labels.SERVICE}={service.name}"
    if service.shared:
        whose = f"'{labels.GATEWAY_LABEL}={labels.SHARED}'"
    return Failure(
        "TokenRefused",
        f"a gateway holds another token than Secret {secret}, which was made anew: "
        f"kubectl delete pods -l {whose} has all pods start with the new keys",
    )
