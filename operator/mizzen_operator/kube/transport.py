"""How the API server is reached: credentials, HTTP sessions, and the rate of what is asked of it."""

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
    """How to reach the API server: KUBECONFIG, else the pod's service account, else the user's kubeconfig.

    Raises:
        kubernetes.aio.config.ConfigException: there is none of the three.
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
    """The header that proves who asks; a token that is replaced in its file is read anew once a minute."""
    token = (await configuration.auth_settings()).get("BearerToken", {}).get("value")
    return {"Authorization": token} if token else {}


def open_session(
    configuration: Configuration,
    timeout: aiohttp.ClientTimeout,
    middlewares: Sequence[aiohttp.ClientMiddlewareType] = (),
    *,
    owner: bool = True,
) -> aiohttp.ClientSession:
    """A session with a configuration's certificates and proxy; each request needs its `authorization`.

    Args:
        configuration: how to reach the API server.
        timeout: of requests that bring none of their own.
        middlewares: what requests and answers pass through.
        owner: whether closing the session breaks its connections too.
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
    """HTTP to the API server with a configuration's credentials.

    The official client's own requests look for proxies and passwords in the environment and the home folder,
    in a thread each time: half of what a request costs.
    """

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._session = open_session(configuration, aiohttp.ClientTimeout(REQUEST_SECONDS))

    async def send(
        self, verb: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        """Send a request; returns the answer's status and body.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: no whole answer came.
        """
        given = {**headers, **await authorization(self._configuration)}
        url = yarl.URL(self._configuration.host + path, encoded=True)
        async with self._session.request(verb, url, data=body, headers=given) as answer:
            return answer.status, await answer.read()

    async def close(self) -> None:
        """Close its connections."""
        await self._session.close()
