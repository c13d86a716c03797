# SPDX-License-Identifier: Apache-2.0
"""Creates the runner of a device: compiles kernels, captures CUDA graphs, and warms the runner up.

The loader calls it after the KV cache is allocated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from mizzen.attention.base import DevicePlannedDecode, DevicePlannedSequences
from mizzen.core.images.types import DIGEST_BYTES, ChunkImage, ImageEncoding
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, Runner, SlotOptions, SlotStart, StepPlan, no_ints
from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.decode_graphs import DecodeGraphs, batch_sizes
from mizzen.engine.execution.prefill_graphs import PrefillGraphs, max_profitable_tokens, token_sizes
from mizzen.engine.execution.runner import CpuRunner, CudaRunner, StepDelay
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading.host import cpu_count
from mizzen.images.types import ImageRules
from mizzen.models.block import QKNorm
from mizzen.models.config import ModelConfig
from mizzen.weights.load import ProgressCallback

log = logging.getLogger(__name__)

WARM_UP_EDGE = 224
"""Width and height in pixels of the image that is encoded to warm up."""
WARM_UP_STEP = -5
"""Number of the first step of `warm_up`."""
WARM_UP_CHUNKS = (1, 2, 9)
"""Tokens of the chunks with an image that warm up; GEMMs for 1, 2 to 8, and 9 to 16 rows differ."""
MAX_SMALL_BATCH = 256
"""Largest number of rows that the GEMMs for small batches support."""
BATCH_STEP = 8
"""Number that divides the batch sizes for which these GEMMs are compiled."""
PROMPT_CHUNK = MAX_SMALL_BATCH + BATCH_STEP
"""Largest number of tokens of the chunks of text that warm up steps without graphs: more than the GEMMs for
small batches support, so that those are not compiled for it."""


def make_runner(
    options: EngineOptions,
    step: StepExecutor,
    device: torch.device,
    delay: StepDelay | None,
    progress: ProgressCallback,
) -> CpuRunner | CudaRunner:
    """Create the runner of a device; on CUDA, compile its kernels and capture its graphs first.

    Args:
        options: Engine options.
        step: Runs the steps.
        device: Device of this rank.
        delay: Seconds to delay each step; for tests, on CPU only.
        progress: Called with the number of captured graphs and their total.

    Raises:
        ValueError: The code of a model of Transformers cannot be captured.
    """
    if options.device == "cpu":
        threads = options.threads or max(1, cpu_count() // options.local_ranks)
        return CpuRunner(step, threads=threads, delay=delay)
    torch.cuda.synchronize(device)  # the captures do not use the stream in which the weights were written
    step.prefill_graphs = make_prefill_graphs(options, step)
    graphs = make_decode_graphs(options, step)
    counts = gemm_row_counts(graphs, step.prefill_graphs)
    if step.images is not None or graphs is None or step.prefill_graphs is None:
        counts |= eager_row_counts(options.prefill_chunk_tokens + options.max_running_requests)
    compile_kernels(step, counts, device, max(1, cpu_count() // options.local_ranks))
    try:
        return CudaRunner(step, device, graphs, progress)
    except RuntimeError as error:
        if step.model.config.implementation == "native" or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"{step.model.config.architecture} of Transformers cannot be captured in CUDA graphs ({error}): "
            "use --cuda-graph off"
        ) from error


def make_decode_graphs(options: EngineOptions, step: StepExecutor) -> DecodeGraphs | None:
    """Create the decode graphs, or return None if the model, options or attention backend exclude them."""
    never_decodes = not step.model.config.generates
    if options.cuda_graph == "off" or never_decodes:
        return None
    if not isinstance(step.attention.decode, DevicePlannedDecode):
        return None
    sizes = batch_sizes(min(options.cuda_graph_max_batch, options.max_running_requests))
    return DecodeGraphs(step.model, step.attention, step.state, step.upload, sizes)


def gemm_row_counts(decode: DecodeGraphs | None, prefill: PrefillGraphs | None) -> set[int]:
    """Return the row counts of GEMMs in the graphs: numbers of tokens, and of rows sampled in prefill."""
    counts = set(decode.sizes) if decode else set()
    if prefill:
        counts.update(prefill.sizes, (min(size, prefill.max_sequences) for size in prefill.sizes))
    return counts


def eager_row_counts(most: int) -> set[int]:
    """Return row counts of small GEMMs that cover steps without graphs.

    `most` is the maximum number of tokens of a step.
    """
    return set(range(BATCH_STEP, min(most + BATCH_STEP, MAX_SMALL_BATCH + 1), BATCH_STEP))


def compile_kernels(step: StepExecutor, counts: set[int], device: torch.device, threads: int) -> None:
    """Compile the kernels of graphs and eager steps before their first use.

    Args:
        step: Runs the steps.
        counts: Numbers of rows of the GEMMs in graphs.
        device: The GPU.
        threads: Number of kernels to compile at the same time.
    """
    start_time, model = time.perf_counter(), step.model
    kernels = model.kernel_specs(counts) | step.attention.decode.kernel_specs(
        norm=model.config.block.qk_norm is QKNorm.HEAD
    )
    if not kernels:
        return
    from mizzen.kernels.nvrtc import compile_in_parallel

    compile_in_parallel(kernels, device.index or 0, threads)
    log.info("compiled or loaded %d kernels in %.1f s", len(kernels), time.perf_counter() - start_time)


def make_prefill_graphs(options: EngineOptions, step: StepExecutor) -> PrefillGraphs | None:
    """Create the prefill graphs, or return None if the options or the attention backend exclude them."""
    running, largest = options.max_running_requests, options.cuda_graph_max_tokens
    max_tokens = options.prefill_chunk_tokens + running
    if largest is None:
        largest = max_profitable_tokens(step.model.config, max_tokens)
    if (
        options.cuda_graph == "off"
        or not largest
        or not isinstance(step.attention.prefill, DevicePlannedSequences)
    ):
        return None
    sizes = token_sizes(min(largest, max_tokens))
    return PrefillGraphs(
        step.model, step.attention, step.state, step.upload, sizes, running, images=step.images
    )


def warm_up(runner: Runner, config: ModelConfig) -> None:
    """Run prompts and decodes, so that the first request does not wait for lazy loading or compilation.

    The steps use page 0 and slot 0, which no request holds yet. The first steps use filters, penalties and
    log probabilities, whose kernels would otherwise be compiled at the first request that needs them; the
    last two steps are plain.
    """
    prompt = np.zeros(1, np.int32)
    chunk = PrefillChunk(slot=0, start=0, tokens=prompt, last=True)
    plain = SamplingParams(temperature=0)
    filtered = SamplingParams(top_p=0.5, logprobs=1)
    processed = replace(filtered, frequency_penalty=1, logit_bias=((0, 1.0),))
    for step, sampling in ((-4, processed), (-2, filtered), (0, plain)):
        slot_options = None if sampling is plain else SlotOptions(tokens=prompt, prompt_tokens=1)
        start = SlotStart(slot=0, length=0, sampling=sampling, seed=0, options=slot_options)
        runner.launch(
            StepPlan(
                step=step - 1,
                decode=no_ints(),
                decode_version=step - 1,
                pages=PageWrites(),
                starts=(start,),
                prefill=(chunk,),
            )
        )
        decode = np.zeros(1, np.int32)
        runner.launch(StepPlan(step=step, decode=decode, decode_version=step, pages=PageWrites()))
        runner.collect()
        runner.collect()


def warm_up_prompts(runner: Runner, step: StepExecutor, first_step: int, tokens: int) -> None:
    """Run the two chunks of a prompt without graphs, as steps run that are larger than all graphs.

    Attention to the first chunk of a prompt uses other kernels than that to chunks with a cached prefix. The
    steps use page 0 and slot 0, which no request holds yet.

    Args:
        runner: The runner of this rank.
        step: Runs the steps for the runner.
        first_step: Number of the first one of the two steps.
        tokens: Number of tokens of a prompt, and of a step, that the engine supports.
    """
    graphs, step.prefill_graphs = step.prefill_graphs, None
    size = max(1, min(PROMPT_CHUNK, tokens // 2))
    start = SlotStart(slot=0, length=0, sampling=SamplingParams(temperature=0), seed=0)
    for index, starts in enumerate(((start,), ())):
        chunk = PrefillChunk(slot=0, start=index * size, tokens=np.zeros(size, np.int32), last=index == 1)
        number = first_step + index
        plan = StepPlan(
            step=number,
            decode=no_ints(),
            decode_version=number,
            pages=PageWrites(),
            starts=starts,
            prefill=(chunk,),
        )
        runner.launch(plan)
        runner.collect()
    step.prefill_graphs = graphs


def warm_up_images(runner: Runner, step: StepExecutor, rules: ImageRules, *, has_sections: bool) -> None:
    """Encode a small image, and run steps with its first embedding, so that the first image does not wait.

    The steps run without prefill graphs, as steps do that are larger than all graphs. The graphs have run
    when they were captured.

    Args:
        runner: The runner of this rank.
        step: Runs the steps for the runner.
        rules: The model's rules for images.
        has_sections: Whether tokens have three rotary positions.
    """
    graphs, step.prefill_graphs = step.prefill_graphs, None
    for plan in image_warm_up_plans(rules, has_sections=has_sections):
        runner.launch(plan)
        runner.collect()
    step.prefill_graphs = graphs


def first_image_step() -> int:
    """Return the number of the first step of `warm_up_images`, which precede those of `warm_up`."""
    return WARM_UP_STEP - 2 - len(WARM_UP_CHUNKS)


def image_warm_up_plans(rules: ImageRules, *, has_sections: bool) -> Iterator[StepPlan]:
    """Yield the plans of `warm_up_images`.

    The steps use page 0 and slot 0, which no request holds yet. The last step drops the image.
    """
    geometry = rules.geometry(WARM_UP_EDGE, WARM_UP_EDGE)
    digest = bytes(DIGEST_BYTES)
    encoding = ImageEncoding(
        digest=digest,
        grid=geometry.grid,
        embeddings=geometry.embeddings,
        pixels=np.zeros(geometry.pixel_shape, np.uint8),
    )
    image = ChunkImage(digest=digest, first=0, offsets=np.zeros(1, np.int32))
    start = SlotStart(slot=0, length=0, sampling=SamplingParams(temperature=0), seed=0)
    one, step = np.zeros(1, np.int32), first_image_step()

    def make_chunk(tokens: int, *, last: bool) -> PrefillChunk:
        return PrefillChunk(
            slot=0,
            start=0,
            tokens=np.array([-1] + [0] * (tokens - 1), np.int32),
            last=last,
            images=(image,),
            rotary=np.zeros((3, tokens), np.int32) if has_sections else None,
        )

    for index, tokens in enumerate(WARM_UP_CHUNKS):
        yield StepPlan(
            step=step,
            decode=no_ints(),
            decode_version=step,
            pages=PageWrites(),
            starts=(start,),
            prefill=(make_chunk(tokens, last=True),),
            encodings=() if index else (encoding,),
        )
        step += 1
    # A decode beside a chunk. They share slot and page, because no result of these steps matters.
    chunk = make_chunk(1, last=False)
    yield StepPlan(step=step, decode=one, decode_version=step, pages=PageWrites(), prefill=(chunk,))
    step += 1
    yield StepPlan(step=step, decode=one, decode_version=step, pages=PageWrites(), dropped_images=(digest,))
