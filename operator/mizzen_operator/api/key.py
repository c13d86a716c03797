"""MODULE."""

from __future__ import annotations

from typing import NamedTuple


class ServiceKey(NamedTuple):
    """Name of one InferenceService."""

    namespace: str
    name: str
