"""Time from the start of a process to a loaded engine, with random weights in files on one GPU (B8).

    python benchmarks/startup.py --shape qwen3-8b [--rounds 3] [--json]

The checkpoint is written first, so that its files are in the page cache. Each round is a new process; the
first compiles kernels and Python's modules, and is told apart from the others, which find them in caches, as
those of an image do. The limit is that of the weights' bytes over `--link`, from the host's memory to the
GPU's. Behind the loaded engine one token is drawn, whose time runs from the start of the process, too. With
several ranks the first phase is also that in which they wait for one another.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from arguments import above_zero, positive
from engine_choices import engine_options, parsed
from rank_logs import quiet_ranks
from safetensors.torch import save_file
from shapes import SHAPES, shape_folder
from tables import Table

from gpu import check_engine, median, parser, run
from mizzen.layers.context import Build
from mizzen.models.decoder import Decoder
from mizzen.models.registry import read_config

LOAD = """
import json, sys
import mizzen.engine.loading.loader  # which LLM imports first of all
from mizzen import LLM, SamplingParams
if __name__ == "__main__":
    print("imported", flush=True)
    try:
        loaded = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    except ValueError as error:
        sys.exit(f"the engine cannot be loaded: {error}")
    with loaded as llm:
        print(json.dumps(dict(llm.engine.info.phases)), flush=True)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), progress=False)
        print("drawn", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Start:
    """When a process had got how far, in seconds from its start."""

    imported: float
    """Python and its modules were there."""
    ready: float
    first_token: float
    phases: dict[str, float]
    """Seconds that each part of loading took."""


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


def start(folder: Path, options: dict[str, Any]) -> Start:
    """Start a process, and let it draw a token."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **bytecode}
    ) as process:
        if process.stdout is None:
            raise RuntimeError("the process has no output")
        told = [(line, time.perf_counter() - begin) for line in process.stdout]
        if process.wait() or len(told) != 3:
            sys.exit(1)  # the process has said why
    (_, imported), (phases, ready), (_, drawn) = told
    return Start(imported, ready, drawn, named(json.loads(phases), options["tensor"]))


def named(phases: dict[str, float], ranks: int) -> dict[str, float]:
    """Return phases by what they are: most of what several ranks call config they wait for one another."""
    met = {"config": "config, ranks meet"} if ranks > 1 else {}
    return {met.get(name, name): seconds for name, seconds in phases.items()}


def show(args: argparse.Namespace, table: Table, size: int, first: Start, rounds: list[Start]) -> None:
    """Print what the rounds took."""
    link = args.link * engine_options(args)["tensor"] if args.device == "cuda" else math.nan
    ready = [one.ready for one in rounds]
    table.row("start to ready", ready, size / link / 1e9, "s", f"first time {first.ready:.1f} s")
    speeds = [size / one.phases["weights"] / 1e9 for one in rounds]
    table.row("weights", speeds, link, "GB/s", f"{size / 1e9:.1f} GB")
    table.row("first token", [one.first_token for one in rounds], None, "s", "from the start on")
    table.row("  Python and imports", [one.imported for one in rounds], None, "s")
    for phase in rounds[0].phases:
        table.row(f"  phase {phase}", [one.phases[phase] for one in rounds], None, "s")


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
            first = start(Path(name), options)
            rounds = [start(Path(name), options) for _ in range(args.rounds)]
    show(args, table, size, first, rounds)
    phases = {phase: median([one.phases[phase] for one in rounds]) for phase in rounds[0].phases}
    startup = {
        "seconds": median([one.ready for one in rounds]),
        "first_seconds": first.ready,
        "first_token_seconds": median([one.first_token for one in rounds]),
        "import_seconds": median([one.imported for one in rounds]),
        "phases": phases,
        "weights_bytes": size,
    }
    return {"startup": startup}


def main() -> None:
    made = parser(__doc__, default="qwen3-8b")
    made.add_argument(
        "--link", type=above_zero, default=55.0, help="GB/s from the host's memory to one GPU's"
    )
    made.add_argument("--context", type=positive, help="context length of the engine")
    made.add_argument("--batch", type=positive, help="requests that the engine runs at once")
    own = {"context": "context_length", "batch": "max_running_requests"}
    same = "a start is the same with it"
    run(parsed(made, own, rounds=1), measure, without={"overlap off": same, "prefix cache off": same})


if __name__ == "__main__":
    main()
