"""Rollouts, scaling and faults of services under load, for hours: `make soak`.

    python tests/cluster/soak.py --requests 100000 --rollouts 20 --cycles 20 --stream-seconds 60

A cluster of processes on this machine: the API server behind a proxy that injects faults in every other
round, a service of simulated engines (4 groups, 2 gateways) and one of real ones with the demo model (2
groups) under load, and one with a single group that probes alone ask. Ends with a report, and one JSON object
last; exits with 1 when a request failed, and with 2 when all were answered and a status was wrong for longer
than allowed (1 s after a process ended, 3 s after one hung; on a machine without a free core, what that
explains besides).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from noloss.local import Site
from noloss.run import Run, Size, printed
from noloss.truth import Wrong


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="requests to be sent at least")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=20, help="of scaling 4 to 1 to 4")
    parser.add_argument("--stream-seconds", type=float, default=60.0, help="length of the longest stream")
    parser.add_argument(
        "--share", type=float, default=0.15, help="of API requests that fail, in every other round"
    )
    parser.add_argument(
        "--pause", type=float, default=0.05, help="rest between short requests of a worker [s]"
    )
    parser.add_argument("--hours", type=float, default=8.0, help="ends after so long with what was done")
    parser.add_argument("--seed", type=int, default=1, help="of the order of things")
    parser.add_argument(
        "--folder", type=Path, help="for the cluster's state and logs; a temporary one if not given"
    )
    return parser.parse_args()


def told(name: str, wrong: Wrong) -> dict[str, Any]:
    """A time in which a status was wrong, for the report."""
    began = time.localtime(time.time() - time.monotonic() + wrong.begin)
    return {
        "service": name,
        "began": time.strftime("%H:%M:%S", began),
        "seconds": round(wrong.seconds, 2),
        "available": wrong.available,
        "cause": wrong.cause,
    }


def main() -> int:
    """Run and report."""
    options = parse()
    size = Size(
        requests=options.requests,
        rollouts=options.rollouts,
        cycles=options.cycles,
        stream_seconds=options.stream_seconds,
        share=options.share,
        pause=options.pause,
        most_seconds=3600 * options.hours,
        seed=options.seed,
    )
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mizzen-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    site = Site(folder)
    site.up()
    run = Run(site, size)
    try:
        asyncio.run(run.long())
    finally:
        if not run.counts:
            shutil.copytree(site.folder / "logs", folder.with_suffix(".logs"), dirs_exist_ok=True)
            print(f"it did not come to its end; logs are in {folder.with_suffix('.logs')}", file=sys.stderr)
        site.down()
    over = [told(*one) for one in run.over()]
    report = {
        **run.report(),
        "over": over,
        "over_strictly": [told(*one) for one in run.over(strictly=True)],
    }
    print("\n".join(printed(report)))
    print(json.dumps(report))
    if run.counts["failed"] or run.counts["started"] != run.counts["ok"]:
        return 1
    return 2 if over else 0


if __name__ == "__main__":
    sys.exit(main())
