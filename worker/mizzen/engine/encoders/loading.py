# SPDX-License-Identifier: Apache-2.0
"""Builds an encoder with its runner, and the configuration of its scheduler.

`mizzen.engine.loading.loader` calls these functions in its start-up phases.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch

from mizzen.attention.whole_prompts import has_prompt_kernel, runs_flash_attention3
from mizzen.core.config import SchedulerConfig
from mizzen.core.request import Pooling
from mizzen.core.sampling_params import SamplingParams
from mizzen.core.step_plan import PageWrites, PrefillChunk, Runner, SlotOptions, SlotStart, StepPlan, no_ints
from mizzen.engine.config import EngineOptions
from mizzen.engine.encoders.executor import EncoderExecutor
from mizzen.engine.encoders.graphs import EncoderGraphs
from mizzen.engine.execution.prefill_graphs import max_profitable_tokens, token_sizes
from mizzen.engine.execution.runner import CpuRunner, CudaRunner, StepDelay
from mizzen.engine.loading.host import cpu_count, device_memory
from mizzen.engine.loading.memory_budget import MemoryShortage, format_gib
from mizzen.engine.loading.memory_need import MemoryNeed, encoder_graph_tokens, encoder_step_tokens
from mizzen.engine.loading.resolve import resolve_dtype, uses_own_kernels
from mizzen.engine.uploader import Uploader
from mizzen.layers.context import BuildContext
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.model import EncoderModel
from mizzen.models.pooling.output import load_dense_layers
from mizzen.weights.load import ProgressCallback, fill_dummy, load_checkpoint

log = logging.getLogger(__name__)

MAX_SPARSE_LENGTH = 1024
"""Longest context length for which FlashAttention 2 runs in graphs of any size. In such a graph it starts
thread blocks for the context length of each prompt; those without work would slow encoders of long contexts.
"""
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")
"""Capabilities with which oneDNN multiplies bfloat16 matrices about twice as fast as those of float32."""
DUMMY_SEED = 0
"""Seed of the random values of `--load-format dummy`."""


def make_encoder(options: EngineOptions, config: ModelConfig, progress: ProgressCallback) -> EncoderModel:
    """Build an encoder on its device, and load its weights and those of its Dense modules.

    Args:
        options: Engine options.
        config: Configuration of an encoder.
        progress: Called with the bytes of weights loaded so far and the bytes of all weights.

    Raises:
        WeightsError: The checkpoint cannot be loaded.
    """
    if config.encoder is None:
        raise ValueError(f"{config.architecture} is not an encoder")
    log_faster_precision(options)
    build = BuildContext(
        device=torch.device(options.device),
        dtype=resolve_dtype(options, config),
        fused=uses_own_kernels(options),
    )
    with torch.inference_mode():
        model = EncoderModel(build, config, config.encoder)
        if options.load_format == "dummy":
            fill_dummy(model.targets(), seed=DUMMY_SEED, progress=progress)
        else:
            load_checkpoint(
                Path(options.model),
                model.targets(),
                tied=True,
                progress=progress,
                names=config.block.names,
                ignored=model.ignored,
            )
            model.pooled.dense = load_dense_layers(
                Path(options.model), config.dense, config.hidden_size, build.device
            )
    return model


def log_faster_precision(options: EngineOptions) -> None:
    """Log that bfloat16 is faster than the default on this processor, if so."""
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name) for name in BFLOAT16_INSTRUCTIONS)
    if fast and options.device == "cpu" and options.dtype == "auto":
        log.info(
            "the encoder computes in float32; with --dtype bfloat16, which rounds its vectors, this "
            "processor computes about twice as fast"
        )


def encoder_scheduling(
    options: EngineOptions, config: ModelConfig, end_token_ids: tuple[int, ...]
) -> SchedulerConfig:
    """Return the configuration of the scheduler: whole prompts, batched up to `prefill_chunk_tokens`.

    Each step in flight has `max_running_requests` slots. The scheduler leaves room for a token after each
    prompt.
    """
    return SchedulerConfig(
        pages_total=0,
        context_length=(options.context_length or config.context_length) + 1,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        max_running_requests=options.max_running_requests * options.steps_in_flight,
        max_waiting_requests=options.max_waiting_requests,
        prefill_chunk_tokens=encoder_step_tokens(config, options),
        steps_in_flight=options.steps_in_flight,
        prefix_cache="none",
        policy=options.policy,
        check_integrity=options.check_integrity,
        whole_prompts=True,
    )


def check_step_memory(options: EngineOptions, model: EncoderModel) -> MemoryNeed:
    """Return the estimated memory of the largest step, after the weights were loaded.

    Raises:
        MemoryShortage: The step does not fit besides the weights.
    """
    weight = model.embedding.weight
    need = MemoryNeed.estimate_encoder(model.config, options, weight.element_size())
    memory = device_memory(weight.device)
    budget = int(memory.total * options.memory_fraction) - (memory.total - memory.free)
    if need.step_bytes + need.graph_bytes > budget:
        raise MemoryShortage(
            f"a step of {encoder_step_tokens(model.config, options)} tokens needs "
            f"{format_gib(need.step_bytes + need.graph_bytes)}, but {format_gib(max(budget, 0))} are left of "
            f"{format_gib(memory.total)} (--memory-fraction {options.memory_fraction}): lower "
            "--prefill-chunk-tokens or --context-length, or free memory"
        )
    return need


def make_encoder_runner(
    options: EngineOptions, model: EncoderModel, device: torch.device, delay: StepDelay | None
) -> CpuRunner | CudaRunner:
    """Create the runner of an encoder, and capture its graphs."""
    step = EncoderExecutor(model, Uploader(device))
    if device.type == "cpu":
        return CpuRunner(step, threads=options.threads or cpu_count(), delay=delay)
    torch.cuda.synchronize(device)  # steps do not use the stream in which the weights were written
    step.prefill_graphs = make_encoder_graphs(options, model)
    return CudaRunner(step, device)


def make_encoder_graphs(options: EngineOptions, model: EncoderModel) -> EncoderGraphs | None:
    """Create the graphs of an encoder; None if its options or its attention exclude them."""
    weight, config = model.embedding.weight, model.config
    most = encoder_graph_tokens(config, options)
    if not most or not has_prompt_kernel(weight.device, weight.dtype, config.head_dim):
        return None
    starts_blocks = not runs_flash_attention3(weight.device, config.head_dim)
    if options.cuda_graph_max_tokens is None and starts_blocks and config.context_length > MAX_SPARSE_LENGTH:
        most = max_profitable_tokens(config, most)
    return EncoderGraphs(model, token_sizes(most))


def warm_up_encoder(runner: Runner) -> None:
    """Run a step with each pooling, so that the first request does not wait for lazy loading."""
    prompt = np.zeros(1, np.int32)
    for step, pooling in enumerate(Pooling, start=-len(Pooling)):
        start = SlotStart(
            slot=0,
            length=0,
            sampling=SamplingParams(temperature=0),
            seed=0,
            options=SlotOptions(tokens=prompt, prompt_tokens=1, pooling=pooling, normalize=True),
        )
        runner.launch(
            StepPlan(
                step=step,
                decode=no_ints(),
                decode_version=step,
                pages=PageWrites(),
                starts=(start,),
                prefill=(PrefillChunk(slot=0, start=0, tokens=prompt, last=True, pools=True),),
            )
        )
        runner.collect()
