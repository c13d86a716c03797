# SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks that use one GPU, one after another, and prints their figures in one table.

    python benchmarks/gpu_all.py [--json]
    python benchmarks/gpu_all.py --device cpu --shape tiny

Each benchmark runs in its own process, and its output is passed on. At the end comes a Markdown table of all
rows, and with `--json` one JSON object after it. If a benchmark fails, the next ones still run; failures are
listed at the end. The second command checks in less than a minute that all benchmarks work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common_parts.arguments import Help, positive

RUNS = (
    "offline.py --shape qwen3-0.6b",
    "offline.py --shape qwen3-8b",
    "decode.py --shape qwen3-0.6b --batch 1 32 256",
    "decode.py --shape qwen3-8b --batch 1 32 256",
    "decode.py --shape qwen3-8b --batch 256 --kv-cache-dtype fp8",
    "prefill.py --shape qwen3-8b --work 1x8192",
    "prefix.py --shape qwen3-8b",
    "mixed.py --shape qwen3-8b",
    "startup.py --shape qwen3-8b",
)


def commands(device: str, shape: str | None) -> list[str]:
    """Return the commands to run, without duplicates; on a CPU, each program runs with small defaults."""
    if device == "cpu":
        return list(dict.fromkeys(f"{run.split()[0]} --device cpu --shape {shape or 'tiny'}" for run in RUNS))
    if shape is None:
        return list(RUNS)
    program_and_rest = (run.split(maxsplit=3) for run in RUNS)
    return list(dict.fromkeys(" ".join([p, "--shape", shape, *rest]) for p, _, _, *rest in program_and_rest))


def run_benchmark(command: str, rounds: int | None) -> dict[str, Any] | None:
    """Run a benchmark and pass on its output; return its JSON object, or None if the benchmark failed."""
    program, *options = command.split()
    options += ["--json", *([] if rounds is None else ["--rounds", str(rounds)])]
    print(f"$ {program} {' '.join(options)}", flush=True)
    arguments = [sys.executable, str(Path(__file__).with_name(program)), *options]
    last = ""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(last, end="", flush=True)
            last = line
    if process.returncode:
        print(last, flush=True)
        return None
    print(flush=True)
    return json.loads(last)


def quantity(number: float | None, unit: str) -> str:
    """Return a number and its unit as text; a dash for None."""
    return "–" if number is None else f"{number:,.2f} {unit}"


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """Return the rows of all benchmarks as one Markdown table."""
    lines = ["| work | figure | limit | of the limit |", "|---|---|---|---|"]
    for row in rows:
        figure, limit = (quantity(row[name], row["unit"]) for name in ("figure", "limit"))
        share = "–" if row["share"] is None else f"{row['share']:.0%}"
        lines.append(f"| `{row['command']}`: {row['work']} | {figure} | {limit} | {share} |")
    return "\n".join(lines)


def describe_machine(machine: dict[str, Any]) -> str:
    """Return the line above the table: GPU, driver, PyTorch and commit, as far as they are known."""
    names = {"gpu": "", "driver": "driver ", "torch": "PyTorch ", "commit": "commit "}
    return ", ".join(word + machine[name] for name, word in names.items() if machine[name])


def main() -> int:
    """Run all benchmarks; return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--shape", help="shape for every benchmark, instead of its own")
    parser.add_argument("--rounds", type=positive, help="rounds of every benchmark; by default its own")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    results = {command: run_benchmark(command, args.rounds) for command in commands(args.device, args.shape)}
    rows = [
        {"command": command, **row} for command, result in results.items() if result for row in result["rows"]
    ]
    machines = {command: result["machine"] for command, result in results.items() if result}
    failed = [command for command, result in results.items() if result is None]
    for line in dict.fromkeys(map(describe_machine, machines.values())):
        print(f"{line}\n")
    print(markdown(rows), flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    if args.json:
        print(json.dumps({"machines": machines, "rows": rows, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
