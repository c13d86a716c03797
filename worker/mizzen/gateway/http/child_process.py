# SPDX-License-Identifier: Apache-2.0
"""One of several gateway processes: `python -m mizzen.gateway.http.child_process CONFIG API ADMIN I COUNT`.

`mizzen.gateway.http.processes` starts it. CONFIG is a `GatewayConfig` as JSON; API and ADMIN are the file
descriptors of inherited sockets that already listen. I is the number of this process, from 0, of COUNT.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from mizzen.common.json_log import set_up_logging
from mizzen.gateway.config import GatewayConfig, ProcessNumber
from mizzen.gateway.http.processes import exit_with_parent
from mizzen.gateway.main import serve, tune_garbage_collector


def main(arguments: list[str]) -> int:
    """Serve until a signal arrives, and return the exit status."""
    import uvloop

    options, api, admin, index, count = arguments
    set_up_logging(program="gateway")
    tune_garbage_collector()
    config = msgspec.json.decode(options, type=GatewayConfig)
    sockets = socket.socket(fileno=int(api)), socket.socket(fileno=int(admin))

    async def run() -> int:
        exit_with_parent()
        return await serve(config, sockets, ProcessNumber(int(index), int(count)))

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
