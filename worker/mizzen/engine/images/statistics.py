# SPDX-License-Identifier: Apache-2.0
"""Statistics of an engine's images, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from mizzen.core.images.counts import ImageUse
from mizzen.engine.images.tasks import ImageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStatistics:
    """Statistics since the engine was loaded."""

    decoding: ImageCounts = field(default_factory=ImageCounts)
    confined: bool | None = None
    """Whether the kernel restricts the system calls of the processes that decode images; None before the
    first of them."""
    use: ImageUse = field(default_factory=ImageUse)
    encoding_seconds: float = 0.0
    """Time that the vision encoder ran on the device, in seconds."""
