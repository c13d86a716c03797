# SPDX-License-Identifier: Apache-2.0
"""Time to encode images with the vision towers of real models, which have random weights, on one GPU.

    python benchmarks/images/encoder.py [--shape qwen3-vl-8b] [--edge 1024] [--batch 1 4] [--profile] [--json]

Several images are encoded in one pass, as the engine does, each as its model resizes it. The limit is the
time of all operations at the bfloat16 rate of a large matrix product, which is measured first. A profile of
the largest batch gives the rate of the linear layers (goal: half of that rate) and the share of attention in
the GPU's time. "host" is the time in which the kernels are launched. With --profile, the ten kernels that
take longest are printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from common_parts import machine_rates
from common_parts.arguments import Help, jsonable, positive
from common_parts.gpu import require_device
from common_parts.tables import Table
from common_parts.vision_shapes import VISION_SHAPES, vision_folder

from mizzen.engine.loading.model_setup import DUMMY_SEED
from mizzen.engine.loading.vision_setup import load_vision_encoder
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageGeometry
from mizzen.layers.context import BuildContext
from mizzen.models.registry import read_config
from mizzen.models.vision.encoder import VisionEncoder
from mizzen.models.vision.operations import EncodingOperations, count_encoding_operations

GOAL = 0.5
"""Rate of linear layers as a share of the rate of a large matrix product."""
GEMM_WORDS = ("gemm", "nvjet", "cutlass", "splitk", "wgmma")
ATTENTION_WORDS = ("flash", "fmha", "attention", "softmax")
GROUPS = ("gemm", "attention", "other")
KERNELS = 10
"""Number of kernels that --profile prints."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An encoder with an image for it."""

    encoder: VisionEncoder
    geometry: ImageGeometry
    pixels: torch.Tensor

    @classmethod
    def load(cls, shape: str, edge: int, device: torch.device) -> Subject:
        """Load the encoder of a shape with random weights, and draw a square image."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        build = BuildContext(device=device, dtype=dtype, fused=device.type == "cuda")
        with vision_folder(shape) as folder:
            vision, rules = read_config(folder).vision, load_image_rules(folder)
            if vision is None or rules is None:
                sys.exit(f"error: {shape} takes no images")
            encoder = load_vision_encoder(folder, build, vision, dummy_seed=DUMMY_SEED)
        geometry = rules.geometry(edge, edge)
        pixels = torch.randint(0, 256, geometry.pixel_shape, dtype=torch.uint8, device=device)
        return cls(encoder, geometry, pixels)

    @property
    def operations(self) -> EncodingOperations:
        """Operations of the image."""
        patch = self.encoder.config.patch_size
        patches = self.geometry.height * self.geometry.width // patch**2
        return count_encoding_operations(self.encoder.config, self.geometry.tiles, patches)

    def encode(self, images: int) -> None:
        """Encode several images like this one in one pass."""
        self.encoder.encode([(self.pixels, self.geometry.grid)] * images)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_encoding(subject: Subject, images: int, rounds: int) -> tuple[float, float]:
    """Return the median seconds of encoding some images, and those of launching their kernels."""
    device = subject.pixels.device
    subject.encode(images)
    whole, launches = [], []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        subject.encode(images)
        launches.append(time.perf_counter() - start)
        synchronize(device)
        whole.append(time.perf_counter() - start)
    return statistics.median(whole), statistics.median(launches)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """GPU seconds of an encoding."""

    kernels: Counter[str]
    """Seconds by name of the kernel."""

    @classmethod
    def measure(cls, subject: Subject, images: int) -> KernelTimes:
        """Profile an encoding of some images on a GPU."""
        subject.encode(images)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
            subject.encode(images)
            torch.cuda.synchronize()
        seconds: Counter[str] = Counter()
        for event in trace.key_averages():
            if str(event.device_type).endswith("CUDA"):
                seconds[event.key] += event.self_device_time_total / 1e6
        return cls(seconds)

    def seconds(self, group: str) -> float:
        """Return the seconds of a group of kernels."""
        return sum(seconds for name, seconds in self.kernels.items() if group_of(name) == group)

    def describe(self, operations: EncodingOperations, rate: float) -> tuple[str, dict[str, float]]:
        """Return a text and the figures, for the operations of the images and the rate of a large GEMM."""
        total = self.kernels.total()
        shares = {group: self.seconds(group) / total for group in GROUPS}
        gemm_rate = operations.gemms / self.seconds("gemm")
        attention_rate = operations.attention / max(self.seconds("attention"), 1e-9)
        parts = ", ".join(f"{group} {share:.0%}" for group, share in shares.items())
        text = (
            f"GPU {total * 1e3:.2f} ms: {parts}; GEMMs {gemm_rate / 1e12:.0f} TFLOP/s ({gemm_rate / rate:.0%}"
            f" of the rate), attention {attention_rate / 1e12:.0f} TFLOP/s"
        )
        figures = {"gpu_seconds": total, "gemm_share_of_rate": gemm_rate / rate, **shares}
        return text, figures


def group_of(kernel: str) -> str:
    """Return whether a kernel belongs to attention, to GEMMs or to neither."""
    name = kernel.lower()
    if any(word in name for word in ATTENTION_WORDS):
        return "attention"
    return "gemm" if any(word in name for word in GEMM_WORDS) else "other"


def measure_shape(shape: str, args: argparse.Namespace, rate: float | None, table: Table) -> dict[str, Any]:
    """Measure the encoder of a shape; `rate` is that of a large GEMM on a GPU."""
    subject = Subject.load(shape, args.edge, torch.device(args.device))
    operations, geometry = subject.operations, subject.geometry
    figures: dict[str, Any] = {"operations": operations.total}
    for images in args.batch:
        whole, launches = time_encoding(subject, images, args.rounds)
        limit = None if rate is None else images * operations.total / rate * 1e3
        work = f"{shape} {geometry.tiles} x {geometry.width} x {geometry.height}, {images}"
        table.row(work, whole * 1e3, limit, "ms", f"host {launches * 1e3:.1f} ms")
        figures[f"seconds_{images}"] = {"whole": whole, "launches": launches}
    if rate is None:
        return figures
    images = max(args.batch)
    times = KernelTimes.measure(subject, images)
    together = EncodingOperations(images * operations.gemms, images * operations.attention)
    text, measured = times.describe(together, rate)
    print(f"    {text}", flush=True)
    for name, seconds in times.kernels.most_common(KERNELS if args.profile else 0):
        print(f"    {seconds * 1e3:7.3f} ms  {group_of(name):9}  {name[:110]}")
    return figures | measured


def main() -> None:
    """Print the times; exit with code 1 on a GPU if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--shape", nargs="+", choices=sorted(VISION_SHAPES), help="models; by default all real ones"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--edge", type=positive, default=1024, help="width and height of images in pixels")
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 4], help="numbers of images in a pass"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="number of rounds; the median counts")
    parser.add_argument("--profile", action="store_true", help="print the longest kernels")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    require_device(args.device)
    on_gpu = args.device == "cuda"
    shapes = args.shape or ([name for name in VISION_SHAPES if name != "tiny-vl"] if on_gpu else ["tiny-vl"])
    with torch.inference_mode():
        rate = machine_rates.measure().flops if on_gpu else None
        table = Table("vision encoders" + (f", {rate / 1e12:.0f} TFLOP/s" if rate else ""))
        results = {shape: measure_shape(shape, args, rate, table) for shape in shapes}
    missed = [name for name, each in results.items() if each.get("gemm_share_of_rate", 1) < GOAL]
    if missed:
        print(f"GEMMs below {GOAL:.0%} of the rate: {', '.join(missed)}")
    if args.json:
        print(json.dumps(jsonable({"rate": rate, "shapes": results})))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
