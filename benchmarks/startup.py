"""Time from the start of a process to a loaded engine, with random weights in files on one GPU (B8).

    python benchmarks/startup.py --shape qwen3-8b [--rounds 3] [--json]

The checkpoint is written first, so that its files are in the page cache. Each round is a new process; the
first compiles kernels and Python's modules, and is told apart from the others, which find them in caches, as
those of an image do. The limit is that of the weights' bytes over `--link`, from the host's memory to the
GPU's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, positive
from engine_choices import engine_options, parsed
from rank_logs import quiet_ranks
from safetensors.torch import save_file
from shapes import SHAPES, shape_folder

from gpu import Table, check_engine, median, parser, run
from mizzen.layers.build import Build
from mizzen.models.decoder import Decoder
from mizzen.models.registry import read_config

LOAD = """
import json, sys
from mizzen import LLM
if __name__ == "__main__":
    try:
        loaded = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"the engine cannot be loaded: {error}")
    with loaded as llm:
        print(json.dumps(dict(llm.engine.info.phases)), flush=True)
"""


def write_checkpoint(folder: Path, shape: str, device: str) -> int:
    """Write a model's folder; return the bytes of its weights."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    model = Decoder(Build(device=torch.device("meta"), dtype=torch.bfloat16), read_config(folder))
    tensors = {}
    for target in model.targets():
        scale = 1.0 if target.ones else target.shape[-1] ** -0.5
        values = torch.randn(target.shape, dtype=torch.bfloat16, device=device) * scale
        tensors[target.name] = (values.fill_(1) if target.ones else values).cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def start(folder: Path, options: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """Start a process; return the seconds until its engine is loaded, and its phases."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **bytecode}
    ) as process:
        if process.stdout is None:
            raise RuntimeError("the process has no output")
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        if process.wait() or not line:
            sys.exit(1)  # the process has said why
    return seconds, json.loads(line)


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Start several processes."""
    more = {"context_length": args.context, "max_running_requests": args.batch}
    chosen = engine_options(args, **{name: value for name, value in more.items() if value})
    options = {**chosen, "device": args.device}
    with shape_folder(args.shape) as folder:
        check_engine(args.device, folder, options)
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), args.shape, args.device)
        with quiet_ranks(options["tensor"]):
            first, _ = start(Path(name), options)
            rounds = [start(Path(name), options) for _ in range(args.rounds)]
    took, phases = median([seconds for seconds, _ in rounds]), rounds[-1][1]
    link = args.link * options["tensor"] if args.device == "cuda" else math.nan
    table.row("start to ready", took, size / link / 1e9, "s", f"first time {first:.1f} s")
    table.row("weights", size / phases["weights"] / 1e9, link, "GB/s", f"{size / 1e9:.1f} GB")
    for phase, seconds in phases.items():
        table.row(f"  {phase}", seconds, None, "s")
    startup = {"seconds": took, "first_seconds": first, "phases": phases, "weights_bytes": size}
    return {"startup": startup}


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument(
        "--link", type=above_zero, default=55.0, help="GB/s from the host's memory to one GPU's"
    )
    made.add_argument("--context", type=positive, help="context length of the engine")
    made.add_argument("--batch", type=positive, help="requests that the engine runs at once")
    run(parsed(made, rounds=1), measure, without=("overlap off", "prefix cache off"))


if __name__ == "__main__":
    main()
