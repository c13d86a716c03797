# SPDX-License-Identifier: Apache-2.0
"""Serves the playground: one HTML document with its style and script inline, and a strict content policy."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI, Response

from mizzen.gateway.playground.paths import PLAYGROUND_PATH

SCRIPTS = ("markdown.js", "chat.js")
"""Files of the document's script, in their order."""
_STYLE, _SCRIPT = "<style></style>", '<script type="module"></script>'


@dataclass(frozen=True, slots=True)
class PlaygroundPage:
    """The document and the headers to send with it."""

    document: bytes
    headers: dict[str, str]


def build_page() -> PlaygroundPage:
    """Return the page, built from the files of this package.

    Raises:
        ValueError: `index.html` lacks the place of the style or of the script.
    """
    files = resources.files(__package__ or "")
    style = files.joinpath("style.css").read_text("utf-8")
    script = "\n".join(files.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    document = files.joinpath("index.html").read_text("utf-8")
    for place in (_STYLE, _SCRIPT):
        if document.count(place) != 1:
            raise ValueError(f"index.html must contain {place} once")
    document = document.replace(_STYLE, f"<style>{style}</style>")
    document = document.replace(_SCRIPT, f'<script type="module">{script}</script>')
    return PlaygroundPage(document.encode(), _headers(style, script))


def _headers(style: str, script: str) -> dict[str, str]:
    """Return the response headers; they allow this style, this script and the gateway's API, and no more."""
    policy = {
        "default-src": "'none'",
        "connect-src": "'self'",
        "script-src": _hash_source(script),
        "style-src": _hash_source(style),
        "img-src": "data:",  # the icon
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        # The browser refuses to parse text as HTML, even if the script tried to.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _hash_source(content: str) -> str:
    """Return the source expression that allows an inline element with exactly this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def add_playground(app: FastAPI) -> None:
    """Add the page, and a redirect from `/` to it; authentication has to let `PUBLIC_PATHS` pass.

    The page's script sends the user's API key with each request to the API, so authentication, limits and
    metrics apply as for every client.
    """
    page = build_page()

    async def playground() -> Response:
        return Response(page.document, headers=page.headers, media_type="text/html")

    async def redirect() -> Response:
        # The location is relative, because a proxy may serve the gateway under a path prefix.
        return Response(status_code=307, headers={"location": PLAYGROUND_PATH.removeprefix("/")})

    for path, endpoint in ((PLAYGROUND_PATH, playground), ("/", redirect)):
        app.add_api_route(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
