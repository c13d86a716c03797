"""Lists once in a while the children that no watch follows, to find what somebody has edited or deleted.

Watches of them would have to be kept alive, and bring every status that a controller writes of a
PodDisruptionBudget, for what happens when somebody's hand slips. A list of their metadata from the API
server's memory says as much, a little later.
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


class Sweep:
    """Compares what is there with what it was when it was compared last."""

    def __init__(
        self, kube: KubeClient, config: OperatorConfig, children: UnwatchedChildren, on_change: OnChange
    ) -> None:
        """Sweep the namespace that is served, or all; `on_change` hears of what is another one or gone."""
        self._kube = kube
        self._namespace = config.namespace
        self._pause = config.recheck_seconds / len(UNWATCHED)
        self._children = children
        self._on_change = on_change
        self._failing: set[str] = set()

    async def run(self) -> None:
        """List one kind after the other, all of them in `recheck_seconds`, for ever."""
        while True:
            for kind in UNWATCHED:
                await asyncio.sleep(self._pause * random.uniform(0.9, 1.0))
                try:
                    await self.look(kind)
                    self._failing.discard(kind)
                except KubeError as error:
                    if kind not in self._failing:  # a role of an older release lacks the right to list them
                        logger.warning("cannot list %s: %s; edits are found more slowly", kind, error)
                    self._failing.add(kind)
                except Exception:
                    logger.exception("unexpected error")

    async def look(self, kind: str) -> None:
        """List a kind, and tell of what has strayed.

        Raises:
            KubeError: the API server failed, or does not let the operator list them.
        """
        pages = [
            page async for page in self._kube.metadata_pages(ObjectRef(kind, self._namespace), _SELECTOR)
        ]
        for name, child in self._children.pop_drifted(kind, pages):
            self._on_change(kind, name, child.labels)
