"""What a service is to those who look at it from outside, whether its spec can be read or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ServiceRef(Protocol):
    """A service by its names, and the status that was written last."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def namespace(self) -> str:
        """Its namespace."""
        ...

    @property
    def uid(self) -> str:
        """Its uid."""
        ...

    @property
    def shared(self) -> bool:
        """Whether it shares its namespace's gateway."""
        ...

    @property
    def status(self) -> Mapping[str, Any]:
        """The status that was written last; empty before the first."""
        ...
