"""Builds an engine from its options."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from mizzen.attention.base import DeviceDecode, DeviceSequences, Geometry, MixedAttention, PagedKV
from mizzen.attention.registry import make_attention
from mizzen.core.config import SchedulerConfig
from mizzen.core.params import SamplingParams
from mizzen.core.plan import Asks, PageWrites, PrefillChunk, Runner, SlotStart, StepPlan, no_ints
from mizzen.core.scheduler import Scheduler
from mizzen.engine.asks import TokenMasks
from mizzen.engine.config import EngineOptions
from mizzen.engine.engine import Engine
from mizzen.engine.grammar.compiler import GrammarCompiler
from mizzen.engine.grammar.intake import Grammars
from mizzen.engine.grammar.masks import GrammarMasks
from mizzen.engine.graphs import DecodeGraphs, batch_sizes
from mizzen.engine.info import EngineInfo
from mizzen.engine.machine import cpu_count, device_memory
from mizzen.engine.memory import KvNeed, MemoryShortage, agreed_pages, count_pages, share_memory
from mizzen.engine.prefill_graphs import PrefillGraphs, paying_tokens, token_sizes
from mizzen.engine.probe import largest_plan, measured_bytes
from mizzen.engine.profile import ProfiledRunner
from mizzen.engine.ranks import Follower, Lead
from mizzen.engine.runner import CpuRunner, CudaRunner, Delay
from mizzen.engine.state import SlotState, Uploader
from mizzen.engine.step import Step
from mizzen.layers.build import Build, dense, skinny
from mizzen.layers.mesh import Axis, Mesh
from mizzen.models.config import ModelConfig
from mizzen.models.decoder import Decoder
from mizzen.models.registry import read_config, read_end_tokens
from mizzen.models.shares import check_shares
from mizzen.parallel.collectives import ALONE
from mizzen.parallel.group import Group
from mizzen.weights.kv_scales import fold_kv_scales, read_kv_scales
from mizzen.weights.load import Progress, fill_dummy, load_checkpoint, size_of

DUMMY_SEED = 0

Report = Callable[[str], None]
"""Called with the name of a phase of start-up as it begins."""
MakeMasks = Callable[[ModelConfig, tuple[int, ...], Uploader], TokenMasks | None]
"""Makes what masks tokens, from the model, its end tokens, and the way to the device."""


def dtype_of(options: EngineOptions, config: ModelConfig) -> torch.dtype:
    """Resolve the precision of weights and KV."""
    name = options.dtype
    if name == "auto":
        name = config.dtype if options.device == "cuda" else "float32"
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


def kv_dtype_of(options: EngineOptions, weights: torch.dtype) -> torch.dtype:
    """Resolve the precision of KV.

    Raises:
        ValueError: the device or the precision of the weights does not serve it.
    """
    if options.kv_cache_dtype == "auto":
        return weights
    if options.device != "cuda" or weights != torch.bfloat16:
        raise ValueError("--kv-cache-dtype fp8 needs --device cuda and --dtype bfloat16: use auto here")
    return torch.float8_e4m3fn


def is_fused(options: EngineOptions) -> bool:
    """Tell whether the kernels of `mizzen.kernels` are used."""
    return options.device == "cuda" and options.fusion == "auto"


def make_model(
    options: EngineOptions, config: ModelConfig, progress: Progress, group: Group | None = None
) -> Decoder:
    """Build the model, or a rank's part of it, on its device and fill its weights."""
    fused = is_fused(options)
    build = Build(
        device=group.place.device if group else torch.device(options.device),
        dtype=dtype_of(options, config),
        mesh=Mesh(Axis(group.rank, group.size)) if group else Mesh(),
        linear=skinny if fused else dense,
        fused=fused,
        ranks=group.collectives if group else ALONE,
    )
    with torch.inference_mode():
        model = Decoder(build, config)
        if options.load_format == "dummy":
            fill_dummy(model.targets(), seed=DUMMY_SEED, progress=progress)
        else:
            load_checkpoint(
                Path(options.model), model.targets(), tied=config.tie_embeddings, progress=progress
            )
    return model


