# SPDX-License-Identifier: Apache-2.0
"""Time to load a checkpoint with a tensor for each expert into main memory, compared with reading its files.

    python benchmarks/weights/small_tensors.py [FOLDER] [--width 96] [--rounds 3] [--json]

The checkpoint has the shape of Qwen3-30B-A3B: 48 layers with 128 experts each, whose gate, up and down
projections are 18,432 tensors. Hidden size and width of an expert are smaller, so that it fits into the
memory of most machines. It is written to FOLDER (by default a temporary folder), in files of 256 MiB, with
random bytes. Each round measures, one after the other, and before each of them drops the files from the page
cache (those of a tmpfs stay in memory):

- read: reading the files from their beginning to their end, in blocks of 16 MiB with 8 threads, into buffers
- load: `load_checkpoint`, which reads neighbouring tensors together, straight into the parameters

Building the model is not measured. Rates are those of the median round.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.base import DecoderModel
from mizzen.models.config import ModelConfig
from mizzen.models.hf_fields import Fields
from mizzen.models.registry import read_model
from mizzen.weights.checkpoint_files import INDEX, checkpoint_files
from mizzen.weights.load import load_checkpoint
from mizzen.weights.stream import BLOCK, FileRange, stream_to_device

FILE_BYTES = 256 << 20
ELEMENT_BYTES = 2
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
LAYERS, EXPERTS = 48, 128


def make_config(hidden: int, width: int) -> ModelConfig:
    """Return the configuration of a Qwen3 mixture with many small experts."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden, "moe_intermediate_size": width}
    fields = {
        **sizes,
        **HEADS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    return read_model(Fields(fields))


def make_model(config: ModelConfig) -> DecoderModel:
    """Return the model with empty parameters in bfloat16."""
    return DecoderModel(BuildContext(device=torch.device("cpu"), dtype=torch.bfloat16), config)


def write_checkpoint(folder: Path, targets: Iterator[WeightTarget]) -> int:
    """Write files with random bytes for all targets, and an index; return the number of tensors."""
    shapes = {target.name: target.shape for target in targets}
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += math.prod(shape) * ELEMENT_BYTES
    noise = os.urandom(1 << 20)
    index: dict[str, str] = {}
    for number, names in enumerate(groups):
        path = folder / f"model-{number:05}-of-{len(groups):05}.safetensors"
        index |= dict.fromkeys(names, path.name)
        entries: dict[str, Any] = {}
        end = 0
        for name in names:
            start, end = end, end + math.prod(shapes[name]) * ELEMENT_BYTES
            entries[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for first in range(0, end, len(noise)):
                file.write(noise[: end - first])
            file.flush()
            os.fsync(file.fileno())
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return len(shapes)


def drop_cache(files: list[Path]) -> None:
    """Drop the files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_files(files: list[Path], into: torch.Tensor) -> None:
    """Read the files from their beginning to their end, each into the beginning of `into`."""
    ranges = [FileRange(path, 0, into[: path.stat().st_size]) for path in files]
    stream_to_device(ranges, lambda _: None)


def load_model(folder: Path, model: DecoderModel) -> None:
    """Fill the model's parameters."""
    load_checkpoint(folder, model.targets(), tied=False, progress=lambda _, __: None)


def measure(folder: Path, config: ModelConfig, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way in each round."""
    files = checkpoint_files(folder)
    model = make_model(config)
    buffer = torch.empty(max(path.stat().st_size for path in files), dtype=torch.uint8)
    ways: dict[str, Callable[[], None]] = {
        "read": lambda: read_files(files, buffer),
        "load": lambda: load_model(folder, model),
    }
    for way in ways.values():  # allocates the pages of all parameters and buffers
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            drop_cache(files)
            gc.collect()
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Write the checkpoint, measure, and print a line for each way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="folder on the disk to measure")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default: %(default)s)")
    parser.add_argument("--width", type=int, default=96, help="width of an expert (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the data as a JSON object, too")
    options = parser.parse_args()
    config = make_config(options.hidden, options.width)
    with ExitStack() as stack:
        parent = options.folder and str(options.folder)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent)))
        tensors = write_checkpoint(folder, make_model(config).targets())
        size = sum(path.stat().st_size for path in checkpoint_files(folder))
        seconds = measure(folder, config, options.rounds)
    print(f"{tensors:,} tensors, {size / 1e9:.2f} GB, blocks of {BLOCK >> 20} MiB")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in middle.items():
        print(f"  {name:<9} {value:6.2f} s {size / value / 1e9:6.2f} GB/s {value / middle['read']:6.2f}x")
    if options.json:
        print(json.dumps({"tensors": tensors, "bytes": size, "seconds": seconds}))


if __name__ == "__main__":
    main()
