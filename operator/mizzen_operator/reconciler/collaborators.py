# SPDX-License-Identifier: Apache-2.0
"""The dependencies of reconcilers, built once per process; `main.py` passes them to `Reconciler`."""

from __future__ import annotations

from dataclasses import dataclass

from mizzen_operator.autoscaling.autoscaler import Autoscaler
from mizzen_operator.config import OperatorConfig
from mizzen_operator.gateway.api_key_secrets import ApiKeySecrets
from mizzen_operator.gateway.reconcile import GatewayReconciler
from mizzen_operator.gateway_client.watch import GatewayWatch
from mizzen_operator.kube.apply import Applier
from mizzen_operator.kube.apply_cache import ApplyCache
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.first_seen import FirstSeen
from mizzen_operator.kube.last_applied import UnwatchedChildren
from mizzen_operator.metrics import Metrics
from mizzen_operator.model_cache.fetch import ModelFetcher
from mizzen_operator.readiness.gates import ReadinessGates
from mizzen_operator.readiness.golden_prompts import Verifier
from mizzen_operator.rollout.dry_run import PodDryRun
from mizzen_operator.rollout.executor import Executor
from mizzen_operator.rollout.pod_policies import PodPolicies
from mizzen_operator.rollout.revisions import Revisions
from mizzen_operator.status.service_metrics import ServiceMetrics
from mizzen_operator.status.writer import StatusWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Collaborators:
    """The dependencies of reconcilers.

    Attributes:
        kube: client of the API server; it reads watched kinds from the store.
        config: options of the operator.
        first_seen: times at which this process first saw the pods of each service.
        autoscaler: writes spec.replicas of services with spec.autoscaling.
        gateway_watch: long-polls the routing tables of gateways.
        gateways: creates and updates gateways, and rotates keys.
        api_key_secrets: finds Secrets with API keys by their label.
        apply_cache: digests of the children that were applied, per service.
        revisions: records revisions as ControllerRevisions.
        executor: creates and deletes groups.
        pod_policies: applies NetworkPolicies and the PodDisruptionBudget of engines.
        dry_run: checks by a dry run whether the API server accepts a revision's pods.
        model_fetcher: fetches models into their caches.
        readiness_gates: writes the readiness gates of engine pods.
        verifier: sends golden prompts to groups and judges the answers.
        status_writer: writes statuses.
    """

    kube: KubeClient
    config: OperatorConfig
    first_seen: FirstSeen
    autoscaler: Autoscaler
    gateway_watch: GatewayWatch
    gateways: GatewayReconciler
    api_key_secrets: ApiKeySecrets
    apply_cache: ApplyCache
    revisions: Revisions
    executor: Executor
    pod_policies: PodPolicies
    dry_run: PodDryRun
    model_fetcher: ModelFetcher
    readiness_gates: ReadinessGates
    verifier: Verifier
    status_writer: StatusWriter


def build_collaborators(
    kube: KubeClient,
    config: OperatorConfig,
    *,
    metrics: Metrics,
    service_metrics: ServiceMetrics,
    autoscaler: Autoscaler,
    gateway_watch: GatewayWatch,
    verifier: Verifier,
    children: UnwatchedChildren,
) -> Collaborators:
    """Build the dependencies of all reconcilers.

    Args:
        kube: client of the API server.
        config: options of the operator.
        metrics: metrics of the process.
        service_metrics: series per service.
        autoscaler: the autoscaler, which also runs as a task of its own.
        gateway_watch: the watch of gateways, which also runs as a task of its own.
        verifier: the verifier, which also runs tasks of its own.
        children: last applied versions of unwatched children; the metadata poller compares with them.
    """
    applier, apply_cache = Applier(kube, metrics, children), ApplyCache(config)
    api_key_secrets = ApiKeySecrets(kube, config.namespace)
    revisions = Revisions(kube, config, metrics)
    return Collaborators(
        kube=kube,
        config=config,
        first_seen=FirstSeen(),
        autoscaler=autoscaler,
        gateway_watch=gateway_watch,
        gateways=GatewayReconciler(
            kube,
            config,
            metrics=metrics,
            api_key_secrets=api_key_secrets,
            applier=applier,
            applied=apply_cache,
            record_key_time=service_metrics.record_keys_created,
        ),
        api_key_secrets=api_key_secrets,
        apply_cache=apply_cache,
        revisions=revisions,
        executor=Executor(
            kube,
            config,
            metrics=metrics,
            revisions=revisions,
            applier=applier,
            applied=apply_cache,
        ),
        pod_policies=PodPolicies(config, applier, apply_cache),
        dry_run=PodDryRun(kube, config),
        model_fetcher=ModelFetcher(kube, config, metrics),
        readiness_gates=ReadinessGates(kube, verifier),
        verifier=verifier,
        status_writer=StatusWriter(kube, metrics, service_metrics),
    )
