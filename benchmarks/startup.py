"""Time from the start of a process to a loaded engine, with random weights in files on one GPU (B8).

    python benchmarks/startup.py --shape qwen3-8b [--rounds 3] [--json]

The checkpoint is written first, so that its files are in the page cache. Each round is a new process; the
first compiles kernels, and is told apart from the others, which find them in the cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu import SHAPES, median, parser
from mizzen.layers.build import Build
from mizzen.models.decoder import Decoder
from mizzen.models.registry import read_config

LOAD = """
import json, sys
from mizzen import LLM
with LLM(sys.argv[1], device="cuda", skip_tokenizer=True) as llm:
    print(json.dumps(dict(llm.engine.info.phases)), flush=True)
"""


def write_checkpoint(folder: Path, shape: str) -> int:
    """Write a model's folder; return the bytes of its weights."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    model = Decoder(Build(device=torch.device("meta"), dtype=torch.bfloat16), read_config(folder))
    tensors = {}
    for target in model.targets():
        scale = 1.0 if target.ones else target.shape[-1] ** -0.5
        values = torch.randn(target.shape, dtype=torch.bfloat16, device="cuda") * scale
        tensors[target.name] = (values.fill_(1) if target.ones else values).cpu()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def start(folder: Path) -> tuple[float, dict[str, float]]:
    """Start a process; return the seconds until its engine is loaded, and its phases."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", LOAD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("the process has no output")
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        if process.wait() or not line:
            raise RuntimeError("the engine could not be loaded")
    return seconds, json.loads(line)


def main() -> None:
    args = parser(__doc__, default="qwen3-8b").parse_args()
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), args.shape)
        first, _ = start(Path(name))
        rounds = [start(Path(name)) for _ in range(args.rounds)]
    took = median([seconds for seconds, _ in rounds])
    phases = rounds[-1][1]
    told = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in phases.items())
    print(
        f"{args.shape}: ready after {took:.1f} s (first time {first:.1f} s); {told}; "
        f"weights at {size / phases['weights'] / 1e9:.1f} GB/s"
    )
    if args.json:
        result = {"seconds": took, "first_seconds": first, "phases": phases, "weights_bytes": size}
        print(json.dumps({"options": vars(args), "startup": result}))


if __name__ == "__main__":
    main()
