# SPDX-License-Identifier: Apache-2.0
"""Names of the objects that the operator creates for a service."""

from __future__ import annotations

import hashlib

PREFIX_CHARACTERS = 33
"""Maximum number of characters of a service's name that a prefix with a digest contains."""


def child_prefix(service: str) -> str:
    """Return the prefix of the names of a service's child objects, at most 40 characters.

    It is the service's name, unless the name contains dots, which are invalid in the names of Services and in
    host names. Then the dots are replaced, and a digest keeps the prefixes of two services apart.
    """
    if "." not in service:
        return service
    digest = hashlib.sha256(service.encode()).hexdigest()[:6]
    return f"{service[:PREFIX_CHARACTERS].replace('.', '-').rstrip('-')}-{digest}"


def gateway_name(service: str) -> str:
    """Return the name of a dedicated gateway's Deployment, Service, ServiceAccount and RoleBinding."""
    return f"{child_prefix(service)}-gateway"


def root_keys_secret(service: str) -> str:
    """Return the name of the Secret from which the Secrets of engine and gateway pods are derived.

    No pod mounts this Secret itself.
    """
    return f"{child_prefix(service)}-keys"


def engine_keys_secret(service: str) -> str:
    """Return the name of the Secret that engine pods mount."""
    return f"{child_prefix(service)}-engine-keys"


def gateway_keys_secret(service: str) -> str:
    """Return the name of the Secret that gateway pods mount."""
    return f"{child_prefix(service)}-gateway-keys"


def engine_disruption_budget(service: str) -> str:
    """Return the name of the PodDisruptionBudget of a service's groups."""
    return f"{child_prefix(service)}-engine"


def controller_revision(service: str, revision: str) -> str:
    """Return the name of the ControllerRevision of a revision."""
    return f"{child_prefix(service)}-{revision}"


def engine_network_policy(service: str) -> str:
    """Return the name of the NetworkPolicy of a service's engines."""
    return f"{child_prefix(service)}-engine"


def fetch_network_policy(service: str) -> str:
    """Return the name of the NetworkPolicy of the pods that fetch a service's model."""
    return f"{child_prefix(service)}-fetch"


def leader_pod(service: str, revision: str, group: int, incarnation: int) -> str:
    """Return the name of a group's leader pod.

    It has at most 63 characters if the service's name has at most 40.
    """
    return f"{child_prefix(service)}-{revision}-{group}-{incarnation}"


def worker_pod(leader: str, rank: int) -> str:
    """Return the name of a pod of a group, other than the leader.

    Args:
        leader: name of the group's leader pod.
        rank: index of the pod in the group, at least 1.
    """
    return f"{leader}-{rank}"


def ranks_service(service: str) -> str:
    """Return the name of the headless Service that gives the pods of groups their DNS names."""
    return f"{child_prefix(service)}-ranks"


def leader_dns_name(service: str, namespace: str, leader: str) -> str:
    """Return the DNS name of a group's leader pod; the name resolves before the pod is ready."""
    return f"{leader}.{ranks_service(service)}.{namespace}.svc"


SHARED_GATEWAY = "mizzen-shared"
"""Name of every object of a namespace's shared gateway.

It cannot collide with a child object of a service, because no name of a child object ends in `-shared`.
"""
