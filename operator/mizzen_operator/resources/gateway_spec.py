"""What one gateway is: the same for one service's as for one that several share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen_operator.api import child_names, labels
from mizzen_operator.api.types import Gateway, InferenceService, Tracing
from mizzen_operator.resources.metadata import MANAGED_BY, owner

LABELLED_VOLUME = "mizzen-labelled-api-keys-"
"""How the volumes of Secrets begin that were found by their label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """What is rendered of one gateway, whether of one service or of several.

    Attributes:
        name: of all its objects.
        selector: labels of its pods.
        owners: owner references of its objects.
        keys: Secret with its CURVE keys and admin token.
        arguments: options that say whom it serves.
        labelled: Secrets with API keys that were found by their label; in one order, for the same pods.
        account: uid of its ServiceAccount. Tokens of one that was deleted are taken no more: pods that have
            such a token must be replaced, or could not follow their engines.
    """

    name: str
    namespace: str
    selector: Mapping[str, str]
    owners: tuple[Mapping[str, Any], ...]
    keys: str
    arguments: tuple[tuple[str, str], ...]
    gateway: Gateway
    drain_timeout: int
    image_pull_secrets: tuple[Mapping[str, Any], ...]
    tracing: Tracing = field(default_factory=Tracing)
    disruption_budgets: bool = True
    flags: tuple[str, ...] = ()
    labelled: tuple[str, ...] = ()
    account: str = ""

    @property
    def key_secrets(self) -> tuple[tuple[str, str, bool], ...]:
        """Secrets with API keys: the volume's name, the Secret's, and whether the pod runs without it."""
        named = self.gateway.api_keys
        more = [name for name in self.labelled if name not in named]
        return (
            *((f"mizzen-api-keys-{index}", name, False) for index, name in enumerate(named)),
            *((f"{LABELLED_VOLUME}{index}", name, True) for index, name in enumerate(more)),
        )

    def metadata(self, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Metadata of one of its objects."""
        return {
            "name": self.name,
            "namespace": self.namespace,
            "labels": {**MANAGED_BY, **self.selector},
            **({"annotations": dict(annotations)} if annotations else {}),
            "ownerReferences": [dict(one) for one in self.owners],
        }


def dedicated(service: InferenceService) -> Front:
    """The gateway of one service."""
    return Front(
        name=child_names.gateway_name(service.name),
        namespace=service.namespace,
        selector={labels.SERVICE: service.name, labels.COMPONENT: labels.GATEWAY},
        owners=(owner(service),),
        keys=child_names.gateway_keys_secret(service.name),
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
    """How long a request waits for a group of a service that may have none."""
    if service.autoscaling is None or service.autoscaling.idle_to_zero is None:
        return []
    return [("--wake-timeout-seconds", str(service.autoscaling.wake_timeout))]
