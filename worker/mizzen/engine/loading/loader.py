"""Builds an engine from its options."""

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
from mizzen.engine.grammar.pending import Grammars
from mizzen.engine.info import EngineInfo
from mizzen.engine.loading.host import cpu_count, held_memory, taken_by
from mizzen.engine.loading.memory_budget import KvNeed, shortage
from mizzen.engine.loading.model_setup import fitting_pages, make_kv, make_model, take_kv_scales, whole_need
from mizzen.engine.loading.resolve import check_options, is_fused, kv_dtype_of, scheduler_config
from mizzen.engine.loading.validate import make_trace_folder
from mizzen.engine.loading.warmup import make_runner, warm_up
from mizzen.engine.sampling.logits_params import TokenMasks
from mizzen.engine.uploader import Uploader
from mizzen.models.config import ModelConfig
from mizzen.models.registry import read_config, read_end_tokens
from mizzen.parallel.collectives import SINGLE_RANK
from mizzen.parallel.process_group import Group
from mizzen.weights.load import Progress, size_of

log = logging.getLogger(__name__)

Report = Callable[[str], None]
"""Called with the name of a phase of start-up as it begins."""
MOST_MASK_THREADS = 12
MakeMasks = Callable[[ModelConfig, tuple[int, ...], Uploader], TokenMasks | None]
"""Makes what masks tokens, from the model, its end tokens, and the way to the device."""


class Phases:
    """Times the phases of start-up and reports each as it begins."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}
        self.current = ""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one phase."""
        self.report(name)
        self.current = name
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to run plans, or a rank's part of one."""

    config: ModelConfig
    end_token_ids: tuple[int, ...]
    scheduling: SchedulerConfig
    runner: CpuRunner | CudaRunner
    info: EngineInfo
    group: Group | None


def load(
    options: EngineOptions,
    phases: Phases,
    progress: Progress,
    delay: StepDelay | None,
    join: Callable[[], Group] | None,
    make_masks: MakeMasks,
) -> Loaded:
    """Load a model or a rank's part of it, allocate its KV, and warm it up.

    Args:
        options: What the engine is told.
        phases: Told as they begin.
        progress: Called with bytes of weights done and in all, then with graphs.
        delay: Holds steps back.
        join: Meets the other ranks, where there are some.
        make_masks: Makes what masks tokens, or None.

    Raises:
        ValueError: an option, config.json or the checkpoint is wrong, or memory is short; names what and why.
    """
    folder = Path(options.model)
    with phases("config"):
        config = read_config(folder)
        check_options(options, config)
        config = config.for_context(options.context_length or config.context_length)
        end_token_ids = read_end_tokens(folder, config)
        if (join is None) != (options.tensor == 1):
            raise ValueError(f"--tensor {options.tensor} needs as many ranks: start `mizzen engine`, or LLM")
        group = join() if join else None
    try:
        return assemble(options, config, end_token_ids, phases, progress, delay, group, make_masks)
    except BaseException as error:
        if group is not None:
            group.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise shortage(phases.current, error) from error
        raise


