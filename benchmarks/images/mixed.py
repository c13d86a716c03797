# SPDX-License-Identifier: Apache-2.0
"""Time between tokens of running streams while prompts with images arrive, with random weights on GPUs.

    python benchmarks/images/mixed.py [--shape qwen3-vl-8b] [--streams 32] [--rate 10] [--seconds 3]
        [--tensor 1] [--json]

Text streams decode continuously, at first alone and then while prompts arrive at a rate: first prompts with
one new image each, then prompts of text alone. Goal: p99 between tokens is at most twice p50 while more
images arrive than the GPU can take (--rate 100 --seconds 0.6); at a lower rate, the shortest steps have no
prefill, and the longest take `max_step_milliseconds`. Then the same images arrive again: none of them may be
decoded or encoded, and 99 % of the tokens that the prefix cache can hold must come from it. At the end, the
prompts of text arrive again when some streams have images in their prompts, whose rotary positions differ
from other positions.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from common_parts.arguments import Help, jsonable, number, positive
from common_parts.gpu import fail, loaded, require_device
from common_parts.tables import Table
from common_parts.vision_shapes import VISION_SHAPES, vision_folder

from mizzen import LLM, SamplingParams
from mizzen.core.request import Finished, FinishReason, Request
from mizzen.engine.images.pending import ImageFile
from mizzen.images.rules import load_image_rules
from mizzen.images.types import ImageRules
from mizzen.offline.image_prompts import prepare_images

START = 200
"""Number of prompt tokens of a stream."""
OUTPUTS = 20_000
"""Maximum number of output tokens of a stream, more than a stream generates in the measurement."""
RATIO_GOAL = 2.0
"""p99 over p50 of the time between tokens while images arrive."""
HIT_GOAL = 0.99
"""Share of the tokens of repeated prompts that must come from the prefix cache."""
PATIENCE = 20.0
"""Maximum time for a part of the measurement beyond its duration, in seconds."""
STREAM_SHARE = 8
"""One stream with an image in its prompt is added for this many streams of text."""
SPARE_SLOTS = 8
"""Number of requests that run besides the streams."""


def draw_image(edge: int, seed: int) -> bytes:
    """Return a JPEG file of coarse noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (edge // 8 + 1, edge // 8 + 1, 3), np.uint8)
    output = io.BytesIO()
    Image.fromarray(noise).resize((edge, edge), Image.Resampling.BICUBIC).save(output, "JPEG", quality=88)
    return output.getvalue()


@dataclass(slots=True)
class Phase:
    """Figures of a part of the measurement."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between successive tokens of a stream."""
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from the arrival of each prompt to its token."""
    seconds: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds between tokens, and prompts per second."""
        p50, p90, p99 = (float(np.percentile(self.gaps, q)) * 1e3 for q in (50, 90, 99))
        first = float(np.median(self.first_tokens)) * 1e3 if self.first_tokens else 0.0
        return {
            "p50_ms": p50,
            "p90_ms": p90,
            "p99_ms": p99,
            "ratio": p99 / p50,
            "prompts_per_second": len(self.first_tokens) / self.seconds,
            "first_token_ms": first,
        }


class Load:
    """Requests on an engine in this process, and the files of their images."""

    def __init__(self, llm: LLM, rules: ImageRules, edge: int) -> None:
        self.engine = llm.engine
        self.page_size = llm.options.page_size
        self.rules = rules
        self.edge = edge
        self.files: dict[bytes, ImageFile] = {}
        self.rng = np.random.default_rng(0)
        self.next_rid = 0
        self.ended: dict[int, Finished] = {}
        self.streams: set[int] = set()
        self.last_token: dict[int, float] = {}

    def text(self, tokens: int) -> np.ndarray:
        """Return random token ids."""
        return self.rng.integers(5, 10_000 if self.rules.placeholder_id > 10_000 else 9, tokens).astype(
            np.int32
        )

    def image_prompt(self, seed: int, tail: int = 16) -> Request:
        """Return a prompt with one drawn image between text; equal seeds make equal prompts."""
        rng = np.random.default_rng(seed)
        before, after = rng.integers(11, 2000, 24), rng.integers(11, 2000, tail)
        ids = np.concatenate([before, [self.rules.placeholder_id], after]).astype(np.int32)
        prepared = prepare_images(ids, [draw_image(self.edge, seed)], self.rules)
        self.files |= prepared.files
        rotary = prepared.rotary
        return Request(
            rid=0,
            prompt=prepared.ids,
            sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True),
            seed=0,
            images=prepared.images,
            rotary=None if rotary is None else rotary.positions,
            rotary_offset=0 if rotary is None else rotary.offset,
        )

    def text_prompt(self, tokens: int) -> Request:
        """Return a prompt of text."""
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        return Request(rid=0, prompt=self.text(tokens), sampling=sampling, seed=0)

    def submit(self, request: Request) -> int:
        """Submit a request with a new id, and return the id."""
        rid = self.next_rid
        self.next_rid += 1
        self.engine.submit(replace(request, rid=rid, seed=rid))
        return rid

    def add_stream(self, request: Request) -> None:
        """Start a stream with the prompt of a request."""
        sampling = SamplingParams(temperature=0.6, max_tokens=OUTPUTS, ignore_eos=True)
        self.streams.add(self.submit(replace(request, sampling=sampling)))

    def step(self) -> dict[int, float]:
        """Run a step; return the time of `time.perf_counter` at which requests got a token, by id."""
        output = self.engine.step(time.monotonic())
        now = time.perf_counter()
        for missing in self.engine.drain_missing_images():
            for digest in missing.digests:
                self.engine.provide_image(replace(self.files[digest], rid=missing.rid))
        self.engine.drain_cache_events()
        for end in (*(output.finished if output else ()), *self.engine.drain_finished()):
            if end.reason is FinishReason.ERROR:
                fail(f"a prompt was rejected: {end.message}")
            if end.rid in self.streams and end.reason is not FinishReason.ABORT:
                fail(f"a stream ended after {end.output_tokens} tokens: raise --engine kv_cache_tokens")
            self.ended[end.rid] = end
        return dict.fromkeys(output.rids.tolist() if output is not None else (), now)

    def start_streams(self, requests: list[Request]) -> None:
        """Start streams, and wait until all have a token."""
        for request in requests:
            self.add_stream(request)
        deadline = time.perf_counter() + PATIENCE
        while len(self.last_token) < len(self.streams):
            tokens = self.step()
            self.last_token |= {rid: at for rid, at in tokens.items() if rid in self.streams}
            if time.perf_counter() > deadline:
                fail("the streams do not start")

    def end_streams(self) -> None:
        """Abort all streams."""
        for rid in self.streams:
            self.engine.abort(rid)
        while self.engine.busy:
            self.step()
        self.streams.clear()
        self.last_token.clear()

    def run(self, prompts: list[Request], rate: float, seconds: float = 0.0) -> Phase:
        """Submit prompts at a rate per second while streams run, and wait for their tokens.

        Args:
            prompts: The prompts.
            rate: Prompts per second; 0 to submit one after another.
            seconds: Minimum duration.
        """
        phase, arrivals = Phase(), dict[int, float]()
        begin, done, sent = time.perf_counter(), 0, 0
        for rid in self.last_token:
            self.last_token[rid] = begin
        while done < len(prompts) or time.perf_counter() - begin < seconds:
            now = time.perf_counter()
            if now - begin > seconds + PATIENCE:
                fail("prompts wait too long: use a lower --rate")
            while sent < len(prompts) and (now >= begin + sent / rate if rate else sent == done):
                due = begin + sent / rate if rate else now
                arrivals[self.submit(prompts[sent])] = due
                sent += 1
            for rid, at in self.step().items():
                if rid in self.streams:
                    phase.gaps.append(at - self.last_token[rid])
                    self.last_token[rid] = at
                elif rid in arrivals:
                    phase.first_tokens.append(at - arrivals[rid])
                    done += 1
        phase.seconds = time.perf_counter() - begin
        return phase


