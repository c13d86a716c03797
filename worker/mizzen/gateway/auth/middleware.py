# SPDX-License-Identifier: Apache-2.0
"""Adds middleware to the OpenAI API: authentication and, if configured, CORS around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from mizzen.gateway.auth.authentication import AuthMiddleware
from mizzen.gateway.playground.paths import PUBLIC_PATHS

if TYPE_CHECKING:
    from mizzen.gateway.gateway import Gateway

EXPOSED_HEADERS = (
    "retry-after",
    "x-request-id",
    "x-mizzen-route",
    "x-mizzen-ignored",
    *(
        f"x-ratelimit-{kind}-{unit}"
        for kind in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)
"""Response headers that scripts of web pages may read."""
PREFLIGHT_SECONDS = 600


def add_auth_middleware(app: FastAPI, gateway: Gateway) -> None:
    """Require authentication, and let web pages from the origins in `--cors-origin` send requests."""
    public_paths = PUBLIC_PATHS if gateway.config.playground else frozenset[str]()
    app.add_middleware(AuthMiddleware, tenants=gateway.tenants, public_paths=public_paths)
    origins = gateway.config.cors_origin
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            max_age=PREFLIGHT_SECONDS,
        )
