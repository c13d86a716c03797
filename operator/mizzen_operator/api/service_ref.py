# SPDX-License-Identifier: Apache-2.0
"""Interface (`typing.Protocol`) of a service whose spec may be invalid; parsed services implement it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ServiceRef(Protocol):
    """Identity of a service, and the status that was written last."""

    @property
    def name(self) -> str:
        """Name of the service."""
        ...

    @property
    def namespace(self) -> str:
        """Namespace of the service."""
        ...

    @property
    def uid(self) -> str:
        """Uid of the service."""
        ...

    @property
    def shares_gateway(self) -> bool:
        """Whether the service uses the shared gateway of its namespace."""
        ...

    @property
    def status(self) -> Mapping[str, Any]:
        """Status that was written last; empty if none was written yet."""
        ...
