# SPDX-License-Identifier: Apache-2.0
"""Settings of images that the CRD rejects, in the form of the other cases in `crd_cases`."""

from __future__ import annotations

from typing import Any

HOSTS = "spec.gateway.images.allowHosts"
WRONG_IMAGES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "hosts of refused URLs",
        {"gateway": {"images": {"allowHosts": ["a.example"]}}},
        HOSTS,
        "remove the hosts",
    ),
    (
        "URLs without hosts",
        {"gateway": {"images": {"urls": "Allowed"}}},
        HOSTS,
        "is required with urls Allowed",
    ),
    *(
        (
            f"host {host}",
            {"gateway": {"images": {"urls": "Allowed", "allowHosts": [host]}}},
            f"{HOSTS}[0]",
            "write cdn.example.com",
        )
        for host in (
            "https://a.example",
            "a.example:443",
            "*",
            "a.*.example",
            "192.0.2.1",
            "localhost",
            "A.b",
        )
    ),
    ("no image", {"gateway": {"images": {"maxPerRequest": 0}}}, "spec.gateway.images.maxPerRequest", "to 1"),
    (
        "huge image",
        {"gateway": {"images": {"maxBytes": 2**28 + 1}}},
        "spec.gateway.images.maxBytes",
        "equal to",
    ),
]
