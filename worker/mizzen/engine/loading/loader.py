# SPDX-License-Identifier: Apache-2.0
"""Loads an engine from its options: model, KV cache, runner, scheduler and grammar compiler.

`mizzen engine`, `mizzen serve` and `LLM` call `load_engine`. Ranks other than 0 call `load_follower`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mizzen.core.config import SchedulerConfig
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner
from mizzen.engine.config import EngineOptions
from mizzen.engine.encoders.loading import (
    check_step_memory,
    encoder_scheduling,
    make_encoder,
    make_encoder_runner,
    warm_up_encoder,
)
from mizzen.engine.engine import Engine
from mizzen.engine.execution.encoding_timer import EncodingTimer
from mizzen.engine.execution.profiler import ProfilingRunner
from mizzen.engine.execution.runner import CpuRunner, CudaRunner, StepDelay
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.execution.tp_worker import FollowerRanks, FollowerRunner
from mizzen.engine.expert_load import ExpertLoadReader
from mizzen.engine.grammar.compile_service import GrammarCompiler
from mizzen.engine.grammar.matchers import GrammarMasks
from mizzen.engine.grammar.pending import GrammarServices
from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.pending import ImageServices
from mizzen.engine.info import EngineInfo
from mizzen.engine.loading.description import describe_engine
from mizzen.engine.loading.encoding_cost import estimate_encoding_cost
from mizzen.engine.loading.host import cpu_count, measure_allocation
from mizzen.engine.loading.image_setup import ImageMemory
from mizzen.engine.loading.memory_budget import memory_shortage
from mizzen.engine.loading.memory_fit import fit_pages_on_ranks, measure_need
from mizzen.engine.loading.memory_need import MemoryNeed
from mizzen.engine.loading.model_setup import (
    fold_checkpoint_kv_scales,
    inspect_config,
    make_attention_with_kv,
    make_model,
    measure_targets,
    measure_weights,
)
from mizzen.engine.loading.phases import ReportPhase, StartupPhases
from mizzen.engine.loading.resolve import check_options, resolve_kv_dtype, scheduler_config, uses_own_kernels
from mizzen.engine.loading.served_images import ServedImages, read_served_images
from mizzen.engine.loading.validate import make_trace_folder
from mizzen.engine.loading.warmup import (
    WARM_UP_STEP,
    first_image_step,
    make_runner,
    warm_up,
    warm_up_images,
    warm_up_prompts,
)
from mizzen.engine.sampling.logits_params import TokenMasks
from mizzen.engine.uploader import Uploader
from mizzen.layers.experts.load import ExpertLoad
from mizzen.layers.linear_methods.base import MeasuredWeights
from mizzen.models.base import DecoderModel
from mizzen.models.config import ModelConfig
from mizzen.models.registry import read_config, read_end_tokens
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import RankGroup
from mizzen.weights.load import ProgressCallback

MAX_MASK_THREADS = 12
"""Maximum number of threads that fill token bitmasks, unless `EngineOptions.mask_threads` is set."""
TokenMaskFactory = Callable[[ModelConfig, tuple[int, ...], Uploader], TokenMasks | None]
"""Creates token bitmasks from a model's config, end tokens and an uploader; returns None on ranks above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, or a rank's shard of it, with a runner that is ready for plans."""

    scheduling: SchedulerConfig
    runner: CpuRunner | CudaRunner
    info: EngineInfo
    group: RankGroup | None = None
    expert_load: ExpertLoad | None = None
    """Counts of the tokens of each expert, if this rank counts them."""
    images: ServedImages | None = None
    """Images that prompts may have; None for text alone."""
    encoding: EncodingTimer | None = None
    """Measures the time of the vision encoder on this rank; None for text alone."""


def load_model(
    options: EngineOptions,
    phases: StartupPhases,
    progress: ProgressCallback,
    delay: StepDelay | None,
    join: Callable[[], RankGroup] | None,
    make_masks: TokenMaskFactory,
) -> LoadedModel:
    """Load a model or a rank's shard of it, allocate its KV cache, and warm it up.

    Args:
        options: Engine options.
        phases: Measures and reports the start-up phases.
        progress: Called with (done, total): bytes while weights load, later graphs while they are captured.
        delay: Seconds to delay each step; for tests, on CPU only.
        join: Waits for all ranks and returns their process group; None for a single rank.
        make_masks: Creates the token bitmasks.

    Raises:
        ValueError: An option, config.json or the checkpoint is wrong, or memory is short. The message names
            the cause.
    """
    folder = Path(options.model)
    group: RankGroup | None = None
    try:
        with phases("config"):
            config = read_config(folder, options.model_implementation)
            if join is not None and config.implementation == "transformers":
                group = join()  # rank 0 inspects the model for all ranks
            config = inspect_config(options, config, group)
            check_options(options, config)
            config = config.with_context_length(options.context_length or config.context_length)
            images = read_served_images(options, config, options.context_length or config.context_length)
            if images is None:
                config = replace(config, vision=None)
            end_token_ids = read_end_tokens(folder, config)
            if (join is None) != (options.tensor == 1):
                raise ValueError(
                    f"--tensor {options.tensor} needs as many ranks: `mizzen engine` and `LLM` start them"
                )
            if join is not None and group is None:
                group = join()
        if config.encoder is not None:
            return build_encoder(options, config, end_token_ids, phases, progress, delay)
        return build_model(options, config, end_token_ids, phases, progress, delay, group, make_masks, images)
    except BaseException as error:
        if group is not None:
            group.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise memory_shortage(phases.current, error) from error
        raise


def build_model(
    options: EngineOptions,
    config: ModelConfig,
    end_token_ids: tuple[int, ...],
    phases: StartupPhases,
    progress: ProgressCallback,
    delay: StepDelay | None,
    group: RankGroup | None,
    make_masks: TokenMaskFactory,
    images: ServedImages | None,
) -> LoadedModel:
    """Load the model for `load_model`, after the config was read and the process group was formed."""
    device = group.config.device if group else torch.device(options.device)
    methods: list[MeasuredWeights] = []
    with phases("weights"):
        model = make_model(options, config, progress, group, methods)
        format_bytes = measure_weights(model, methods)
        image_memory = ImageMemory(options, images, model, group) if images else None
        encoder_bytes = image_memory.format_bytes if image_memory else Counter[str]()
        format_bytes += encoder_bytes
    with phases("kv"):
        context = options.context_length or config.context_length
        kv_dtype = resolve_kv_dtype(options, model.embedding.weight.dtype)
        element = model.embedding.weight.element_size()
        need = MemoryNeed.estimate(model.config, options, element, kv_dtype.itemsize)
        upload = Uploader(device)
        key_scales = fold_checkpoint_kv_scales(options, model, kv_dtype)

        def make_step(pages: int, columns: int) -> StepExecutor:
            attention = make_attention_with_kv(
                model,
                options.page_size,
                pages + (device.type == "cuda"),  # the last page is the scratch page
                prefill=options.attention_prefill,
                decode=options.attention_decode,
                dtype=kv_dtype,
                key_scales=key_scales,
            )
            state = SlotState(
                options.max_running_requests,
                columns,
                upload,
                pages if device.type == "cuda" else None,
                vocab=config.vocab_size,
                ranks=group.collectives if group else SINGLE_RANK,
                has_rotary_offsets=images is not None and config.rope.has_sections,
            )
            store = image_memory.store if image_memory else None
            return StepExecutor(
                model, attention, state, upload, fused=uses_own_kernels(options), images=store
            )

        columns = -(-context // options.page_size)
        with model.without_fused_swiglu():
            need = measure_need(
                options, context, need, device, group, lambda pages: make_step(pages, columns)
            )
        if image_memory is not None:
            need = image_memory.add_to(need, options)
        pages = fit_pages_on_ranks(options, context, need, device, group, encoder_bytes.total())
        scheduling = scheduler_config(
            options,
            pages,
            context,
            end_token_ids,
            images.capacity if images else 0,
            estimate_encoding_cost(options, config, images.vision) if images else None,
        )
        step = make_step(pages, scheduling.columns)
    step.state.logits_params.masks = make_masks(config, end_token_ids, upload)
    with phases("graphs") if device.type == "cuda" else nullcontext():
        runner, graph_bytes = measure_allocation(
            device, lambda: make_runner(options, step, device, delay, progress)
        )
    with phases("warmup"):
        if device.type == "cuda":
            first = (WARM_UP_STEP if images is None else first_image_step()) - 2
            room = min(context, scheduling.columns * options.page_size, options.prefill_chunk_tokens)
            warm_up_prompts(runner, step, first, room)
        if images is not None:
            warm_up_images(runner, step, images.rules, has_sections=config.rope.has_sections)
        if image_memory is not None:
            image_memory.store.timer.reset()
        warm_up(runner, config)
        if group:
            group.barrier("warm")
    info = describe_engine(
        options,
        model.config,
        scheduling,
        phases.seconds,
        model.embedding.weight,
        format_bytes,
        need,
        graph_bytes=graph_bytes,
        attention=step.attention.backend_names,
    )
    return LoadedModel(
        scheduling=scheduling,
        runner=runner,
        info=info,
        group=group,
        expert_load=model.expert_load if isinstance(model, DecoderModel) else None,
        images=images,
        encoding=image_memory.store.timer if image_memory else None,
    )


def build_encoder(
    options: EngineOptions,
    config: ModelConfig,
    end_token_ids: tuple[int, ...],
    phases: StartupPhases,
    progress: ProgressCallback,
    delay: StepDelay | None,
) -> LoadedModel:
    """Load an encoder for `load_model`, after the config was read."""
    device = torch.device(options.device)
    with phases("weights"):
        model = make_encoder(options, config, progress)
        format_bytes = measure_targets(model.targets())
    with phases("kv"):
        scheduling = encoder_scheduling(options, config, end_token_ids)
        need = check_step_memory(options, model)
        runner = make_encoder_runner(options, model, device, delay)
    with phases("warmup"):
        warm_up_encoder(runner)
    info = describe_engine(
        options, config, scheduling, phases.seconds, model.embedding.weight, format_bytes, need
    )
    return LoadedModel(scheduling=scheduling, runner=runner, info=info)


def mask_thread_count(options: EngineOptions) -> int:
    """Return the number of threads that fill token bitmasks.

    By default, one CPU is left to each rank of the node, and half of the remaining CPUs fill bitmasks, up to
    MAX_MASK_THREADS.
    """
    return options.mask_threads or min(MAX_MASK_THREADS, max(1, (cpu_count() - options.local_ranks) // 2))


def load_engine(
    options: EngineOptions,
    report: ReportPhase = lambda phase: None,
    progress: ProgressCallback = lambda done, total: None,
    delay: StepDelay | None = None,
    compiler: GrammarCompiler | None = None,
    followers: FollowerRanks | None = None,
) -> Engine:
    """Load an engine in this process, which is rank 0 if there are several ranks.

    Args:
        options: Engine options.
        report: Called with the name of each phase as it begins: config, weights, kv, graphs (cuda), warmup.
        progress: Called with (done, total): bytes while weights load, later graphs while they are captured.
        delay: Seconds to delay each step; for tests, on CPU only.
        compiler: Grammar compiler that several engines of the same model share; the caller closes it. By
            default the engine creates its own.
        followers: Connections to the other ranks; None for a single rank.

    Raises:
        ValueError: An option, config.json or the checkpoint is wrong, or memory is short. The message names
            the cause.
        RanksFailed: Another rank failed to start.
    """
    if options.profile:
        make_trace_folder(Path(options.profile))
    grammars: list[GrammarServices] = []

    def make_masks(config: ModelConfig, end_token_ids: tuple[int, ...], upload: Uploader) -> GrammarMasks:
        grammar_compiler = compiler or GrammarCompiler(options.model, config.vocab_size, end_token_ids)
        masks = GrammarMasks(
            config.vocab_size, upload, grammar_compiler.counts, threads=mask_thread_count(options)
        )
        grammars.append(GrammarServices(grammar_compiler, masks, compiler is not None))
        if options.device == "cuda":
            grammar_compiler.start_loading()
        return masks

    loaded = load_model(
        options, StartupPhases(report), progress, delay, followers and followers.join_group, make_masks
    )
    runner: Runner = loaded.runner
    if followers and loaded.group:
        runner = followers.make_runner(loaded.runner, loaded.group)
    profiled: ProfilingRunner | None = None
    if options.profile:
        device = torch.device(options.device)
        runner = profiled = ProfilingRunner(runner, Path(options.profile), options.profile_steps, device)
    services = grammars[0] if grammars else None
    load = ExpertLoadReader(loaded.expert_load) if loaded.expert_load is not None else None
    return Engine(
        loaded.info, Scheduler(loaded.scheduling), runner, services, profiled, load, image_services(loaded)
    )


def image_services(loaded: LoadedModel) -> ImageServices | None:
    """Return what an engine needs for images; None for text alone."""
    if loaded.images is None:
        return None
    timer = loaded.encoding
    return ImageServices(loaded.images.rules, ImageDecoder(), (lambda: timer.seconds) if timer else float)


def load_follower(
    options: EngineOptions,
    join: Callable[[], RankGroup],
    report: ReportPhase = lambda phase: None,
    progress: ProgressCallback = lambda done, total: None,
) -> FollowerRunner:
    """Load a shard of the model in this process, which is a rank other than 0.

    Args:
        options: Engine options.
        join: Waits for all ranks and returns their process group.
        report: Called with the name of each phase as it begins, as in `load_engine`.
        progress: Called with (done, total): bytes while weights load, later graphs while they are captured.

    Raises:
        ValueError: An option, config.json or the checkpoint is wrong, or memory is short.
        RanksFailed: Another rank failed to start.
    """
    loaded = load_model(options, StartupPhases(report), progress, None, join, lambda *_: None)
    return FollowerRunner(loaded.runner, loaded.group)
