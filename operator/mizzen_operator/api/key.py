# SPDX-License-Identifier: Apache-2.0
"""The key of one InferenceService in queues and caches."""

from __future__ import annotations

from typing import NamedTuple


class ServiceKey(NamedTuple):
    """Namespace and name of an InferenceService."""

    namespace: str
    name: str
