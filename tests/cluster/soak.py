# SPDX-License-Identifier: Apache-2.0
"""Roll out, scale and break services under load for half an hour or more: `make soak`.

    python tests/cluster/soak.py --requests 100000 --rollouts 20 --cycles 20 --stream-seconds 60

The cluster consists of processes on this machine. Its API server is behind a proxy that injects faults in
every other round. Two services are under load: one of simulated engines (4 groups, 2 gateways), and one of
real engines with the demo model (2 groups). A third service, with a single group, gets only probes. The last
line of the output is a JSON object. The exit code is 1 if a request failed, and 2 if no request failed but a
status was wrong for longer than allowed: 1 s after a process ended, 3 s after a process hung, and longer on a
machine without a free core.
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
from noloss.run import Run, Size, format_report
from noloss.truth import WrongStatus


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000, help="minimum number of requests")
    parser.add_argument("--rollouts", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=20, help="scaling cycles 4 to 1 to 4")
    parser.add_argument("--stream-seconds", type=float, default=60.0, help="length of the longest stream")
    parser.add_argument(
        "--share", type=float, default=0.15, help="share of API requests that fail, in every other round"
    )
    parser.add_argument(
        "--pause", type=float, default=0.05, help="pause between short requests of a worker [s]"
    )
    parser.add_argument("--hours", type=float, default=8.0, help="time limit of the run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random order of changes and faults")
    parser.add_argument(
        "--folder", type=Path, help="folder for the cluster's state and logs; a temporary one by default"
    )
    return parser.parse_args()


def describe(name: str, wrong: WrongStatus) -> dict[str, Any]:
    """Return the report's entry for an interval in which a status was wrong."""
    began = time.localtime(time.time() - time.monotonic() + wrong.begin)
    return {
        "service": name,
        "began": time.strftime("%H:%M:%S", began),
        "seconds": round(wrong.seconds, 2),
        "available": wrong.available,
        "cause": wrong.cause,
    }


def main() -> int:
    """Run the test, print its report, and return the exit code."""
    options = parse()
    size = Size(
        requests=options.requests,
        rollouts=options.rollouts,
        cycles=options.cycles,
        stream_seconds=options.stream_seconds,
        share=options.share,
        pause=options.pause,
        max_seconds=3600 * options.hours,
        seed=options.seed,
    )
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mizzen-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    site = Site(folder)
    site.up()
    run = Run(site, size)
    try:
        asyncio.run(run.run_long())
    finally:
        if not run.counts:
            shutil.copytree(site.folder / "logs", folder.with_suffix(".logs"), dirs_exist_ok=True)
            print(f"the run was interrupted; logs are in {folder.with_suffix('.logs')}", file=sys.stderr)
        site.down()
    violations = [describe(*violation) for violation in run.violations()]
    report = {
        **run.report(),
        "over": violations,
        "over_strictly": [describe(*violation) for violation in run.violations(strict=True)],
    }
    print("\n".join(format_report(report)))
    print(json.dumps(report))
    if run.counts["failed"] or run.counts["started"] != run.counts["ok"]:
        return 1
    return 2 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
