# SPDX-License-Identifier: Apache-2.0
"""Waits at the start of the process until the API server serves every kind that the informers watch.

kopf discovers kinds only once. If it started before the CRD was created, or while the API server was still
starting, it would never watch InferenceServices.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mizzen_operator.api import labels
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError, describe_error
from mizzen_operator.kube.refs import ObjectRef

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
GROUPS = frozenset({labels.GROUP, "apps"})
"""API groups of the watched kinds; the core group is served as soon as the API server is."""


async def wait_until_served(kube: KubeClient) -> None:
    """Wait until the API server's discovery lists the watched kinds; log the reason whenever it changes.

    Args:
        kube: client that reads from the API server itself.
    """
    reported = ""
    while problem := await _find_problem(kube):
        if problem != reported:
            logger.warning("waiting for the API server: %s", problem)
        reported = problem
        await asyncio.sleep(POLL_SECONDS)
    if reported:
        logger.info("the API server serves all watched kinds")


async def _find_problem(kube: KubeClient) -> str:
    """Return why the watched kinds cannot be discovered yet; empty if they can.

    An API server that is starting lists only some groups, and answers 403 until it has loaded its roles.
    """
    try:
        groups = await kube.get(ObjectRef("APIGroupList", ""))
        resources = await kube.get(ObjectRef("APIResourceList", ""))
    except KubeError as error:
        return describe_error(error)
    missing = GROUPS - {group["name"] for group in _items(groups, "groups")}
    if missing - {labels.GROUP}:
        return f"it does not serve the API group {min(missing - {labels.GROUP})} yet"
    names = {resource["name"] for resource in _items(resources, "resources")}
    if missing or labels.PLURAL not in names:
        return f"it does not serve {labels.PLURAL} of {labels.API_VERSION}: create the CRD"
    return ""


def _items(body: dict[str, Any] | None, field: str) -> list[dict[str, Any]]:
    """Return the entries of a discovery document; none if the document is missing or empty."""
    return (body or {}).get(field) or []
