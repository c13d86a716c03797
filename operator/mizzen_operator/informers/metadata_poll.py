# SPDX-License-Identifier: Apache-2.0
"""Polls the metadata of unwatched children to find manual edits and deletions.

Manual edits of these kinds are rare. Watches would find them, but would have to be kept alive, and would also
deliver every status update of a PodDisruptionBudget. A metadata list from the API server's memory finds the
same edits a little later. `main.py` runs the poller on the leader.
"""

from __future__ import annotations

import asyncio
import logging
import random

from mizzen_operator.config import OperatorConfig
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.last_applied import UNWATCHED, UnwatchedChildren
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.store import OnChange
from mizzen_operator.resources.metadata import MANAGED_BY

logger = logging.getLogger(__name__)

_SELECTOR = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())


class MetadataPoller:
    """Compares the metadata of unwatched children with the versions that were last applied."""

    def __init__(
        self, kube: KubeClient, config: OperatorConfig, children: UnwatchedChildren, on_change: OnChange
    ) -> None:
        """Create a poller; `on_change` is called for each child that was edited or deleted."""
        self._kube = kube
        self._namespace = config.namespace
        self._interval = config.recheck_seconds / len(UNWATCHED)
        self._children = children
        self._on_change = on_change
        self._failing: set[str] = set()

    async def run(self) -> None:
        """Poll the kinds in turn, each once per `recheck_seconds`, until the task is cancelled."""
        while True:
            for kind in UNWATCHED:
                await asyncio.sleep(self._interval * random.uniform(0.9, 1.0))
                try:
                    await self.poll(kind)
                    self._failing.discard(kind)
                except KubeError as error:
                    if kind not in self._failing:  # the role of an older release lacks the permission
                        text = "cannot list %s: %s; edits of these objects will be noticed later"
                        logger.warning(text, kind, error)
                    self._failing.add(kind)
                except Exception:
                    logger.exception("unexpected error while polling %s", kind)

    async def poll(self, kind: str) -> None:
        """List the children of a kind, and call `on_change` for each one that was edited or deleted.

        Raises:
            KubeError: the API server failed, or the operator may not list the kind.
        """
        pages = [
            page async for page in self._kube.metadata_pages(ObjectRef(kind, self._namespace), _SELECTOR)
        ]
        for name, child in self._children.pop_drifted(kind, pages):
            self._on_change(kind, name, child.labels)
