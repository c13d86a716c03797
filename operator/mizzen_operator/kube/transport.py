# SPDX-License-Identifier: Apache-2.0
"""Connection to the API server: credentials and HTTP sessions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import aiohttp
import yarl
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import incluster_config

from mizzen_operator.config import VERSION

USER_AGENT = f"mizzen-operator/{VERSION}"
REQUEST_SECONDS = 30.0
CONNECTIONS = 100


async def load_configuration() -> Configuration:
    """Load the client configuration: KUBECONFIG, else the pod's service account, else the user's kubeconfig.

    Raises:
        kubernetes.aio.config.ConfigException: none of the three exists.
    """
    configuration = Configuration()
    if _in_pod() and not os.environ.get("KUBECONFIG"):
        kube_config.load_incluster_config(client_configuration=configuration)
    else:
        await kube_config.load_kube_config(client_configuration=configuration)
    return configuration


def _in_pod() -> bool:
    return os.path.exists(incluster_config.SERVICE_TOKEN_FILENAME)


async def authorization(configuration: Configuration) -> dict[str, str]:
    """Return the Authorization header. A token file is read once a minute, because tokens are rotated."""
    token = (await configuration.auth_settings()).get("BearerToken", {}).get("value")
    return {"Authorization": token} if token else {}


def open_session(
    configuration: Configuration,
    timeout: aiohttp.ClientTimeout,
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    *,
    owner: bool = True,
) -> aiohttp.ClientSession:
    """Open a session with a configuration's certificates and proxy; the caller adds `authorization` headers.

    Args:
        configuration: how to reach the API server.
        timeout: timeout of requests that set none of their own.
        middlewares: middlewares of the session.
        owner: whether closing the session also closes its connections.
    """
    rest = RESTClientObject(configuration)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS, ssl=rest.ssl_context),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"User-Agent": USER_AGENT},
        timeout=timeout,
        proxy=rest.proxy,
        middlewares=middlewares,
        connector_owner=owner,
    )


class Connection:
    """HTTP connection to the API server with a configuration's credentials.

    It replaces the official client. For each request, the official client uses a thread to search the
    environment and the home folder for proxies and passwords, which is half of the request's cost.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._session = open_session(configuration, aiohttp.ClientTimeout(REQUEST_SECONDS))

    async def send(
        self, verb: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a request; return status and body of the response.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: there was no complete response.
        """
        all_headers = {**headers, **await authorization(self._configuration)}
        url = yarl.URL(self._configuration.host + path, encoded=True)
        async with self._session.request(verb, url, data=body, headers=all_headers) as answer:
            return answer.status, await answer.read()

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()