def assemble(
    options: EngineOptions,
    config: ModelConfig,
    end_token_ids: tuple[int, ...],
    phases: Phases,
    progress: Progress,
    delay: StepDelay | None,
    group: Group | None,
    make_masks: MakeMasks,
) -> Loaded:
    """Do what `load` does once the configuration is known and the ranks have met."""
    device = group.place.device if group else torch.device(options.device)
    with phases("weights"):
        model = make_model(options, config, progress, group)
    with phases("kv"):
        context = options.context_length or config.context_length
        kv_dtype = kv_dtype_of(options, model.embedding.weight.dtype)
        need = KvNeed.of(config, options, model.embedding.weight.element_size(), kv_dtype.itemsize)
        upload = Uploader(device)
        key_scales = take_kv_scales(options, model, kv_dtype)

        def make_step(pages: int, columns: int) -> StepExecutor:
            attention = make_kv(
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
            return StepExecutor(model, attention, state, upload, fused=is_fused(options))

        columns = -(-context // options.page_size)
        with model.without_fused_swiglu():
            need = whole_need(options, context, need, device, group, lambda pages: make_step(pages, columns))
        pages = fitting_pages(options, context, need, device, group)
        scheduling = scheduler_config(options, pages, context, end_token_ids)
        step = make_step(pages, scheduling.columns)
    step.state.logits_params.masks = make_masks(config, end_token_ids, upload)
    with phases("graphs") if device.type == "cuda" else nullcontext():
        runner, graph_bytes = taken_by(device, lambda: make_runner(options, step, device, delay, progress))
    with phases("warmup"):
        warm_up(runner, config)
        if group:
            group.barrier("warm")
    memory = held_memory(device)
    info = EngineInfo(
        context_length=scheduling.capacity_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        pages_total=pages,
        weights_bytes=sum(size_of(target) for target in model.targets()),
        kv_bytes=pages * options.page_size * need.token_bytes,
        step_bytes=need.step_bytes,
        graph_bytes=graph_bytes,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        device=options.device,
        generates=config.generates,
        attention=step.attention.names,
        device_bytes=memory.total,
        free_bytes=memory.free,
        phases=phases.seconds,
    )
    tell(info)
    return Loaded(
        config=config,
        end_token_ids=end_token_ids,
        scheduling=scheduling,
        runner=runner,
        info=info,
        group=group,
    )


def tell(info: EngineInfo) -> None:
    """Log what was loaded."""
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


def mask_threads(options: EngineOptions) -> int:
    """Return how many threads fill masks: by default half of the processors that the ranks leave."""
    return options.mask_threads or min(MOST_MASK_THREADS, max(1, (cpu_count() - options.local_ranks) // 2))


def load_engine(
    options: EngineOptions,
    report: Report = lambda phase: None,
    progress: Progress = lambda done, total: None,
    delay: StepDelay | None = None,
    compiler: GrammarCompiler | None = None,
    lead: FollowerRanks | None = None,
) -> Engine:
    """Load a model and everything around it; of several ranks, rank 0's part.

    Args:
        options: What the engine is told.
        report: Called with the name of each phase as it begins: config, weights, kv, graphs (cuda), warmup.
        progress: Called with bytes of weights done and in all, then with graphs.
        delay: Holds steps back; for tests, on cpu alone.
        compiler: Compiles grammars, for several engines of one model; the caller closes it.
        lead: The other ranks, where there are some.

    Raises:
        ValueError: an option, config.json or the checkpoint is wrong, or memory is short; names what and why.
        RanksFailed: another rank did not come along.
    """
    if options.profile:
        make_trace_folder(Path(options.profile))
    grammars: list[Grammars] = []

    def make_masks(config: ModelConfig, end_token_ids: tuple[int, ...], upload: Uploader) -> GrammarMasks:
        chosen = compiler or GrammarCompiler(options.model, config.vocab_size, end_token_ids)
        masks = GrammarMasks(config.vocab_size, upload, chosen.counts, threads=mask_threads(options))
        grammars.append(Grammars(chosen, masks, compiler is not None))
        if options.device == "cuda":
            chosen.warm()
        return masks

    loaded = load(options, Phases(report), progress, delay, lead and lead.join_group, make_masks)
    runner: Runner = loaded.runner
    if lead and loaded.group:
        runner = lead.make_runner(loaded.runner, loaded.group)
    profiled: ProfilingRunner | None = None
    if options.profile:
        device = torch.device(options.device)
        runner = profiled = ProfilingRunner(runner, Path(options.profile), options.profile_steps, device)
    return Engine(loaded.info, Scheduler(loaded.scheduling), runner, grammars[0], profiled)


def load_follower(
    options: EngineOptions,
    join: Callable[[], Group],
    report: Report = lambda phase: None,
    progress: Progress = lambda done, total: None,
) -> FollowerRunner:
    """Load the part of another rank than 0.

    Raises:
        ValueError, RanksFailed: as `load_engine`.
    """
    loaded = load(options, Phases(report), progress, None, join, lambda *_: None)
    return FollowerRunner(loaded.runner, loaded.group)
