"""One step of one service: observe, plan, execute, status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from mizzen_operator.api.gpu_memory_check import fit
from mizzen_operator.api.key import ServiceKey
from mizzen_operator.api.types import InferenceService
from mizzen_operator.autoscaling.autoscaler import Autoscaler
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.reconcile import Entrance, Entrances, token_refused
from mizzen_operator.gateway_client.routing_table import Acknowledgements
from mizzen_operator.gateway_client.watch import GatewayListener
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.client import Kube
from mizzen_operator.kube.errors import Failure, KubeError, Refused, brief, rejection
from mizzen_operator.kube.objects import holds, stamp
from mizzen_operator.kube.refs import Ref
from mizzen_operator.model_cache.fetch import POLL_SECONDS, ModelFetcher
from mizzen_operator.model_cache.progress import Download, allowed_actions, new_download, restart_progress_clock, load_finished_download, pause_during_download, pin_revision
from mizzen_operator.pods.cold_start import cold_start_entry
from mizzen_operator.pods.group import Group
from mizzen_operator.pods.observe import ObservedState, observe
from mizzen_operator.readiness.gates import ReadinessGates
from mizzen_operator.reconciler.context import PreviousResult, Look, ReconcileResult, telling
from mizzen_operator.resources.revision_hash import engine_image, revision
from mizzen_operator.rollout import progress
from mizzen_operator.rollout.actions import Action, DeleteGroup, delete_mislabelled_pods, drop_creations
from mizzen_operator.rollout.dry_run import PodDryRun
from mizzen_operator.rollout.executor import Executor
from mizzen_operator.rollout.planner import plan
from mizzen_operator.rollout.pod_policies import PodPolicies
from mizzen_operator.rollout.revisions import Revisions
from mizzen_operator.rollout.state import load_state
from mizzen_operator.status.inputs import StatusInputs
from mizzen_operator.status.missing_refs import CONFIG_MAP, RequiredRef, engine_refs, fetch_refs, gateway_refs
from mizzen_operator.status.writer import StatusWriter

WAITS_SECONDS = 5.0
"""How long a pod may wait to begin before it is seen whether it lacks something."""

logger = logging.getLogger(__name__)


class Steps:
    """Does the next step of services whose specs can be acted on."""

    def __init__(
        self,
        kube: Kube,
        config: OperatorConfig,
        *,
        gateways: GatewayListener,
        gates: ReadinessGates,
        revisions: Revisions,
        models: ModelFetcher,
        executor: Executor,
        policies: PodPolicies,
        applied: ApplyCache,
        entrances: Entrances,
        writer: StatusWriter,
        autoscaler: Autoscaler,
    ) -> None:
        self._kube = kube
        self._config = config
        self._gateways = gateways
        self._gates = gates
        self._revisions = revisions
        self._models = models
        self._executor = executor
        self._policies = policies
        self._applied = applied
        self._entrances = entrances
        self._writer = writer
        self._autoscaler = autoscaler
        self._rehearsal = PodDryRun(kube, config)
        self._known: dict[ServiceKey, PreviousResult] = {}

    def forget(self, key: ServiceKey) -> None:
        """A service is gone."""
        self._known.pop(key, None)
        self._rehearsal.forget(key)

    async def step(self, key: ServiceKey, service: InferenceService) -> ReconcileResult:
        """Do what is next for a service, and write its status.

        Raises:
            KubeError: the API server failed; what could be done without its answer is done.
        """
        observed = await observe(self._kube, service)
        self._autoscaler.seen(key, service.autoscaling, service.uid)
        look = Look(
            service,
            observed,
            newest=revision(service, self._config),
            now=datetime.now(UTC),
            memory=load_state(service.status),
            groups=observed.groups,
            fits=fit(service),
            download=load_finished_download(service),
        )
        known = self._known.get(key, PreviousResult())
        if self._applied.expire(service, observed.progress_marker, settled=observed.settled):
            self._revisions.forget(key)
        await telling(self._work(key, look), partial(self._tell_meanwhile, key, look, known))
        found = look if look.error is None else look.by(known)
        if look.error is None or found.entrance is not None:
            await self._tell(key, found)
        self._known[key] = found.known
        if look.error is not None:
            raise look.error
        return self._outcome(key, look)

    async def _work(self, key: ServiceKey, look: Look) -> None:
        """Do what is next. Who is let in, and who may be evicted, is settled before there is a pod."""
        await look.attempt(self._policies.apply_network_policies(look.service))
        await look.attempt(self._policies.apply_disruption_budget(look.service))
        await look.attempt(self._advance(key, look))
        await look.attempt(self._miss(look))

    async def _advance(self, key: ServiceKey, look: Look) -> None:
        """Bring the gateway, the groups and the model a step further."""
        service, observed, newest = look.service, look.observed, look.newest
        entrance = look.entrance = await self._entrances.make(key, service, observed)
        look.failure = look.failure or entrance.failure
        acknowledged = look.acknowledged = await self._ask(key, service, observed, entrance)
        if acknowledged.refused:
            look.failure = look.failure or token_refused(service)
        groups = look.groups = await self._gates.update_routable(service, observed.groups, acknowledged)
        look.cold_start = _cold_start(observed.groups, groups)
        groups = look.groups = await self._gates.update_verified(service, newest, groups, acknowledged)
        look.rotation = await self._entrances.rotate(service, entrance, groups, acknowledged)
        download, problem = await self._fetch(service, observed)
        look.failure = look.failure or problem
        memory = progress.update_state(service, newest, groups, acknowledged.by_all, look.now)
        look.memory, look.download, look.learned = restart_progress_clock(memory, download), download, True
        used = {memory.stable_revision, *(group.revision for group in groups)}
        recorded = await self._revisions.sync(service, newest, used)
        refusal = await self._rehearse(look)
        look.failure = look.failure or refusal
        actions = self._plan(look, restorable=memory.stable_revision in recorded, refused=refusal is not None)
        if any(isinstance(action, DeleteGroup) for action in actions):
            async with look.writing:
                service = look.service = await self._writer.write_failures(look.service, look.memory)
        await self._executor.execute(pin_revision(service, download), newest, actions)

    async def _rehearse(self, look: Look) -> Failure | None:
        """Why no group of the newest revision can be made; of one that there was, nobody asks."""
        there = {group.revision for group in look.groups}
        if look.newest in there or look.newest == look.memory.stable_revision:
            return None
        return await self._rehearsal.check(pin_revision(look.service, look.download), look.newest)

    async def _miss(self, look: Look) -> None:
        """Look for what the spec names where a pod waits to begin: the node tells nobody but in events."""
        settings = look.entrance.shared if look.entrance is not None else None
        gateway = settings.sharing.oldest.gateway if settings is not None else look.service.gateway
        late = stamp(look.now - timedelta(seconds=WAITS_SECONDS))
        needs: list[RequiredRef] = []
        if any(one.creating_containers and one.created <= late for one in look.observed.gateways):
            needs += gateway_refs(gateway)
        current = [one for one in look.groups if one.live and one.revision == look.newest]
        if any(one.creating_containers and one.created <= late for one in current):
            needs += engine_refs(look.service)
        if look.download is not None and look.download.waiting_for and not look.download.total_bytes:
            needs += fetch_refs(look.service)
        sought = [one for one in needs if one.kind != CONFIG_MAP]  # of those it may read its own alone
        refs = [Ref(one.kind, look.service.namespace, one.name) for one in sought]
        there = await asyncio.gather(*map(self._kube.exists, refs), return_exceptions=True)
        look.absent = tuple(one for one, found in zip(sought, there, strict=True) if found is False)

    def _plan(self, look: Look, *, restorable: bool, refused: bool) -> list[Action]:
        service, newest = look.service, look.newest
        wanted = progress.build_target(service, newest, look.memory, restorable=restorable)
        wanted = pause_during_download(wanted, look.download)
        hopeless = refused or (look.fits is not None and not look.fits.fits)
        if hopeless:  # nothing is made of it, and nothing goes for it
            wanted = replace(wanted, paused=True)
        taken = look.observed.taken_names | self._executor.foreign_pod_names(service)
        actions = plan(wanted, look.groups, look.acknowledged.by_all, taken)
        if hopeless:
            actions = drop_creations(actions, newest)
        return [*delete_mislabelled_pods(look.observed.mislabelled_pods), *allowed_actions(actions, newest, look.download)]

    async def _tell_meanwhile(self, key: ServiceKey, look: Look, known: PreviousResult) -> None:
        """Tell what is there now, while the look waits for an answer of the API server, or its turn to ask.

        Of a service that nobody was told to be available nothing can have become untrue that would hurt.
        """
        if not holds(look.service.status, "Available"):
            return
        try:
            async with look.writing:
                body = await self._kube.get(Ref("InferenceService", key.namespace, key.name))
                now = look.by(known)
                if now.entrance is None or body is None or body["metadata"]["uid"] != look.service.uid:
                    return
                look.service = replace(look.service, status=body.get("status", {}))
                observed = await observe(self._kube, look.service)
                now = replace(now, service=look.service, observed=observed, groups=observed.groups)
                await self._tell(key, replace(now, memory=load_state(look.service.status), learned=False))
        except KubeError as error:  # what the look waits for goes on
            logger.warning("%s/%s: cannot tell how it is: %s", *key, brief(error))

    async def _tell(self, key: ServiceKey, look: Look) -> None:
        """Write the status.

        Raises:
            KubeError: the API server failed.
        """
        service, entrance, silent = look.service, look.entrance, look.acknowledged.silent
        facts = StatusInputs(
            service,
            look.newest,
            engine_image(service, self._config),
            look.groups,
            [replace(pod, answers=pod.address not in silent) for pod in look.observed.gateways],
            look.deployment,
            look.failure,
            entrance.shared.sharing if entrance is not None and entrance.shared is not None else None,
            look.memory,
            not look.downloading and progress.is_overdue(service, look.memory, look.now),
            self._autoscaler.scales(key),
            self._autoscaler.rival(key),
            entrance.keys if entrance is not None else None,
            look.rotation,
            look.fits,
            self._models.reported_download(key, look.download),
            look.cold_start,
            look.acknowledged.api_keys,
            look.absent,
        )
        await self._writer.write(key, facts, counted=look.learned)

    def _outcome(self, key: ServiceKey, look: Look) -> ReconcileResult:
        waits = look.rotation is not None or any(group.backing_off for group in look.groups)
        left = progress.seconds_to_deadline(look.service, look.memory, look.now)
        again = left + 1 if left is not None and left > 0 else None
        if look.downloading and not look.service.suspend:
            again = POLL_SECONDS if look.failure is None else None
        others = self._entrances.others(key, look.entrance)
        return ReconcileResult(waits, look.observed.settled, look.failure, others, again)

    async def _fetch(
        self, service: InferenceService, observed: ObservedState
    ) -> tuple[Download | None, Failure | None]:
        """Bring the model on its way; where that is rejected, what serves is looked after all the same."""
        try:
            return await self._models.sync(service, unused=not observed.groups), None
        except (Refused, KubeError) as error:
            failure = rejection(error)
            if failure is None or not service.access.cached:
                raise
            return new_download(service, failed=failure.message), failure

    async def _ask(
        self, key: ServiceKey, service: InferenceService, observed: ObservedState, entrance: Entrance
    ) -> Acknowledgements:
        ready = any(group.live and group.containers_ready for group in observed.groups)
        wanted = ready or entrance.rotating or not (service.autoscaling is None or service.suspend)
        if not wanted:
            self._gateways.forget(key)
            return Acknowledgements()
        answer = await self._gateways.ask(observed.gateways, entrance.token, key)
        if answer.refused:  # the token may have been made anew
            self._entrances.distrust(key)
            self._revisions.forget(key)
        return answer if observed.gateway_rollout_complete else replace(answer, strangers=frozenset())


def _cold_start(before: Sequence[Group], after: Sequence[Group]) -> Mapping[str, Any]:
    """`status.coldStart` of the slowest of groups that gateways have just come to route to; empty of none."""
    served = {group.uid for group in before if group.was_routable}
    came = [group for group in after if group.was_routable and group.uid not in served]
    starts = [cold_start_entry(group.name, group.start, datetime.now(UTC)) for group in came]
    return max(starts, key=lambda start: start["firstReadySeconds"], default={})
