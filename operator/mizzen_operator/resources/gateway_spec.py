# SPDX-License-Identifier: Apache-2.0
"""Description of a gateway, dedicated or shared, from which the builders create its objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import CommonMetadata, Gateway, InferenceService, Tracing
from mizzen_operator.resources.metadata import MANAGED_BY, annotations_member, owner_reference

LABELLED_VOLUME = "mizzen-labelled-api-keys-"
"""Prefix of the names of volumes with Secrets that were found by label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """Description of a gateway of one or several services.

    Attributes:
        name: name of all its objects.
        namespace: namespace of all its objects.
        selector: labels of its pods.
        owners: owner references of its objects.
        keys_secret: name of the Secret with its CURVE keys and admin token.
        arguments: command-line options, with values, that name the services.
        gateway: gateway settings in force.
        drain_timeout: seconds for which a terminating pod waits for its requests to finish.
        image_pull_secrets: references to Secrets for pulling the image.
        tracing: tracing settings of the spec; `gateway_manifests` adds those of the operator's options.
        disruption_budgets: whether it has a PodDisruptionBudget.
        flags: command-line options without values.
        labelled_secrets: names of Secrets with API keys that were found by label; sorted, so that the pod
            template does not change with their order.
        service_account_uid: uid of its ServiceAccount; empty if unknown. Pods with the token of a deleted
            account must be replaced, because they could no longer watch their engines.
        common: labels and annotations of all its objects and pods.
    """

    name: str
    namespace: str
    selector: Mapping[str, str]
    owners: tuple[Mapping[str, Any], ...]
    keys_secret: str
    arguments: tuple[tuple[str, str], ...]
    gateway: Gateway
    drain_timeout: int
    image_pull_secrets: tuple[Mapping[str, Any], ...]
    tracing: Tracing = field(default_factory=Tracing)
    disruption_budgets: bool = True
    flags: tuple[str, ...] = ()
    labelled_secrets: tuple[str, ...] = ()
    service_account_uid: str = ""
    common: CommonMetadata = field(default_factory=CommonMetadata)

    @property
    def api_key_volumes(self) -> tuple[tuple[str, str, bool], ...]:
        """Each Secret with API keys: volume name, Secret name, and whether the Secret is optional."""
        named = self.gateway.api_keys
        more = [name for name in self.labelled_secrets if name not in named]
        return (
            *((f"mizzen-api-keys-{index}", name, False) for index, name in enumerate(named)),
            *((f"{LABELLED_VOLUME}{index}", name, True) for index, name in enumerate(more)),
        )

    def metadata(self, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the metadata of one of its objects."""
        return {
            "name": self.name,
            "namespace": self.namespace,
            "labels": {**self.common.labels, **MANAGED_BY, **self.selector},
            **annotations_member(self.common, annotations or {}),
            "ownerReferences": [dict(owner) for owner in self.owners],
        }


def dedicated_gateway_spec(service: InferenceService) -> GatewaySpec:
    """Return the description of a service's dedicated gateway."""
    return GatewaySpec(
        name=child_names.gateway_name(service.name),
        namespace=service.namespace,
        selector={labels.SERVICE: service.name, labels.COMPONENT: labels.GATEWAY},
        owners=(owner_reference(service),),
        keys_secret=child_names.gateway_keys_secret(service.name),
        arguments=(
            ("--served-name", service.model.served_name),
            *(("--alias", alias) for alias in service.model.aliases),
            ("--service", service.name),
            *_wake_timeout_option(service),
        ),
        gateway=service.gateway,
        drain_timeout=service.lifecycle.drain_timeout,
        image_pull_secrets=tuple(service.pod_template["imagePullSecrets"]),
        tracing=service.tracing,
        disruption_budgets=service.availability.disruption_budgets,
        flags=("--suspended",) if service.suspend else (),
        common=service.common,
    )


def _wake_timeout_option(service: InferenceService) -> list[tuple[str, str]]:
    """Return the option that limits how long a request waits for a group of a service scaled to zero."""
    if service.autoscaling is None or service.autoscaling.idle_to_zero is None:
        return []
    return [("--wake-timeout-seconds", str(service.autoscaling.wake_timeout))]
