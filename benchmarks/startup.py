# SPDX-License-Identifier: Apache-2.0
"""Time from the start of a process until the engine is loaded, with random weights in files, on one GPU.

    python benchmarks/startup.py --shape qwen3-8b [--rounds 3] [--json]

The checkpoint is written first, so its files are in the page cache. Each round is a new process. The first
round compiles kernels and Python modules, and is reported separately; later rounds find them in caches, like
a process in the container image. The limit is the time to copy the weights from host memory to GPU memory at
the bandwidth `--link`.
After loading, the engine generates one token; the time to that token counts from the start of the process,
too. With several ranks, the first phase includes the time for which ranks wait for each other.
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
from common_parts.arguments import above_zero, positive
from common_parts.engine_options import engine_options, parse_checked_args
from common_parts.gpu import benchmark_parser, check_engine, median, run
from common_parts.rank_logs import quiet_ranks
from common_parts.shapes import SHAPES, shape_folder
from common_parts.tables import Table
from safetensors.torch import save_file

from mizzen.layers.context import BuildContext
from mizzen.models.base import DecoderModel
from mizzen.models.registry import read_config

LOAD = """
import json, sys
import mizzen.engine.loading.loader  # the slowest import of LLM
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
        print("generated", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Start:
    """Times of one process, in seconds after its start."""

    imported: float
    """Time at which Python had imported all modules."""
    ready: float
    """Time at which the engine was loaded."""
    first_token: float
    """Time at which the first token was generated."""
    phases: dict[str, float]
    """Duration of each phase of loading in seconds, by name."""


def write_checkpoint(folder: Path, shape: str, device: str) -> int:
    """Write a model folder with random weights; return the size of the weights in bytes."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    model = DecoderModel(BuildContext(device=torch.device("meta"), dtype=torch.bfloat16), read_config(folder))
    tensors = {}
    for target in model.targets():
        scale = 1.0 if target.fill is not None else target.shape[-1] ** -0.5
        values = torch.randn(target.shape, dtype=torch.bfloat16, device=device) * scale
        tensors[target.name] = (values if target.fill is None else values.fill_(target.fill)).cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def start(folder: Path, options: dict[str, Any]) -> Start:
    """Start a process that loads the engine and generates one token; return its times."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    begin = time.perf_counter()
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **bytecode}
    ) as process:
        if process.stdout is None:
            raise RuntimeError("the process has no output")
        lines = [(line, time.perf_counter() - begin) for line in process.stdout]
        if process.wait() or len(lines) != 3:
            sys.exit(1)  # the process has reported the reason
    (_, imported), (phases, ready), (_, generated) = lines
    return Start(imported, ready, generated, label_phases(json.loads(phases), options["tensor"]))


def label_phases(phases: dict[str, float], ranks: int) -> dict[str, float]:
    """Return the phases; with several ranks, the label of the config phase says that it includes waiting."""
    labels = {"config": "config, ranks meet"} if ranks > 1 else {}
    return {labels.get(name, name): seconds for name, seconds in phases.items()}


def print_rounds(
    args: argparse.Namespace, table: Table, size: int, first: Start, rounds: list[Start]
) -> None:
    """Add the times of the rounds to the table; `size` is the size of the weights in bytes."""
    link = args.link * engine_options(args)["tensor"] if args.device == "cuda" else math.nan
    ready = [round_.ready for round_ in rounds]
    table.row("start to ready", ready, size / link / 1e9, "s", f"first round {first.ready:.1f} s")
    speeds = [size / round_.phases["weights"] / 1e9 for round_ in rounds]
    table.row("weights", speeds, link, "GB/s", f"{size / 1e9:.1f} GB")
    table.row("first token", [round_.first_token for round_ in rounds], None, "s", "from process start")
    table.row("  Python and imports", [round_.imported for round_ in rounds], None, "s")
    for phase in rounds[0].phases:
        table.row(f"  phase {phase}", [round_.phases[phase] for round_ in rounds], None, "s")


def measure(args: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Write the checkpoint, start one process per round, and return the figures."""
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
    print_rounds(args, table, size, first, rounds)
    phases = {phase: median([round_.phases[phase] for round_ in rounds]) for phase in rounds[0].phases}
    startup = {
        "seconds": median([round_.ready for round_ in rounds]),
        "first_seconds": first.ready,
        "first_token_seconds": median([round_.first_token for round_ in rounds]),
        "import_seconds": median([round_.imported for round_ in rounds]),
        "phases": phases,
        "weights_bytes": size,
    }
    return {"startup": startup}


def main() -> None:
    parser = benchmark_parser(__doc__, default="qwen3-8b")
    parser.add_argument("--link", type=above_zero, default=55.0, help="GB/s from host memory to one GPU")
    parser.add_argument("--context", type=positive, help="context length of the engine")
    parser.add_argument("--batch", type=positive, help="maximum number of running requests of the engine")
    own = {"context": "context_length", "batch": "max_running_requests"}
    same = "does not affect the start"
    run(
        parse_checked_args(parser, own, rounds=1),
        measure,
        without={"overlap off": same, "prefix cache off": same},
    )


if __name__ == "__main__":
    main()