def repeat_prompts(load: Load, prompts: list[Request]) -> dict[str, float]:
    """Submit prompts that were computed before; return counts, and the share of possible cached tokens."""
    statistics = load.engine.image_statistics
    decoded, encoded = statistics.decoding.decoded, statistics.use.encoded
    first = load.next_rid
    load.run(prompts, rate=0)
    ended = [load.ended[rid] for rid in range(first, load.next_rid)]
    possible = [(len(prompt.prompt) - 1) // load.page_size * load.page_size for prompt in prompts]
    return {
        "decoded": load.engine.image_statistics.decoding.decoded - decoded,
        "encoded": load.engine.image_statistics.use.encoded - encoded,
        "hit_share": sum(end.cached_tokens for end in ended) / sum(possible),
    }


def report_images(load: Load, prompts: list[Request], table: Table) -> dict[str, float]:
    """Submit prompts with images again; print and return counts, and the share of cached tokens."""
    repeated = repeat_prompts(load, prompts)
    statistics = load.engine.image_statistics
    table.row(
        "encoder per image",
        statistics.encoding_seconds / statistics.use.encoded * 1e3,
        None,
        "ms",
        f"{len(prompts[0].prompt)} tokens in a prompt, decoding is "
        + ("confined" if statistics.confined else "not confined"),
    )
    print(
        f"  repeated images: {repeated['decoded']:.0f} decoded, {repeated['encoded']:.0f} encoded, "
        f"{repeated['hit_share']:.1%} of possible tokens cached",
        flush=True,
    )
    return repeated


def measure(args: argparse.Namespace, llm: LLM, rules: ImageRules, table: Table) -> dict[str, Any]:
    """Run all phases; print and return their figures."""
    begin = time.perf_counter()
    load = Load(llm, rules, args.edge)
    count = max(1, round(args.rate * args.seconds))
    phases: dict[str, dict[str, float]] = {}

    def record(name: str, phase: Phase) -> None:
        figures = phases[name] = phase.figures
        note = (
            f"at {time.perf_counter() - begin:.0f} s: "
            f"p99 {figures['p99_ms']:.1f} ms, {figures['ratio']:.2f} x p50; "
            f"{figures['prompts_per_second']:.1f} prompts/s, first token {figures['first_token_ms']:.0f} ms"
        )
        table.row(name, figures["p50_ms"], None, "ms", note)

    def texts() -> list[Request]:
        return [load.text_prompt(args.text_prompt) for _ in range(count)]

    images = [load.image_prompt(i) for i in range(count)]
    load.run([load.image_prompt(1_000_000 + i) for i in range(3)], rate=0)  # warm-up
    load.start_streams([load.text_prompt(START) for _ in range(args.streams)])
    gc.collect()
    gc.freeze()  # as engines that serve do
    record("streams alone", load.run([], 0, args.seconds / 2))
    load.run([load.image_prompt(2_000_000 + i) for i in range(4)], rate=args.rate)  # warm-up of the budget
    record("images arrive", load.run(images, args.rate))
    repeated = report_images(load, images[-min(count, 20) :], table)
    record("text arrives", load.run(texts(), args.rate))
    load.start_streams(images[: max(1, args.streams // STREAM_SHARE)])
    record("alone, image streams", load.run([], 0, args.seconds / 2))
    record("text, image streams", load.run(texts(), args.rate))
    load.end_streams()
    return {"phases": phases, "repeated": repeated}


def reaches_goals(results: dict[str, Any]) -> bool:
    """Return whether all goals are reached."""
    repeated = results["repeated"]
    return (
        results["phases"]["images arrive"]["ratio"] <= RATIO_GOAL
        and not repeated["decoded"]
        and not repeated["encoded"]
        and repeated["hit_share"] >= HIT_GOAL
    )


def main() -> None:
    """Print the figures; exit with code 1 on a GPU if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument(
        "--shape", choices=sorted(VISION_SHAPES), default="qwen3-vl-8b", help="shape of the model"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks that everything works"
    )
    parser.add_argument("--streams", type=positive, default=32, help="number of streams of text")
    parser.add_argument("--rate", type=number, default=10.0, help="prompts that arrive in a second")
    parser.add_argument("--seconds", type=number, default=3.0, help="duration of each phase")
    parser.add_argument("--edge", type=positive, default=1024, help="width and height of images in pixels")
    parser.add_argument("--text-prompt", type=positive, default=512, help="tokens of prompts of text")
    parser.add_argument(
        "--max-step-milliseconds", type=number, default=25.0, help="target duration of steps with prefill"
    )
    parser.add_argument("--tensor", type=positive, default=1, help="GPUs that share the model")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    args = parser.parse_args()
    require_device(args.device)
    options: dict[str, Any] = {
        "tensor": args.tensor,
        "load_format": "dummy",
        "skip_tokenizer": True,
        "context_length": 24_576,
        "max_running_requests": args.streams + max(1, args.streams // STREAM_SHARE) + SPARE_SLOTS,
        "max_step_milliseconds": args.max_step_milliseconds,
    }
    if args.device == "cpu":
        options |= {"kv_cache_tokens": 65_536, "threads": 1}
    begin = time.perf_counter()
    with vision_folder(args.shape) as folder:
        rules = load_image_rules(folder)
        if rules is None:
            fail(f"{args.shape} takes no images")
        with loaded(args.device, folder, options) as llm:
            table = Table(
                f"{args.shape}, {args.streams} streams, {args.rate:g} prompts/s, loaded in "
                f"{time.perf_counter() - begin:.0f} s: between tokens, p50"
            )
            results: dict[str, Any] = measure(args, llm, rules, table)
    if args.json:
        print(json.dumps(jsonable({"options": vars(args), **results})))
    sys.exit(0 if args.device == "cpu" or reaches_goals(results) else 1)


if __name__ == "__main__":
    main()
