"""MODULE."""

from __future__ import annotations


def gateway_name(service: str) -> str:
    """Name of the gateway's Deployment, Service, ServiceAccount and RoleBinding."""
    return f"{service}-gateway"


def service_of_gateway(gateway: str) -> str:
    """Name of the service whose own gateway has this name; empty when it is no such name."""
    service = gateway.removesuffix("-gateway")
    return service if service != gateway else ""


def root_keys_secret(service: str) -> str:
    """Name of the Secret that the keys of both kinds of pods follow from; no pod mounts it."""
    return f"{service}-keys"


def engine_keys_secret(service: str) -> str:
    """Name of the Secret that engine pods mount."""
    return f"{service}-engine-keys"


def gateway_keys_secret(service: str) -> str:
    """Name of the Secret that gateway pods mount."""
    return f"{service}-gateway-keys"


def engine_disruption_budget(service: str) -> str:
    """Name of the PodDisruptionBudget of a service's groups."""
    return f"{service}-engine"


def controller_revision(service: str, revision: str) -> str:
    """Name of the ControllerRevision of a revision."""
    return f"{service}-{revision}"


def engine_network_policy(service: str) -> str:
    """Name of the NetworkPolicy of a service's engines."""
    return f"{service}-engine"


def fetch_network_policy(service: str) -> str:
    """Name of the NetworkPolicy of the pods that fetch a service's model."""
    return f"{service}-fetch"


def leader_pod(service: str, revision: str, group: int, incarnation: int) -> str:
    """Name of a group's leading pod; at most 63 characters for a service name of 40."""
    return f"{service}-{revision}-{group}-{incarnation}"


def worker_pod(leader: str, rank: int) -> str:
    """Name of another pod of a group than its leading one, `rank` counting from 1."""
    return f"{leader}-{rank}"


def ranks_service(service: str) -> str:
    """Name of the headless Service that gives pods of groups their DNS names."""
    return f"{service}-ranks"


def leader_dns_name(service: str, namespace: str, leader: str) -> str:
    """DNS name of a group's leading pod, before it is ready, too."""
    return f"{leader}.{ranks_service(service)}.{namespace}.svc"


SHARED_GATEWAY = "mizzen-shared"
"""Name of everything of the gateway that a namespace's services share; no service's child ends in -shared."""
