# SPDX-License-Identifier: Apache-2.0
"""Create the fetcher of images that the gateway's options describe."""

from __future__ import annotations

from mizzen.gateway.config import GatewayConfig
from mizzen.gateway.images.addresses import AddressPolicy
from mizzen.gateway.images.fetch import ImageFetcher
from mizzen.gateway.images.image_url import AllowedHosts


def new_fetcher(config: GatewayConfig) -> ImageFetcher | None:
    """Return the fetcher of images, or None if images may not be given as URLs.

    Raises:
        ValueError: a host or a network in the options is invalid.
    """
    if config.image_urls != "allowed":
        return None
    return ImageFetcher(AllowedHosts(config.image_hosts), AddressPolicy(config.image_blocked_network))
