# SPDX-License-Identifier: Apache-2.0
"""AWS Signature Version 4 for S3 requests without a body. This module does no I/O.

Spec: "Authenticating Requests: Using the Authorization Header (AWS Signature Version 4)" of the S3 API
reference. Unlike other AWS services, S3 requires paths to be URI-encoded only once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class AccessKey:
    """An AWS access key; `token` is the session token of a temporary key, or else empty."""

    id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def sign(
    method: str, url: str, given: Mapping[str, str], key: AccessKey, region: str, now: datetime
) -> dict[str, str]:
    """Return the headers that sign a request without a body.

    Args:
        method: GET or HEAD.
        url: complete URL of the request.
        given: other headers of the request, which are signed too.
        key: access key to sign with.
        region: region of the bucket.
        now: current time in UTC.
    """
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    own = {"x-amz-content-sha256": EMPTY_SHA256, "x-amz-date": stamp}
    if key.token:
        own["x-amz-security-token"] = key.token
    signed = {name.lower(): " ".join(value.split()) for name, value in given.items()}
    signed |= {**own, "host": parts.netloc}
    names = ";".join(sorted(signed))
    query = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    request = "\n".join(
        [
            method,
            quote(unquote(parts.path) or "/", safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in query),
            *(f"{name}:{signed[name]}" for name in sorted(signed)),
            "",
            names,
            EMPTY_SHA256,
        ]
    )
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    secret = f"AWS4{key.secret}".encode()
    for part in (*scope.split("/"), text):
        secret = hmac.digest(secret, part.encode(), "sha256")
    shown = f"AWS4-HMAC-SHA256 Credential={key.id}/{scope},SignedHeaders={names},Signature={secret.hex()}"
    return {**own, "Authorization": shown}