def make_kv(
    model: Decoder,
    page_size: int,
    pages: int,
    *,
    prefill: str,
    decode: str,
    dtype: torch.dtype | None = None,
    key_scales: tuple[float, ...] = (),
) -> MixedAttention:
    """Allocate the paged KV of a model (of the weights' precision, or `dtype`) and the attention over it."""
    config, weight, held = model.config, model.embedding.weight, model.layers[0].attention
    geometry = Geometry(
        heads=held.heads, kv_heads=held.kv_heads, head_dim=config.head_dim, windows=config.windows
    )
    shape = (config.layers, pages * page_size, held.kv_heads, config.head_dim)
    keys, values = (zeros(shape, dtype or weight.dtype, weight.device) for _ in range(2))
    kv = PagedKV(keys=keys, values=values, page_size=page_size, key_scales=key_scales)
    return make_attention(geometry, kv, prefill=prefill, decode=decode)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; on cpu the memory is taken only where it is written to."""
    if device.type != "cpu":
        return (
            torch.zeros(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=device)
            .view(dtype)
            .view(shape)
        )
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def check_options(options: EngineOptions, config: ModelConfig) -> None:
    """Refuse what this engine or model cannot do.

    Raises:
        ValueError: names the option and the way out.
    """
    check_shares(config, options.tensor)
    if options.context_length is not None and options.context_length > config.context_length:
        raise ValueError(
            f"--context-length {options.context_length} is beyond the model's max_position_embeddings "
            f"({config.context_length}): lower it"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda finds no GPU here: use --device cpu, or a machine with one")
    if options.device == "cuda" and torch.cuda.device_count() < options.tensor:
        raise ValueError(
            f"--tensor {options.tensor} needs as many GPUs, {torch.cuda.device_count()} are here: lower it"
        )


class Phases:
    """Times the phases of start-up and reports each as it begins."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Run one phase."""
        self.report(name)
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
    delay: Delay | None,
    join: Callable[[], Group] | None,
    make_masks: MakeMasks,
) -> Loaded:
    """Load a model or a rank's part of it, allocate its KV, and warm it up.

    Args:
        options: What the engine is told.
        phases: Told as they begin.
        progress: Called with bytes of weights done and in all.
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
    if group is None:
        return assemble(options, config, end_token_ids, phases, progress, delay, None, make_masks)
    try:
        return assemble(options, config, end_token_ids, phases, progress, delay, group, make_masks)
    except BaseException:
        group.close()
        raise


def assemble(
    options: EngineOptions,
    config: ModelConfig,
    end_token_ids: tuple[int, ...],
    phases: Phases,
    progress: Progress,
    delay: Delay | None,
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

        def make_step(pages: int, columns: int) -> Step:
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
                ranks=group.collectives if group else ALONE,
            )
            return Step(model, attention, state, upload, fused=is_fused(options))

        if device.type == "cuda" and group is None and options.kv_cache_tokens is None:
            columns = -(-context // options.page_size)
            need = measured(options, context, need, device, lambda pages: make_step(pages, columns))
        pages = fitting_pages(options, context, need, device, group)
        scheduling = scheduler_config(options, pages, context, end_token_ids)
        step = make_step(pages, scheduling.columns)
    step.state.extras.masks = make_masks(config, end_token_ids, upload)
    with phases("warmup"):
        runner = make_runner(options, step, device, delay)
        warm_up(runner, config)
        if group:
            group.barrier("warm")
    if isinstance(runner, CudaRunner):
        phases.seconds["graphs"] = runner.capture_seconds
    info = EngineInfo(
        context_length=scheduling.capacity_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        pages_total=pages,
        weights_bytes=sum(size_of(target) for target in model.targets()),
        kv_bytes=pages * options.page_size * need.token_bytes,
        step_bytes=need.step_bytes,
        dtype=str(model.embedding.weight.dtype).removeprefix("torch."),
        device=options.device,
        phases=phases.seconds,
    )
    return Loaded(
        config=config,
        end_token_ids=end_token_ids,
        scheduling=scheduling,
        runner=runner,
        info=info,
        group=group,
    )


def take_kv_scales(options: EngineOptions, model: Decoder, kv_dtype: torch.dtype) -> tuple[float, ...]:
    """Fold the checkpoint's scales of an 8-bit KV cache into the weights; return those of keys, by layer.

    Raises:
        WeightsError: a scale is no positive number.
    """
    if kv_dtype != torch.float8_e4m3fn or options.load_format == "dummy":
        return ()
    scales = read_kv_scales(Path(options.model))
    fold_kv_scales(model.targets(), scales)
    keys = tuple(scales.get(layer, (1.0, 1.0))[0] for layer in range(model.config.layers))
    return keys if any(scale != 1 for scale in keys) else ()


def measured(
    options: EngineOptions,
    context: int,
    need: KvNeed,
    device: torch.device,
    make_step: Callable[[int], Step],
) -> KvNeed:
    """Run the largest step over KV of its own; return what it took (graphs are still estimated).

    Raises:
        MemoryShortage: not even that step fits.
    """
    page_bytes = options.page_size * need.token_bytes
    try:
        taken = measured_bytes(make_step, largest_plan(options, context), page_bytes, device)
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryShortage(
            f"the largest step of {options.prefill_chunk_tokens} prompt tokens and "
            f"{options.max_running_requests} requests finds no memory beside the weights: lower "
            f"--prefill-chunk-tokens or --max-running-requests ({error})"
        ) from error
    return need.taking(taken)


def fitting_pages(
    options: EngineOptions, context: int, need: KvNeed, device: torch.device, group: Group | None
) -> int:
    """Return how many KV pages fit, on every rank.

    Raises:
        MemoryShortage: none do, or ranks differ too much.
    """
    if group is None:
        return count_pages(options, context, need, device_memory(device))
    group.barrier("weights")  # nobody's weights are still coming
    memory = share_memory(device_memory(device), options)
    pages = count_pages(options, context, need, memory)
    words = [word.split() for word in group.exchange("pages", f"{pages} {memory.free}")]
    free = [int(word[1]) for word in words] if device.type == "cuda" else None
    return agreed_pages([int(word[0]) for word in words], free)


def load_engine(
    options: EngineOptions,
    report: Report = lambda phase: None,
    progress: Progress = lambda done, total: None,
    delay: Delay | None = None,
    compiler: GrammarCompiler | None = None,
    lead: Lead | None = None,
) -> Engine:
    """Load a model and everything around it; of several ranks, rank 0's part.

    Args:
        options: What the engine is told.
        report: Called with the name of each phase as it begins: config, weights, kv, warmup.
        progress: Called with bytes of weights done and in all.
        delay: Holds steps back; for tests, on cpu alone.
        compiler: Compiles grammars, for several engines of one model; the caller closes it.
        lead: The other ranks, where there are some.

    Raises:
        ValueError: an option, config.json or the checkpoint is wrong, or memory is short; names what and why.
        RanksFailed: another rank did not come along.
    """
    grammars: list[Grammars] = []

    def make_masks(config: ModelConfig, end_token_ids: tuple[int, ...], upload: Uploader) -> GrammarMasks:
        chosen = compiler or GrammarCompiler(options.model, config.vocab_size, end_token_ids)
        masks = GrammarMasks(config.vocab_size, upload, chosen.counts)
        grammars.append(Grammars(chosen, masks, compiler is not None))
        if options.device == "cuda":
            chosen.warm()
        return masks

    loaded = load(options, Phases(report), progress, delay, lead and lead.join, make_masks)
    runner: Runner = loaded.runner
    if lead and loaded.group:
        runner = lead.over(loaded.runner, loaded.group)
    profiled: ProfiledRunner | None = None
    if options.profile:
        device = torch.device(options.device)
        runner = profiled = ProfiledRunner(runner, Path(options.profile), options.profile_steps, device)
    return Engine(loaded.info, Scheduler(loaded.scheduling), runner, grammars[0], profiled)


def load_follower(
    options: EngineOptions,
    join: Callable[[], Group],
    report: Report = lambda phase: None,
    progress: Progress = lambda done, total: None,
) -> Follower:
    """Load the part of another rank than 0.

    Raises:
        ValueError, RanksFailed: as `load_engine`.
    """
    loaded = load(options, Phases(report), progress, None, join, lambda *_: None)
    return Follower(loaded.runner, loaded.group)


def scheduler_config(
    options: EngineOptions, pages: int, context_length: int, end_token_ids: tuple[int, ...]
) -> SchedulerConfig:
    """Return what the scheduler is told."""
    return SchedulerConfig(
        pages_total=pages,
        context_length=context_length,
        end_token_ids=end_token_ids,
        page_size=options.page_size,
        max_running_requests=options.max_running_requests,
        max_waiting_requests=options.max_waiting_requests,
        prefill_chunk_tokens=options.prefill_chunk_tokens,
        max_step_milliseconds=options.max_step_milliseconds,
        steps_in_flight=options.steps_in_flight,
        prefix_cache=options.prefix_cache,
        eviction=options.eviction,
        policy=options.policy,
        check_integrity=options.check_integrity,
    )


def make_runner(
    options: EngineOptions, step: Step, device: torch.device, delay: Delay | None
) -> CpuRunner | CudaRunner:
    """Make the runner of a device."""
    if options.device == "cpu":
        threads = options.threads or max(1, cpu_count() // options.tensor)
        return CpuRunner(step, threads=threads, delay=delay)
    torch.cuda.synchronize(device)  # weights were written in another stream
    step.graphs = make_prefill_graphs(options, step)
    return CudaRunner(step, device, make_graphs(options, step))


def make_graphs(options: EngineOptions, step: Step) -> DecodeGraphs | None:
    """Make the decode graphs, where options and attention backend allow."""
    if options.cuda_graph == "off" or not isinstance(step.attention.decode, DeviceDecode):
        return None
    sizes = batch_sizes(min(options.cuda_graph_max_batch, options.max_running_requests))
    return DecodeGraphs(step.model, step.attention, step.state, step.upload, sizes)


def make_prefill_graphs(options: EngineOptions, step: Step) -> PrefillGraphs | None:
    """Make the graphs of steps with prompts, where options and attention backend allow."""
    running, largest = options.max_running_requests, options.cuda_graph_max_tokens
    most = options.prefill_chunk_tokens + running
    if largest is None:
        largest = paying_tokens(step.model.config, most)
    if options.cuda_graph == "off" or not largest or not isinstance(step.attention.prefill, DeviceSequences):
        return None
    sizes = token_sizes(min(largest, most))
    return PrefillGraphs(step.model, step.attention, step.state, step.upload, sizes, running)


def warm_up(runner: Runner, config: ModelConfig) -> None:
    """Run a prompt and a decode, so that the first request meets neither lazy loading nor first touches.

    They write to page 0 and slot 0, which no request holds yet. Once plainly, and once with penalties and log
    probabilities, whose kernels would be compiled under way.
    """
    prompt = np.zeros(1, np.int32)
    chunk = PrefillChunk(slot=0, start=0, tokens=prompt, last=True)
    wishes = SamplingParams(temperature=0, frequency_penalty=1, logprobs=1, logit_bias=((0, 1.0),))
    for step, sampling in ((-2, wishes), (0, SamplingParams(temperature=0))):
        asks = Asks(tokens=prompt, prompt_tokens=1) if sampling is wishes else None
        start = SlotStart(slot=0, length=0, sampling=sampling, seed=0, asks=asks)
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
