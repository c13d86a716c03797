"""Loads an engine from its options: the model, its KV cache, the runner, the scheduler and grammars.

`mizzen engine`, `mizzen serve` and `LLM` call `load_engine`; other ranks than 0 call `load_follower`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mizzen.core.config import SchedulerConfig
from mizzen.core.scheduler import Scheduler
from mizzen.core.step_plan import Runner
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.execution.profiler import ProfilingRunner
from mizzen.engine.execution.runner import CpuRunner, CudaRunner, StepDelay
from mizzen.engine.execution.slot_state import SlotState
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.execution.tp_worker import FollowerRanks, FollowerRunner
from mizzen.engine.grammar.compile_service import GrammarCompiler
from mizzen.engine.grammar.matchers import GrammarMasks
from mizzen.engine.grammar.pending import GrammarServices
from mizzen.engine.info import EngineInfo
from mizzen.engine.loading.host import cpu_count, measure_allocation, reported_device_memory
from mizzen.engine.loading.memory_budget import MemoryNeed, memory_shortage
from mizzen.engine.loading.model_setup import (
    fit_pages_on_ranks,
    fold_checkpoint_kv_scales,
    make_attention_with_kv,
    make_model,
    measure_need,
)
from mizzen.engine.loading.resolve import check_options, resolve_kv_dtype, scheduler_config, uses_own_kernels
from mizzen.engine.loading.validate import make_trace_folder
from mizzen.engine.loading.warmup import make_runner, warm_up
from mizzen.engine.sampling.logits_params import TokenMasks
from mizzen.engine.uploader import Uploader
from mizzen.models.config import ModelConfig
from mizzen.models.registry import read_config, read_end_tokens
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import RankGroup
from mizzen.weights.load import ProgressCallback, target_bytes

log = logging.getLogger(__name__)

ReportPhase = Callable[[str], None]
"""Called with the name of a start-up phase when it begins."""
MAX_MASK_THREADS = 12
"""Default maximum of threads that fill grammar masks."""
TokenMaskFactory = Callable[[ModelConfig, tuple[int, ...], Uploader], TokenMasks | None]
"""Creates the token masks from the model, its end tokens, and the uploader to the device."""


class StartupPhases:
    """Times the phases of start-up and reports each when it begins."""

    def __init__(self, report: ReportPhase) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one phase in the context."""
        self.report(name)
        self.current = name
        start_time = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start_time


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model, or a rank's shard of one, that is ready to run plans."""

    config: ModelConfig
    end_token_ids: tuple[int, ...]
    scheduling: SchedulerConfig
    runner: CpuRunner | CudaRunner
    info: EngineInfo
    group: RankGroup | None


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
        phases: Times and reports the phases.
        progress: Called with bytes of weights done and in total, then with numbers of graphs.
        delay: Holds steps back.
        join: Meets the other ranks, if any.
        make_masks: Creates the token masks, or returns None.

    Raises:
        ValueError: An option, config.json or the checkpoint is wrong, or memory is short; names what and why.
    """
    folder = Path(options.model)
    with phases("config"):
        config = read_config(folder)
        check_options(options, config)
        config = config.with_context_length(options.context_length or config.context_length)
        end_token_ids = read_end_tokens(folder, config)
        if (join is None) != (options.tensor == 1):
            raise ValueError(f"--tensor {options.tensor} needs as many ranks: start `mizzen engine`, or LLM")
        group = join() if join else None
    try:
        return build_model(options, config, end_token_ids, phases, progress, delay, group, make_masks)
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
) -> LoadedModel:
    """Do the work of `load_model` once the configuration is known and the ranks have met."""
    device = group.config.device if group else torch.device(options.device)
    with phases("weights"):
        model = make_model(options, config, progress, group)
    with phases("kv"):
        context = options.context_length or config.context_length
        kv_dtype = resolve_kv_dtype(options, model.embedding.weight.dtype)
        need = MemoryNeed.estimate(config, options, model.embedding.weight.element_size(), kv_dtype.itemsize)
        upload = Uploader(device)
        key_scales = fold_checkpoint_kv_scales(options, model, kv_dtype)

        def make_step(pages: int, columns: int) -> StepExecutor:
            attention = make_attention_with_kv(
                model,
                options.page_size,
                pages + (device.type == "cuda"),  # the last one is scratch
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
            )
            return StepExecutor(model, attention, state, upload, fused=uses_own_kernels(options))

        columns = -(-context // options.page_size)
        with model.without_fused_swiglu():
            need = measure_need(
                options, context, need, device, group, lambda pages: make_step(pages, columns)
            )
        pages = fit_pages_on_ranks(options, context, need, device, group)
        scheduling = scheduler_config(options, pages, context, end_token_ids)
        step = make_step(pages, scheduling.columns)
    step.state.logits_params.masks = make_masks(config, end_token_ids, upload)
    with phases("graphs") if device.type == "cuda" else nullcontext():
        runner, graph_bytes = measure_allocation(
            device, lambda: make_runner(options, step, device, delay, progress)
        )
    with phases("warmup"):
        warm_up(runner, config)
        if group:
            group.barrier("warm")
    memory = reported_device_memory(device)
    info = EngineInfo(
        context_length=scheduling.capacity_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        pages_total=pages,
        weights_bytes=sum(target_bytes(target) for target in model.targets()),
        kv_bytes=pages * options.page_size * need.token_bytes,
        step_bytes=need.step_bytes,
        graph_bytes=graph_bytes,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        device=options.device,
        generates=config.generates,
        attention=step.attention.backend_names,
        device_bytes=memory.total,
        free_bytes=memory.free,
        phases=phases.seconds,
    )
    log_loaded(info)
    return LoadedModel(
        config=config,
        end_token_ids=end_token_ids,
        scheduling=scheduling,
        runner=runner,
        info=info,
        group=group,
    )


def log_loaded(info: EngineInfo) -> None:
    """Log the sizes of the loaded engine."""
    decode, prefill = info.attention
    fields = {
        "weights_bytes": info.weights_bytes,
        "kv_bytes": info.kv_bytes,
        "kv_tokens": info.pages_total * info.page_size,
        "step_bytes": info.step_bytes,
        "graph_bytes": info.graph_bytes,
        "other_bytes": info.other_bytes,
        "free_bytes": info.free_bytes,
        "device_bytes": info.device_bytes,
        "attention_decode": decode,
        "attention_prefill": prefill,
        **{f"{name}_seconds": round(seconds, 3) for name, seconds in info.phases.items()},
    }
    log.info("the engine is loaded", extra={"fields": fields})


def mask_thread_count(options: EngineOptions) -> int:
    """Return the number of threads that fill masks: by default half of the CPUs that the ranks leave."""
    return options.mask_threads or min(MAX_MASK_THREADS, max(1, (cpu_count() - options.local_ranks) // 2))


def load_engine(
    options: EngineOptions,
    report: ReportPhase = lambda phase: None,
    progress: ProgressCallback = lambda done, total: None,
    delay: StepDelay | None = None,
    compiler: GrammarCompiler | None = None,
    followers: FollowerRanks | None = None,
) -> Engine:
    """Load a model and everything around it; of several ranks, rank 0's shard.

    Args:
        options: Engine options.
        report: Called with the name of each phase as it begins: config, weights, kv, graphs (cuda), warmup.
        progress: Called with bytes of weights done and in total, then with numbers of graphs.
        delay: Holds steps back; for tests, on cpu only.
        compiler: Compiles grammars for several engines of one model; the caller closes it.
        followers: The other ranks, if any.

    Raises:
        ValueError: An option, config.json or the checkpoint is wrong, or memory is short; names what and why.
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
    return Engine(loaded.info, Scheduler(loaded.scheduling), runner, grammars[0], profiled)


def load_follower(
    options: EngineOptions,
    join: Callable[[], RankGroup],
    report: ReportPhase = lambda phase: None,
    progress: ProgressCallback = lambda done, total: None,
) -> FollowerRunner:
    """Load the shard of a rank other than 0.

    Raises:
        ValueError, RanksFailed: As `load_engine`.
    """
    loaded = load_model(options, StartupPhases(report), progress, None, join, lambda *_: None)
    return FollowerRunner(loaded.runner, loaded.group)
