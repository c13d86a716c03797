# SPDX-License-Identifier: Apache-2.0
"""`python -m mizzen_local.node`: the process of the node, which runs the kubelet and the service proxy."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

import aiohttp

from mizzen_local.addresses import Addresses
from mizzen_local.api import ApiClient
from mizzen_local.controlplane import NODE
from mizzen_local.events import Recorder
from mizzen_local.network import ServiceProxy
from mizzen_local.node.kubelet import Kubelet
from mizzen_local.node.node_context import NodeContext


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m mizzen_local.node", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the cluster's folder")
    parser.add_argument("--range", type=int, required=True, help="index of the cluster's address range")
    parser.add_argument(
        "--gpus", type=int, required=True, help="number of nvidia.com/gpu that the node offers"
    )
    parser.add_argument("--pod-server", default="", help="URL at which pods reach the API server")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> None:
    """Run the node until SIGTERM or SIGINT."""
    folder, addresses = options.folder, Addresses(options.range)
    limits = aiohttp.TCPConnector(force_close=True, limit=0)
    async with (
        ApiClient(folder / "node.kubeconfig") as api,
        aiohttp.ClientSession(connector=limits) as session,
    ):
        recorder = Recorder(api, "mizzen-local", NODE)
        node = NodeContext(
            api=api,
            session=session,
            recorder=recorder,
            folder=folder,
            address=addresses.host,
            server=options.pod_server or api.server,
            authority=folder / "pki" / "ca.crt",
        )
        kubelet = Kubelet(node, NODE, addresses, options.gpus)
        network = ServiceProxy(api, recorder, {"fieldSelector": f"spec.nodeName={NODE}"})
        work = asyncio.gather(kubelet.run(), network.run())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        try:
            await work
        except asyncio.CancelledError:
            logging.info("the node has stopped")


def main() -> None:
    """Run the node with the options of the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(run(arguments()))


if __name__ == "__main__":
    main()
