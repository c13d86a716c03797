# SPDX-License-Identifier: Apache-2.0
"""`mizzen-operator check`: tests whether an installed operator works; the chart's `helm test` runs it.

It checks the CRD, the Lease and the Service, and repeats the checks until they pass or the timeout expires.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from mizzen_operator.api import labels
from mizzen_operator.api.addresses import join_address
from mizzen_operator.kube.client import KubeClient
from mizzen_operator.kube.errors import KubeError
from mizzen_operator.kube.refs import ObjectRef
from mizzen_operator.kube.transport import load_configuration
from mizzen_operator.metrics import Metrics

RETRY_SECONDS = 1.0
REQUEST_SECONDS = 5.0


class CheckError(Exception):
    """A fault of the installation, with the remedy in its message."""


def main(arguments: Sequence[str]) -> int:
    """Run the checks and print their results.

    Returns:
        Exit code: 0 if all checks pass, 1 if one still fails after `--timeout-seconds`.
    """
    parser = argparse.ArgumentParser(
        "mizzen-operator check",
        description="Checks that the CRD is served, that a replica of the operator leads, and that the "
        "operator's Service answers.",
    )
    parser.add_argument("--name", default="mizzen-operator", help="Name of the operator's Service and Lease")
    parser.add_argument("--namespace", default="default", help="Namespace of both")
    parser.add_argument("--port", type=int, default=8080, help="Port of the Service")
    parser.add_argument(
        "--timeout-seconds", type=float, default=60.0, help="Time for which failing checks are repeated"
    )
    options = parser.parse_args(list(arguments))
    try:
        results = asyncio.run(_check(options.name, options.namespace, options.port, options.timeout_seconds))
    except (CheckError, KubeError) as error:
        print(f"mizzen-operator check: {error}", file=sys.stderr)
        return 1
    print("\n".join(results))
    return 0


async def _check(name: str, namespace: str, port: int, seconds: float) -> list[str]:
    """Repeat the checks for up to `seconds` until all of them pass; return their results, one line each.

    Raises:
        CheckError: a check still fails at the end of that time.
        KubeError: the API server still fails at the end of that time.
    """
    kube, deadline = KubeClient(await load_configuration(), Metrics()), time.monotonic() + seconds
    try:
        while True:
            try:
                return [
                    await _check_crd(kube, namespace),
                    await _check_leader(kube, ObjectRef("Lease", namespace, name)),
                    await _check_service(kube, ObjectRef("Service", namespace, name), port),
                ]
            except (CheckError, KubeError):
                if time.monotonic() + RETRY_SECONDS > deadline:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
    finally:
        await kube.close()


async def _check_crd(kube: KubeClient, namespace: str) -> str:
    try:
        await kube.list(ObjectRef("InferenceService", namespace))
    except KubeError as error:
        if error.code != 404:
            raise
        message = f"{labels.GROUP}/{labels.VERSION} is not served: install the CRD (the chart contains it)"
        raise CheckError(message) from error
    return f"{labels.GROUP}/{labels.VERSION} is served"


async def _check_leader(kube: KubeClient, ref: ObjectRef) -> str:
    lease = await kube.get(ref)
    holder = (lease or {}).get("spec", {}).get("holderIdentity")
    if not holder:
        raise CheckError(f"no replica holds Lease {ref.namespace}/{ref.name}: see the operator's log")
    return f"{holder} leads"


async def _check_service(kube: KubeClient, ref: ObjectRef, port: int) -> str:
    service = await kube.get(ref)
    if service is None:
        raise CheckError(f"there is no Service {ref.namespace}/{ref.name}: is this the release's name?")
    url = _readyz_url(service, port)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(REQUEST_SECONDS)) as session,
            session.get(url) as answer,
        ):
            text = (await answer.text()).strip()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CheckError(f"{url}: {error or 'no answer in time'}; is a NetworkPolicy in the way?") from error
    if answer.status != 200:
        raise CheckError(f"{url}: {answer.status}, {text}")
    return f"{url}: {text}"


def _readyz_url(service: dict[str, Any], port: int) -> str:
    return f"http://{join_address(service['spec']['clusterIP'], port)}/readyz"
