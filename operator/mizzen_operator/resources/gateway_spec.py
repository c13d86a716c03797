"""The gateway to build, dedicated or shared, independent of the kinds of its objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import Gateway, InferenceService, Tracing
from mizzen_operator.resources.metadata import MANAGED_BY, owner_reference

LABELLED_VOLUME = "mizzen-labelled-api-keys-"
"""Prefix of the volumes of Secrets that were found by label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpec:
    """A gateway of one service or several.

    Attributes:
        name: name of all its objects.
        selector: labels of its pods.
        owners: owner references of its objects.
        keys_secret: name of the Secret with its CURVE keys and admin token.
        arguments: options that name the services.
        labelled_secrets: Secrets with API keys that were found by label; sorted, so that pods do not change.
        service_account_uid: uid of its ServiceAccount. Tokens of a deleted account are rejected: pods that
            hold one must be replaced, or could not follow their engines.
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

    @property
    def api_key_volumes(self) -> tuple[tuple[str, str, bool], ...]:
        """Volume name and Secret name of each Secret with API keys, and whether the Secret is optional."""
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
            "labels": {**MANAGED_BY, **self.selector},
            **({"annotations": dict(annotations)} if annotations else {}),
            "ownerReferences": [dict(one) for one in self.owners],
        }


def dedicated_gateway_spec(service: InferenceService) -> GatewaySpec:
    """Return the gateway of one service."""
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
            *_wake(service),
        ),
        gateway=service.gateway,
        drain_timeout=service.lifecycle.drain_timeout,
        image_pull_secrets=tuple(service.pod_template["imagePullSecrets"]),
        tracing=service.tracing,
        disruption_budgets=service.availability.disruption_budgets,
        flags=("--suspended",) if service.suspend else (),
    )


def _wake(service: InferenceService) -> list[tuple[str, str]]:
    """Return the option with a request's maximum wait for a group of a service that may have none."""
    if service.autoscaling is None or service.autoscaling.idle_to_zero is None:
        return []
    return [("--wake-timeout-seconds", str(service.autoscaling.wake_timeout))]
