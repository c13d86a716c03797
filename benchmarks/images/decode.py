# SPDX-License-Identifier: Apache-2.0
"""Images per second that one CPU core decodes and resizes, compared with Transformers.

    python benchmarks/images/decode.py [--edge 1024] [--images 12] [--rounds 5] [--json]

The images are square JPEG files of quality 88 with smooth content and noise, for the sizes of Qwen2-VL with
patches of 14 pixels. Mizzen decodes and resizes them to 8-bit pixels; the GPU normalizes these. Transformers'
PIL image processor also normalizes pixels and cuts them into patches, on the CPU. A third measurement takes
the confined process into account. Runs alternate, so that other load on the machine affects all, and the
rates are in images per second of CPU time, of the process with one thread; medians are compared.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.options import DecoderOptions
from mizzen.images.decode import convert_to_rgb, decode_image, turn_upright
from mizzen.images.rules import read_image_rules
from mizzen.images.types import ImageRules

RATE_GOAL = 45.0
"""Images per second of CPU time."""
RATIO_GOAL = 3.0
"""Rate as a multiple of that of Transformers."""
PATIENCE = 120.0
"""Maximum time for a round of the decoder, in seconds."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Files of images, their edge in pixels, and the rules to resize them."""

    files: list[bytes]
    edge: int
    rules: ImageRules

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the images."""
        return self.edge, self.edge


def make_workload(edge: int, images: int) -> Workload:
    """Return files with random content."""
    files = []
    for seed in range(images):
        source = np.random.default_rng(seed)
        small = Image.fromarray(source.integers(0, 256, (edge // 32, edge // 32, 3), np.uint8))
        smooth = np.asarray(small.resize((edge, edge), Image.Resampling.BICUBIC), np.int16)
        noise = source.integers(-6, 7, smooth.shape, np.int16)
        file = io.BytesIO()
        Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
        files.append(file.getvalue())
    rules = read_image_rules({"model_type": "qwen2_vl"}, {"max_pixels": 12_845_056}, {})
    if rules is None:
        raise RuntimeError("Qwen2-VL has no rules for images")
    return Workload(files, edge, rules)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def time_stages(workload: Workload) -> dict[str, float]:
    """Return the CPU time of each stage of decoding, in milliseconds per image."""
    seconds = {"decode": 0.0, "resize": 0.0, "copy": 0.0}
    geometry = workload.rules.geometry(*workload.size)
    for content in workload.files:
        start = time.process_time()
        image = convert_to_rgb(turn_upright(Image.open(io.BytesIO(content))))
        decoded = time.process_time()
        resized = image.resize((geometry.width, geometry.height), Image.Resampling.BICUBIC)
        end = time.process_time()
        np.asarray(resized)
        seconds["decode"] += decoded - start
        seconds["resize"] += end - decoded
        seconds["copy"] += time.process_time() - end
    return {name: 1000 * value / len(workload.files) for name, value in seconds.items()}


def measure_function(workload: Workload, function: Callable[[bytes], object]) -> float:
    """Return the number of images per second of CPU time for a function that processes one."""
    start = cpu_seconds()
    for content in workload.files:
        function(content)
    return len(workload.files) / (cpu_seconds() - start)


def measure_decoder(workload: Workload) -> float:
    """Return the number of images per second of CPU time of one confined process and of this process.

    The first images start the process, which is not measured.
    """
    decoder = ImageDecoder(DecoderOptions(processes=1, queue_seconds=PATIENCE))
    try:
        run_decoder(decoder, workload)
        start = cpu_seconds() + process_seconds(decoder)
        run_decoder(decoder, workload)
        return len(workload.files) / (cpu_seconds() + process_seconds(decoder) - start)
    finally:
        decoder.close()


def process_seconds(decoder: ImageDecoder) -> float:
    """Return the CPU time of the decoder's processes in seconds."""
    ticks = 0
    for process in decoder.process_ids:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def run_decoder(decoder: ImageDecoder, workload: Workload) -> None:
    """Decode all images.

    Raises:
        RuntimeError: an image failed, or the images took longer than PATIENCE.
    """
    for index, content in enumerate(workload.files):
        decoder.submit(index.to_bytes(4, "big"), content, workload.rules, workload.size)
    end = time.monotonic() + PATIENCE
    while decoder.pending:
        for result in decoder.drain():
            if result.pixels is None:
                raise RuntimeError(result.error)
        if time.monotonic() > end:
            raise RuntimeError("the decoder takes too long")
        time.sleep(0.005)


def run(workload: Workload, rounds: int) -> dict[str, Any]:
    """Measure in turns, and return rates and goals."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(max_pixels=12_845_056)

    def process(content: bytes) -> None:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
        processor(images=image, return_tensors="np")

    rates: dict[str, list[float]] = {"transformers": [], "mizzen": [], "mizzen in a process": []}
    for _ in range(rounds):
        rates["transformers"].append(measure_function(workload, process))
        rates["mizzen"].append(
            measure_function(
                workload, lambda content: decode_image(content, workload.rules, workload.size, None)
            )
        )
        rates["mizzen in a process"].append(measure_decoder(workload))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "edge": workload.edge,
        "file_bytes": statistics.mean(map(len, workload.files)),
        "images_per_cpu_second": medians,
        "ratio": medians["mizzen"] / medians["transformers"],
        "stages_ms": time_stages(workload),
        "load": os.getloadavg()[0],
        "cpus": os.cpu_count(),
    }


def main() -> None:
    """Print the rates; exit with code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="compare image preprocessing with Transformers")
    parser.add_argument("--edge", type=int, default=1024, help="width and height of the images in pixels")
    parser.add_argument("--images", type=int, default=12, help="number of images of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    result = run(make_workload(args.edge, args.images), args.rounds)
    if args.json:
        print(json.dumps(result))
    else:
        for name, rate in result["images_per_cpu_second"].items():
            print(f"{name:22} {rate:7.1f} images/s of CPU time")
        stages = ", ".join(f"{name} {value:.1f}" for name, value in result["stages_ms"].items())
        print(f"ratio {result['ratio']:.2f} (goal {RATIO_GOAL}); rate goal {RATE_GOAL}; ms: {stages}")
        print(f"load {result['load']:.1f} on {result['cpus']} CPUs")
    reached = result["ratio"] >= RATIO_GOAL and result["images_per_cpu_second"]["mizzen"] >= RATE_GOAL
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
